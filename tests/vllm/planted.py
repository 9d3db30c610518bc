"""Proposers with a planted fault, or that say more, for vLLM to load."""

from __future__ import annotations

import sys
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


class Telling(Proposer):
    """Says at its end how many steps without drafts were sampled as without speculation."""

    def close(self) -> None:
        if not self._is_closed and self._plain_sampler is not None:
            print(f"planted: {self._plain_sampler.num_steps} steps were sampled plainly", file=sys.stderr, flush=True)
        super().close()
