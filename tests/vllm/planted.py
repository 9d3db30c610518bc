"""Proposers with a planted fault, for vLLM to load."""

from __future__ import annotations

from typing import Any

from autospec.integrations.vllm import Proposer


class Raising(Proposer):
    """Fails inside each step but the first, after it has drafted."""

    def _step(self, args: Any, named: Any) -> list[list[int]]:
        drafts = super()._step(args, named)
        if any(drafts):
            raise RuntimeError("planted")
        return drafts


class RaisingAtStart(Proposer):
    """Fails as soon as the model is loaded."""

    def _begin(self, target_model: Any) -> None:
        raise RuntimeError("planted at the start")
