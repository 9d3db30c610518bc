"""The policy of one wrapped model, shared by its requests."""

from __future__ import annotations

import threading

from autospec.errors import ExactnessError
from autospec.policies.base import Policy
from autospec.types import Action, BlockContext, BlockOutcome


class Controller:
    """Chooses before each block and learns after it; calls from several threads are put in a row."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = threading.Lock()

    def choose(self, context: BlockContext) -> Action:
        with self._lock:
            return self._policy.choose(context)

    def observe(self, outcome: BlockOutcome) -> None:
        """Pass on what a block did, once it is certain that asked, drafted and counted agree."""
        asked, drafted, judged, accepted = (
            outcome.action.block_length,
            outcome.num_draft_tokens,
            outcome.num_judged_tokens,
            outcome.num_accepted_tokens,
        )
        if not (asked >= drafted >= judged >= accepted >= 0 and 1 <= outcome.num_committed_tokens <= accepted + 1):
            raise ExactnessError(f"a block's counts contradict each other: {outcome}")
        with self._lock:
            self._policy.observe(outcome)
