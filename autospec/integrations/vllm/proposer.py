"""What vLLM makes and calls: the boundary, behind which nothing may cost a request."""

from __future__ import annotations

import atexit
import inspect
import logging
import multiprocessing.util
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from autospec.controller import Controller
from autospec.costs.batches import BatchCosts
from autospec.drafts.base import DraftRequest
from autospec.drafts.registry import make_sources
from autospec.errors import ConfigurationError
from autospec.integrations.vllm.batch import Batch
from autospec.integrations.vllm.engine import (
    ShapeError,
    ending_with,
    is_leader,
    limits_of,
    num_ranks,
    read_call,
    tokenizer_of,
)
from autospec.integrations.vllm.plain_sampling import PlainSampler, install
from autospec.integrations.vllm.sampling import UNKNOWN, Rows, Sampling, rows_of_caller
from autospec.integrations.vllm.served import Served
from autospec.integrations.vllm.settings import read_settings
from autospec.integrations.vllm.telemetry import EngineTelemetry, describe_engine
from autospec.memory import weight_bytes
from autospec.policies.registry import make_policy
from autospec.segments import DEFAULT, Prompt, clean, make_segmenter
from autospec.segments.prompts import excerpt
from autospec.tuned_files import drafts_with

BLOCK_LENGTHS = (1, 2, 4, 8, 16)
SWEEP_SECONDS = 0.5
COSTS_SECONDS = 600.0
"""Between two times that what steps cost goes to the store."""
MOST_FAILURES = 100
"""Calls in a row that fail before the proposer drafts no more: each costs time, and none brings anything."""
MOST_LOOKS = 8
"""Calls in which it is looked for how requests are sampled, before that is taken to be unknown."""

_log = logging.getLogger("autospec.vllm")


