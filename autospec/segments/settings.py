"""The table `[segments]` of a configuration file, in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autospec.errors import ConfigurationError
from autospec.segments.rules import CONDITIONS, Rule

KEYS = ("builtin", "clusters", "max_segments", "rules")
RULE_KEYS = ("name", *CONDITIONS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the table says; docs/segments.md describes it."""

    rules: tuple[Rule, ...]
    builtin: bool = False
    clusters: Path | None = None
    max_segments: int | None = None


def load_settings(path: str | Path) -> Settings:
    """Read the table `[segments]` of a TOML file; other tables are left alone.

    Raises:
        ConfigurationError: the file cannot be read, or something in it is not as docs/segments.md says. The message
            names file and rule.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(
            f"{path}: cannot read the rules ({reason}); expected the path of a TOML file"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not a TOML file in UTF-8 ({error})") from error
    table = content.get("segments")
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: no table [segments]; rules stand in [[segments.rules]]")
    try:
        return _settings(table, path.parent)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}, {error}") from error


def _settings(table: Mapping[str, Any], folder: Path) -> Settings:
    _no_others(table, KEYS, "[segments]")
    builtin, clusters, most = table.get("builtin", False), table.get("clusters"), table.get("max_segments")
    if not isinstance(builtin, bool):
        raise ConfigurationError(f"[segments]: builtin = {builtin!r}; true or false is needed")
    if clusters is not None and not (isinstance(clusters, str) and clusters):
        raise ConfigurationError(f"[segments]: clusters = {clusters!r}; the path of an .npz file is needed")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigurationError(f"[segments]: max_segments = {most!r}; a whole number from 1 up is needed")
    rows = table.get("rules", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigurationError("[segments]: rules must be tables; begin each with [[segments.rules]]")
    rules = []
    for number, row in enumerate(rows, 1):
        shown = f" ({row['name']!r})" if "name" in row else ""
        try:
            _no_others(row, RULE_KEYS, "the rule")
            if "name" not in row:
                raise ConfigurationError("no name; name = '...' is the segment")
            rules.append(Rule(**row))
        except ConfigurationError as error:
            raise ConfigurationError(f"rule {number}{shown:.60}: {error}") from error
    return Settings(tuple(rules), builtin, folder / clusters if clusters is not None else None, most)


def _no_others(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise ConfigurationError(f"{where}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
