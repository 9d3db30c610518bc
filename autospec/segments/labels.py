"""Labels that a caller gives: with the call, or around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from autospec.errors import ConfigurationError

DEFAULT = "default"
MAX_LENGTH = 80

_label: ContextVar[str | None] = ContextVar("autospec_segment", default=None)
_tenant: ContextVar[str | None] = ContextVar("autospec_tenant", default=None)


@contextmanager
def segment(label: str) -> Iterator[None]:
    """Label every wrapped `generate` call inside the block: `with autospec.segment("summarise"): ...`.

    Args:
        label: name of the segment; control characters are dropped and it is cut to 80 characters.

    Raises:
        ConfigurationError: not a text, or empty.
    """
    token = _label.set(clean(label))
    try:
        yield
    finally:
        _label.reset(token)


@contextmanager
def tenant(name: str) -> Iterator[None]:
    """Say for whom the wrapped calls inside the block are made: `with autospec.tenant(headers["x-tenant"]): ...`.

    Rules may ask for it (docs/segments.md). It is not stored.

    Args:
        name: as it came in a header; control characters are dropped and it is cut to 80 characters.

    Raises:
        ConfigurationError: not a text, or empty.
    """
    token = _tenant.set(clean(name, "tenant"))
    try:
        yield
    finally:
        _tenant.reset(token)


def surrounding() -> str | None:
    """The label of the innermost `autospec.segment` block; None outside of any."""
    return _label.get()


def current_tenant() -> str | None:
    """The name of the innermost `autospec.tenant` block; None outside of any."""
    return _tenant.get()


def resolve(explicit: str | None) -> str:
    """The segment of a call by labels alone: the explicit one, else the surrounding block's, else `default`."""
    return clean(explicit) if explicit is not None else surrounding() or DEFAULT


def clean(label: str, name: str = "segment") -> str:
    """A label as it is stored.

    Raises:
        ConfigurationError: not a text, or nothing is left of it.
    """
    if not isinstance(label, str):
        raise ConfigurationError(f"{name}={label!r}: a text is needed")
    words = re.sub(r"[^\S ]|[^\x20-\uffff\U00010000-\U0010ffff]|[\x7f-\x9f]", " ", label).split()
    cleaned = " ".join(words)[:MAX_LENGTH].rstrip()
    if not cleaned:
        raise ConfigurationError(f"{name}={label!r}: at least one visible character is needed")
    return cleaned
