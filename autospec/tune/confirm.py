"""Does a policy keep live what its walk promised? Held-out prompts, decoded plainly and under it in turn."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from autospec.decoding.ties import examine
from autospec.drafts.base import DraftSource
from autospec.drafts.registry import make_sources
from autospec.errors import AutospecError, ConfigurationError
from autospec.policies.base import Policy, Unmeasured
from autospec.policies.fixed import Fixed
from autospec.policies.registry import make_policy
from autospec.scores.scorer import Scorer
from autospec.scores.walk import Walked
from autospec.speculator import Speculator, wrap
from autospec.telemetry.labels import columns, pad, visible
from autospec.traffic import TrafficRequest
from autospec.tune.intervals import Interval, speed_up
from autospec.types import BlockOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.costs.model import CostModel

WARM_UP_TOKENS = 8
MOST_COLUMNS = 40
"""Of a segment's name."""
MOST_ERROR_COLUMNS = 300
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
SAME, PARTED, TIE, DIFFERENT = "same", "parted", "tie", "different"
_KINDS = (SAME, PARTED, TIE, DIFFERENT)  # of several repeats the last of these counts


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of `generate` said and took."""

    tokens: tuple[int, ...]
    seconds: float
    prefill_seconds: float  # of these; on an accelerator as far as the host waited for it
    decoding: str  # as in `greedy` or `sample temperature=0.8`

    def seconds_for(self, num_tokens: int) -> float:
        """The seconds, had it had so many tokens: those after prefill, which gives the first one, in proportion.

        Raises:
            AutospecError: it has one token alone, and so no seconds per token.
        """
        if num_tokens == len(self.tokens):
            return self.seconds
        if len(self.tokens) < 2:
            raise AutospecError(f"an answer of one token cannot be compared with one of {num_tokens}")
        prefill = min(self.prefill_seconds, self.seconds)
        return prefill + (self.seconds - prefill) * (num_tokens - 1) / (len(self.tokens) - 1)


class Arm:
    """One way to decode: a policy, with draft sources of its own.

    The model is wrapped for each answer alone, so that arms can take turns on it. Sources are attached once and the
    policy is an object, so that nothing is measured again.

    Args:
        model, tokenizer: the target, not wrapped.
        policy: taken as it is, and goes on learning; None: plain steps.
        drafts: sources that no other arm has: they learn from the answers of this one.
        sampling: as in `wrap`.
        costs: the policy's, to be corrected by each block as they are in service; None: they stay as they are.
        clock: seconds.

    Raises:
        ConfigurationError: `wrap` would not take them, or the model is wrapped.
        DraftError: a source cannot work with this target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        policy: Policy | None,
        drafts: Iterable[str | DraftSource] = (),
        *,
        sampling: str = "paired",
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._tokenizer, self._sampling, self._clock = model, tokenizer, sampling, clock
        sources = make_sources(drafts)
        for source in sources.values():
            source.attach(model, tokenizer)
        self._sources: list[Any] = [_Attached(source) for source in sources.values()]
        self._policy: Any = _Served(make_policy(Fixed() if policy is None else policy, sources, Unmeasured), costs)
        with self._wrapped(is_control=False):
            pass  # what is wrong with any of it is known now

    def answer(
        self,
        request: TrafficRequest,
        *,
        seed: int = 0,
        is_control: bool = False,
        learns: bool = True,
        most_tokens: int | None = None,
    ) -> Answer:
        """Decode a recorded prompt with the options that it was decoded with.

        Args:
            request: recorded.
            seed: of the noise that tokens are drawn with.
            is_control: decode plainly, as this policy's controls are.
            learns: sources and policy keep what they see; of policies those that have `state` and `restore` can do
                without.
            most_tokens: of the answer, where the options allow more.

        Raises:
            AutospecError: it was not decoded by blocks. Besides, whatever `generate` raises.
        """
        device = self._model.device
        prompt = torch.tensor([request.prompt], device=device, dtype=torch.long)
        options = recorded_options(request)
        if most_tokens is not None:
            options["max_new_tokens"] = min(most_tokens, int(options.get("max_new_tokens", most_tokens)))
        for source in self._sources:
            source.is_taught = learns
        with self._kept(learns), self._wrapped(is_control=is_control) as speculator:
            _wait_for(device)
            started = self._clock()
            output: Any = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generator=torch.Generator(device).manual_seed(seed),
                segment=request.segment,
                **options,
            )
            _wait_for(device)
            seconds = self._clock() - started
            record = speculator.last_request
        assert record is not None  # generate has just set it
        if record.fallback_reason is not None:
            raise AutospecError(f"left to the original generate: {record.fallback_reason}")
        tokens = tuple(output[0, len(request.prompt) :].tolist())
        return Answer(tokens, seconds, record.seconds.prefill, record.decoding)

    def _wrapped(self, *, is_control: bool) -> Speculator:
        return wrap(
            self._model,
            tokenizer=self._tokenizer,
            drafts=self._sources,
            policy=self._policy,
            sampling=self._sampling,
            control_share=float(is_control),
        )

    @contextmanager
    def _kept(self, learns: bool) -> Iterator[None]:
        """Unless it learns, what the policy has learned is afterwards what it was before, where it can be."""
        take, give = (getattr(self._policy, name, None) for name in ("state", "restore"))
        before = copy.deepcopy(take()) if not learns and take is not None and give is not None else None
        try:
            yield
        finally:
            if before is not None and give is not None:
                give(before)


