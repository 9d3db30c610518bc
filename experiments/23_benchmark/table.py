"""The summary as tables in markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common import interval, line, rule


def tables(results: Mapping[str, Any]) -> str:
    """All of `results.json` that a reader wants to see."""
    return "\n".join(_tables(results)) + "\n"


def _tables(results: Mapping[str, Any]) -> Iterator[str]:
    for group, found in results["groups"].items():
        yield from _speed_ups(group, found)
    yield from _bars(results["groups"])
    yield from _floors(results)
    yield from _memory(results.get("memory", {}))


def _speed_ups(group: str, found: Mapping[str, Any]) -> Iterator[str]:
    columns = list(next(iter(found["speed_up"].values())))
    yield f"### {group}\n"
    yield line("arm", "ms a token", *columns, "same / tie / other")
    yield rule(len(columns) + 3)
    for arm, ratios in found["speed_up"].items():
        verdict = found["verdicts"].get(arm)
        counts = " / ".join(str(n) for n in verdict.values()) if verdict else ""
        cells = (interval(ratios[column]) for column in columns)
        yield line(_named(arm, found), f"{found['milliseconds_per_token'][arm]:.1f}", *cells, counts)
    for arm, error in found["failed"].items():
        yield f"\n{arm} failed: {error}"
    if others := found.get("others"):
        yield f"\nOther processes took {others['mean']:.1%} of the cores on average, and more than a tenth of them "
        yield f"in {others['answers_beyond_a_tenth']} of {others['answers']} answers (at most {others['most']:.0%})."
    yield ""


def _bars(groups: Mapping[str, Any]) -> Iterator[str]:
    rows = [(group, auto, bar) for group, found in groups.items() for auto, bar in found["bars"].items()]
    if not rows:
        return
    yield line("bar", "", "over the mix, beside each peer's best", "segments won", "")
    yield rule(5)
    for group, auto, bar in rows:
        peers = ", ".join(f"{peer} {interval(ratio)}" for peer, ratio in bar["over_peers"].items())
        missed = [f"{s} {interval(b['over_it'])}" for s, b in bar["segments"].items() if b["over_it"][0] <= 1.0]
        lost = f"; lost: {', '.join(missed)}" if missed else ""
        won = f"{bar['segments_won']} of {len(bar['segments'])}{lost}"
        yield line(group, auto, peers, won, "met" if bar["is_met"] else f"missed: {bar['least_over_a_peer']:.2f}")
    yield ""


def _floors(results: Mapping[str, Any]) -> Iterator[str]:
    rows = [(group, found["floor"]) for group, found in results["groups"].items() if found.get("floor")]
    if not rows:
        return
    yield line("floor: weights over memory bandwidth", "arm", "forwards a token", "ms a token", "floor", "times it")
    yield rule(6)
    for group, floors in rows:
        for arm, floor in floors.items():
            milliseconds = floor["milliseconds_per_token"]
            least = floor["floor_milliseconds_per_token"]
            forwards = f"{floor['target_forwards_per_token']:.2f}"
            yield line(group, arm, forwards, f"{milliseconds:.1f}", f"{least:.1f}", f"{milliseconds / least:.2f}")
    yield ""


def _memory(memory: Mapping[str, Any]) -> Iterator[str]:
    if not memory:
        return
    yield line("memory of a process with one arm, MB", "peak resident", "held by autospec", "its assistant's weights")
    yield rule(4)
    for arm, found in memory.items():
        cells = (found.get(key) for key in ("peak_resident_bytes", "held_bytes", "assistant_bytes"))
        yield line(arm, *("" if cell is None else f"{cell / 1e6:,.1f}" for cell in cells))


def _named(arm: str, found: Mapping[str, Any]) -> str:
    setting = found["settings"].get(arm)
    return f"{arm} ({setting})" if setting else arm