class Proposer:
    """vLLM's proposer of draft tokens, for `--speculative-config '{"method": "custom_class", "model": ...}'`.

    Settings are in the environment (`AUTOSPEC_VLLM_STORE` and others, docs/vllm.md).

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        ConfigurationError: a setting is wrong, or this vLLM is not one that can be served. The engine does not start.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._limits = limits_of(vllm_config)
        self._settings = settings = read_settings(getattr(vllm_config, "additional_config", None))
        self._sources = make_sources(drafts_with(settings.policy, settings.drafts))
        if others := [name for name, source in self._sources.items() if not getattr(source, "is_retrieval", False)]:
            raise ConfigurationError(
                f"drafts={others[0]}: in vLLM only retrieval sources draft, as ngram and suffix do"
            )
        if settings.store is not None:
            from autospec.telemetry.urls import parse_url  # loads sqlalchemy

            parse_url(settings.store)
        self._segmenter = make_segmenter(settings.segments)
        longest = self._limits.num_speculative_tokens
        lengths = sorted({*(k for k in BLOCK_LENGTHS if k < longest), longest})
        self._costs = BatchCosts(lengths, self._sources)
        self._policy = make_policy(settings.policy, self._sources, lambda: self._costs)
        self._controller = Controller(self._policy, settings.control_share)
        self._telemetry: EngineTelemetry | None = None
        self._tokenizer: Any = None
        self._ended: deque[Served] = deque()
        self._lock = threading.RLock()
        self._recording = threading.RLock()
        self._batch: Batch | None = None
        self._rows: Rows | None = None  # of whatever calls, where it shows them
        self._num_looks = 0
        self._plain_sampler: PlainSampler | None = None
        self._is_closed = False
        self._costs_due = time.monotonic() + COSTS_SECONDS
        self._said: set[str] = set()
        self._num_failures = 0
        self._make_draft_request: Callable[[str], DraftRequest] | None = None

    def load_model(self, target_model: Any = None, *args: Any, **named: Any) -> None:
        """vLLM has loaded the target: everything else can begin. Never raises."""
        try:
            self._begin(target_model)
        except Exception as error:  # noqa: BLE001  # the engine can answer without drafts
            self._fail("autospec drafts nothing in this engine, and records nothing", error)
            self._num_failures = MOST_FAILURES

    def propose(self, *args: Any, **named: Any) -> list[list[int]]:
        """Draft tokens for each row of the batch; see `engine.read_call` for what vLLM says. Never raises."""
        num_rows = _num_rows(args, named)
        nothing: list[list[int]] = [[] for _ in range(num_rows)]
        if self._is_closed or self._num_failures >= MOST_FAILURES:
            return nothing
        try:
            self._look_at(getattr(inspect.currentframe(), "f_back", None))
            with self._lock:
                drafts = self._step(args, named)
            self._num_failures = 0
            return drafts
        except ShapeError as error:
            self._fail("autospec drafts nothing in this engine", error)
            self._num_failures = MOST_FAILURES
        except Exception as error:  # noqa: BLE001  # drafts are never worth an answer
            self._fail("a step goes without drafts", error)
            self._num_failures += 1
            self._forget()
        return nothing

    def flush(self) -> None:
        """Wait until the requests that have ended are in the store."""
        self._tidy()
        if self._telemetry is not None:
            self._telemetry.flush()

    def close(self) -> None:
        """Record what is left, and what was learned. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._batch is not None:
                self._batch.close()
            if self._plain_sampler is not None:
                self._plain_sampler.close()
        self._record_ended()
        if self._telemetry is not None:
            self._telemetry.note_costs(self._costs)
            self._telemetry.close()

    def _begin(self, target_model: Any) -> None:
        settings = self._settings
        if not is_leader():
            self._is_closed = True
            return
        self._tokenizer = tokenizer_of(self._config)
        for source in self._sources.values():
            source.attach(target_model, self._tokenizer)
        if settings.store is not None:
            size = weight_bytes([target_model]) or None
            deployment = describe_engine(self._config, self._sources, name=settings.name, model_bytes=size)
            self._telemetry = EngineTelemetry(
                settings.store,
                deployment,
                self._policy,
                self._controller,
                resume=settings.resume,
                run=settings.run,
            )
            for is_sampled, points in self._telemetry.known_steps.items():
                self._costs.begin_with(points, is_sampled=is_sampled)
        self._make_draft_request = _draft_requests(int(self._config.model_config.get_vocab_size()))
        self._batch = Batch(
            ending_with(self._limits, self._tokenizer),
            self._sources,
            self._controller,
            self._costs,
            segment_of=self._segment_of,
            draft_request_of=self._make_draft_request,
            finish=self._ended.append,
            trace=settings.trace if settings.store is not None else 0.0,
        )
        _close_at_exit(self)
        threading.Thread(target=_sweep, args=(weakref.ref(self),), name="autospec-sweeper", daemon=True).start()

    def _look_at(self, frame: FrameType | None) -> None:
        """Find out who calls, as long as that is not known: how requests are sampled is read there."""
        if self._rows is not None and self._rows.runner is None:
            self._rows, self._num_looks = None, 0  # another one calls now
        if self._rows is not None or self._num_looks >= MOST_LOOKS:
            return
        self._num_looks += 1
        self._rows = rows_of_caller(frame)
        if self._rows is not None and self._settings.plain_sampler and num_ranks(self._config) == 1:
            if self._plain_sampler is not None:
                self._plain_sampler.close()
            self._plain_sampler = install(self._rows.runner)

    def _step(self, args: Sequence[Any], named: dict[str, Any]) -> list[list[int]]:
        call = read_call(args, named)
        if call.unknown and "unknown" not in self._said:
            self._said.add("unknown")
            _log.warning(
                "vLLM says more than this autospec knows of, and is not listened to: %s", ", ".join(call.unknown)
            )
        if self._batch is None:
            self._begin(None)
        if self._batch is None:
            return [[] for _ in call.sampled]
        sampling = _unknown if self._rows is None else self._rows
        return self._batch.step(call.sampled, call.lengths, call.token_ids, call.num_step_tokens, call.most, sampling)

    def _forget(self) -> None:
        try:
            with self._lock:
                if self._batch is not None:
                    self._batch.forget()
        except Exception as error:  # noqa: BLE001  # it may be what failed before
            self._fail("plain steps are not counted", error)

    def _segment_of(self, prompt: Sequence[int], sampling: Sampling) -> str:
        try:
            tokens, tokenizer = list(prompt), self._tokenizer
            text = (lambda: "") if tokenizer is None else (lambda: excerpt(tokens, tokenizer))
            decoding = "sample" if sampling is UNKNOWN else sampling.decoding
            seen = Prompt(text, len(tokens), do_sample=sampling.do_sample, decoding=decoding)
            return clean(self._segmenter.assign(seen).segment)
        except Exception as error:  # noqa: BLE001  # a label for the report is never worth an answer
            self._fail(f"such requests are in segment {DEFAULT!r}", error)
            return DEFAULT

    def _tidy(self) -> None:
        """Between steps: end what has been away for long, record what has ended."""
        with self._lock:
            if self._batch is not None and not self._is_closed:
                self._batch.sweep()
        self._record_ended()
        if self._telemetry is None:
            return
        self._telemetry.tend()
        if time.monotonic() >= self._costs_due:
            self._costs_due = time.monotonic() + COSTS_SECONDS
            self._telemetry.note_costs(self._costs)

    def _record_ended(self) -> None:
        with self._recording:  # whoever closes waits for what the sweeper is at
            while self._ended:
                served = self._ended.popleft()
                try:
                    if self._telemetry is not None:
                        self._telemetry.record(served)
                    for source in self._sources.values():
                        learn = getattr(source, "learn", None)
                        if learn is not None:
                            learn(served.draft_request, served.answer)
                except Exception as error:  # noqa: BLE001  # one request is no reason to lose the others
                    self._fail("a request that has ended is not recorded, or not learned from", error)

    def _fail(self, what: str, error: Exception) -> None:
        """Say what went wrong: the first time of each kind, with where it did."""
        kind = f"{what} {type(error).__name__}"
        if kind not in self._said:
            self._said.add(kind)
            _log.error("autospec: %s: %s: %s", what, type(error).__name__, error, exc_info=error)