class _Attached:
    """A draft source that is attached already; from answers it learns only when it is to."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self.is_taught = True

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """It is."""

    def __getattr__(self, name: str) -> Any:
        if name == "learn" and not self.is_taught:
            raise AttributeError(name)
        return getattr(self._source, name)


class _Served:
    """In all else the policy itself, whose costs learn from each block as they do where `wrap` has measured them."""

    def __init__(self, policy: Policy, costs: CostModel | None) -> None:
        self._policy, self._costs = policy, costs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, outcome: BlockOutcome) -> None:
        self._policy.observe(outcome)
        if self._costs is not None:
            self._costs.observe(outcome)


@dataclass(frozen=True, slots=True)
class Compared:
    """One request, decoded both ways."""

    request: TrafficRequest
    off_seconds: float = 0.0
    seconds: float = 0.0  # under the policy, for as many tokens as the plain answer has
    kind: str = ""  # of the two answers: `same`, `tie`, `different`, or `parted` where nobody judged
    error: str | None = None  # why there are no seconds


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Of one segment, or of all."""

    segment: str
    requests: int
    predicted: Interval  # speed-up over plain decoding, by the walks
    measured: Interval  # live
    off_seconds: float  # live
    seconds: float
    same_output: int  # requests whose two answers were equal token by token
    ties: int = 0  # greedy answers that part where rounding decides between two tokens
    different: int = 0  # greedy answers that part elsewhere: a fault
    errors: tuple[str, ...] = ()  # requests that are left out, each with the reason

    @property
    def surplus(self) -> float:
        """Predicted over measured speed-up, less 1: above 0 more was promised than came true."""
        return self.predicted.ratio / self.measured.ratio - 1.0


def teach(
    model: PreTrainedModel,
    drafts: Iterable[str | DraftSource],
    past: Sequence[TrafficRequest],
    *,
    sampling: str = "paired",
) -> list[DraftSource]:
    """Draft sources that know recorded answers, as they would have in service.

    A walk lets pools know earlier answers alone. So must sources be that are to do live what was walked: new ones,
    taught by the training part. Those that scored the traffic know the very answers that are to come.

    Args:
        model: the target, not wrapped.
        drafts: new sources, as in `wrap`.
        past: answered requests, in order of arrival.
        sampling: as in `wrap`.

    Returns:
        The sources.
    """
    sources = make_sources(drafts)
    scorer = Scorer(model, sources, sampling=sampling)
    for request in past:
        scorer.learn(request)
    return list(sources.values())


