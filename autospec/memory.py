"""How much memory an object holds: containers, NumPy arrays and torch tensors that can be reached from it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_CONTROL_GROUP = "/sys/fs/cgroup"
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def held_bytes(roots: Iterable[Any], *, shared: Iterable[Any] = ()) -> int:
    """Bytes of all that can be reached from `roots`, each thing counted once.

    Args:
        roots: where to begin.
        shared: what is held by others anyway and not counted, such as a target whose layers a draft uses.
    """
    seen: set[int] = set()
    _walk(shared, seen)
    return _walk(roots, seen)


def weight_bytes(modules: Iterable[Any]) -> int:
    """Bytes of parameters and buffers; what modules share is counted once."""
    storages: dict[int, int] = {}
    for module in modules:
        if isinstance(module, torch.nn.Module):
            for tensor in (*module.parameters(), *module.buffers()):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def free_bytes() -> int | None:
    """Memory that is free on this machine and, where it says so, left to this process's control group; None: unknown.

    What the system would give up when asked (its caches of files) is not counted.
    """
    found: list[int] = []
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
        limit, used = (
            Path(_CONTROL_GROUP, f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current")
        )
        found.append(int(limit) - int(used))
    except (OSError, ValueError, AttributeError):  # another system, no control group, or one without a limit
        pass
    return min(found, default=None)


def _walk(roots: Iterable[Any], seen: set[int]) -> int:
    total = 0
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _CODE) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif isinstance(thing, np.ndarray):
            if isinstance(thing.base, np.ndarray):
                waiting.append(thing.base)
            else:
                total += thing.nbytes
        else:
            total += sys.getsizeof(thing)
            waiting.extend(gc.get_referents(thing))
    return total
