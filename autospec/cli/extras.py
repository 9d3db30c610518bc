"""How to install what an extra of the distribution needs: commands that work as they are printed."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "autospec-decoding"


def missing(extra: str) -> list[str]:
    """Requirements of the extra that are not met here, as in `plotly>=6.0`."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # run from a bare tree: nothing says what is asked for
        return []
    return [
        f"{each.name}{each.specifier}"
        for each in asked
        if each.marker is not None
        and each.marker.evaluate({"extra": extra})
        and not each.marker.evaluate({"extra": ""})
        if not each.specifier.contains(_version(each.name), prereleases=True)
    ]


def install_command(extra: str) -> str | None:
    """Installs what is missing of the extra into this environment; None where nothing is."""
    found = missing(extra)
    if not found:
        return None
    has_pip = _version("pip") != "0"
    start = (
        [sys.executable, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*start, *found])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"
