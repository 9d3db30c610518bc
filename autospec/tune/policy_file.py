"""The file of a tuned policy: one readable TOML, with what it was made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from autospec.errors import AutospecError

HEADER = """\
# A policy for each segment, made by `autospec tune`.
# autospec.wrap(model, tokenizer=tokenizer, drafts=[...], policy="tuned:THIS_FILE")
# needs the draft sources that it names.

"""


def write_policy(path: Path, contents: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all.

    Args:
        path: ends in `.toml`.
        contents: as `autospec.policies.tuned.make_tuned` takes them.

    Raises:
        AutospecError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(HEADER + tomli_w.dumps(_without_none(contents)), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise AutospecError(f"{path}: {error.strerror or type(error).__name__}") from error


def _without_none(value: Any) -> Any:
    """TOML knows no nothing: what is None is left out."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(each) for each in value]
    return value
