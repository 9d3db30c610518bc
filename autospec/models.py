"""Where models come from: the demonstration model, a folder, or a hub id. Weights are read from safetensors alone."""

import os
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autospec.errors import ConfigurationError, ModelError
from autospec.fetching import SOURCES, cache_folder, fetch, one_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DTYPES",
    "PACKAGED",
    "DType",
    "cache_folder",
    "faster_dtype",
    "fetch",
    "load",
    "load_model",
    "load_tokenizer",
    "resolve",
]

DType = Literal["auto", "bfloat16", "float32", "float16"]

DTYPES = ("auto", "bfloat16", "float32", "float16")

PACKAGED = ("smollm2-135m-assistant",)
"""Models that come with autospec: an assistant for the demonstration model, without a tokenizer of its own."""


def faster_dtype(repeats: int = 9) -> Literal["bfloat16", "float32"]:
    """The format in which this machine decodes single tokens faster.

    On an accelerator bfloat16. Processors without instructions for it are several times slower with it: a trial of
    one-row products with weights that fit no cache decides, within a second.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        weights = [torch.ones((1536, 576), dtype=dtype) for _ in range(20)]
        row = torch.ones((1, 576), dtype=dtype)
        laps = []
        for _ in range(repeats):
            started = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(row, weight)
            laps.append(time.perf_counter() - started)
        seconds[dtype] = statistics.median(laps)
    return "bfloat16" if seconds[torch.bfloat16] <= seconds[torch.float32] else "float32"


def known() -> list[str]:
    """The short names that `resolve` knows."""
    return sorted([*SOURCES, *PACKAGED])


def resolve(target: str) -> str:
    """Turn what a user typed into what `from_pretrained` takes.

    Args:
        target: a known short name (fetched if need be), a folder, or a hub id.

    Returns:
        A folder, or the hub id as it was given.

    Raises:
        ModelError: `target` looks like a path and is not a folder, or the known model cannot be fetched.
    """
    if not target.strip():
        raise ModelError(f"no model given: name a folder, a hub id, or one of {', '.join(known())}")
    if target in SOURCES:
        return str(fetch(target))
    if target in PACKAGED:
        folder = Path(str(files("autospec.data").joinpath(target)))
        if not folder.is_dir():
            raise ModelError(f"{target} is missing from this installation of autospec: install it again")
        return str(folder)
    path = Path(os.path.expanduser(target))
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ModelError(f"{target} is a file: give the folder that holds config.json and the safetensors files")
    if target.startswith((".", "~", os.sep)) or target.endswith(os.sep) or target.count(os.sep) > 1:
        raise ModelError(f"{target} does not exist: give a model folder, a hub id (owner/name), or a known short name")
    return target


def load(
    target: str, *, dtype: DType = "auto", device: str | None = None, trust_remote_code: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a target and its tokenizer, ready for inference. Pickled weights are never read.

    Args:
        target: what `resolve` takes.
        dtype: of the weights; "auto" keeps the one they were saved in.
        device: such as "cpu" or "cuda:0"; None leaves the model where transformers puts it.
        trust_remote_code: run code that comes with the model. Off unless you have read it.

    Returns:
        The model in eval mode, and its tokenizer.

    Raises:
        ConfigurationError: `dtype` is unknown.
        ModelError: anything else that kept the model from loading, in one line.
    """
    model = load_model(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)

    return model, load_tokenizer(target, trust_remote_code=trust_remote_code)


def load_tokenizer(target: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer alone; of a folder, from nowhere else.

    Raises:
        ModelError: as for `load`.
    """
    place = resolve(target)

    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                place, local_files_only=Path(place).is_dir(), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise ModelError(f"cannot load the tokenizer of {target!r}: {one_line(error)}") from error
    return tokenizer


def load_model(
    target: str, *, dtype: DType = "auto", device: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedModel":
    """Load a model alone, as `load` does: for an assistant that has no tokenizer of its own.

    Raises:
        ConfigurationError, ModelError: as for `load`.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"unknown dtype {dtype!r}: one of {', '.join(DTYPES)}")
    place = resolve(target)
    _refuse_unreadable(place)

    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
            )
            if device is not None:
                model = model.to(device)
    except Exception as error:  # transformers, safetensors and torch raise many kinds
        raise ModelError(f"cannot load {target!r}: {one_line(error)}") from error
    model.eval()
    loaded: PreTrainedModel = model
    return loaded


def _refuse_unreadable(place: str) -> None:
    folder = Path(place)
    if not folder.is_dir():
        return  # a hub id: from_pretrained(use_safetensors=True) checks
    if not (folder / "config.json").is_file():
        raise ModelError(f"{place} is not a model folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickled:
        raise ModelError(
            f"{place} has pickled weights only ({pickled[0]}), which can run code when read: "
            "save the model again as safetensors (save_pretrained does)"
        )
    raise ModelError(f"{place} has no weights: no *.safetensors file is in it")
