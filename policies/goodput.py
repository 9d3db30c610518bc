"""Model-based choice: the block that gains most over what the segment's time is worth, plain steps among them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from autospec.errors import ConfigurationError
from autospec.policies.acceptance import AcceptanceModel
from autospec.policies.base import MAX_SEGMENTS, CostEstimates, check_range
from autospec.policies.checking import check_goodput
from autospec.policies.prices import PriceList, Prices
from autospec.policies.stopping import MarginalStop
from autospec.types import NONE, Action, BlockContext, BlockOutcome, Reason

_PRIOR_STEPS = 10.0  # plain steps that a segment's rate starts from
_RATE_KEPT = 0.98
_EVIDENCE_KEPT = 0.985  # of what is known of a source, for each block of the segment without it
_EVIDENCE_GAINED = 0.2  # of what was lost of it, for each block with the source
_SPREAD_TOKENS = 64  # over which a long catching up is spread, where so many are left
_LONG_BACKLOG = 32  # tokens; a shorter one is of a source that is used by turns
_LENGTHS_BEYOND = 2  # of those to choose from, that a block with a stop may reach
_MOST_KNOWN = 4096
_SHOWN = 3  # candidates in a reason
_LOOK_EVERY = 32  # blocks of a segment; one that is never ended shows how unsure positions really fare
_GRANT_STEPS = 2.0  # plain steps that a segment may lose by exploring before it has a budget


class _Candidate(NamedTuple):
    value: float  # tokens gained over what the same seconds bring at the segment's rate
    tokens: float
    seconds: float
    source: str
    block_length: int

    def gain(self, step: float) -> float:
        return self.tokens / self.seconds * step


class _Expected(NamedTuple):
    """Of the blocks of one source in one segment, by block length."""

    changes: tuple[int, int]  # of the acceptance model when it was reckoned
    prices: PriceList
    tokens: list[float]
    seconds: list[float]


@dataclass(slots=True)
class _Segment:
    """What was done in a segment. Seconds are predicted ones, which no stall of the machine disturbs."""

    source: str = NONE  # of the last block
    block_length: int = 0
    tokens: float = 0.0  # discounted, for its rate
    seconds: float = 0.0
    budget: float = _GRANT_STEPS  # plain steps that exploring may still be expected to lose
    blocks: int = 0
    tried: dict[str, tuple[int, float]] = field(default_factory=dict)  # source -> `blocks` and evidence at its last use

    def evidence(self, source: str) -> float:
        """Share of what is known of a source that still counts: less, the longer it rested."""
        block, evidence = self.tried.get(source, (self.blocks, 1.0))
        return evidence * float(_EVIDENCE_KEPT ** (self.blocks - block))

    def use(self, source: str) -> None:
        evidence = self.evidence(source)
        self.tried[source] = (self.blocks, evidence + _EVIDENCE_GAINED * (1.0 - evidence))


class Goodput:
    """Chooses the block with the most predicted gain in committed tokens per second.

    A block is worth its expected tokens less what its seconds would bring at the segment's rate so far: that maximises
    tokens per second over many blocks that differ. Where they do not differ it is the block with the most tokens per
    second. The maximum is taken over all sources and block lengths at once: device cost is a staircase, so a
    walk from one length to the next would stop too early.

    Retrieval sources are judged by what they offer in this very block, and are learnt from whether they are
    used or not. Others are learnt from by using them: one that might be better, given how little is known of it, is
    tried for as long as the expected loss stays within the budget. Model drafts that heed a stop are asked for more
    than the best length, and end the block where by their own confidence no further position is worth its seconds.

    Args:
        costs: seconds of drafting and verifying on this device.
        acceptance: what is learned of the sources, as a model or as the settings of one; None: as usual.
        minimum_gain: predicted gain over a plain step, in tokens, below which plain decoding is not left.
        hysteresis: predicted gain over the last action, in tokens, below which that one is kept.
        exploration: plain steps that exploring may be expected to lose, for each block of the segment.
        optimism: standard deviations by which a source is hoped to be better than it is thought to be.

    Source: goodput as in TurboSpec (Liu et al. 2024); the value of time as in semi-Markov decisions (Howard 1963).
    """

    name = "goodput"
    wants_offers = True

    def __init__(
        self,
        costs: CostEstimates,
        *,
        acceptance: AcceptanceModel | Mapping[str, float] | None = None,
        minimum_gain: float = 0.02,
        hysteresis: float = 0.03,
        exploration: float = 0.0075,
        optimism: float = 1.0,
    ) -> None:
        check_range("minimum_gain", minimum_gain, 0.0, 10.0)
        check_range("hysteresis", hysteresis, 0.0, 10.0)
        check_range("exploration", exploration, 0.0, 1.0)
        check_range("optimism", optimism, 0.0, 10.0)
        self._prices = Prices(costs)
        self._acceptance = _acceptance_model(acceptance)
        self._minimum_gain = minimum_gain
        self._hysteresis = hysteresis
        self._exploration = exploration
        self._optimism = optimism
        self._segments: dict[str, _Segment] = {}
        self._catch_up: dict[str, list[float]] = {}  # source -> discounted tokens and seconds of long backlogs
        self._offering: set[str] = set()  # sources that are learnt from by their offers
        self._known: dict[tuple[str, str], _Expected] = {}  # of segments and sources lately asked about

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values; what is learned is no setting."""
        return {
            "acceptance": self._acceptance.settings,
            "minimum_gain": self._minimum_gain,
            "hysteresis": self._hysteresis,
            "exploration": self._exploration,
            "optimism": self._optimism,
        }

    def choose(self, context: BlockContext) -> Action:
        offers, tokens_left = context.offers, context.tokens_left
        segment = self._segment(context.segment)
        prices = self._prices.at(context.context_tokens)
        step = prices.step
        rate = max((segment.tokens + _PRIOR_STEPS) / (segment.seconds + _PRIOR_STEPS * step), 1.0 / step)
        off = _Candidate(1.0 - rate * step, 1.0, step, NONE, 0)
        lengths = prices.block_lengths
        if lengths and lengths[-1] >= tokens_left:
            lengths = lengths[: bisect_left(lengths, tokens_left)]  # those that have room
        found: dict[str, _Values] = {}
        excluded: list[str] = []
        if not self._offering.issuperset(offers):
            self._offering.update(offers)
        for source in context.sources if lengths else ():
            draft, offer = self._prices.draft(source, prices), offers.get(source)
            if draft is None:
                excluded.append(f"{source} (not timed)")
            elif offer is None:
                found[source] = self._of_source(context, source, lengths, draft, prices, rate)
            elif offer.num_tokens:
                found[source] = self._of_offer(context, source, lengths, prices, rate)
            else:
                excluded.append(f"{source} (nothing found)")
        best = max(found.values(), key=_most).best() if found else off
        least = off.value + self._minimum_gain
        kind, chosen = ("best", best) if best.value >= least else ("off", off)
        values = found.get(segment.source)
        last = None if values is None else values.of_length(segment.block_length)
        if last is not None and best.value > last.value >= max(least, best.value - self._hysteresis):
            kind, chosen = "kept", last
        tried = self._worth_trying(segment, context, found, chosen, prices, rate)
        if tried is not None:
            segment.budget -= max(0.0, chosen.value - tried.value + rate * found[tried.source].unspread)
            kind, chosen = "explore", tried
        segment.source, segment.block_length = chosen.source, chosen.block_length
        length, stop = chosen.block_length, None
        if chosen.source in context.stoppable:
            if kind in ("best", "kept") and segment.blocks % _LOOK_EVERY == 0:
                kind = "look"
            if kind in ("best", "kept"):
                length = lengths[min(lengths.index(length) + _LENGTHS_BEYOND, len(lengths) - 1)]
                stop = self._stop(context, chosen.source, length, prices, rate)
            else:  # a trial is to be had at the price that was reckoned with
                stop = self._stop(context, chosen.source, length, prices, 0.0)
        reason = Reason(kind, partial(_words, kind, chosen, [*found.values()], step, excluded))
        return Action(chosen.source, length, reason, chosen.gain(step), stop)

    def verify_width(self, num_tokens: int, context_tokens: int) -> int:
        """Tokens that a forward over `num_tokens` is padded to."""
        return self._prices.width(num_tokens, context_tokens)

    def observe(self, outcome: BlockOutcome) -> None:
        for settled in outcome.offers:
            if outcome.request is not None:
                self._acceptance.add_offer(outcome.request, settled)
        action = outcome.action
        if outcome.catch_up_tokens > _LONG_BACKLOG and action.block_length:
            tokens, seconds = self._catch_up.get(action.source, (0.0, 0.0))
            self._catch_up[action.source] = [
                0.9 * tokens + outcome.catch_up_tokens,
                0.9 * seconds + outcome.catch_up_seconds,
            ]
        segment = self._segment(outcome.segment)
        segment.blocks += 1
        segment.budget = min(segment.budget + self._exploration, _GRANT_STEPS + 100.0 * self._exploration)
        if action.block_length:
            if action.source not in self._offering:
                self._acceptance.add(outcome)
            segment.use(action.source)
        seconds = self._prices.seconds(
            action.source if action.source not in self._offering else NONE,
            outcome.num_draft_steps,
            outcome.num_draft_tokens,
            outcome.context_tokens,
        )
        segment.tokens = _RATE_KEPT * segment.tokens + outcome.num_committed_tokens
        segment.seconds = _RATE_KEPT * segment.seconds + seconds

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        return {
            "acceptance": self._acceptance.state(),
            "segments": {name: asdict(segment) for name, segment in self._segments.items()},
            "offering": sorted(self._offering),
            "catch_up": {source: list(sums) for source, sums in self._catch_up.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        try:
            check_goodput(state)
            segments = {
                name: _Segment(**{**values, "tried": dict(values["tried"])})  # not the given one
                for name, values in state["segments"].items()
            }
            offering = set(state["offering"])
            known = state.get("catch_up", {})
            catch_up = {source: [float(tokens), float(seconds)] for source, (tokens, seconds) in known.items()}
            self._acceptance.restore(state["acceptance"])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigurationError(f"this is no state of policy {self.name!r}: {error!r}") from error
        self._segments, self._offering, self._catch_up = segments, offering, catch_up
        self._known.clear()

    def _segment(self, name: str) -> _Segment:
        segment = self._segments.pop(name, None) or _Segment()
        self._segments[name] = segment  # the newest last
        if len(self._segments) > MAX_SEGMENTS:
            del self._segments[next(iter(self._segments))]
        return segment

    def _of_offer(
        self, context: BlockContext, source: str, lengths: Sequence[int], prices: PriceList, rate: float
    ) -> _Values:
        """Blocks of a proposal that is there already: asking for it costs no more. A longer block has all of it."""
        num_tokens = context.offers[source].num_tokens
        committed = list(accumulate(self._acceptance.offer_survival(context, source), initial=1.0))
        whole = bisect_right(lengths, num_tokens)  # blocks that have as many tokens as were asked for
        tokens, seconds = [committed[k] for k in lengths[:whole]], prices.verify_blocks[:whole]
        if whole < len(lengths) and (not whole or lengths[whole - 1] < num_tokens):
            tokens.append(committed[num_tokens])
            seconds.append(prices.verify[num_tokens])
            whole += 1
        return _Values(source, lengths if whole == len(lengths) else lengths[:whole], tokens, seconds, rate)

    def _of_source(
        self,
        context: BlockContext,
        source: str,
        lengths: Sequence[int],
        draft: Sequence[float],
        prices: PriceList,
        rate: float,
    ) -> _Values:
        expected = self._expected(context.segment, source, draft, prices)
        tokens, seconds = expected.tokens, expected.seconds
        backlog = context.backlogs.get(source, 0)
        if not backlog:
            return _Values(source, lengths, tokens, seconds, rate)
        catch_up = self._catch_up_seconds(source, backlog, prices)
        if backlog <= _LONG_BACKLOG:
            return _Values(source, lengths, tokens, seconds, rate, each=catch_up)
        share = catch_up / max(1, min(context.tokens_left, _SPREAD_TOKENS))
        spread = [time + share * num for time, num in zip(seconds, tokens, strict=True)]
        return _Values(source, lengths, tokens, spread, rate, unspread=catch_up)

    def _expected(self, segment: str, source: str, draft: Sequence[float], prices: PriceList) -> _Expected:
        """Of the source's blocks, what it takes to catch up left out; reckoned anew only where something changed."""
        changes = self._acceptance.changes(segment, source)
        known = self._known.get((segment, source))
        if known is not None and known.prices is prices and known.changes == changes:
            return known
        accepted = self._acceptance.expected_tokens(segment, source, prices.block_lengths[-1])
        hit_rate = self._acceptance.hit_rate(segment, source)
        verify, miss_seconds = prices.verify, (1.0 - hit_rate) * prices.step
        tokens = [1.0 + hit_rate * accepted[k] for k in prices.block_lengths]
        seconds = [
            time + hit_rate * verify[k] + miss_seconds for k, time in zip(prices.block_lengths, draft, strict=True)
        ]
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        self._known[segment, source] = known = _Expected(changes, prices, tokens, seconds)
        return known

    def _stop(
        self, context: BlockContext, source: str, block_length: int, prices: PriceList, rate: float
    ) -> MarginalStop:
        temperature, output_tokens = context.request.temperature, context.output_tokens
        rates, confident = self._acceptance.of_a_block(
            context.segment, source, temperature, output_tokens, block_length
        )
        return MarginalStop(rates, confident, self._prices.steps(source, prices), prices.verify, rate)

    def _catch_up_seconds(self, source: str, backlog: int, prices: PriceList) -> float:
        """What bringing the draft's cache up to date takes: as estimated, corrected by what it took."""
        tokens, seconds = self._catch_up.get(source, (0.0, 0.0))
        estimated = self._prices.catch_up(source, backlog, prices)
        return (_SPREAD_TOKENS * estimated + backlog * seconds) / (_SPREAD_TOKENS + tokens)

    def _worth_trying(
        self,
        segment: _Segment,
        context: BlockContext,
        found: Mapping[str, _Values],
        chosen: _Candidate,
        prices: PriceList,
        rate: float,
    ) -> _Candidate | None:
        """Of the blocks that would be better than the chosen one if their source were as good as it may be, the best.

        None where there are none, or where what it is expected to lose is beyond the budget.
        """
        least, verify = chosen.value + self._hysteresis, prices.verify
        best: _Candidate | None = None
        for source, values in found.items():
            affordable = chosen.value - segment.budget + rate * values.unspread  # a trial may be the only one
            if source == chosen.source or source in context.offers or values.most < affordable:
                continue
            survival = self._acceptance.optimistic_survival(
                context.segment, source, values.lengths[-1], self._optimism, segment.evidence(source)
            )
            hoped = list(accumulate(survival, initial=1.0))
            draft = self._prices.draft(source, prices) or ()
            hopeful = [
                index
                for index, (k, time) in enumerate(zip(values.lengths, draft, strict=False))
                if values.values[index] >= affordable and hoped[k] - rate * (time + verify[k]) > least
            ]
            if hopeful:
                each = values.at(max(hopeful, key=values.values.__getitem__))
                best = each if best is None or each.value > best.value else best
        return best


def _acceptance_model(given: AcceptanceModel | Mapping[str, float] | None) -> AcceptanceModel:
    if isinstance(given, AcceptanceModel):
        return given
    try:
        return AcceptanceModel(**{"discount": 0.99, "prior_acceptance": 0.5, **(given or {})})
    except TypeError as error:
        raise ConfigurationError(f"acceptance={given!r:.80}: settings of an acceptance model are needed") from error


class _Values:
    """What one source's blocks are worth.

    Args:
        source: its name.
        lengths: [n], block lengths, ascending.
        tokens, seconds: at least [n], expected of such a block.
        rate: tokens per second that the segment's time brings.
        each: seconds that every one of them takes besides.
        unspread: seconds that the first of these blocks takes once, of which each of them is charged a share.
    """

    __slots__ = ("_each", "_seconds", "_source", "_tokens", "lengths", "most", "unspread", "values")

    def __init__(
        self,
        source: str,
        lengths: Sequence[int],
        tokens: list[float],
        seconds: list[float],
        rate: float,
        each: float = 0.0,
        unspread: float = 0.0,
    ) -> None:
        self._each, self.unspread = each, unspread
        self._source, self.lengths, self._tokens, self._seconds = source, lengths, tokens, seconds
        if len(tokens) > len(lengths):
            tokens = tokens[: len(lengths)]
        if each:
            charge = rate * each
            self.values = [num - rate * time - charge for num, time in zip(tokens, seconds, strict=False)]
        else:
            self.values = [num - rate * time for num, time in zip(tokens, seconds, strict=False)]
        self.most = max(self.values)

    def best(self) -> _Candidate:
        return self.at(self.values.index(self.most))

    def of_length(self, block_length: int) -> _Candidate | None:
        return self.at(self.lengths.index(block_length)) if block_length in self.lengths else None

    def at(self, index: int) -> _Candidate:
        seconds = self._seconds[index] + self._each
        return _Candidate(self.values[index], self._tokens[index], seconds, self._source, self.lengths[index])


_most = attrgetter("most")


def _words(kind: str, chosen: _Candidate, found: list[_Values], step: float, excluded: Sequence[str]) -> str:
    """What was done, the best of each source by predicted goodput relative to plain steps, and what was left out."""
    shown = [values.best() for values in sorted(found, key=_most, reverse=True)]
    if kind in ("kept", "explore"):
        shown = [chosen, *shown]
    words = ", ".join([f"{c.source}:{c.block_length} {c.tokens / c.seconds * step:.2f}x" for c in shown[:_SHOWN]])
    text = f"{kind}: {words or 'nothing to choose from'}"
    return f"{text}; left out: {', '.join(excluded)}" if excluded else text
