"""Any policy, with a control beside it and a brake: it may not lose against plain decoding without being stopped."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from autospec.errors import ConfigurationError
from autospec.policies.base import MAX_SEGMENTS, CostEstimates, Policy, check_range
from autospec.policies.brake import Brake
from autospec.policies.checking import check_guard
from autospec.policies.prices import Prices
from autospec.types import Action, BlockContext, BlockOutcome, Reason, RequestContext

_PLAIN_BLOCKS = 65  # the last ones, by which the estimate of a plain step is corrected
_LONGEST_PAUSE = 16  # times the first one
_STALL = 4.0  # times the seconds that a block should take; what is above is no fault of the action


@dataclass(slots=True)
class _Segment:
    brake: Brake = field(default_factory=Brake)
    is_on: bool = False
    blocks: int = 0
    paused_until: int = 0  # in `blocks`
    pause: int = 0  # length of the last one
    trips: int = 0


class Guard:
    """Lets another policy choose, unless speculation would not pay or has been losing.

    Args:
        policy: the one that chooses.
        costs: seconds on this device. What a plain step really takes is corrected by those that are seen.
        control_share: share of the requests that are decoded plainly throughout, chosen at random.
        minimum_gain: predicted goodput above that of plain steps below which plain decoding is not left, where the
            policy says what it predicts.
        hysteresis: so much below that, an action may fall before plain decoding is returned to.
        error_rate: probability that a test stops speculation although it does not lose.
        pause_blocks: blocks decoded plainly after that, before it is tried again; twice as many after each more.
        seed: of the choice of controls; None: another one in each process.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    def __init__(
        self,
        policy: Policy,
        costs: CostEstimates,
        *,
        control_share: float = 0.02,
        minimum_gain: float = 0.02,
        hysteresis: float = 0.02,
        error_rate: float = 0.01,
        pause_blocks: int = 200,
        seed: int | None = 0,
        name: str | None = None,
    ) -> None:
        check_range("control_share", control_share, 0.0, 1.0)
        check_range("minimum_gain", minimum_gain, 0.0, 10.0)
        check_range("hysteresis", hysteresis, 0.0, 10.0)
        check_range("error_rate", error_rate, 1e-9, 1.0)
        check_range("pause_blocks", pause_blocks, 1, 1_000_000)
        self.policy = policy
        self.name = name or f"guard:{policy.name}"
        self._prices = Prices(costs)
        self._control_share = control_share
        self._minimum_gain = minimum_gain
        self._hysteresis = hysteresis
        self._error_rate = error_rate
        self._pause_blocks = pause_blocks
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._segments: dict[str, _Segment] = {}
        self._plain: deque[float] = deque(maxlen=_PLAIN_BLOCKS)  # measured / estimated seconds of plain steps
        self._plain_ratio = 1.0

    @property
    def settings(self) -> dict[str, object]:
        """As it was made, in plain values; the policy inside with its own."""
        return {
            "control_share": self._control_share,
            "minimum_gain": self._minimum_gain,
            "hysteresis": self._hysteresis,
            "error_rate": self._error_rate,
            "pause_blocks": self._pause_blocks,
            "seed": self._seed,
            "policy": {"policy": self.policy.name, "settings": dict(getattr(self.policy, "settings", {}))},
        }

    @property
    def wants_offers(self) -> bool:
        return bool(getattr(self.policy, "wants_offers", False))

    @property
    def trips(self) -> Mapping[str, int]:
        """How often speculation was stopped, by segment."""
        return {name: segment.trips for name, segment in self._segments.items() if segment.trips}

    def is_control(self, request: RequestContext) -> bool:
        return bool(self._random.random() < self._control_share)

    def choose(self, context: BlockContext) -> Action:
        segment = self._segment(context.segment)
        if segment.blocks < segment.paused_until:
            return Action(reason=f"guard: it lost, {segment.paused_until - segment.blocks} plain blocks to go")
        action = self.policy.choose(context)
        if not action.block_length:
            segment.is_on = False
            return action
        least = 1.0 + self._minimum_gain - (self._hysteresis if segment.is_on else 0.0)
        if action.gain is not None and action.gain < least and action.reason_kind not in ("explore", "probe"):
            segment.is_on = False
            words = "guard: less than {:.2f}x plain is predicted; {}".format
            return Action(reason=Reason("guard", partial(words, least, action.reason)))
        segment.is_on = True
        return action

    def verify_width(self, num_tokens: int, context_tokens: int) -> int:
        """As the policy inside has it."""
        width = getattr(self.policy, "verify_width", None)
        return num_tokens if width is None else int(width(num_tokens, context_tokens))

    def observe(self, outcome: BlockOutcome) -> None:
        self.policy.observe(outcome)
        segment = self._segment(outcome.segment)
        segment.blocks += 1
        action = outcome.action
        step = self._prices.at(outcome.context_tokens).step
        if not action.block_length:
            if outcome.seconds > 0.0:
                self._correct(outcome.seconds / step)
            return
        expected = self._prices.seconds(
            action.source, outcome.num_draft_steps, outcome.num_draft_tokens, outcome.context_tokens
        )
        plain = step * self._plain_ratio
        seconds = min(outcome.seconds or expected, _STALL * self._plain_ratio * expected)
        gain = outcome.num_committed_tokens - seconds / plain
        if segment.brake.add(gain, action.block_length + 1.0):
            longest = _LONGEST_PAUSE * self._pause_blocks
            segment.pause = min(2 * segment.pause, longest) if segment.pause else self._pause_blocks
            segment.paused_until = segment.blocks + segment.pause
            segment.trips += 1
        elif not segment.brake.seen:  # a test passed
            segment.pause = 0

    def state(self) -> dict[str, Any]:
        """What it has learned, and what the policy inside has, as plain JSON values."""
        segments = {
            name: {
                "brake": each.brake.state(),
                "is_on": each.is_on,
                "blocks": each.blocks,
                "paused_until": each.paused_until,
                "pause": each.pause,
                "trips": each.trips,
            }
            for name, each in self._segments.items()
        }
        return {
            "segments": segments,
            "plain": list(self._plain),
            "plain_ratio": self._plain_ratio,
            "random": self._random.bit_generator.state,
            "policy": self.policy.state() if hasattr(self.policy, "state") else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        try:
            check_guard(state)
            segments = {
                name: _Segment(**{**values, "brake": Brake.restored(values["brake"], self._error_rate)})
                for name, values in state["segments"].items()
            }
            chance = np.random.default_rng()
            chance.bit_generator.state = state["random"]
            plain = deque((float(ratio) for ratio in state["plain"]), maxlen=_PLAIN_BLOCKS)
            ratio, inner = float(state["plain_ratio"]), state["policy"]
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigurationError(f"this is no state of policy {self.name!r}: {error!r}") from error
        if inner is not None and hasattr(self.policy, "restore"):
            self.policy.restore(inner)
        self._segments, self._random, self._plain, self._plain_ratio = segments, chance, plain, ratio

    def _segment(self, name: str) -> _Segment:
        segment = self._segments.pop(name, None) or _Segment(Brake(self._error_rate))
        self._segments[name] = segment  # the newest last
        if len(self._segments) > MAX_SEGMENTS:
            del self._segments[next(iter(self._segments))]
        return segment

    def _correct(self, ratio: float) -> None:
        self._plain.append(ratio)
        if len(self._plain) % 16 == 1 or len(self._plain) == _PLAIN_BLOCKS:
            self._plain_ratio = statistics.median(self._plain)
