"""Policies: rules that choose draft source and block length before each block. No torch, one file each."""

from autospec.policies.base import CostEstimates, Policy
from autospec.policies.fixed import Fixed
from autospec.policies.goodput import Goodput
from autospec.policies.registry import make_policy

__all__ = ["CostEstimates", "Fixed", "Goodput", "Policy", "make_policy"]
