"""The policy of one wrapped model, shared by its requests."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from autospec.errors import ConfigurationError, ExactnessError
from autospec.forks import renew_after_fork
from autospec.notices import warn
from autospec.policies.base import Policy, asked
from autospec.types import NONE, Action, BlockContext, BlockOutcome, RequestContext

NEVER_ACCEPTED_TOKENS = 100


class Controller:
    """Chooses before each block and learns after it; calls from several threads are put in a row.

    Args:
        policy: chooses.
        control_share: share of the requests that are controls, chosen at random; None: as the policy has it.
    """

    def __init__(self, policy: Policy, control_share: float | None = None) -> None:
        self._policy = policy
        self._control_share = control_share
        self._random = random.Random()
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._judged: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    @property
    def is_off(self) -> bool:
        return getattr(self._policy, "is_off", False) is True  # a method of that name is something else

    def asks(self, segment: str, sources: Collection[str]) -> Collection[str]:
        return asked(self._policy, segment, sources)

    def is_control(self, request: RequestContext) -> bool:
        if self._control_share is not None:
            return self._random.random() < self._control_share
        takes = getattr(self._policy, "is_control", None)
        if takes is None:
            return False
        with self._lock:
            return bool(takes(request))

    def choose(self, context: BlockContext) -> Action:
        with self._lock:
            action = self._policy.choose(context)
        if not isinstance(action, Action) or type(action.block_length) is not int or action.block_length < 0:
            shown = f"{type(action).__name__} {getattr(action, 'label', action)!s:.80}"
            raise ConfigurationError(
                f"policy {self._policy.name!r} chose {shown}: an Action with a block length of at least 0 is needed"
            )
        is_plain = action.source == NONE or action.block_length == 0
        return Action(reason=action.reason) if is_plain else action

    def verify_width(self, num_tokens: int, context_tokens: int) -> int:
        """Tokens that a forward over `num_tokens` is padded to, where the policy reckons with it. Takes no lock."""
        width = getattr(self._policy, "verify_width", None)
        return num_tokens if width is None else int(width(num_tokens, context_tokens))

    @property
    def can_resume(self) -> bool:
        """Whether the policy can be asked for what it has learned, and go on from it."""
        return callable(getattr(self._policy, "state", None)) and callable(getattr(self._policy, "restore", None))

    def state(self) -> Any:
        """What the policy has learned, between two blocks. Only where it `can_resume`."""
        with self._lock:
            return self._policy.state()  # type: ignore[attr-defined]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have the policy go on from such a state. Only where it `can_resume`.

        Raises:
            ConfigurationError: the policy does not know this state.
        """
        with self._lock:
            self._policy.restore(state)  # type: ignore[attr-defined]

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
        source = outcome.action.source
        with self._lock:
            self._policy.observe(outcome)
            was_unheard_of = self._judged[source] < NEVER_ACCEPTED_TOKENS
            self._judged[source] += judged
            self._accepted[source] += accepted
            is_time = was_unheard_of and self._judged[source] >= NEVER_ACCEPTED_TOKENS
        if is_time and self._accepted[source] == 0:
            warn(
                f"none of the first {self._judged[source]} draft tokens of {source!r} was accepted: "
                "is it made for this model? Answers stay right, but nothing is gained"
            )
