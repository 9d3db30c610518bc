"""Policies: rules that choose draft source and block length before each block. No torch, one file each."""

from autospec.policies.base import CostEstimates, Policy
from autospec.policies.epsilon_greedy import EpsilonGreedy
from autospec.policies.exp3 import Exp3
from autospec.policies.fixed import Fixed
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard
from autospec.policies.hedge import Hedge
from autospec.policies.linucb import LinUCB
from autospec.policies.registry import make_policy
from autospec.policies.thompson import Thompson
from autospec.policies.transformers_constant import TransformersConstant
from autospec.policies.transformers_heuristic import TransformersHeuristic
from autospec.policies.tuned import Tuned
from autospec.policies.ucb import UCB

__all__ = [
    "UCB",
    "CostEstimates",
    "EpsilonGreedy",
    "Exp3",
    "Fixed",
    "Goodput",
    "Guard",
    "Hedge",
    "LinUCB",
    "Policy",
    "Thompson",
    "TransformersConstant",
    "TransformersHeuristic",
    "Tuned",
    "make_policy",
]
