"""From rows of answers to speed-ups, intervals and bars."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from common import MIX

RESAMPLES = 4_000

Row = Mapping[str, Any]
"""`arm`, `prompt`, `segment`, `seconds`, `output_tokens`; `verdict` where it was compared."""


class Times:
    """Seconds and tokens of every arm that has answered every prompt.

    Args:
        rows: of one number format and one decoding.
        base: the arm whose prompts count.
        seed: of the resampling, of prompts within each segment.
    """

    def __init__(self, rows: Sequence[Row], base: str, seed: int = 0) -> None:
        by_arm: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            if "error" not in row:
                by_arm[row["arm"]][row["prompt"]] = row
        prompts = by_arm[base]
        self.arms = [arm for arm, found in by_arm.items() if found.keys() == prompts.keys()]
        self.segments = list(dict.fromkeys(row["segment"] for row in prompts.values()))
        names = [[p for p, row in prompts.items() if row["segment"] == s] for s in self.segments]
        order = [prompt for segment in names for prompt in segment]
        starts = np.cumsum([0, *map(len, names)])
        self._places = {s: np.arange(starts[i], starts[i + 1]) for i, s in enumerate(self.segments)}
        self._places[MIX] = np.arange(len(order))
        rng = np.random.default_rng(seed)
        self._draws = {
            s: self._places[s][rng.integers(0, len(self._places[s]), (RESAMPLES, len(self._places[s])))]
            for s in self.segments
        }
        self._draws[MIX] = np.concatenate([self._draws[s] for s in self.segments], axis=1)
        self._cells = {
            arm: np.array([[by_arm[arm][p][key] for p in order] for key in ("seconds", "output_tokens")])
            for arm in self.arms
        }

    def per_token(self, arm: str, segment: str = MIX) -> float:
        """Seconds per output token, prefill included."""
        seconds, tokens = self._cells[arm][:, self._places[segment]].sum(axis=1)
        return float(seconds / tokens)

    def speed_up(self, arm: str, other: str, segment: str = MIX) -> list[float]:
        """How many times faster `arm` is than `other`, and its 95 % interval over the prompts."""
        sums = {a: self._cells[a][:, self._draws[segment]].sum(axis=2) for a in (arm, other)}
        drawn = (sums[other][0] / sums[other][1]) / (sums[arm][0] / sums[arm][1])
        value = self.per_token(other, segment) / self.per_token(arm, segment)
        return [round(float(v), 4) for v in (value, *np.quantile(drawn, [0.025, 0.975]))]


def summarise(
    rows: Sequence[Row], base: str, autos: Sequence[str], peers: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """One number format and one decoding.

    Args:
        rows: all answers that were measured.
        base: the arm that speed-ups are over.
        autos: the arms that the bars are for.
        peers: each peer's arms (its default and its best setting); the faster one on the whole mix stands for it.
    """
    times = Times(rows, base)
    failed = {row["arm"]: row["error"] for row in rows if "error" in row and row["arm"] not in times.arms}
    best = {
        peer: min(there, key=times.per_token)
        for peer, arms in peers.items()
        if (there := [arm for arm in arms if arm in times.arms])
    }
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row["arm"]] += row.get("output_tokens", 0)
    return {
        "milliseconds_per_token": {arm: round(1000 * times.per_token(arm), 3) for arm in times.arms},
        "output_tokens": {arm: tokens[arm] for arm in times.arms},
        "speed_up": {
            arm: {segment: times.speed_up(arm, base, segment) for segment in (MIX, *times.segments)}
            for arm in times.arms
        },
        "verdicts": verdicts(rows),
        "others": others(rows),
        "failed": failed,
        "best_of_peer": best,
        "bars": {auto: bar(times, auto, best) for auto in autos if auto in times.arms and best},
    }


def others(rows: Sequence[Row]) -> dict[str, float] | None:
    """What else ran on the machine during the answers, as shares of all cores; None where it is not known."""
    shares = [float(share) for row in rows if (share := row.get("others_share")) is not None]
    if not shares:
        return None
    return {
        "mean": round(sum(shares) / len(shares), 4),
        "most": round(max(shares), 4),
        "answers_beyond_a_tenth": sum(share > 0.1 for share in shares),
        "answers": len(shares),
    }


def bar(times: Times, auto: str, best: Mapping[str, str]) -> dict[str, Any]:
    """Faster than every peer's best on the whole mix, and in all segments but one."""
    mix = {peer: times.speed_up(auto, arm) for peer, arm in best.items()}
    segments = {}
    for segment in times.segments:
        ratios = {peer: times.speed_up(auto, arm, segment) for peer, arm in best.items()}
        nearest = min(ratios, key=lambda peer: ratios[peer][0])
        segments[segment] = {"fastest_peer": nearest, "over_it": ratios[nearest]}
    won = sum(found["over_it"][0] > 1.0 for found in segments.values())
    least = min(ratio[0] for ratio in mix.values())
    return {
        "over_peers": mix,
        "segments": segments,
        "segments_won": won,
        "is_met": least > 1.0 and won >= len(segments) - 1,
        "least_over_a_peer": least,
    }


def verdicts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How many answers of each arm were plain decoding's, parted at a tie, or differed; where that was judged."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if "verdict" in row:
            counts[row["arm"]][row["verdict"]] += 1
    return {arm: {kind: count[kind] for kind in ("identical", "tie", "different")} for arm, count in counts.items()}


def best_setting(rows: Sequence[Row]) -> dict[str, Any]:
    """Of a sweep: the setting with the fewest seconds per token over all prompts, those that raised left out.

    Raises:
        ValueError: none has answered all prompts.
    """
    by_setting: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_setting[row["setting"]].append(row)
    whole = {s: found for s, found in by_setting.items() if not any("error" in row for row in found)}
    if not whole:
        raise ValueError(f"no setting works: {rows[0].get('error') if rows else 'nothing was tried'}")
    per_token = {s: sum(r["seconds"] for r in f) / sum(r["output_tokens"] for r in f) for s, f in whole.items()}
    return {
        "best": min(per_token, key=lambda s: per_token[s]),
        "milliseconds_per_token": {s: round(1000 * v, 3) for s, v in per_token.items()},
        "failed": {s: found[-1]["error"] for s, found in by_setting.items() if s not in whole},
    }
