"""autospec: exact, adaptive speculative decoding for Hugging Face transformers.

    import autospec

    speculator = autospec.wrap(model, tokenizer=tokenizer, store="sqlite:///autospec.db")
    model.generate(**inputs, max_new_tokens=128)  # unchanged call, now speculative
    speculator.close()

Importing autospec is cheap: torch and everything else load when they are first used.
"""

from typing import TYPE_CHECKING, Any

from autospec.errors import (
    AutospecError,
    ConfigurationError,
    DraftError,
    ExactnessError,
    ModelError,
    StoreError,
)
from autospec.segments import segment, tenant
from autospec.types import Action, BlockContext, BlockOutcome, RequestRecord

if TYPE_CHECKING:
    from autospec import backends as backends
    from autospec import drafts as drafts
    from autospec import models as models
    from autospec import policies as policies
    from autospec import telemetry as telemetry
    from autospec import traffic as traffic
    from autospec.speculator import Speculator as Speculator
    from autospec.speculator import wrap as wrap

__all__ = [
    "Action",
    "AutospecError",
    "BlockContext",
    "BlockOutcome",
    "ConfigurationError",
    "DraftError",
    "ExactnessError",
    "ModelError",
    "RequestRecord",
    "Speculator",
    "StoreError",
    "backends",
    "drafts",
    "models",
    "policies",
    "segment",
    "telemetry",
    "tenant",
    "traffic",
    "wrap",
]

_MODULES = ("backends", "drafts", "models", "policies", "telemetry", "traffic")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in ("Speculator", "wrap"):
        return getattr(import_module(f"{__name__}.speculator"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
