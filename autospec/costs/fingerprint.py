"""What seconds depend on: measured costs are used again where all of this is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from autospec.deployment import device_name
from autospec.drafts.base import DraftSource
from autospec.memory import weight_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.backend import Backend

METHOD = 2
"""Grows when calibration measures something else than before."""


def describe(
    target: PreTrainedModel, sources: Mapping[str, DraftSource], backend: Backend | None = None
) -> dict[str, Any]:
    """Device, software, target and draft sources with their settings, in plain JSON values.

    Args:
        target: the model that verifies.
        sources: draft sources by name.
        backend: how forwards run; None: as the models themselves run them.
    """
    return {
        "method": METHOD,
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "batch": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": _model(target),
        "sources": {name: _settings(source) for name, source in sorted(sources.items())},
        **({} if backend is None or backend.is_eager else {"backend": backend.shapes}),
    }


def digest(description: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of a description."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _model(model: Any) -> dict[str, Any]:
    config = model.config
    text = repr(config)
    if hasattr(config, "to_json_string"):
        values = json.loads(config.to_json_string(use_diff=False))
        values.pop("_name_or_path", None)  # where it lies is no matter
        text = json.dumps(values, sort_keys=True)
    return {
        "class": type(model).__name__,
        "name": Path(str(getattr(model, "name_or_path", "") or "")).name,
        "config": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": weight_bytes([model]),
        "dtype": str(model.dtype),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "is_compiled": getattr(model, "_compiled_call_impl", None) is not None,
    }


def _settings(thing: Any, depth: int = 0) -> dict[str, Any]:
    """The kind of a source, and what it holds of plain values, models and other sources."""
    found: dict[str, Any] = {"kind": f"{type(thing).__module__}.{type(thing).__qualname__}"}
    for name, value in sorted(getattr(thing, "__dict__", {}).items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
        elif isinstance(value, torch.nn.Module) and hasattr(value, "config"):
            found[name] = _model(value)
        elif isinstance(value, tuple) and all(v is None or isinstance(v, (bool, int, float, str)) for v in value):
            found[name] = list(value)
        elif depth < 3 and callable(getattr(value, "start", None)):
            found[name] = _settings(value, depth + 1)
        elif depth < 3 and isinstance(value, list):
            found[name] = [_settings(each, depth + 1) for each in value if callable(getattr(each, "start", None))]
    return found
