"""What the policy of a wrapped model has learned: saved in the store, and gone on from by the next one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from autospec.controller import Controller
from autospec.fetching import one_line
from autospec.notices import warn
from autospec.policies.base import Policy
from autospec.policies.merging import merge
from autospec.policies.states import check, newest_segments
from autospec.types import Deployment, PolicyState, PolicyVersion

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder

_log = logging.getLogger("autospec")
SAVE_SECONDS = 60.0
"""At least, between two times that a state is saved."""
MOST_SHARE = 0.001
"""Of the time that making states may take."""
MOST_SEGMENTS = 2_000
"""In a saved state: those seen last."""
MOST_STATES = 32
"""That are merged: the newest."""
MOST_AGE = timedelta(days=30)
_MOST_INHERITED = 100


class Learned:
    """Saves what one policy learns, and restores what others of its kind have learned.

    Does nothing for a policy without `state` and `restore`, or with a database that ends with the process.

    Args:
        controller: of the policy.
        policy: the policy itself, to tell how its states are merged.
        version: of its settings: states of others are not for it.
        recorder: where states go.
        deployment: where the model is.
    """

    def __init__(
        self, controller: Controller, policy: Policy, version: PolicyVersion, recorder: Recorder, deployment: Deployment
    ) -> None:
        self._controller = controller
        self._policy = policy
        self._version = version
        self._recorder = recorder
        self._deployment = deployment
        self._learns = controller.can_resume and recorder.store.is_lasting
        self._inherited: Mapping[str, datetime] = {}
        self._begin()
        self._at_exit: object = None
        if self._learns:
            self._at_exit = _save_at_exit(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._process = uuid.uuid4().hex
        self._has_news = False
        self._last_place = 0  # of the last state among the records
        self._last_saved = datetime.fromtimestamp(0, UTC)
        self._not_before = time.monotonic() + SAVE_SECONDS

    def resume(self) -> None:
        """Go on from what was learned in the last 30 days, if anything was.

        Never raises: what cannot be used is skipped, with one warning.
        """
        if not self._learns:
            return
        try:
            found, num_damaged = self._recorder.store.policy_states(
                self._deployment, self._version.version, datetime.now(UTC) - MOST_AGE, MOST_STATES
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, answers can be given without it
            warn(f"what was learned before could not be read, so nothing is known yet: {error}", stacklevel=5)
            return
        usable, reason = [], "it is damaged"
        for state in found:
            try:
                check(self._policy, state.state)
                usable.append(state)
            except Exception as error:  # noqa: BLE001  # nothing in a database may keep a model from being wrapped
                num_damaged, reason = num_damaged + 1, one_line(error)
        while usable:
            try:
                merged, count = merge(self._policy, [state.state for state in usable], int(self._process, 16))
                self._controller.restore(merged)
            except Exception as error:  # noqa: BLE001  # a policy may be anybody's, and so may a state
                num_damaged, reason = num_damaged + 1, f"{type(error).__name__}: {error}"
                del usable[0]
            else:
                self._inherited = _lineage(usable[:count])
                _log.info("policy %s goes on from what %d processes had learned", self._policy.name, count)
                break
        if num_damaged:
            warn(f"{num_damaged} of the states that policies had learned were skipped: {reason}", stacklevel=5)

    def after_request(self, deployment: Deployment) -> None:
        """Save, if it is time. Never raises.

        Args:
            deployment: where the model is now.
        """
        self._deployment = deployment
        if not self._learns:
            return
        if os.getpid() != self._pid:  # forked: the parent saves under its own name
            self._begin()
        self._has_news = True
        now = time.monotonic()
        if now < self._not_before or not self._lock.acquire(blocking=False):
            return
        try:
            # while the database is away, states would fill the spool, each with all that the one before it had
            if self._recorder.recorded - self._recorder.waiting >= self._last_place:
                self._save()
                taken = time.monotonic() - now
                self._not_before = now + max(SAVE_SECONDS, taken / MOST_SHARE)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Save what is new, for the last time. Never raises."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)  # type: ignore[arg-type]  # what it was registered with
            self._at_exit = None
        if not self._learns or os.getpid() != self._pid:
            return
        with self._lock:
            if self._has_news:
                self._save()

    def _save(self) -> None:
        self._has_news = False
        try:
            state = newest_segments(self._controller.state(), MOST_SEGMENTS)
            now = max(datetime.now(UTC), self._last_saved + timedelta(microseconds=1))  # clocks are set back
            self._recorder.note(
                PolicyState(
                    self._deployment,
                    self._policy.name,
                    self._version.version,
                    self._process,
                    now,
                    state,
                    self._inherited,
                )
            )
            self._last_saved, self._last_place = now, self._recorder.recorded
        except Exception as error:  # noqa: BLE001  # a policy may be anybody's
            self._learns = False
            warn(f"what the policy learns is not kept: {type(error).__name__}: {error}", stacklevel=5)


def _lineage(states: list[PolicyState]) -> dict[str, datetime]:
    """What these states are, and what they went on from themselves: the newest of it."""
    found: dict[str, datetime] = {}
    for state in states:
        for process, when in ((state.process, state.updated_at), *state.inherited.items()):
            found[process] = max(when, found.get(process, when))
    newest = sorted(found.items(), key=lambda each: each[1])[-_MOST_INHERITED:]
    return dict(newest)


def _save_at_exit(learned: Learned) -> object:
    """Programs end without close(), too; what waits for the database then is written by the recorder, after this."""
    this = weakref.ref(learned)

    def save() -> None:
        found = this()
        if found is not None:
            found.close()

    return atexit.register(save)
