"""An environment for each package that is measured against, in front of the one that runs this.

What that one has is seen from it, so that torch is not installed twice; pip installs what the package needs
otherwise, and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

OWN = "own"
"""The environment that runs this script."""


@dataclass(frozen=True)
class Environment:
    """A package at a release, and the transformers that it is used with."""

    name: str
    packages: tuple[str, ...]


TRANSFORMERS = "transformers==5.23.*"
"""The newest before 5.24, which renamed the cache: economize's `generate` raises there, flashspec uses the old name."""
PEERS = {
    "flashspec": Environment("flashspec", ("flashspec==0.3.1", TRANSFORMERS)),
    "economize": Environment("economize", ("economize==0.3.2", TRANSFORMERS)),
}
TORCH = f"torch=={version('torch').partition('+')[0]}"
"""Any other release would be gigabytes."""


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of an environment, which is made first where it is missing or another.

    Raises:
        RuntimeError: pip could not install the package; what it said.
    """
    if name == OWN:
        return Path(sys.executable)
    environment, place = PEERS[name], folder / name
    python, stamp = place / "bin" / "python", place / "ready.json"
    wanted = {"packages": list(environment.packages), "torch": TORCH, "python": sys.version, "in_front_of": sys.prefix}
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return python
    print(f"making {place} with {', '.join(environment.packages)}", file=sys.stderr, flush=True)
    venv.EnvBuilder(clear=True, with_pip=False).create(place)
    path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", path], check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "main.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    constraints = place / "constraints.txt"
    constraints.write_text(TORCH + "\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--constraint", str(constraints)]
    done = subprocess.run([*command, *environment.packages], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: pip could not install {environment.packages}: {done.stderr.strip()[-2000:]}")
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return python
