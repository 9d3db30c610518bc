"""What was chosen, for whom, and what it is worth: as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autospec.telemetry.labels import columns, pad, visible
from autospec.tune.candidates import Part
from autospec.tune.choice import Choice
from autospec.tune.intervals import Interval
from autospec.tune.search import Tried

MOST_COLUMNS = 40
"""Of a segment's name."""


def label(part: Part) -> str:
    """Short, as in `ngram:4` or `auto`."""
    if "policy" not in part:
        return "off" if not part["block_length"] else f"{part['source']}:{part['block_length']}"
    return "auto (tuned)" if part["policy"] == "guard" else str(part["policy"])


def lines(choice: Choice, tried: Sequence[Tried], notes: Sequence[str]) -> Iterator[str]:
    """The report, line by line."""
    yield f"tried {len(tried)} policies; the fastest over all in training: {label(tried[0].part)}"
    yield ""
    names = [visible(each.segment, MOST_COLUMNS) for each in choice.segments]
    width = max([len("segment"), *map(columns, names)])
    yield "speed-up over plain decoding, with 95 % intervals; requests: to choose by + held out"
    yield ""
    yield f"{'segment':{width}}  policy        requests  in training           held out              why"
    for name, each in zip(names, choice.segments, strict=True):
        requests = f"{each.train_requests}+{each.held_out_requests}"
        yield (
            f"{pad(name, width)}  {label(each.part):12}  {requests:>8}  {said(each.train):20}  "
            f"{said(each.held_out):20}  {each.why}"
        )
    yield f"{'all':{width}}  {'':12}  {'':8}  {said(choice.train):20}  {said(choice.held_out):20}"
    yield ""
    surplus = choice.train.ratio - choice.held_out.ratio
    yield f"speed-up in training minus held out: {surplus:+.3f} (much above 0: overfitted)"
    yield from notes


def said(interval: Interval | None) -> str:
    """A speed-up with its interval."""
    return "-" if interval is None else f"{interval.ratio:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
