"""Which slice of traffic a request belongs to: a label given with the call or around it, else `default`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from autospec.errors import ConfigurationError

DEFAULT = "default"
MAX_LENGTH = 80

_label: ContextVar[str | None] = ContextVar("autospec_segment", default=None)


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


def resolve(explicit: str | None) -> str:
    """The segment of a call: the explicit label, else the surrounding block's, else `default`."""
    return clean(explicit) if explicit is not None else _label.get() or DEFAULT


def clean(label: str) -> str:
    """A label as it is stored.

    Raises:
        ConfigurationError: not a text, or nothing is left of it.
    """
    if not isinstance(label, str):
        raise ConfigurationError(f"segment={label!r}: a text is needed")
    cleaned = " ".join(re.sub(r"[^\S ]|[^\x20-\uffff\U00010000-\U0010ffff]|[\x7f-\x9f]", " ", label).split())[
        :MAX_LENGTH
    ]
    if not cleaned:
        raise ConfigurationError(f"segment={label!r}: at least one visible character is needed")
    return cleaned
