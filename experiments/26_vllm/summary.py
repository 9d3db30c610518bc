"""From rows of answered chunks to tokens per second, latencies, acceptance and bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from arms import AUTOS, FAMILIES, NAMES, NONE
from common import MIX, script

PERCENTILES = (50, 90, 99)
BARS = {"alone_over_best_fixed": 1.0, "crowded_over_none": 0.98, "proposer_share": 0.03}

Row = Mapping[str, Any]
"""A chunk that an arm has answered: `arm`, `concurrency`, `decoding`, `seconds`, `proposer`, and `requests`, each with
`prompt`, `segment`, `seconds`, `tokens`, `num_draft_tokens`, `num_accepted_tokens` and `num_steps`."""


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """By concurrency and decoding, the mix of decodings included."""
    groups: dict[str, dict[str, Any]] = {}
    for concurrency in sorted({row["concurrency"] for row in rows}):
        same = [row for row in rows if row["concurrency"] == concurrency]
        decodings = list(dict.fromkeys(row["decoding"] for row in same))
        of_decoding = {name: [row for row in same if row["decoding"] == name] for name in decodings}
        groups[str(concurrency)] = {name: _group(found) for name, found in {**of_decoding, MIX: same}.items()}
    return {"groups": groups, "bars": bars(groups)}


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    by_arm = {name: found for name in NAMES if (found := [row for row in rows if row["arm"] == name])}
    times = script("23_benchmark", "summary").Times(
        list(_answers(row for same in by_arm.values() for row in same)), NONE
    )
    speed_ups = {
        arm: {MIX: times.speed_up(arm, NONE), **{s: times.speed_up(arm, NONE, s) for s in times.segments}}
        for arm in times.arms
    }
    plain = _greedy(by_arm[NONE])
    entries = {arm: _entry(found) for arm, found in by_arm.items()}
    for arm, entry in entries.items():
        mine = _greedy(by_arm[arm])
        entry["greedy_answers_as_none"] = sum(mine[p] == tokens for p, tokens in plain.items() if p in mine)
        entry["greedy_answers"] = len(mine)
    return {"arms": entries, "over_none": speed_ups}


def _answers(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for request in row["requests"]:
            counted = {"output_tokens": len(request["tokens"])}
            yield {"arm": row["arm"], **{k: request[k] for k in ("prompt", "segment", "seconds")}, **counted}


def _greedy(rows: Sequence[Row]) -> dict[str, list[int]]:
    return {r["prompt"]: r["tokens"] for row in rows if row["decoding"] == "greedy" for r in row["requests"]}


def _entry(rows: Sequence[Row]) -> dict[str, Any]:
    """What one arm did: sums, and what is read off them."""
    requests = [request for row in rows for request in row["requests"]]
    sums = {name: sum(r[name] for r in requests) for name in ("num_draft_tokens", "num_accepted_tokens", "num_steps")}
    seconds, tokens = sum(row["seconds"] for row in rows), sum(len(r["tokens"]) for r in requests)
    latencies = np.percentile([request["seconds"] for request in requests], PERCENTILES)
    watched = [row["proposer"] for row in rows if row["proposer"]]
    return {
        "requests": len(requests),
        "output_tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 3),
        "latency_seconds": {f"p{p}": round(float(v), 4) for p, v in zip(PERCENTILES, latencies, strict=True)},
        **sums,
        "proposer": {key: round(sum(each[key] for each in watched), 6) for key in watched[0]} if watched else None,
    }


def proposer_share(entry: Mapping[str, Any]) -> float:
    """Of the steps' time, what choosing and drafting took."""
    watched = entry["proposer"]
    return float(watched["proposer_seconds"] / watched["step_seconds"]) if watched["step_seconds"] else 0.0


def bars(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For each state of autospec. Over the mix of decodings: all tokens over all seconds."""
    sizes = sorted(groups, key=int)
    alone, crowded = sizes[0], sizes[-1]
    found = {}
    for auto in AUTOS:
        mixes = {size: groups[size][MIX]["arms"] for size in sizes}
        if any(auto not in arms or NONE not in arms for arms in mixes.values()):
            continue
        fixed = [arm for arm in mixes[alone] if arm in (NONE, *FAMILIES)]
        best = max(fixed, key=lambda arm: mixes[alone][arm]["tokens_per_second"])
        over_best = _ratio(mixes[alone], auto, best)
        over_none = _ratio(mixes[crowded], auto, NONE)
        shares = {size: round(proposer_share(mixes[size][auto]), 5) for size in sizes}
        found[auto] = {
            "best_fixed_alone": best,
            "alone_over_best_fixed": over_best,
            "crowded_over_none": over_none,
            "proposer_share": shares,
            "is_alone_met": over_best >= BARS["alone_over_best_fixed"],
            "is_crowded_met": over_none >= BARS["crowded_over_none"],
            "is_share_met": max(shares.values()) < BARS["proposer_share"],
        }
    return found


def _ratio(arms: Mapping[str, Any], one: str, other: str) -> float:
    return round(float(arms[one]["tokens_per_second"] / arms[other]["tokens_per_second"]), 4)


def best_setting(rows: Sequence[Row], concurrency: int) -> dict[str, Any]:
    """Of a sweep's rows: the `setting` with the most tokens per second over both decodings, at a concurrency."""
    by_setting: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["concurrency"] == concurrency:
            by_setting[row["setting"]].append(row)
    rates = {setting: _entry(found)["tokens_per_second"] for setting, found in by_setting.items()}
    return {"best": max(rates, key=lambda setting: rates[setting]), "tokens_per_second": rates}
