"""Steps without any draft are sampled as without speculation: vLLM 0.32 draws what would replace refused drafts anyway.

It does so for each row and entry of the vocabulary, in every step of an engine that may speculate.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

_ARGUMENTS = ("metadata", "draft_probs", "logits", "sampling_metadata")


class PlainSampler:
    """Stands in for `forward` of an engine's rejection sampler, until it is closed.

    Where no request has a draft, the bonus token of each, which comes from vLLM's own sampler, is all that the
    rejection sampler gives back: [rows, 1], int32. Wherever more is asked for, or something is not as expected, the
    original is called.

    Args:
        module: the rejection sampler. Of ranks that share a model none may draw less than the others, so that this is
            for engines of one rank.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._original = module.forward
        self._is_closed = False
        self.num_steps = 0  # that were sampled plainly
        self._stand_in = self._forward
        module.forward = self._stand_in

    def close(self) -> None:
        """Put the original back. May be called twice; never raises."""
        self._is_closed = True  # where somebody else has wrapped it meanwhile, this hands on
        try:
            if vars(self._module).get("forward") is self._stand_in:
                del self._module.forward
        except Exception:  # noqa: BLE001  # it hands on
            return

    def _forward(self, *args: Any, **named: Any) -> Any:
        if not self._is_closed:
            try:
                asked = dict(zip(_ARGUMENTS, args, strict=False)) | named
                metadata, logits, sampling = asked["metadata"], asked["logits"], asked["sampling_metadata"]
                if set(asked) == set(_ARGUMENTS) and logits is not None and _is_plain(metadata, sampling):
                    bonus = logits[metadata.bonus_logits_indices]
                    output = self._module.sampler(logits=bonus, sampling_metadata=sampling, predict_bonus_token=True)
                    self.num_steps += 1
                    return output
            except Exception:  # noqa: BLE001  # if it is the sampler's own, the original raises it, too
                self._is_closed = True
        return self._original(*args, **named)


def install(runner: Any) -> PlainSampler | None:
    """Put it on a model runner; None, and nothing done, where that is of another shape. Never raises."""
    try:
        module = getattr(runner, "rejection_sampler", None)
        if module is None or "forward" in vars(module) or module.synthetic_mode:
            return None
        is_known = _takes(module.forward, _ARGUMENTS, exactly=True) and _takes(
            module.sampler.forward, ("logits", "sampling_metadata", "predict_bonus_token")
        )
        return PlainSampler(module) if is_known and callable(module.sampler) else None
    except Exception:  # noqa: BLE001  # it is of another shape
        return None


def _is_plain(metadata: Any, sampling: Any) -> bool:
    """Is one token of each row all that is asked for?"""
    thinking = sampling.thinking_budget_state_holder  # whoever samples moves its state on
    return bool(
        metadata.max_spec_len == 0
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and (thinking is None or not thinking.has_tracked_requests())
    )


def _takes(function: Any, names: Sequence[str], *, exactly: bool = False) -> bool:
    found = list(inspect.signature(function).parameters)
    return found == list(names) if exactly else set(names) <= set(found)
