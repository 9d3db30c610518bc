"""Measured costs on disk, one JSON file for each fingerprint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autospec.costs.fingerprint import digest
from autospec.costs.table import CostTable
from autospec.fetching import cache_folder, one_line
from autospec.files import replacing

FORMAT = 1

_log = logging.getLogger("autospec")


def costs_folder() -> Path:
    """`$AUTOSPEC_COSTS`, else `costs` in the folder of fetched models: `$AUTOSPEC_CACHE` or the user's cache."""
    if given := os.environ.get("AUTOSPEC_COSTS"):
        return Path(given).expanduser()
    return cache_folder() / "costs"


def costs_file(description: Mapping[str, Any]) -> Path:
    """Where costs of what is described are kept."""
    return costs_folder() / f"{digest(description)}.json"


def _usable_file(description: Mapping[str, Any]) -> Path | None:
    """`costs_file`; None, which the log says, where its folder is of a user that there is not."""
    try:
        return costs_file(description)
    except RuntimeError as error:
        given = os.environ.get("AUTOSPEC_COSTS") or os.environ.get("AUTOSPEC_CACHE") or "~/.cache"
        _log.warning("measured costs are not kept, the folder in %r is not to be found: %s", given, one_line(error))
        return None


def load(description: Mapping[str, Any]) -> CostTable | None:
    """The costs measured before; None where there are none. A file that cannot be used is named in the log."""
    if (path := _usable_file(description)) is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if content.get("fingerprint") != json.loads(json.dumps(description)):
            raise ValueError("it belongs to another device, model or source")
        return CostTable.from_json(content["table"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _log.warning("%s is not used, costs are measured again: %s", path, one_line(error))
        return None


def save(description: Mapping[str, Any], table: CostTable) -> Path | None:
    """Write the costs, whole or not at all. Returns: the file; None where none can be written, which the log says."""
    if (path := _usable_file(description)) is None:
        return None
    return write_whole(path, {"format": FORMAT, "fingerprint": description, "table": table.to_json()})


def write_whole(path: Path, content: Mapping[str, Any]) -> Path | None:
    """Write JSON, whole or not at all. Returns: the file; None where it cannot be written, which the log says."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning("measured costs cannot be kept in %s: %s", path.parent, one_line(error))
        return None
    return path
