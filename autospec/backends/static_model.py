"""One model over a cache of fixed shape: each of its forwards was prepared at start-up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from autospec.backends.agreement import agree
from autospec.backends.base import CannotPrepareError, Forward, Runner, Static
from autospec.backends.static_cache import StaticStore, layout_of
from autospec.backends.widths import plan
from autospec.caches import CACHE_KEYWORD, append, decoding_cache

CHECK_TOKENS = 5
"""Of the text after which each prepared forward is compared with the model's own."""


class Holder(Protocol):
    """Who has its text in the buffers."""

    def give_way(self) -> None:
        """Save what is in the buffers: another one of the same request wants them."""


class StaticModel:
    """Runs tokens after what its cache holds, in forwards of a few shapes.

    Args:
        model: a causal language model whose cache has plain layers.
        settings: its widths.
        capacities: of the cache, rising; the buffers of a smaller one are the beginning of the largest one's.
        runner: prepares the forwards.
    """

    def __init__(self, model: PreTrainedModel, settings: Static, capacities: tuple[int, ...], runner: Runner) -> None:
        self.model = model
        self.widths = tuple(width for width in settings.widths if width < capacities[-1])
        self.capacities = capacities
        self.runner = runner
        self._store = StaticStore(layout_of(model), capacities[-1])
        device = self._store.keys.device
        self._steps = torch.arange(self.widths[-1], device=device)
        self._ids = {width: torch.zeros((1, width), dtype=torch.long, device=device) for width in self.widths}
        self._positions = {width: torch.zeros((1, width), dtype=torch.long, device=device) for width in self.widths}
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._holder: Holder | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._store.length

    @property
    def memory_bytes(self) -> int:
        """Of cache, buffers, and what the runner keeps."""
        buffers = (self._steps, *self._ids.values(), *self._positions.values())
        return self._store.memory_bytes + sum(each.nbytes for each in buffers) + self.runner.memory_bytes

    def prepare(self) -> Iterator[str]:
        """Prepare and check one forward after the other. Yields: what comes next, for those who wait.

        Raises:
            CannotPrepareError: one cannot be prepared, or gives other logits than the model.
        """
        generator = torch.Generator().manual_seed(0)
        size = int(self.model.get_input_embeddings().weight.shape[0])
        tokens = torch.randint(0, size, (1, CHECK_TOKENS + self.widths[-1]), generator=generator).to(self._steps.device)
        following = tokens[:, CHECK_TOKENS:]
        for width, capacity in product(self.widths, self.capacities):
            if width >= capacity:  # there is always something in the cache
                continue
            text = tokens[:, : min(CHECK_TOKENS, capacity - width)]
            yield f"{width} tokens over {capacity}"
            with torch.inference_mode(False), torch.no_grad(), self.model._optimize_model_for_decode():
                _, cache = append(self.model, text, decoding_cache(self.model))
                self._store.load(cache)  # no forward is prepared on an empty cache: models have a short cut for those
                self._fill(following[:, :width], width)
                self._store.written = self._store.length + width
                forward = self.runner.prepare(self._forward(width, capacity))
                self._forwards[width, capacity] = forward
                self._store.load(cache)
                found = self.run(following[:, :width], capacity).clone()
                expected, _ = append(self.model, following[:, :width], cache, logits_kept=width)
            self.clear()
            if not agree(found, expected):
                raise CannotPrepareError(f"its forward over {width} tokens, prepared, gives other logits")

    def has_room(self, num_tokens: int) -> bool:
        """Do so many more tokens fit?"""
        return self._store.length + num_tokens <= self.capacities[-1]

    def run(self, tokens: Tensor, capacity: int | None = None) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: [1, n], on the model's device.
            capacity: look at one of this size, where it is not the smallest that has room.

        Returns:
            logits, [n, vocab_size], valid until the next forward.
        """
        capacities = self.capacities if capacity is None else (capacity,)
        steps = plan(tokens.shape[1], self._store.length, self.widths, capacities)
        parts, start = [], 0
        with torch.inference_mode(False), torch.no_grad():  # as when they were prepared
            for step in steps:
                end = start + step.num_tokens
                self._store.wipe()
                self._fill(tokens[:, start:end], step.width)
                self._store.written = self._store.length + step.width
                logits = self._forwards[step.width, step.capacity]()[: step.num_tokens]
                self._store.length += step.num_tokens
                # the next forward may use the same memory
                parts.append(logits if end == tokens.shape[1] else logits.clone())
                start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens; 0 only wipes what padding left behind them."""
        self._store.crop(num_tokens)

    def fits(self, cache: DynamicCache) -> bool:
        """Can the text go on in the buffers? Args: cache: of plain layers that hold something."""
        return self._store.fits(cache)

    def load(self, cache: DynamicCache) -> None:
        """Go on from a cache of plain layers."""
        self._store.load(cache)

    def save(self, cache: DynamicCache) -> None:
        """Give a cache of plain layers a copy of what is held."""
        self._store.save(cache)

    def view(self) -> DynamicCache:
        """What is held, to be read until the next forward."""
        return self._store.view()

    def pretend(self, length: int) -> None:
        """Be as long, whatever is held: it makes no difference to the time that a forward takes."""
        self._store.length = self._store.written = length

    def clear(self) -> None:
        """Hold nothing."""
        self._holder = None
        self._store.crop(self._store.length)

    def is_held_by(self, holder: Holder) -> bool:
        return self._holder is holder

    def take(self, holder: Holder) -> None:
        """The buffers are for `holder` from now on: it loads its text. Who had them saves his."""
        if self._holder is not None and self._holder is not holder:
            self._holder.give_way()
        self._holder = holder

    def _fill(self, tokens: Tensor, width: int) -> None:
        """Put a forward's tokens and their place into its buffers. Args: tokens: [1, n], n <= width."""
        ids, number = self._ids[width], tokens.shape[1]
        if number == width:
            ids.copy_(tokens)
        else:
            ids[:, :number].copy_(tokens)
            ids[:, number:].copy_(tokens[:, -1:].expand(1, width - number))
        length = self._store.length
        torch.add(self._steps[:width], length, out=self._positions[width][0])
        self._store.device_length.fill_(length)

    def _forward(self, width: int, capacity: int) -> Forward:
        model, ids, positions = self.model, self._ids[width], self._positions[width]
        cache: dict[str, Any] = {CACHE_KEYWORD: self._store.cache(capacity, positions[0])}

        def forward() -> Tensor:
            logits: Tensor = model(
                input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **cache
            ).logits[0]
            return logits

        return forward
