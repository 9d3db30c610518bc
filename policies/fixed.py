"""The same action for every block."""

from __future__ import annotations

from autospec.errors import ConfigurationError
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome


class Fixed:
    """Always `source` with `block_length`; plain steps where the source is not usable.

    Args:
        source: a draft source's name.
        block_length: draft tokens asked for in each block; 0 = plain steps.

    Raises:
        ConfigurationError: `block_length` is negative or not a whole number, or `none` is asked to draft.
    """

    def __init__(self, source: str = NONE, *, block_length: int = 0) -> None:
        if isinstance(block_length, bool) or not isinstance(block_length, int) or block_length < 0:
            raise ConfigurationError(
                f"block_length={block_length!r}: a whole number of at least 0 is needed (0 = plain decoding)"
            )
        if source == NONE and block_length > 0:
            raise ConfigurationError(f"draft source 'none' proposes nothing: block_length={block_length} must be 0")
        self.source = source
        self.block_length = block_length
        self.name = "off" if block_length == 0 else f"fixed:{source}:{block_length}"
        self._action = Action(source, block_length, "fixed") if block_length else OFF

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values."""
        return {"source": self.source, "block_length": self.block_length}

    def choose(self, context: BlockContext) -> Action:
        return self._action if self.source in context.sources else OFF

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""
