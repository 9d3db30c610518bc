"""Where and with what requests run."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from autospec.memory import weight_bytes
from autospec.types import Deployment


def describe_deployment(model: Any, drafts: Mapping[str, Any], backend: str = "eager") -> Deployment:
    """Host, device, target, dtype, drafts, versions and weights of a wrapped model.

    Args:
        model: the target.
        drafts: draft sources by name; the weights of one that has a `model` count.
        backend: how forwards run; named among the versions where it is not the model's own way.
    """
    return Deployment(
        host=socket.gethostname(),
        device=device_name(model.device),
        target=model_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        drafts=tuple(sorted(drafts)),
        versions={
            "autospec": package_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **({} if backend == "eager" else {"backend": backend}),
        },
        model_bytes=weight_bytes([model, *(getattr(source, "model", None) for source in drafts.values())]),
    )


def package_version() -> str:
    """The installed version of autospec, `0+unknown` in a bare checkout."""
    try:
        return version("autospec-decoding")
    except PackageNotFoundError:
        return "0+unknown"


def model_name(model: Any) -> str:
    """The model's name without the folders of this machine."""
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu: {_processor_name()}, {torch.get_num_threads()} threads"
    return str(device)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
