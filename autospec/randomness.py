"""Where every random draw of decoding comes from, behind one small interface.

Production backs it with a torch generator; an exhaustive enumeration of all draws can stand in its place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Randomness(Protocol):
    """Draws of categories and of yes or no."""

    def categorical(self, probs: Tensor) -> int:
        """Draw an index. Args: probs: [vocab_size], sums to 1."""

    def bernoulli(self, probability: float) -> bool:
        """True with the given probability."""

    def fork(self) -> Randomness:
        """A copy that will draw with the noise this one uses next, while this one stays as it is."""


class TorchRandomness:
    """Draws as transformers' `generate` does: one `torch.multinomial` call per token.

    Args:
        device: where the probabilities live; its global generator is used when `generator` is None.
        generator: a generator to use instead of the global one.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self._device = device
        self._generator = generator

    def categorical(self, probs: Tensor) -> int:
        # [1, vocab_size], as in `generate`: the generator is then used in exactly the same way
        return int(torch.multinomial(probs[None], num_samples=1, generator=self._generator).item())

    def bernoulli(self, probability: float) -> bool:
        draw = torch.rand((), dtype=torch.float64, device=self._device, generator=self._generator)
        return bool(draw.item() < probability)

    def fork(self) -> TorchRandomness:
        copy = torch.Generator(device=self._device)
        copy.set_state(self._state())
        return TorchRandomness(self._device, copy)

    def _state(self) -> Tensor:
        if self._generator is not None:
            return self._generator.get_state()
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        if self._device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self._device.type).get_rng_state()  # type: ignore[no-any-return]