def _unknown(row: int) -> Sampling:
    return UNKNOWN


def _num_rows(args: Sequence[Any], named: dict[str, Any]) -> int:
    """As many lists are to be given back as there are of sampled tokens."""
    rows = next((each for each in (*args, *named.values()) if isinstance(each, list)), ())
    return len(rows)


def _draft_requests(vocab_size: int) -> Callable[[str], DraftRequest]:
    """What retrieval sources may know: the vocabulary and the segment, and nothing of how tokens are sampled."""
    import torch
    from transformers import LogitsProcessorList

    from autospec.randomness import TorchRandomness

    device = torch.device("cpu")

    def make(segment: str) -> DraftRequest:
        return DraftRequest(
            device=device,
            vocab_size=vocab_size,
            do_sample=False,
            processors=LogitsProcessorList(),
            randomness=TorchRandomness(device),
            scores_dtype=torch.float32,
            is_paired=False,
            segment=segment,
        )

    return make


def _sweep(proposer: weakref.ref[Proposer]) -> None:
    """Tidies as long as the proposer lives."""
    pause = threading.Event()
    while True:
        pause.wait(SWEEP_SECONDS)
        this = proposer()
        if this is None or this._is_closed:
            return
        try:
            this._tidy()
        except Exception as error:  # noqa: BLE001  # requests go on, whatever is made of their records
            this._fail("requests that have ended are looked after again later", error)
        del this


def _close_at_exit(proposer: Proposer) -> None:
    """Engines end as children of `multiprocessing`, without atexit, or with the program."""
    this = weakref.ref(proposer)

    def close() -> None:
        found = this()
        if found is not None:
            found.close()

    multiprocessing.util.Finalize(None, close, exitpriority=20)  # before the recorder's own
    atexit.register(close)
