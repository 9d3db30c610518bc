"""Traffic whose acceptance and costs are known: what any policy does on it, and what one would do that knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from autospec.policies.base import Policy
from autospec.types import OFF, Action, BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext

LENGTHS = (1, 2, 4, 8, 16)
LONGEST = LENGTHS[-1]


@dataclass(frozen=True)
class Source:
    """How a draft source fares in a segment.

    Args:
        rate: acceptance of a draft token in a typical block.
        spread: standard deviation, between blocks, of the logit of that.
        hit: share of blocks in which there is anything to propose.
        is_retrieval: it says beforehand what it would propose, with a match length that tells something of the rate.
    """

    rate: float
    spread: float = 0.0
    hit: float = 1.0
    is_retrieval: bool = False


Segment = Mapping[str, Source]


@dataclass(frozen=True)
class Device:
    """Seconds: of verifying so many tokens, of proposing so many, and how much measurements scatter."""

    verify: Mapping[int, float]  # by width, read off linearly between
    draft_per_token: Mapping[str, float]
    scatter: float = 0.05
    stalls: float = 0.002  # share of blocks that take twenty times as long
    block_lengths: tuple[int, ...] = LENGTHS

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return _read_off(tuple(self.verify.items()), num_tokens)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return self.draft_per_token[source] * block_length if source in self.draft_per_token else 1e-4


@cache
def _read_off(curve: tuple[tuple[int, float], ...], num_tokens: int) -> float:
    widths, seconds = zip(*curve, strict=True)
    return float(np.interp(num_tokens, widths, seconds))


BFLOAT16 = Device({1: 38.5e-3, 2: 38.6e-3, 4: 39.6e-3, 8: 42.8e-3, 16: 52.5e-3, 17: 53.7e-3}, {"assistant": 4e-3})
FLOAT32 = Device({1: 56e-3, 2: 92e-3, 4: 86e-3, 8: 78e-3, 16: 95e-3, 17: 97e-3}, {"assistant": 8e-3})


@dataclass
class Traffic:
    """Requests of many segments, block by block.

    Args:
        segments: at the beginning.
        weights: how often a request is in each segment; in turn if None.
        blocks: of all requests together.
        changed: from the share of the blocks that are done to the segments as they are then; None where they stay.
        slowed: from that share to the factor by which the device is slower.
        per_request: blocks of a request, on average.
    """

    segments: Mapping[str, Segment]
    blocks: int
    weights: Sequence[float] | None = None
    changed: Callable[[float], Mapping[str, Segment]] | None = None
    slowed: Callable[[float], float] = field(default=lambda done: 1.0)
    per_request: int = 40


@dataclass(frozen=True)
class Block:
    """One block, as it went and as it would have gone."""

    segment: str
    request: RequestContext
    output_tokens: int
    offers: Mapping[str, Offer]
    runs: Mapping[str, int]  # draft tokens that are accepted in a row, by source, of a block that is long enough
    scatter: float  # measured seconds over true ones
    slowdown: float
    done: float  # share of all blocks


def blocks(traffic: Traffic, device: Device, seed: int) -> Iterator[Block]:
    """The same for every policy: what the actions bring differs, the luck does not."""
    rng = np.random.default_rng(seed)
    names = list(traffic.segments)
    weights = None if traffic.weights is None else np.array(traffic.weights) / np.sum(traffic.weights)
    count = num_requests = 0
    while count < traffic.blocks:
        name = names[num_requests % len(names) if weights is None else rng.choice(len(names), p=weights)]
        num_requests += 1
        temperature = float(rng.choice([0.0, 0.8]))
        done = count / traffic.blocks
        segment = (traffic.changed(done) if traffic.changed else traffic.segments)[name]
        request = RequestContext(name, 100, 4096, temperature > 0, tuple(segment), temperature)
        moods = dict.fromkeys(segment, 0.0)
        recent: dict[str, float] = {}
        output_tokens = 1
        for _ in range(int(rng.integers(traffic.per_request // 2, 3 * traffic.per_request // 2 + 1))):
            offers, runs = {}, {}
            for source, truth in segment.items():
                moods[source] = 0.7 * moods[source] + math.sqrt(1 - 0.49) * rng.normal()
                logit = math.log(truth.rate / (1 - truth.rate)) + truth.spread * moods[source]
                rate = 1 / (1 + math.exp(-logit))
                is_hit = rng.random() < truth.hit
                fates = rng.random(LONGEST) < rate
                length = LONGEST if rng.random() < 0.5 else int(rng.integers(1, LONGEST + 1))
                match = max(1, round(2 ** (1.5 + 0.5 * moods[source] + 0.5 * rng.normal())))
                run = int(np.cumprod(fates).sum()) if is_hit else 0
                runs[source] = min(run, length) if truth.is_retrieval else run
                if truth.is_retrieval:
                    offers[source] = Offer(length if is_hit else 0, match if is_hit else 0, (), recent.get(source))
                    if is_hit:
                        recent[source] = 0.8 * recent.get(source, 0.5) + 0.2 * (run > 0)
            scatter = math.exp(device.scatter * rng.normal()) * (20.0 if rng.random() < device.stalls else 1.0)
            done = count / traffic.blocks
            yield Block(name, request, output_tokens, offers, runs, scatter, traffic.slowed(done), done)
            output_tokens += 2
            count += 1


@dataclass(frozen=True)
class Step:
    """What a policy did in a block: tokens, and the seconds that it truly takes, without the scatter of measuring."""

    segment: str
    action: Action
    tokens: int
    seconds: float
    plain_seconds: float  # of one plain step then


def outcome(block: Block, action: Action, device: Device, context: BlockContext) -> tuple[BlockOutcome, Step]:
    """What comes of an action."""
    length, source = action.block_length, action.source
    run = block.runs.get(source, 0)
    offer = block.offers.get(source)
    drafted = 0 if length == 0 else min(length, offer.num_tokens) if offer else length
    accepted = min(run, drafted)
    judged = min(drafted, accepted + 1)
    verify = device.verify_seconds(drafted + 1, context.context_tokens) * block.slowdown
    draft = device.draft_seconds(source, length, context.context_tokens) * block.slowdown if length else 0.0
    settled = tuple(
        OfferOutcome(name, each, block.output_tokens, min(each.num_tokens, block.runs[name] + 1), block.runs[name])
        for name, each in block.offers.items()
        if name in context.offers
    )
    result = BlockOutcome(
        segment=block.segment,
        action=action,
        context_tokens=context.context_tokens,
        num_draft_tokens=drafted,
        num_judged_tokens=judged,
        num_accepted_tokens=accepted,
        num_committed_tokens=accepted + 1,
        draft_seconds=draft * block.scatter,
        verify_seconds=verify * block.scatter,
        request=block.request,
        offers=settled,
    )
    plain = device.verify_seconds(1, context.context_tokens) * block.slowdown
    return result, Step(block.segment, action, accepted + 1, verify + draft, plain)


def run(policy: Policy, traffic: Sequence[Block], device: Device, estimates: object | None = None) -> list[Step]:
    """A policy on blocks as `blocks` gives them. Args: estimates: with `observe`, learns costs from measurements."""
    steps, request, is_control = [], None, False
    for block in traffic:
        sources = tuple(block.runs)
        offers = block.offers if getattr(policy, "wants_offers", False) else {}
        context = BlockContext(block.request, 100 + block.output_tokens, block.output_tokens, sources, offers)
        if block.request is not request:
            request = block.request
            is_control = bool(getattr(policy, "is_control", lambda _: False)(request))
        action = replace(OFF, reason="control") if is_control else policy.choose(context)
        result, step = outcome(block, action, device, context)
        policy.observe(result)
        if hasattr(estimates, "observe"):
            estimates.observe(result)
        steps.append(step)
    return steps


def goodput(steps: Sequence[Step]) -> float:
    """Tokens per second, of all blocks together."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def goodputs(met: Sequence[Block], device: Device) -> dict[Action, float]:
    """Tokens per second of every fixed action on the same blocks, the device at its usual speed."""
    sources = tuple(met[0].runs)
    found = {OFF: 1.0 / device.verify_seconds(1, 0)}
    verify = np.array([device.verify_seconds(width, 0) for width in range(1, LONGEST + 2)])
    for source in sources:
        runs = np.array([block.runs[source] for block in met])
        offered = np.array([block.offers[source].num_tokens if source in block.offers else LONGEST for block in met])
        for length in LENGTHS:
            drafted = np.minimum(offered, length)
            tokens = np.minimum(runs, drafted).sum() + len(met)
            seconds = verify[drafted].sum() + len(met) * device.draft_seconds(source, length, 0)
            found[Action(source, length)] = float(tokens / seconds)
    return found


def best_fixed(segment: Segment, device: Device, num_blocks: int = 20_000, seed: int = 12345) -> Action:
    """The action that brings the most tokens per second in a segment, found by trying all of them on many blocks."""
    found = goodputs(list(blocks(Traffic({"s": segment}, num_blocks), device, seed)), device)
    return max(found, key=lambda action: found[action])


class Oracle:
    """Takes the best fixed action of each segment, known beforehand, also when that changes.

    Args:
        actions: from a segment's truth (by identity) to the action.
        traffic: to know which truth holds.
    """

    name = "oracle"

    def __init__(self, actions: Callable[[str, int], Action]) -> None:
        self._actions = actions
        self._count = 0

    def choose(self, context: BlockContext) -> Action:
        self._count += 1
        return self._actions(context.segment, self._count - 1)

    def observe(self, outcome: BlockOutcome) -> None:
        """It knows."""
