"""Prompt and answer as tensors that grow without being copied for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROOM = 256  # tokens; doubled as often as needed


class Tokens:
    """Committed tokens, on the host and on the model's device; only ever appended to, so views of them stay valid.

    Args:
        input_ids: [1, n], the prompt.
        is_mirrored: keep a copy on the device; None: where the device is not the host itself.
    """

    def __init__(self, input_ids: Tensor, is_mirrored: bool | None = None) -> None:
        self.length = input_ids.shape[1]
        self.device = input_ids.device
        self._make_room(input_ids.cpu(), self.length + _ROOM)
        self._mirror: Tensor | None = None
        if input_ids.device.type != "cpu" if is_mirrored is None else is_mirrored:
            self._mirror = _with_room(input_ids, self.length + _ROOM)
        self._num_mirrored = self.length

    @property
    def on_host(self) -> Tensor:
        """[1, n]."""
        return self._host[:, : self.length]

    @property
    def on_device(self) -> Tensor:
        """[1, n]."""
        return self._first(self.length)

    def append(self, token: int) -> None:
        if self.length == len(self._numbers):
            self._make_room(self._host, 2 * self.length)
        self._numbers[self.length] = token
        self.length += 1

    def followed_by(self, draft_tokens: Sequence[int]) -> Tensor:
        """[1, n + k], on the device: the committed tokens and drafts; valid until the next token is appended."""
        end = self.length + len(draft_tokens)
        if end > len(self._numbers):
            self._make_room(self._host, 2 * end)
        if draft_tokens:
            self._numbers[self.length : end] = draft_tokens
        return self._first(end)

    def _make_room(self, tokens: Tensor, capacity: int) -> None:
        self._numbers: Any = np.zeros(capacity, dtype=np.int64)  # which numpy writes single tokens to faster than torch
        self._numbers[: tokens.shape[1]] = tokens.numpy()[0]
        self._host = torch.from_numpy(self._numbers)[None]  # the same memory

    def _first(self, end: int) -> Tensor:
        """[1, end], on the device."""
        if self._mirror is None:
            return self._host[:, :end]
        if end > self._mirror.shape[1]:
            self._mirror = _with_room(self._mirror, self._host.shape[1])
        if end > self._num_mirrored:
            new = slice(self._num_mirrored, end)
            self._mirror[:, new] = self._host[:, new].to(self.device)
        self._num_mirrored = min(end, self.length)  # drafts beyond the committed tokens are sent again
        return self._mirror[:, :end]


def _with_room(tokens: Tensor, capacity: int) -> Tensor:
    """[1, capacity], int64, beginning with the tokens."""
    grown = torch.zeros((1, capacity), dtype=torch.long, device=tokens.device)
    grown[:, : tokens.shape[1]] = tokens
    return grown
