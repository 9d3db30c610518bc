"""What a policy has learned in several processes, as one state.

Each process decides on its own and saves what it has learned. A new one goes on from all of it. How, for the policies
that count (`goodput`, with or without `guard` around it):

- **Counts.** Let process i have discounted counts n_i of blocks and r_ij, a_ij of draft position j judged and accepted,
  for one segment and source. The evidence of independent blocks adds up: n = sum n_i, r_j = sum r_ij, a_j = sum a_ij. A
  process that has seen all these blocks would not know more than its horizon of 1 / (1 - discount) blocks, so all
  sums are multiplied by c = min(1, horizon / n). Rates a_j / r_j are left by that as they are: means of the processes'
  own rates weighted by what each has seen, and so between them. Without discount the horizon is the largest n_i.
- **Means of features** are weighted by the offers that each rests on, whose sum is capped at the same horizon.
- **Confidence.** Process i holds the weights w as a Gaussian with mean m_i and precision P_i = P_0 + L_i, where P_0 is
  the prior (mean zero) that all share and L_i what its offers said. The product of the posteriors has the prior once
  for each process: dividing the surplus out gives precision P_0 + sum L_i and information sum P_i m_i. Both
  sums are multiplied by c = max tr L_i / sum tr L_i, so P = P_0 + c sum L_i and P m = c sum P_i m_i: the result
  is as certain as the most certain of them, and several copies of a state merge to that state.
- **Rates of a segment** (tokens and seconds so far) are added up and scaled to the largest share of seconds. The
  budget for exploring is the smallest, since what was spent is spent. Of each source, the last use is the
  one fewest blocks ago. Tokens and seconds of catching up are added up and scaled to the largest number of tokens.
- **Guard.** A test cannot be continued from two halves: per segment the one of the state with most blocks goes
  on. A segment that any process has paused stays so for as many blocks as were left. The last ratios of plain
  steps are joined. No state's random numbers are taken over, or processes that began together would choose the same
  requests as controls.

**Evidence that is counted twice.** Processes that went on from one state all contain it, and merging them counts it
once for each. That cannot make the result surer than one process can be: every sum is capped, at the horizon or
at the most certain part. It shifts weight from what the processes have seen since to what they have in common, which
discounting undoes within a horizon. States that another one has taken over without being changed are not merged at
all (`telemetry/states.py`, `heads`), so a single process that is restarted goes on exactly.

Any other policy goes on from the newest state alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autospec.policies.base import MAX_SEGMENTS, Policy
from autospec.policies.checking import State
from autospec.policies.confidence import Confidence
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard
from autospec.policies.states import newest_segments

_PLAIN_RATIOS = 65


def merge(policy: Policy, states: Sequence[State], seed: int) -> tuple[State, int]:
    """One state out of several, for `policy.restore`. A single one stays exactly what it is.

    Args:
        policy: who is to go on from it.
        states: of equal policies, newest first, at least one; those that `check` lets pass.
        seed: of the random numbers where there are several states.

    Returns:
        The state, and how many of the newest states are in it.
    """
    if len(states) == 1:
        return states[0], 1
    if type(policy) is Guard:
        merged, count = _merge_guards(policy, states, seed)
    elif type(policy) is Goodput:
        merged, count = _merge_goodputs(states, _horizon(policy)), len(states)
    else:
        merged, count = dict(states[0]), 1
        if isinstance(merged.get("random"), Mapping):
            merged["random"] = _random(seed)
    return newest_segments(merged, MAX_SEGMENTS), count


def _merge_guards(policy: Guard, states: Sequence[State], seed: int) -> tuple[dict[str, Any], int]:
    plain = [ratio for state in reversed(states) for ratio in state["plain"]][-_PLAIN_RATIOS:]
    inner, count = None, len(states)
    if hasattr(policy.policy, "restore"):
        inner, count = merge(policy.policy, [state["policy"] for state in states], seed + 1)
    return {
        **states[0],
        "segments": _joined([state["segments"] for state in states], _merge_brakes),
        "plain": plain,
        "plain_ratio": statistics.median(plain) if plain else 1.0,
        "random": _random(seed),
        "policy": inner,
    }, count


def _merge_brakes(found: Sequence[State]) -> State:
    """Of one segment. A pause is counted in blocks of its own process: what is left of it is what can be compared."""
    longest = max(found, key=lambda each: each["blocks"])
    left = [max(0, each["paused_until"] - each["blocks"]) for each in found]
    if not any(left):
        return {**longest, "trips": max(each["trips"] for each in found)}
    return {
        **longest,
        "is_on": False,
        "paused_until": longest["blocks"] + max(left),
        "pause": max(each["pause"] for each, blocks in zip(found, left, strict=True) if blocks),
        "trips": max(each["trips"] for each in found),
    }


def _merge_goodputs(states: Sequence[State], horizon: float) -> dict[str, Any]:
    models = [state["acceptance"] for state in states]

    def merge_counts(found: Sequence[State]) -> State:
        return _merge_counts(found, horizon)

    return {
        **states[0],
        "acceptance": {
            **models[0],
            "by_segment": _joined([m["by_segment"] for m in models], lambda found: _joined(found, merge_counts)),
            "by_source": _joined([m["by_source"] for m in models], merge_counts),
            "confidence": _joined([m["confidence"] for m in models], _merge_confidences),
        },
        "segments": _joined([state["segments"] for state in states], _merge_segments),
        "catch_up": _joined([state.get("catch_up", {}) for state in states], _merge_catch_ups),
        "offering": sorted({source for state in states for source in state["offering"]}),
    }


def _merge_counts(found: Sequence[State], horizon: float) -> State:
    asked = sum(each["asked"] for each in found)
    kept = _share(min(asked, _limit(horizon, [each["asked"] for each in found])), asked)
    latest = sum(each["late"][0] for each in found)
    late_kept = _share(max(each["late"][0] for each in found), latest)
    length = max(len(each["at_risk"]) for each in found)
    return {
        **found[0],
        "at_risk": (kept * _sum_padded([each["at_risk"] for each in found], length)).tolist(),
        "accepted": (kept * _sum_padded([each["accepted"] for each in found], length)).tolist(),
        "asked": kept * asked,
        "proposed": kept * sum(each["proposed"] for each in found),
        **_merge_means(found, horizon),
        "late": [late_kept * latest, late_kept * sum(each["late"][1] for each in found)],
    }


def _merge_means(found: Sequence[State], horizon: float) -> State:
    seen = [each["seen"] for each in found]
    if not sum(seen):
        return {}
    return {
        "features": np.average([each["features"] for each in found], axis=0, weights=seen).tolist(),
        "score": float(np.average([each["score"] for each in found], weights=seen)),
        "seen": min(sum(seen), _limit(horizon, seen)),
    }


def _merge_confidences(found: Sequence[State]) -> State:
    prior = np.array(Confidence().state()["precision"])
    precisions = [np.array(each["precision"], dtype=float) for each in found]
    certainties = [max(0.0, float(np.trace(precision - prior))) for precision in precisions]
    if not sum(certainties):
        return found[0]
    kept = max(certainties) / sum(certainties)
    precision = prior + kept * sum(precision - prior for precision in precisions)
    information = kept * sum(p @ np.array(each["weights"]) for p, each in zip(precisions, found, strict=True))
    weights = np.linalg.solve(precision, information)
    return {**found[0], "weights": weights.tolist(), "precision": precision.tolist()}


def _merge_segments(found: Sequence[State]) -> State:
    seconds = sum(each["seconds"] for each in found)
    kept = _share(max(each["seconds"] for each in found), seconds)
    blocks = max(each["blocks"] for each in found)
    ago: dict[str, tuple[int, float]] = {}  # source -> blocks since its last use, evidence at it
    for each in found:
        for source, (block, evidence) in each["tried"].items():
            since = (each["blocks"] - block, evidence)
            if source not in ago or since[0] < ago[source][0]:
                ago[source] = since
    return {
        **found[0],
        "tokens": kept * sum(each["tokens"] for each in found),
        "seconds": kept * seconds,
        "budget": min(each["budget"] for each in found),
        "blocks": blocks,
        "tried": {source: [blocks - since, evidence] for source, (since, evidence) in ago.items()},
    }


def _merge_catch_ups(found: Sequence[Any]) -> Any:
    tokens, seconds = (sum(sums) for sums in zip(*found, strict=True))
    kept = _share(max(each[0] for each in found), tokens)
    return [kept * tokens, kept * seconds]


def _joined(parts: Sequence[State], combine: Callable[[Sequence[State]], State]) -> dict[str, Any]:
    """Parts by name, those of the newest state at the end. What one state alone has stays as it is."""
    order: dict[str, None] = {}
    for part in reversed(parts):
        for name in part:
            order.pop(name, None)
            order[name] = None
    joined = {}
    for name in order:
        found = [part[name] for part in parts if name in part]
        joined[name] = found[0] if len(found) == 1 else combine(found)
    return joined


def _horizon(policy: Goodput) -> float:
    """Blocks that discounted counts can come to; infinite where nothing is forgotten."""
    discount = policy._acceptance.settings["discount"]
    assert isinstance(discount, (int, float))
    return 1.0 / (1.0 - discount) if discount < 1.0 else math.inf


def _limit(horizon: float, each: Iterable[float]) -> float:
    return horizon if math.isfinite(horizon) else max(each)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 1.0


def _sum_padded(rows: Sequence[Sequence[float]], length: int) -> Any:
    total = np.zeros(length)
    for row in rows:
        total[: len(row)] += row
    return total


def _random(seed: int) -> Mapping[str, Any]:
    return np.random.default_rng(seed).bit_generator.state
