"""`autospec.wrap(model)`: the model's own `generate` stays the call to make, and becomes speculative."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import update_wrapper
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin

from autospec.backend_choice import checked_backend, choose_backend
from autospec.backends.backend import EAGER, Backend
from autospec.calls import Call
from autospec.controller import Controller
from autospec.decoding.decoder import Decoder
from autospec.decoding.probe import why_not_by_blocks
from autospec.decoding.support import CannotDecodeError
from autospec.decoding.tally import Stopwatch, Tally
from autospec.deployment import describe_deployment, model_name
from autospec.drafts.base import DraftSource
from autospec.drafts.registry import make_sources
from autospec.errors import ConfigurationError
from autospec.forks import renew_after_fork
from autospec.notices import warn
from autospec.observations import calibration_samples, peak_memory_bytes, policy_version, predicted_control_seconds
from autospec.observers import Observer, Observers
from autospec.policies.base import CostEstimates, Policy, Unmeasured, check_range
from autospec.policies.registry import make_policy
from autospec.policies.tuned import Tuned
from autospec.randomness import TorchRandomness, plain_draws
from autospec.recording import Redact, TokenRecorder, needs_store
from autospec.resuming import Learned
from autospec.segments import Segmenter, make_segmenter
from autospec.segments.requests import RequestSegments
from autospec.telemetry.traces import pack
from autospec.tuned_files import differences, drafts_with
from autospec.types import Deployment, PhaseSeconds, RequestRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.base import Static
    from autospec.costs.upkeep import Upkeep
    from autospec.telemetry.recorder import Recorder
    from autospec.traffic import Traffic

SAMPLING = ("paired", "maximal")


def wrap(
    model: PreTrainedModel,
    *,
    tokenizer: Any | None = None,
    drafts: Iterable[str | DraftSource] = ("ngram",),
    policy: str | Policy = "auto",
    store: str | None = None,
    sampling: str = "paired",
    backend: str | Static = "auto",
    strict: bool = False,
    run: str | None = None,
    metrics: Observer | Iterable[Observer] | None = None,
    segments: str | Path | Segmenter | None = None,
    trace: float = 0.0,
    record: bool | Redact | str | Path | Traffic = False,
    control_share: float | None = None,
    resume: bool = True,
) -> Speculator:
    """Make `model.generate(...)` speculative until the returned object is closed.

    Args:
        model: a causal language model of transformers, the target.
        tokenizer: the target's tokenizer; needed for stop strings and to compare an assistant's vocabulary by text.
        drafts: draft sources, by name or as objects; `none` is always there.
        policy: `auto`, `off`, `fixed:ngram:5`, or a policy object. `auto` measures the device first (seconds).
        store: URL of the telemetry database, as in `sqlite:///autospec.db`; None keeps only `last_request`.
        sampling: how drawn drafts are verified: `paired` gives the text that plain sampling gives from the same seed,
            `maximal` accepts more often, with the same distribution.
        backend: how forwards run. `eager`: as the model runs them. `compile`: prepared now, for a few widths (CUDA
            graphs; on a CPU torch.compile, minutes). `auto`: prepared where that was measured to be faster. Or shapes
            of your own, `autospec.backends.Static(...)` (docs/backends.md).
        strict: decode plainly wherever rounding is known to part texts, that is in half precision and with quantised
            weights: there a forward over a block and one-token forwards often order nearly equal logits differently.
        run: a label for the requests of an experiment.
        metrics: who is told of each request: `autospec.telemetry.Metrics()` (Prometheus), `autospec.telemetry.Spans()`
            (OpenTelemetry), any object with `observe(record)`, or several of them.
        record: keep prompts and answers in the database, as token ids. True, or a function that
            takes both as lists and gives what may be kept of them, None for nothing. Needs a store. Or a folder, or
            `autospec.traffic.Traffic(folder, ...)`: into files there instead, for `tune`; needs no store, but the
            tokenizer (docs/traffic.md).
        trace: share of the requests, chosen at random, whose blocks are stored one by one. Needs a store.
        control_share: share of the requests, chosen at random, that are decoded plainly throughout to measure what
            speed-up means. None: as the policy has it, which is 0.02 with `auto` and 0 with a fixed one.
        resume: begin with what policies with the same name and settings have learned on a like device, for the same
            target, dtype and drafts, in the last 30 days, as far as it is in the store. It takes the place of what a
            policy object has learned before. False: begin anew.
        segments: which segment a call without a label is in. None: `default`; `auto`: the built-in ones; the path of a
            TOML file with rules, or a `Segmenter` (docs/segments.md).

    Raises:
        ConfigurationError: an unknown or impossible option, or the model is wrapped already.
        DraftError: a draft source cannot work with this target.
        StoreError: the database cannot be used.
    """
    return Speculator(
        model,
        tokenizer=tokenizer,
        drafts=drafts,
        policy=policy,
        store=store,
        sampling=sampling,
        backend=backend,
        strict=strict,
        run=run,
        trace=trace,
        record=record,
        metrics=metrics,
        segments=segments,
        control_share=control_share,
        resume=resume,
    )


class Speculator:
    """A wrapped model. Close it, or use it as a context manager, to get the original `generate` back."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any | None,
        drafts: Iterable[str | DraftSource],
        policy: str | Policy,
        store: str | None,
        sampling: str,
        backend: str | Static,
        strict: bool,
        run: str | None,
        trace: float,
        record: bool | Redact | str | Path | Traffic,
        metrics: Observer | Iterable[Observer] | None,
        segments: str | Path | Segmenter | None,
        control_share: float | None,
        resume: bool,
    ) -> None:
        if isinstance(model, type) or not callable(getattr(model, "generate", None)) or not hasattr(model, "config"):
            raise ConfigurationError(f"wrap({type(model).__name__}): a transformers model with generate() is needed")
        if isinstance(model.generate, _Installed):
            raise ConfigurationError("this model is wrapped already: close() the first speculator")
        if sampling not in SAMPLING:
            raise ConfigurationError(f"sampling={sampling!r}: known are {', '.join(SAMPLING)}")
        checked_backend(backend)
        for name, choice in (("strict", strict), ("resume", resume)):
            if not isinstance(choice, bool):
                raise ConfigurationError(f"{name}={choice!r}: True or False is needed")
        for name, value, example in (("store", store, "sqlite:///autospec.db"), ("run", run, "a label")):
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{name}={value!r}: a text or None is needed, as in {name}={example!r}")
        check_range("trace", trace, 0.0, 1.0)
        if control_share is not None:
            check_range("control_share", control_share, 0.0, 1.0)
        if store is None and (trace or needs_store(record)):
            raise ConfigurationError("trace= and record= are kept in a database: give store=, too")
        if isinstance(tokenizer, str):
            raise ConfigurationError(f"tokenizer={tokenizer!r}: pass the tokenizer itself, not its name")
        self._tokens = TokenRecorder(record)
        self._observers = Observers(metrics)
        self._segments = RequestSegments(make_segmenter(segments))
        self.model = model
        self.tokenizer = tokenizer
        self.sources = make_sources(drafts_with(policy, drafts))
        self._refusal = _why_never(model) if self.sources else None
        if self._refusal is None:
            for source in self.sources.values():
                source.attach(model, tokenizer)
        self._tokens.attach(tokenizer, model_name(model))
        self._costs: CostEstimates | None = None
        self._upkeep: Upkeep | None = None
        if self._refusal and policy == "auto":
            policy = "off"
        make_policy(policy, self.sources, Unmeasured)  # what is wrong is said now, not after minutes of preparing
        self._recorder = self._opened(store)
        try:
            self.backend = (
                Backend(reason=self._refusal) if self._refusal else choose_backend(backend, model, self.sources)
            )
            self.policy = make_policy(policy, self.sources, Unmeasured if self._refusal else self._measure_costs)
            self._check_provenance()
        except BaseException:
            if self._recorder is not None:
                self._recorder.close()
            raise
        self.last_request: RequestRecord | None = None
        self._sampling = sampling
        self._strict = strict
        self._trace = trace
        self._random = random.Random()  # of our own: the user's global one is not moved
        self._policy_version = policy_version(self.policy, made_by="wrap")
        self._controller = Controller(self.policy, control_share)
        self._run = run
        self._deployments: dict[str, Deployment] = {}  # by how forwards ran
        self._usual_backend = self.backend.name  # of the requests that the policy mostly learns from
        self._place = (model.device, model.dtype)
        self._is_closed = False
        self._is_inside: ContextVar[bool] = ContextVar("autospec_inside", default=False)
        self._is_control: ContextVar[bool] = ContextVar("autospec_control", default=False)
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._warned: set[str] = set()
        self._learned: Learned | None = None
        if self._recorder is not None:
            self._observers.watch(self._recorder)
            self._recorder.note(self._policy_version)
            deployment = self._deployment(self._usual_backend)
            for sample in calibration_samples(self._costs, deployment):
                self._recorder.note(sample)
            self._learned = Learned(self._controller, self.policy, self._policy_version, self._recorder, deployment)
            if resume:
                self._learned.resume()
        self._install()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` calls while the model is wrapped.

        Takes and returns the same, and takes besides:

        Args:
            segment: a label for the report; `with autospec.segment(...)` sets it, too.
            generator: a torch generator on the model's device to sample with, in place of torch's global one. The text
                is the one that plain decoding gives when the global generator starts in this one's state.
        """
        if self._is_closed:
            raise ConfigurationError("this speculator is closed: wrap the model again")
        if args and isinstance(args[0], type(self.model)):
            raise ConfigurationError("custom_generate=speculator.generate works on the wrapped model alone")
        if self._is_inside.get():  # transformers drafts with the model itself, or answers one call by several
            return self._original(*args, **kwargs)
        label = kwargs.pop("segment", None)
        generator = kwargs.pop("generator", None)
        if generator is not None:
            generator = _checked_generator(generator, self.model.device)
        call = Call(self.model, args, kwargs)
        if call.arguments.get("custom_generate") in (self.generate, self._installed):
            del call.arguments["custom_generate"], kwargs["custom_generate"]
        if self._upkeep is not None:
            self._upkeep.before_request()
        request = _Running()
        segment = self._segments.of(label, call, self.tokenizer)
        is_control = self._is_control.get()
        reason = None if is_control else self._why_not(call)
        decoder = Decoder(
            segment=segment,
            chooser=self._controller if self._upkeep is None else self._upkeep.watching(self._controller),
            sources=self.sources,
            sampling=self._sampling,
            streamer=call.streamer,
            make_randomness=lambda device: TorchRandomness(device, generator),
            keeps_blocks=self._recorder is not None and self._random.random() < self._trace,
            backend=self.backend,
            hands_back_cache=call.hands_back_cache,
        )
        error: BaseException | None = None
        output: Any = None
        try:
            if reason is None and not is_control:
                try:
                    output = self._original(**call.for_decoder(decoder, self.tokenizer))
                except CannotDecodeError as cannot:
                    reason = str(cannot)
            if reason is not None or is_control:
                # a function of the user's may well call generate for itself; of transformers, every call is one request
                is_one = call.arguments.get("custom_generate") is None
                with plain_draws(generator), self._inside() if is_one else nullcontext():
                    output = self._original(*args, **kwargs, **call.missing_for_original(self.tokenizer))
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._record(request, call, decoder, segment, output, reason, error, is_control=is_control)
        return output

    @contextmanager
    def control(self) -> Iterator[None]:
        """Calls inside the block run the original `generate`, timed and recorded as control."""
        if self._is_closed:
            raise ConfigurationError("this speculator is closed: wrap the model again")
        token = self._is_control.set(True)
        try:
            yield
        finally:
            self._is_control.reset(token)

    def flush(self) -> None:
        """Wait until everything recorded so far is in the database."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Flush telemetry and give the model its own `generate` back. May be called twice."""
        self._is_closed = True
        self._uninstall()
        if self._learned is not None:
            self._learned.close()
            self._learned = None
        if self._recorder is not None:
            self._recorder.close()
            self._observers.forget(self._recorder)
            self._recorder = None
        self._tokens.close()
        self.backend.close()

    def __enter__(self) -> Speculator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def recorder(self) -> Recorder | None:
        """Where records go; None without a store or after `close`."""
        return self._recorder

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Calls inside the block belong to the request that is running, and go to the original `generate`."""
        token = self._is_inside.set(True)
        try:
            yield
        finally:
            self._is_inside.reset(token)

    @staticmethod
    def _opened(store: str | None) -> Recorder | None:
        if store is None:
            return None
        from autospec.telemetry.recorder import Recorder  # heavy: loads sqlalchemy

        return Recorder(store)

    def _deployment(self, backend: str) -> Deployment:
        """Where the model is now, for requests whose forwards ran so."""
        found = self._deployments.get(backend)
        if found is None:
            found = self._deployments[backend] = describe_deployment(self.model, self.sources, backend)
        return found

    def _measure_costs(self) -> CostEstimates:
        from autospec.costs.upkeep import Upkeep

        self._upkeep = Upkeep(self.model, self.sources, backend=self.backend)
        self._costs = self._upkeep.costs
        return self._costs

    def _check_provenance(self) -> None:
        """Warn where a tuned policy is used elsewhere than it was tuned, and know the costs here."""
        if self._refusal is not None or not isinstance(self.policy, Tuned):
            return
        if found := list(differences(self.policy, self.model, self.sources)):
            if self._costs is None:
                self._measure_costs()
            warn(
                f"this policy was tuned with {'; '.join(found)}: its speed-ups were predicted for that, costs are "
                "measured here (autospec tune again for the best policy)",
                stacklevel=5,
            )

    def _install(self) -> None:
        self._previous = vars(self.model).get("generate")
        self._original = self.model.generate
        self._installed = _Installed(self, self._original)
        self.model.generate = self._installed

    def _uninstall(self) -> None:
        if vars(self.model).get("generate") is not self._installed:
            return
        del self.model.generate
        if self._previous is not None:
            self.model.generate = self._previous

    def _why_not(self, call: Call) -> str | None:
        """What can be told from the call alone; the decoder finds the rest once the call is prepared."""
        if self._refusal is not None:
            return self._refusal
        if self._strict and (coarse := _coarse_format(self.model)):
            return f"strict=True, and blocks in {coarse} round differently from one token at a time"
        if call.arguments.get("custom_generate") is not None:
            return "the call brings its own custom_generate"
        if call.arguments.get("assistant_model") is not None:
            return "the call brings its own assistant_model"
        if self.model.training:
            return "the model is in training mode"
        if call.setting("cache_implementation") == "paged":
            return "a paged cache is decoded by transformers' continuous batching"
        if call.setting("assistant_early_exit") is not None:
            return "the call brings its own assistant_early_exit"
        if call.arguments.get("synced_gpus"):
            return "synced_gpus=True"
        if call.setting("token_healing"):
            return "token healing is left to transformers"
        if call.lacks_tokenizer(self.tokenizer):
            return "stop strings need a tokenizer"
        return None

    def _record(
        self,
        request: _Running,
        call: Call,
        decoder: Decoder,
        segment: str,
        output: Any,
        reason: str | None,
        error: BaseException | None,
        *,
        is_control: bool,
    ) -> None:
        total_seconds = request.watch.total()
        tally, is_original = decoder.tally, reason is not None or is_control
        is_control = is_control or (tally.is_control and not is_original)  # asked for, or chosen by the policy
        if is_original:
            tally = Tally()
            seconds = PhaseSeconds(other=total_seconds)
            prompt_tokens = call.prompt_tokens()
            output_tokens = call.output_tokens(output, is_encoder_decoder=self.model.config.is_encoder_decoder)
        else:
            seconds = tally.phases(total_seconds)
            prompt_tokens, output_tokens = decoder.prompt_tokens, decoder.output_tokens
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            warn(f"left to the original generate: {reason}", stacklevel=4)
        parameter = next(self.model.parameters(), None)
        if parameter is None or (parameter.device, parameter.dtype) != self._place:  # moved since it was wrapped
            self._place = (self.model.device, self.model.dtype)
            self._deployments = {}
            self._usual_backend = EAGER  # what was prepared belongs to where it was
        record = RequestRecord(
            request_id=request.id,
            started_at=request.started_at,
            segment=segment,
            policy="off" if is_control else self.policy.name,
            is_control=is_control,
            do_sample=bool(call.setting("do_sample")),
            decoding=call.describe(),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seconds=seconds,
            fallback_reason=reason,
            notes="; ".join(tally.notes) or None,
            error=f"{type(error).__name__}: {error}" if error is not None else None,
            run=self._run,
            deployment=self._deployment(self.backend.name if tally.is_prepared else EAGER),
            **tally.counts(),
            policy_version=None if is_control else self._policy_version.version,
            predicted_control_seconds=None
            if is_original or is_control or (self._upkeep is not None and self._upkeep.is_prepared != tally.is_prepared)
            else predicted_control_seconds(self._costs, tally, prompt_tokens, output_tokens, total_seconds),
            peak_memory_bytes=peak_memory_bytes(self._place[0]),
            trace=None if tally.outcomes is None else pack(tally.outcomes),
            tokens=None
            if self._recorder is None
            else self._tokens.for_store(call, output, is_encoder_decoder=self.model.config.is_encoder_decoder),
        )
        with self._lock:
            self.last_request = record
        recorder = self._recorder
        if recorder is not None:
            recorder.record(record)
        self._tokens.to_traffic(record, call, output, is_encoder_decoder=self.model.config.is_encoder_decoder)
        self._observers.observe(record)
        learned = self._learned  # another thread may close
        if learned is not None:
            learned.after_request(self._deployment(self._usual_backend))


class _Running:
    """When a request began, and its name."""

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        self.started_at = datetime.now(UTC)
        self.watch = Stopwatch()


class _Installed:
    """What stands in the model's place for `generate`. A copy of the model, or a pickled one, has its own again."""

    def __init__(self, speculator: Speculator, original: Any) -> None:
        update_wrapper(self, original)
        self._speculator = speculator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._speculator.generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_generate(memo[id(self._speculator.model)])

    def __reduce__(self) -> Any:
        return _own_generate, (self._speculator.model,)


def _checked_generator(generator: Any, device: torch.device) -> torch.Generator | None:
    if not isinstance(generator, torch.Generator):
        raise ConfigurationError(f"generator={generator!r}: a torch.Generator or None is needed")
    if generator is torch.default_generator or any(generator is each for each in torch.cuda.default_generators):
        return None
    if not _is_same_place(generator.device, device):
        raise ConfigurationError(
            f"the generator is on {generator.device}, the model on {device}: make it there, "
            f"torch.Generator({str(device)!r})"
        )
    return generator


def _is_same_place(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def _coarse_format(model: Any) -> str | None:
    """The number format, where it is one in which rounding often decides between tokens."""
    if getattr(model, "is_quantized", False):
        return "quantised weights"
    return None if model.dtype in (torch.float32, torch.float64) else str(model.dtype).removeprefix("torch.")


def _own_generate(model: Any) -> MethodType:
    return MethodType(type(model).generate, model)


def _why_never(model: Any) -> str | None:
    """Why no call of this model can be decoded by blocks; None when some can."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are decoded by transformers itself"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt tuning is left to peft"
    is_peft = hasattr(model, "get_base_model")
    if not is_peft and getattr(type(model), "generate", None) is not GenerationMixin.generate:
        return f"{type(model).__name__} has a generate of its own"
    try:
        return why_not_by_blocks(model)
    except Exception as error:  # noqa: BLE001  # whatever it is, this model is not one to speculate with
        text = " ".join(str(error).split())
        return f"the model could not be probed ({type(error).__name__}: {text:.200})"
