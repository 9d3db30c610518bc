"""What drafting and verifying cost in seconds on the device at hand."""

from autospec.costs.table import CostTable

__all__ = ["CostTable"]
