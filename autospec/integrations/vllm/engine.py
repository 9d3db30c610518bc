"""What is read off vLLM's configuration and calls. An untested release is judged by their shape, not by its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import ConfigurationError
from autospec.integrations.vllm.batch import Limits
from autospec.integrations.vllm.rows import Tokens

_NEEDED = {
    "speculative_config.num_speculative_tokens": int,
    "model_config.max_model_len": int,
    "model_config.get_vocab_size": None,
}


class ShapeError(ConfigurationError):
    """This vLLM is not one that the proposer knows how to talk to."""


def limits_of(config: Any) -> Limits:
    """Args: config: vLLM's `VllmConfig`. Raises: ShapeError: it lacks something, or runs asynchronously."""
    for path, kind in _NEEDED.items():
        value = _at(config, path)
        if not callable(value) if kind is None else type(value) is not kind:
            raise ShapeError(f"vLLM's configuration has no usable {path} ({value!r:.60}): {_remedy()}")
    if _at(config, "scheduler_config.async_scheduling"):
        raise ShapeError("asynchronous scheduling shows a proposer no tokens: start vLLM with --no-async-scheduling")
    return Limits(
        num_speculative_tokens=config.speculative_config.num_speculative_tokens,
        max_model_len=config.model_config.max_model_len,
        end_tokens=_end_tokens(config.model_config),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """What `propose` is told."""

    sampled: Sequence[Sequence[int]]  # [rows]
    lengths: NDArray[np.int32]  # [at least rows]
    token_ids: Tokens  # [at least rows, longest]
    num_step_tokens: int | None  # of the step, with what it may be padded by
    most: int | None  # draft tokens that are wanted now
    unknown: tuple[str, ...]  # arguments that say something this release of autospec does not know


def read_call(args: Sequence[Any], named: Mapping[str, Any]) -> Call:
    """The arguments of a call of `propose`.

    vLLM 0.32 hands over tokens sampled, numbers of tokens and token ids, and `slot_mappings` by name; to its own n-gram
    proposer it says first how many tokens it wants. Both are understood, and further arguments are looked past.

    Raises:
        ShapeError: it is something else.
    """
    most = None
    if args and type(args[0]) is int:
        most, args = args[0], args[1:]
    sampled, lengths, token_ids = [*args, *(named.get(name) for name in _NAMES[len(args) :])][:3]
    unknown = (*(type(each).__name__ for each in args[3:]), *(name for name in named if name not in _KNOWN))
    is_known = (
        isinstance(sampled, list)
        and all(isinstance(tokens, list) for tokens in sampled)
        and isinstance(lengths, np.ndarray)
        and lengths.ndim == 1
        and lengths.dtype.kind == "i"
        and isinstance(token_ids, np.ndarray)
        and token_ids.ndim == 2
        and token_ids.dtype.kind == "i"
        and min(len(lengths), len(token_ids)) >= len(sampled)
    )
    if not is_known:
        shown = ", ".join(
            f"{type(each).__name__}{list(getattr(each, 'shape', ''))}" for each in (*args, *named.values())
        )
        raise ShapeError(f"vLLM called propose({shown:.200}), which is not as it was: {_remedy()}")
    return Call(sampled, lengths, token_ids, _step_tokens(named.get("slot_mappings")), most, unknown)


_NAMES = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
_KNOWN = (*_NAMES, "slot_mappings")


def is_leader() -> bool:
    """Whose drafts does the scheduler take? Of ranks that share a model, the first one's; the others see the same."""
    try:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return bool(get_tensor_model_parallel_rank() == 0)
    except (ImportError, AssertionError):  # without vLLM, or where nothing is distributed
        return True


def num_ranks(config: Any) -> int:
    """That share one model."""
    return int(getattr(getattr(config, "parallel_config", None), "world_size", 1))


def tokenizer_of(config: Any) -> Any | None:
    """The tokenizer that vLLM has; None where it runs without."""
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(config.model_config)
    except ImportError:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(config.model_config.tokenizer)


def ending_with(limits: Limits, tokenizer: Any) -> Limits:
    """The limits, with the end token of the tokenizer, at which vLLM ends answers whatever the configuration says."""
    end = getattr(tokenizer, "eos_token_id", None)
    return limits if end is None else replace(limits, end_tokens=limits.end_tokens | {int(end)})


def _step_tokens(slot_mappings: Any) -> int | None:
    """Each layer has a slot for each token of the step; with micro-batches they are not looked at."""
    first = next(iter(slot_mappings.values()), None) if isinstance(slot_mappings, Mapping) else None
    shape: Sequence[int] = getattr(first, "shape", ())
    return int(next(iter(shape))) if len(shape) == 1 else None


def _end_tokens(model_config: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model_config, "try_get_generation_config", None)
    settings = generation() if callable(generation) else {}
    for value in (
        getattr(getattr(model_config, "hf_text_config", None), "eos_token_id", None),
        settings.get("eos_token_id") if isinstance(settings, Mapping) else None,
    ):
        found.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return frozenset(int(token) for token in found)


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _remedy() -> str:
    return "autospec was tried with 0.32; use that release, or another draft method"
