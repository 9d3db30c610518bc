"""The certifier: proves, on models small enough to enumerate, that choices never change the output distribution."""

from autospec.certify.cases import full_cases, quick_cases
from autospec.certify.certifier import BOUND, Case, Certificate, certify
from autospec.certify.synthetic import SyntheticModel, constant_table, random_table

__all__ = [
    "BOUND",
    "Case",
    "Certificate",
    "SyntheticModel",
    "certify",
    "constant_table",
    "full_cases",
    "quick_cases",
    "random_table",
]
