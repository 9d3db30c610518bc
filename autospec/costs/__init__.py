"""What drafting and verifying cost in seconds on the device at hand."""

from autospec.costs.model import CostModel
from autospec.costs.table import CostTable, Curve

__all__ = ["CostModel", "CostTable", "Curve"]