def confirm(
    model: PreTrainedModel,
    tokenizer: Any,
    drafts: Iterable[str | DraftSource],
    policy: Policy,
    requests: Sequence[TrafficRequest],
    predicted: Mapping[str, Walked],
    *,
    sampling: str = "paired",
    repeats: int = 1,
    max_requests: int | None = None,
    seed: int = 0,
    costs: CostModel | None = None,
    progress: Callable[[Compared], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Confirmed]:
    """A live comparison with plain decoding, on requests that a policy was not chosen by.

    Each prompt is decoded twice, by the decoder's own plain steps without a draft source, and under the policy; plainly
    first for every second request. Both begin with the same noise. Whole calls are timed, prefill included, after a
    first one of each that is not.

    Answers end where they end. What is sampled now is another text than the recorded one, from the same distribution: a
    prediction by recorded answers holds for it in the mean. The two answers of a pair are one text, but for rounding,
    with greedy decoding and `sampling="paired"`. Where their lengths differ all the same, or since `maximal` draws
    other tokens, the policy's seconds after prefill are brought to the plain answer's number of tokens.

    A policy's controls are those of its walk, so that both sides have the same ones.

    Args:
        model, tokenizer: the target, not wrapped.
        drafts: sources that know the training part and nothing later, see `teach`.
        policy: as it is after the training part; it goes on learning.
        requests: recorded, in order of arrival. Those without a prediction are left out.
        predicted: the policy's walks along these requests, by their ids.
        sampling: as in `wrap`.
        repeats: of each pair, whose mean counts. Sources learn in the last one alone, as they would copy the answer
            else, and policies that can be restored, too.
        max_requests: decode so many at most, of each segment in turn. Policy and sources then learn from these alone,
            while the walk has learned from those between them, too.
        seed: of the first pair's noise; the next one has the next.
        costs: the policy's, to be corrected by each block as in service; None: they stay as they were in the walk.
        progress: told of each request.
        clock: seconds.

    Returns:
        By segment, in the order of their names, and of all requests last.

    Raises:
        ConfigurationError: there is nothing to decode, `wrap` would not take this, or a number is out of range.
        AutospecError: no request could be decoded.
    """
    for name, value in (("repeats", repeats), ("max_requests", max_requests)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigurationError(f"{name}={value!r}: a whole number of at least 1 is needed")
    chosen = _spread([each for each in requests if each.request_id in predicted], max_requests)
    if not chosen:
        raise ConfigurationError("no held-out request with a prediction: there is nothing to confirm it by")
    off = Arm(model, tokenizer, None, sampling=sampling, clock=clock)
    on = Arm(model, tokenizer, policy, drafts, sampling=sampling, costs=costs, clock=clock)
    found = []
    for each in _compared(model, (off, on), chosen, predicted, repeats, seed):
        found.append(each)
        if progress is not None:
            progress(each)
    return summary(found, predicted)


def _compared(
    model: PreTrainedModel,
    arms: tuple[Arm, Arm],
    requests: Sequence[TrafficRequest],
    predicted: Mapping[str, Walked],
    repeats: int,
    seed: int,
) -> Iterator[Compared]:
    """Each request; one that fails costs itself alone."""
    is_warm = False
    for number, request in enumerate(requests):
        is_control = predicted[request.request_id].is_control
        try:
            if not is_warm:
                for arm in arms:
                    arm.answer(request, learns=False, most_tokens=WARM_UP_TOKENS)
                is_warm = True
            pairs = []
            for repeat in range(repeats):
                both: dict[Arm, Answer] = {}
                for arm in arms if (number + repeat) % 2 == 0 else arms[::-1]:
                    both[arm] = arm.answer(
                        request,
                        seed=seed + number * repeats + repeat,
                        is_control=is_control and arm is arms[1],
                        learns=repeat == repeats - 1,
                    )
                pairs.append((both[arms[0]], both[arms[1]]))
            made = compare(request, pairs, [judge(model, request, *pair) for pair in pairs])
        except Exception as error:  # noqa: BLE001  # of this request alone, and said
            made = Compared(request, error=f"{type(error).__name__}: {' '.join(str(error).split()):.200}")
        yield made


def compare(request: TrafficRequest, pairs: Sequence[tuple[Answer, Answer]], kinds: Sequence[str]) -> Compared:
    """Means of several pairs of answers, the plain one first in each. Args: kinds: of the pairs, see `judge`.

    Raises:
        AutospecError: answers of different length, one of a single token.
    """
    return Compared(
        request,
        sum(off.seconds for off, _ in pairs) / len(pairs),
        sum(on.seconds_for(len(off.tokens)) for off, on in pairs) / len(pairs),
        max(kinds, key=_KINDS.index),
    )


def judge(model: PreTrainedModel, request: TrafficRequest, off: Answer, on: Answer) -> str:
    """Whether two answers are the same; greedy ones that are not are examined with the target's own forwards."""
    if off.tokens == on.tokens:
        return SAME
    if off.decoding != "greedy":
        return PARTED  # drawn, or other processors decide than the logits alone
    difference = examine(model, torch.tensor([request.prompt], device=model.device), off.tokens, on.tokens)
    return TIE if difference is not None and difference.is_tie else DIFFERENT


def summary(compared: Sequence[Compared], predicted: Mapping[str, Walked]) -> list[Confirmed]:
    """By segment, in the order of their names, and of all requests last. Args: predicted: walks by request id.

    Raises:
        AutospecError: there is not one that was decoded.
    """
    if all(each.error is not None for each in compared):
        why = next((each.error for each in compared), "there is none")
        raise AutospecError(f"none of {len(compared)} requests could be decoded: {why}")
    names = sorted({each.request.segment for each in compared if each.error is None})
    groups = [(name, [each for each in compared if each.request.segment == name]) for name in names]
    return [_confirmed(name, group, predicted) for name, group in [*groups, ("all", list(compared))]]


def _confirmed(segment: str, compared: Sequence[Compared], predicted: Mapping[str, Walked]) -> Confirmed:
    done = [each for each in compared if each.error is None]
    walked = [predicted[each.request.request_id] for each in done]
    prefill = [each.request.prefill_seconds or 0.0 for each in walked]
    off = [each.off_seconds for each in done]
    on = [each.seconds for each in done]
    kinds = Counter(each.kind for each in done)
    return Confirmed(
        segment=segment,
        requests=len(done),
        predicted=speed_up(
            [each.off_seconds + more for each, more in zip(walked, prefill, strict=True)],
            [each.seconds + more for each, more in zip(walked, prefill, strict=True)],
        ),
        measured=speed_up(off, on),
        off_seconds=sum(off),
        seconds=sum(on),
        same_output=kinds[SAME],
        ties=kinds[TIE],
        different=kinds[DIFFERENT],
        errors=tuple(f"{each.request.request_id}: {each.error}" for each in compared if each.error is not None),
    )


def confirm_lines(confirmed: Sequence[Confirmed]) -> Iterator[str]:
    """Predicted beside measured, and what the answers were. Args: confirmed: as `confirm` gives it."""
    names = [visible(each.segment, MOST_COLUMNS) for each in confirmed]
    width = max([len("segment"), *map(columns, names)])
    yield "speed-up over plain decoding, with 95 % intervals: predicted by the walk, and measured live"
    yield ""
    yield f"{'segment':{width}}  requests  {'predicted':20}  {'measured':20}  predicted / measured - 1"
    for name, each in zip(names, confirmed, strict=True):
        yield (
            f"{pad(name, width)}  {each.requests:>8}  {_said(each.predicted):20}  {_said(each.measured):20}  "
            f"{100 * each.surplus:>+22.1f} %"
        )
    yield ""
    every = confirmed[-1]
    seconds = f"{every.off_seconds:.1f} s plainly, {every.seconds:.1f} s under the policy"
    yield f"prompts decoded both ways, each way first in turn: {every.requests}; {seconds}"
    yield from _outputs(every)
    if every.errors:
        first = visible(every.errors[0], MOST_ERROR_COLUMNS)
        counted = "1 request failed and counts" if len(every.errors) == 1 else f"{len(every.errors)} failed and count"
        yield f"{counted} nowhere; the first is {first}"


def _outputs(every: Confirmed) -> Iterator[str]:
    yield f"{every.same_output} of {every.requests} answers were the plain one token by token"
    if every.ties:
        yield f"{every.ties} parted at a numerical tie: two tokens that the target's rounding decides between"
    if every.different:
        yield f"{every.different} parted by more than rounding, which is a fault: see docs/exactness.md"
    if parted := every.requests - every.same_output - every.ties - every.different:
        yield f"{parted} parted where tokens were drawn, or processors had a say: not examined"


def _said(interval: Interval) -> str:
    return f"{interval.ratio:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def recorded_options(request: TrafficRequest) -> dict[str, Any]:
    """Of `generate`, those of the request: with one bound of the answer, and none on drawing where it is greedy."""
    options: dict[str, Any] = dict(request.options)
    if options.get("do_sample") is False:
        options = {name: value for name, value in options.items() if name not in _SAMPLING}
    if "max_new_tokens" in options:
        options.pop("max_length", None)
    elif "max_length" not in options:
        options["max_new_tokens"] = len(request.output)
    return options


def _spread(requests: Sequence[TrafficRequest], most: int | None) -> list[TrafficRequest]:
    """So many at most, of each segment in turn, in the order in which they arrived."""
    if most is None or len(requests) <= most:
        return list(requests)
    by_segment: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        by_segment.setdefault(request.segment, []).append(place)
    in_turn = [place for turn in zip_longest(*by_segment.values()) for place in turn if place is not None]
    return [requests[place] for place in sorted(in_turn[:most])]


def _wait_for(device: torch.device) -> None:
    """What was asked of an accelerator is done before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
