"""Does a policy keep live what its walk promised? Held-out prompts, decoded plainly and under it in turn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from autospec.decoding.ties import examine
from autospec.drafts.base import DraftSource
from autospec.errors import AutospecError, ConfigurationError
from autospec.policies.base import Policy
from autospec.scores.walk import Walked
from autospec.telemetry.labels import columns, pad, visible
from autospec.traffic import TrafficRequest
from autospec.tune.arms import Answer, Arm
from autospec.tune.intervals import Interval, interval_of, said, speed_up
from autospec.tune.report import MOST_COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.costs.model import CostModel

WARM_UP_TOKENS = 8
MOST_ERROR_COLUMNS = 300
SAME, PARTED, TIE, DIFFERENT = "same", "parted", "tie", "different"
_KINDS = (SAME, PARTED, TIE, DIFFERENT)  # of several repeats the last of these counts


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
    off = [each.off_seconds for each in done]
    on = [each.seconds for each in done]
    kinds = Counter(each.kind for each in done)
    return Confirmed(
        segment=segment,
        requests=len(done),
        predicted=interval_of([predicted[each.request.request_id] for each in done]),
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
            f"{pad(name, width)}  {each.requests:>8}  {said(each.predicted):20}  {said(each.measured):20}  "
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


def _spread(requests: Sequence[TrafficRequest], most: int | None) -> list[TrafficRequest]:
    """So many at most, of each segment in turn, in the order in which they arrived."""
    if most is None or len(requests) <= most:
        return list(requests)
    by_segment: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        by_segment.setdefault(request.segment, []).append(place)
    in_turn = [place for turn in zip_longest(*by_segment.values()) for place in turn if place is not None]
    return [requests[place] for place in sorted(in_turn[:most])]
