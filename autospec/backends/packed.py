"""Linear layers in the layout that oneDNN multiplies fastest in: a CPU's forwards, unchanged in all else."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from autospec.backends.agreement import agree
from autospec.backends.attention import grouped_attention
from autospec.backends.base import CannotPrepareError
from autospec.caches import append
from autospec.fetching import one_line
from autospec.forks import renew_after_fork

NAME = "packed"
CHECK_TOKENS = [5, 1, 3]
"""Of the text whose logits are compared with the model's own: a prompt, a plain step and a block."""
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # of each dtype that is packed, to compare bits
_ROWS = 16  # of each weight, one of which is looked at before a request, in turn

_known: WeakValueDictionary[tuple[int, ...], PackedLinears] = WeakValueDictionary()  # by `id` of their layers
_known_lock = threading.Lock()


class PackedLinears:
    """Packed copies of a model's linear layers, and their use while a request runs.

    The model itself stays as it is: only for as long as a request runs, and in its thread alone, its linear layers
    multiply by their packed copies, and its attention takes heads together (`grouped_attention`). All else in a forward
    (hooks, adapters, flags, caches of any kind) is the model's.

    Weights that were replaced, moved or changed in place are packed anew before the next request. In-place changes are
    known by torch's own count of them; those made past it (through `.data`) by a row of each weight, another one in
    every request: a change of whole matrices is seen at once, one of a few rows may not be.

    Args:
        modules: as `linear_layers` finds them.
        around: `id` of each module of the model, whose attention runs along.
    """

    @classmethod
    def of(cls, model: PreTrainedModel) -> PackedLinears:
        """Those of a model; copies that share its layers share what was packed, too.

        Raises:
            CannotPrepareError: it has none that can be packed, or its forwards are not those that Python would run.
        """
        if why := why_never(model):
            raise CannotPrepareError(why)
        modules = linear_layers(model)
        if not modules:
            raise CannotPrepareError("it has no linear layers of float32 or bfloat16 on the CPU")
        key = tuple(map(id, modules))
        with _known_lock:
            found = _known.get(key)
            if found is None:
                _known[key] = found = cls(modules, frozenset(map(id, model.modules())))
        return found

    def __init__(self, modules: Sequence[nn.Linear], around: Collection[int] = ()) -> None:
        self.num_captures = 0
        self._around = around
        self._users: Counter[int] = Counter()  # requests by thread
        self._layers = [_Layer(module, self._users) for module in modules]
        self._round = 0
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._pack()

    @property
    def memory_bytes(self) -> int:
        """Of what is held beside the model's weights."""
        return sum(layer.module.weight.nbytes for layer in self._layers) + sum(rows.nbytes for rows in self._kept)

    @contextmanager
    def lease(self, model: PreTrainedModel) -> Iterator[str | None]:
        """For one request of the model. Yields: why it is decoded eagerly; None where packed layers are in use."""
        user = threading.get_ident()
        with self._lock:
            why = self._why_not_now(model) or self._renew()
            if why is None:
                if not self._users:
                    for layer in self._layers:
                        layer.install()
                self._users[user] += 1
        try:
            with nullcontext() if why else grouped_attention(self._around):
                yield why
        finally:
            if why is None:
                with self._lock:
                    self._users[user] -= 1
                    if self._users[user] <= 0:  # below it: this is a forked child, where it was forgotten
                        del self._users[user]
                    if not self._users:
                        for layer in self._layers:
                            layer.uninstall()

    def _why_not_now(self, model: PreTrainedModel) -> str | None:
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        modules = () if self._users else (layer.module for layer in self._layers)  # while they run, they have ours
        if any(map(_has_own_forward, (model, *modules))):
            return "the model got a forward of its own"
        return None

    def _renew(self) -> str | None:
        """Pack anew what changed. Returns: why it cannot be packed any more."""
        self._round = (self._round + 1) % len(self._rows)
        if any(layer.has_changed() for layer in self._layers):
            if not all(_can_be_packed(layer.module) for layer in self._layers):
                return "the model was moved, converted or changed after its layers were packed"
        elif torch.equal(torch.cat(self._rows[self._round]), self._kept[self._round]):
            return None
        try:
            self._pack()
        except RuntimeError as error:  # no memory for it
            return f"its layers could not be packed anew: {one_line(error)}"
        return None

    def forget_users(self) -> None:
        """In a forked child: whoever used it is not there, and another thread may get the same number."""
        self._users.clear()
        for layer in self._layers:
            layer.uninstall()

    def _pack(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers:
                layer.pack()
            self._rows = [[_row(layer.module.weight, number) for layer in self._layers] for number in range(_ROWS)]
            self._kept = [torch.cat(rows) for rows in self._rows]
        self.num_captures += len(self._layers)


class _Layer:
    """One linear layer and its packed copy. Args: users: threads whose forwards use it."""

    def __init__(self, module: nn.Linear, users: Counter[int]) -> None:
        self.module = module
        self._forward = _Forward(module, users)
        self._packed_from: tuple[Any, ...] = ()

    def pack(self) -> None:
        weight = self.module.weight
        self._forward.dtype = weight.dtype
        self._forward.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._packed_from = weight, weight.data_ptr(), _version(weight)

    def has_changed(self) -> bool:
        weight, place, version = self._packed_from
        now = self.module._parameters.get("weight")  # not by its name, which takes torch longer
        return now is not weight or now.data_ptr() != place or _version(now) != version

    def install(self) -> None:
        vars(self.module)["forward"] = self._forward

    def uninstall(self) -> None:
        if vars(self.module).get("forward") is self._forward:
            del vars(self.module)["forward"]


class _Forward:
    """`nn.Linear.forward` by the packed weight, for those who use it now; for all others as ever."""

    __slots__ = ("_module", "_multiply", "_users", "dtype", "packed")

    def __init__(self, module: nn.Linear, users: Counter[int]) -> None:
        self._module, self._users = module, users
        self.dtype = module.weight.dtype
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default
        self.packed: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        module = self._module
        if threading.get_ident() not in self._users or torch.is_grad_enabled() or states.dtype is not self.dtype:
            return functional.linear(states, module.weight, module.bias)
        product: Tensor = self._multiply(states, self.packed, module.bias, "none", [], "")
        return product

    def __reduce__(self) -> Any:
        """A copy of the model that is made meanwhile runs as ever, by its own weights."""
        return partial, (nn.Linear.forward, self._module)


def _forget_users() -> None:
    for each in list(_known.values()):
        each.forget_users()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_users)


