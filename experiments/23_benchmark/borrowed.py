"""What other experiments have already."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def live() -> ModuleType:
    """experiments/15_live/run.py."""
    spec = importlib.util.spec_from_file_location("live", Path(__file__).parent.parent / "15_live" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
