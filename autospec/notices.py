"""Warnings that never cost an answer."""

from __future__ import annotations

import logging
import warnings

_log = logging.getLogger("autospec")


def warn(text: str, *, stacklevel: int = 2) -> None:
    """Warn; where warnings are turned into errors, log instead: a notice must not end a request that went well."""
    try:
        warnings.warn(f"autospec: {text}", stacklevel=stacklevel + 1)
    except UserWarning:
        _log.warning("%s", text)
