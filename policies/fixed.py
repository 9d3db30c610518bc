"""The same action for every block."""

from __future__ import annotations

from dataclasses import replace

from autospec.errors import ConfigurationError
from autospec.policies.base import check_range
from autospec.policies.stopping import ConfidenceStop
from autospec.types import NONE, OFF, Action, BlockContext, BlockOutcome


class Fixed:
    """Always `source` with `block_length`; plain steps where the source is not usable.

    Args:
        source: a draft source's name.
        block_length: draft tokens asked for in each block; 0 = plain steps.
        least_margin: a block ends where the difference of the draft's two largest probabilities is less. Of sources
            that heed a stop; others go on.
        most_entropy: and where its entropy is more, nats; None: any will do.

    Raises:
        ConfigurationError: `source` is no name, `block_length` is negative or not a whole number, `none` is asked to
            draft, or a number is out of range.
    """

    def __init__(
        self,
        source: str = NONE,
        *,
        block_length: int = 0,
        least_margin: float = 0.0,
        most_entropy: float | None = None,
    ) -> None:
        if not isinstance(source, str):
            raise ConfigurationError(f"source={source!r:.60}: the name of a draft source is needed")
        if isinstance(block_length, bool) or not isinstance(block_length, int) or block_length < 0:
            raise ConfigurationError(
                f"block_length={block_length!r}: a whole number of at least 0 is needed (0 = plain decoding)"
            )
        if source == NONE and block_length > 0:
            raise ConfigurationError(f"draft source 'none' proposes nothing: block_length={block_length} must be 0")
        check_range("least_margin", least_margin, 0.0, 1.0)
        if most_entropy is not None:
            check_range("most_entropy", most_entropy, 0.0, 100.0)
        self.source = source
        self.block_length = block_length
        self.least_margin, self.most_entropy = least_margin, most_entropy
        self.is_off = block_length == 0 and type(self) is Fixed  # another kind may choose otherwise, or learn
        stops = least_margin > 0.0 or most_entropy is not None
        self.name = "off" if block_length == 0 else f"fixed:{source}:{block_length}{':stop' if stops else ''}"
        self._action = Action(source, block_length, "fixed") if block_length else OFF
        if block_length and stops:
            self._action = replace(self._action, stop=ConfidenceStop(least_margin, most_entropy))

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values."""
        found: dict[str, object] = {"source": self.source, "block_length": self.block_length}
        if self.least_margin:
            found["least_margin"] = self.least_margin
        if self.most_entropy is not None:
            found["most_entropy"] = self.most_entropy
        return found

    def choose(self, context: BlockContext) -> Action:
        return self._action if self.source in context.sources else OFF

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""
