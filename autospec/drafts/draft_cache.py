"""What a draft model has read in one request: in a cache that grows, or in buffers of fixed shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autospec.caches import append, drop_last, new_cache, why_not_rollback
from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

    from autospec.backends.static_model import StaticModel

_MOST_FORWARDS = 4
"""Of fixed shape, for what is read at once; more tokens are read faster in one forward without."""


class DraftCache:
    """A draft model and its cache.

    Args:
        model: the draft.
        static: its prepared forwards, which other sessions of the request may use in between.
    """

    def __init__(self, model: PreTrainedModel, static: StaticModel | None = None) -> None:
        self._model = model
        self._static = static
        self._dynamic: DynamicCache | None = None

    @property
    def is_ready(self) -> bool:
        """The next few tokens need no moving of what was read before."""
        return self._static is None or self._static.is_held_by(self)

    def append(self, tokens: Tensor) -> Tensor:
        """Read tokens. Args: tokens: [1, n]. Returns: logits of the last one, [1, draft_vocab_size].

        Raises:
            DraftError: the model's cache cannot be rolled back.
        """
        static = self._static
        if static is not None and static.is_held_by(self):
            number = tokens.shape[1]
            if static.has_room(number) and number <= _MOST_FORWARDS * static.widths[-1]:
                return static.run(tokens)[-1:]
            self.give_way()
            if not static.has_room(number):
                self._static = None
        is_first = self._dynamic is None
        cache = new_cache(self._model) if self._dynamic is None else self._dynamic
        logits, self._dynamic = append(self._model, tokens, cache)
        if is_first and (why := why_not_rollback(self._dynamic)):
            raise DraftError(f"{type(self._model).__name__} cannot draft: {why}")
        return logits

    def get_ready(self) -> None:
        """Move what was read to the buffers of fixed shape, where there are some with room for it."""
        if self.is_ready or self._dynamic is None or self._static is None:
            return
        if int(self._dynamic.get_seq_length()) >= self._static.capacities[-1]:
            self._static = None
            return
        self._static.take(self)
        self._static.load(self._dynamic)

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens. Once per proposal, also for none: layers that forget are trimmed by it alone."""
        if self._static is not None and self._static.is_held_by(self):
            self._static.crop(num_tokens)
        elif self._dynamic is not None:
            drop_last(self._dynamic, num_tokens)

    def give_way(self) -> None:
        """Keep what was read without the buffers."""
        if self._static is not None and self._static.is_held_by(self) and self._dynamic is not None:
            self._static.save(self._dynamic)
            self._static.clear()

    def lend(self, cache: DynamicCache) -> None:
        """Go on from a copy of another one's cache, which grows."""
        self._dynamic = cache

    def take_back(self) -> None:
        """Forget what was lent."""
        self._dynamic = None
