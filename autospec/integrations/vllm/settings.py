"""How the proposer is set up: environment variables, or `autospec` in vLLM's `--additional-config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autospec.errors import ConfigurationError

PREFIX = "AUTOSPEC_VLLM_"
KEY = "autospec"
"""In `additional_config`, which vLLM hands on as it is. Its speculative config takes no fields of others."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Settings:
    """As `autospec.wrap` takes them, but for what belongs to an engine."""

    store: str | None = None  # URL of the telemetry database
    policy: str = "auto"
    drafts: tuple[str, ...] = ("ngram", "suffix")  # retrieval sources
    segments: str | None = "auto"  # or the path of a TOML file, or `none`
    control_share: float | None = None  # None: as the policy has it
    trace: float = 0.0  # share of the requests whose blocks are stored one by one
    run: str | None = None
    name: str | None = None  # of this engine, in place of the host's
    resume: bool = True  # go on from what others have learned
    plain_sampler: bool = True  # steps without drafts are sampled as without speculation


def read_settings(additional_config: object = None, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings; a variable of the environment comes before the same setting in the configuration.

    Raises:
        ConfigurationError: a setting that there is not, or a value that it cannot have.
    """
    environment = os.environ if environment is None else environment
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"additional_config[{KEY!r}]={given!r:.60}: an object is needed")
    found = {(f"additional_config[{KEY!r}][{name!r}]", str(name)): value for name, value in given.items()}
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            found[variable, variable.removeprefix(PREFIX).lower()] = text
    known = [each.name for each in fields(Settings)]
    values: dict[str, Any] = {}
    for (where, name), value in found.items():
        if name not in known:
            raise ConfigurationError(f"{where}: no such setting; known are {', '.join(known)}")
        values[name] = _READ.get(name, _text)(where, value)
    return Settings(**values)


def _text(where: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{where}={value!r:.60}: a text is needed")
    return value or None


def _needed_text(where: str, value: Any) -> str:
    found = _text(where, value)
    if found is None:
        raise ConfigurationError(f"{where} is empty")
    return found


def _segments(where: str, value: Any) -> str | None:
    found = _text(where, value)
    return None if found == "none" else found


def _names(where: str, value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{where}={value!r:.60}: names are needed, as in ngram,suffix")
    return tuple(name.strip() for name in names if name.strip())


def _share(where: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if isinstance(value, bool) or not 0.0 <= share <= 1.0:
        raise ConfigurationError(f"{where}={value!r:.60}: a number from 0 to 1 is needed")
    return share


def _flag(where: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"{where}={value!r:.60}: true or false is needed")
    return text in _TRUE


_READ: Mapping[str, Any] = {
    "policy": _needed_text,
    "drafts": _names,
    "segments": _segments,
    "control_share": _share,
    "trace": _share,
    "resume": _flag,
    "plain_sampler": _flag,
}
