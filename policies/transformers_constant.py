"""What transformers does with `num_assistant_tokens_schedule="constant"`, to compare with."""

from __future__ import annotations

from autospec.errors import ConfigurationError
from autospec.policies.reading import check_whole
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome

NUM_ASSISTANT_TOKENS = 20
"""What transformers 5.24 starts from where a generation config does not say."""


def check_source(source: object) -> None:
    """Refuse what cannot be the name of a source that drafts.

    Raises:
        ConfigurationError: names it.
    """
    if not isinstance(source, str) or source in ("", NONE):
        raise ConfigurationError(f"source={source!r}: the name of a draft source is needed")


class TransformersConstant:
    """The same block length for every block, shortened where fewer tokens are left.

    Its other rule, to end a draft below `assistant_confidence_threshold`, is the draft source's own affair here.

    Args:
        source: a draft source's name.
        num_assistant_tokens: draft tokens asked for in each block.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: transformers 5.24, generation/candidate_generator.py.
    """

    name = "transformers_constant"

    def __init__(self, source: str, *, num_assistant_tokens: int = NUM_ASSISTANT_TOKENS) -> None:
        check_source(source)
        check_whole("num_assistant_tokens", num_assistant_tokens, 1)
        self.source = source
        self._block_length = num_assistant_tokens
        self.settings: dict[str, object] = {"source": source, "num_assistant_tokens": num_assistant_tokens}

    def choose(self, context: BlockContext) -> Action:
        block_length = min(self._block_length, context.tokens_left - 1)
        if block_length < 1 or self.source not in context.sources:
            return OFF
        return Action(self.source, block_length, "kept: constant schedule")

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""
