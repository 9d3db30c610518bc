"""Locks in forked children: one that another thread of the parent held at the fork would stay locked for ever."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(holder: Any) -> None:
    """In forked children `holder._lock` is a new `threading.Lock`.

    What the lock guards may have been half changed when the fork came: use it where that is estimates, counts and what
    a policy has learned, which are never wrong for an answer.
    """
    _known.add(holder)


def _renew() -> None:
    for holder in list(_known):
        holder._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
