"""How forwards are run: as the model itself runs them, or in a few fixed shapes that were prepared at start-up."""

from __future__ import annotations

from autospec.backends.backend import Backend, Lease
from autospec.backends.base import Static
from autospec.backends.static_model import StaticModel

__all__ = ["Backend", "Lease", "Static", "StaticModel"]
