"""The summary as tables in markdown, the bars last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arms import NONE
from common import MIX, interval, line, rule
from summary import BARS, proposer_share


def tables(results: Mapping[str, Any]) -> str:
    """All of `results.json` that a reader wants to see."""
    return "\n".join(_tables(results)) + "\n"


def _tables(results: Mapping[str, Any]) -> Iterator[str]:
    for family, why in results["left_out"].items():
        yield f"left out, {family}: {why}\n"
    for concurrency, groups in results["groups"].items():
        chosen = {family: found[concurrency] for family, found in results["settings_of"].items()}
        yield from _rates(concurrency, groups, chosen)
        yield from _segments(groups[MIX]["over_none"])
    if others := results.get("others"):
        yield f"Other processes took {others['mean']:.1%} of the cores on average, and more than a tenth of them "
        yield f"in {others['answers_beyond_a_tenth']} of {others['answers']} turns (at most {others['most']:.0%}).\n"
    yield from _bars(results["bars"])


def _rates(concurrency: str, groups: Mapping[str, Any], chosen: Mapping[str, str]) -> Iterator[str]:
    decodings = [name for name in groups if name != MIX]
    columns = (*(f"{name}, tokens/s" for name in decodings), "mix, tokens/s", "answers, p50 / p90 / p99 s")
    yield f"### {concurrency} at once\n"
    yield line("arm", *columns, "accepted of drafted", "drafted a step", "proposer of a step", "greedy as none")
    yield rule(len(columns) + 5)
    for arm, entry in groups[MIX]["arms"].items():
        rates = [f"{groups[name]['arms'][arm]['tokens_per_second']:.1f}" for name in (*decodings, MIX)]
        latency = " / ".join(f"{seconds:.2f}" for seconds in entry["latency_seconds"].values())
        drafted, steps = entry["num_draft_tokens"], entry["num_steps"]
        accepted = f"{entry['num_accepted_tokens'] / drafted:.2f}" if drafted else ""
        share = f"{proposer_share(entry):.2%}" if entry["proposer"] else ""
        yield line(
            f"{arm} ({chosen[arm]})" if arm in chosen else arm,
            *rates,
            latency,
            accepted,
            f"{drafted / steps:.2f}" if steps else "",
            share,
            f"{entry['greedy_answers_as_none']} of {entry['greedy_answers']}",
        )
    yield ""


def _segments(over_none: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    columns = list(over_none[NONE])
    yield line("over none, by the requests' own seconds per token", *columns)
    yield rule(len(columns) + 1)
    for arm, ratios in over_none.items():
        if arm != NONE:
            yield line(arm, *(interval(ratios[column]) for column in columns))
    yield ""


def _bars(bars: Mapping[str, Any]) -> Iterator[str]:
    yield line("bar", *bars)
    yield rule(len(bars) + 1)
    kinds = (
        (f"alone, over the best fixed: at least {BARS['alone_over_best_fixed']:g}", "alone_over_best_fixed", "alone"),
        (f"most at once, over none: at least {BARS['crowded_over_none']:g}", "crowded_over_none", "crowded"),
    )
    for said, key, kind in kinds:
        yield line(said, *(f"{bar[key]:.3f}, {_verdict(bar[f'is_{kind}_met'])}" for bar in bars.values()))
    shares = (
        f"{' / '.join(f'{share:.2%}' for share in bar['proposer_share'].values())}, {_verdict(bar['is_share_met'])}"
        for bar in bars.values()
    )
    yield line(f"proposer of a step: under {BARS['proposer_share']:.0%}", *shares)
    yield line("best fixed, alone", *(bar["best_fixed_alone"] for bar in bars.values()))


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"
