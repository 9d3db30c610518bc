"""What was chosen, for whom, and what it is worth: as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autospec.telemetry.labels import columns, pad, visible
from autospec.tune.candidates import Part
from autospec.tune.choice import Choice
from autospec.tune.curves import ALL, Curve
from autospec.tune.intervals import said
from autospec.tune.search import Tried

MOST_COLUMNS = 40
"""Of a segment's name."""
MOST_SOURCE_COLUMNS = 24
"""Of a draft source's name, which may be a plug-in's."""


def label(part: Part) -> str:
    """Short, as in `ngram:4`, `assistant:6 margin>=0.40`, `auto (tuned)` or `goodput (pooled; ngram, assistant)`."""
    if "policy" not in part:
        length = part.get("block_length")
        if not length:
            return "off"
        stops = [
            f" {name}{sign}{part[key]:.2f}"
            for key, name, sign in (("least_margin", "margin", ">="), ("most_entropy", "entropy", "<="))
            if part.get(key) is not None
        ]
        return f"{visible(str(part.get('source')), MOST_SOURCE_COLUMNS)}:{length}{''.join(stops)}"
    is_auto = part["policy"] == "guard"
    remarks = ["tuned"] if is_auto else []
    if part.get("pooled"):
        remarks.append("pooled")
    if sources := part.get("sources"):
        remarks.append(", ".join(visible(str(source), MOST_SOURCE_COLUMNS) for source in sources))
    name = "auto" if is_auto else visible(str(part["policy"]), MOST_SOURCE_COLUMNS)
    return f"{name} ({'; '.join(remarks)})" if remarks else name


def lines(
    choice: Choice,
    tried: Sequence[Tried],
    notes: Sequence[str],
    curves: Mapping[str, Sequence[Curve]] | None = None,
) -> Iterator[str]:
    """The report, line by line.

    Args:
        choice: what each segment got.
        tried: the best over all first.
        notes: lines to end with.
        curves: as `autospec.tune.curves.curves` makes them; None: they are left out.
    """
    yield f"tried {len(tried)} policies; the fastest over all in training: {label(tried[0].part)}"
    yield ""
    names = [visible(each.segment, MOST_COLUMNS) for each in choice.segments]
    labels = [label(each.part) for each in choice.segments]
    width = max([len("segment"), *map(columns, names)])
    policy_width = max(12, *map(columns, labels)) if labels else 12
    yield "speed-up over plain decoding, with 95 % intervals; requests: to choose by + held out"
    yield ""
    yield f"{'segment':{width}}  {'policy':{policy_width}}  requests  in training           held out              why"
    for name, policy, each in zip(names, labels, choice.segments, strict=True):
        requests = f"{each.train_requests}+{each.held_out_requests}"
        yield (
            f"{pad(name, width)}  {pad(policy, policy_width)}  {requests:>8}  {said(each.train):20}  "
            f"{said(each.held_out):20}  {each.why}"
        )
    yield f"{'all':{width}}  {'':{policy_width}}  {'':8}  {said(choice.train):20}  {said(choice.held_out):20}"
    yield ""
    yield f"speed-up in training minus held out: {surplus(choice):+.3f} (much above 0: overfitted)"
    if curves is not None:
        yield ""
        yield from curve_lines(curves)
        yield ""
    yield from notes


def curve_lines(curves: Mapping[str, Sequence[Curve]]) -> Iterator[str]:
    """A row for each segment and source, a column for each block length; all traffic comes last."""
    if not any(curves.values()):
        yield "predicted speed-up by block length: no draft source to predict"
        return
    yield "predicted speed-up by block length, the same in every block (0 is plain decoding; * is the fastest of a row)"
    yield ""
    rows = [(name if first else "", curve) for name, group in in_order(curves) for first, curve in _firsts(group)]
    sources = [visible(curve.source, MOST_SOURCE_COLUMNS) for _, curve in rows]
    lengths = sorted({point.block_length for _, curve in rows for point in curve.points})
    width = max(len("segment"), *(columns(name) for name, _ in rows))
    source_width = max(len("source"), *map(columns, sources))
    head = "".join(f"{length:>6} " for length in lengths)
    yield f"{'segment':{width}}  {'source':{source_width}} {head}  fastest"
    for (name, curve), source in zip(rows, sources, strict=True):
        cells = {
            point.block_length: f"{point.speed_up.ratio:6.2f}{'*' if point is curve.best else ' '}"
            for point in curve.points
        }
        row = "".join(cells.get(length, " " * 7) for length in lengths)
        yield f"{pad(name, width)}  {pad(source, source_width)} {row}  {best_of(curve)}"


def _firsts(curves: Sequence[Curve]) -> Iterator[tuple[bool, Curve]]:
    return ((place == 0, curve) for place, curve in enumerate(curves))


def in_order(curves: Mapping[str, Sequence[Curve]]) -> list[tuple[str, Sequence[Curve]]]:
    """Names to be shown with their curves, all traffic last."""
    own = [(visible(segment, MOST_COLUMNS), group) for segment, group in curves.items() if segment != ALL]
    return [*own, ("all", curves[ALL])] if ALL in curves else own


def best_of(curve: Curve) -> str:
    """The fastest block length with its speed-up, as in `4: 1.66x (1.50 to 1.80)`."""
    best = curve.best
    return f"{best.block_length}: {said(best.speed_up)}" if best.block_length else "off"


def surplus(choice: Choice) -> float:
    """Speed-up in training minus held out."""
    return choice.train.ratio - choice.held_out.ratio