@torch.no_grad()
def check_packed(model: PreTrainedModel, layers: PackedLinears) -> None:
    """Compare a forward with the model's own.

    Raises:
        CannotPrepareError: they differ by more than rounding, or packed layers cannot be used now.
    """
    size = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, size, (1, sum(CHECK_TOKENS)), generator=torch.Generator().manual_seed(0))
    parts = torch.split(tokens, CHECK_TOKENS, dim=1)
    expected = _logits(model, parts)
    with layers.lease(model) as why:
        if why:
            raise CannotPrepareError(why)
        found = _logits(model, parts)
    if not agree(found, expected):
        raise CannotPrepareError("its forward, packed, gives other logits")


def _logits(model: PreTrainedModel, parts: Sequence[Tensor]) -> Tensor:
    """[tokens, vocab_size], of parts of a text, one after the other over one cache, if the model has any."""
    cache, logits = None, []
    for part in parts:
        found, cache = append(model, part, cache, logits_kept=part.shape[1])
        logits.append(found)
    return torch.cat(logits)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Those that can be packed."""
    return [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module)]


def why_never(model: Any) -> str | None:
    """Why no layers of this model are packed; None where they may be."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} wraps the model that runs"
    if not getattr(torch.ops.mkldnn, "_linear_pointwise", None):
        return "this build of torch has no oneDNN"
    name = next((name for name, module in model.named_modules() if _has_own_forward(module)), None)
    return None if name is None else f"{name or type(model).__name__} has a forward of its own"


def _has_own_forward(module: nn.Module) -> bool:
    """Was it compiled, or is it run by something else than its class?"""
    return "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None


def _can_be_packed(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_plain = type(weight) is nn.Parameter and weight.layout is torch.strided and weight.is_contiguous()
    return is_plain and weight.device.type == "cpu" and weight.dtype in _INTEGERS and weight.numel() > 0


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version  # those are not counted


def _row(weight: Tensor, number: int) -> Tensor:
    """The bits of one of its rows, [in_features]; those of all numbers are spread over it."""
    return weight.detach()[number * len(weight) // _ROWS].view(_INTEGERS[weight.dtype])
