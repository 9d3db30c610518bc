"""What a backend of fixed shapes is fit for: which models, and whether a model is still the one it was prepared for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from autospec.caches import AROUND, context_window, has_own, stretches_beyond

_ATTENTION = ("sdpa", "eager")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ADAPTERS = "its adapters may be switched between two forwards"


def why_never(model: PreTrainedModel) -> str | None:
    """Why no forward of this model is run in fixed shapes; None when they may be tried."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} wraps the model that runs"
    if getattr(model, "_hf_peft_config_loaded", False):
        return _ADAPTERS
    if (attention := getattr(model.config, "_attn_implementation", None)) not in _ATTENTION:
        return f"its attention ({attention}) looks at caches of growing shape"
    if stretches_beyond(model) is not None:
        return "its rotary positions depend on the length of the text"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return "its layers are spread over several devices"
    if context_window(model) is None:
        return "it does not say how long a text may be"
    return _why_not_as_it_is(model)


class Identity:
    """What a prepared forward depends on in the model, beside the values of its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._before = _identity(model)

    def why_changed(self) -> str | None:
        """Why what was prepared is not what the model would do now; None when it is."""
        if why := _why_not_as_it_is(self._model):
            return why
        if _identity(self._model) != self._before:
            return "the model was moved, converted or changed after its forwards were prepared"
        return None


def why_not_now(device: torch.device) -> str | None:
    """Why a forward at this point of the program would not run as it was prepared; None when it would."""
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    return None


def _identity(model: PreTrainedModel) -> tuple[Any, ...]:
    tensors = (*model.parameters(), *model.buffers())
    places = tuple((each.data_ptr(), each.dtype, each.shape) for each in tensors)
    return places, getattr(model.config, "_attn_implementation", None), model.training


def _why_not_as_it_is(model: PreTrainedModel) -> str | None:
    """What Python decides anew in each of its forwards, or around them; None where there is no such thing."""
    if own := next((name for name in AROUND if has_own(model, name)), None):  # prepared forwards do without
        return f"it has a {own} of its own"
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS) or "forward" in vars(module):
            return f"{name or type(model).__name__} has a forward hook"
        if hasattr(type(module), "adapter_layer_names"):  # a layer that peft has put in the place of another one
            return _ADAPTERS
    return None
