"""Why a recorded request was decoded as it was: its decisions, block by block where they were kept."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from autospec.errors import ConfigurationError
from autospec.telemetry import codec, traces
from autospec.telemetry.labels import visible
from autospec.telemetry.schema import DeploymentRow, RequestRow, TraceRow
from autospec.telemetry.store import Store
from autospec.types import NONE, BlockOutcome, RequestRecord, split_label

LAST = "last"
SHORTEST = 4
"""Characters of a request's id that may stand for it."""


def find_request(store: Store, name: str) -> tuple[RequestRecord, list[BlockOutcome], str | None]:
    """A request and its blocks.

    Args:
        store: where it was recorded.
        name: its id, the beginning of it, or `last` for the newest.

    Returns:
        The request; its blocks, none where they were not kept; and why they cannot be read, where they cannot.

    Raises:
        ConfigurationError: there is no such request, or there are several.
        StoreError: the database cannot be read.
    """
    query = select(RequestRow, DeploymentRow, TraceRow).join(DeploymentRow, isouter=True)
    query = query.join(TraceRow, TraceRow.request_id == RequestRow.request_id, isouter=True)
    if name == LAST:
        query = query.order_by(RequestRow.id.desc()).limit(1)
    elif SHORTEST <= len(name) <= 32 and all(character in "0123456789abcdef" for character in name):
        query = query.where(RequestRow.request_id.between(name, name + "g")).limit(2)
    else:
        raise ConfigurationError(
            f"request {visible(name, 40)!r}: its id is needed, or the first {SHORTEST} or more of its 32 hexadecimal "
            f"digits, or `{LAST}`"
        )
    with store.reading() as connection, Session(connection) as session:
        found = session.execute(query).all()
        if len(found) != 1:
            how_many = "several requests begin" if found else "no request begins"
            what = "there are no requests" if name == LAST else f"{how_many} with {name}"
            raise ConfigurationError(f"{what} in {store.url}")
        row, place, trace = found[0]
        record = codec.row_to_request(row, None if place is None else codec.row_to_deployment(place))
        data = None if trace is None else bytes(trace.blocks)
    try:
        return record, [] if data is None else traces.unpack(data, record.segment), None
    except ConfigurationError as error:
        return record, [], str(error)


def explain(record: RequestRecord, blocks: Sequence[BlockOutcome], width: int = 120, trouble: str | None = None) -> str:
    """The decisions of a request in words and numbers.

    Args:
        record: the request.
        blocks: its blocks, none where they were not kept.
        width: columns of the terminal.
        trouble: why the blocks that were kept cannot be read.

    Returns:
        The text, ending in a newline.
    """
    seconds = record.seconds
    lines = [
        f"request {record.request_id}, {record.started_at:%Y-%m-%d %H:%M:%S} UTC, "
        f"segment {visible(record.segment, 60)}",
        f"policy {visible(record.policy, 60)}{_version(record)}, {visible(record.decoding, 10 * width)}, "
        f"{record.prompt_tokens} prompt tokens, {record.output_tokens} of the answer in {seconds.total:.3f} s",
    ]
    if record.is_control:
        lines.append("decoded plainly throughout: it is a control, which measures what speed-up means")
    if record.predicted_control_seconds is not None and seconds.total > 0:
        ratio = record.predicted_control_seconds / seconds.total
        lines.append(f"predicted for plain decoding: {record.predicted_control_seconds:.3f} s, {ratio:.2f} times this")
    for title, text in (("left to the original generate", record.fallback_reason), ("note", record.notes)):
        if text:
            lines.append(f"{title}: {visible(text, 10 * width)}")
    if record.error:
        lines.append(f"it failed: {visible(record.error, 10 * width)}")
    if record.decisions:
        lines += ["", "What was decided, and how often:"]
        lines += [
            f"{count:6}  {visible(what, width)}" for what, count in sorted(record.decisions.items(), key=_by_count)
        ]
    if record.by_action:
        lines += ["", "What it brought:"]
        lines += [_action(label, record) for label in sorted(record.by_action, key=lambda each: split_label(each))]
    lines.append("")
    if blocks:
        lines.append("Block by block: context, action, drafted, accepted, committed (+1 included), ms, reason")
        lines += [_block(block, width) for block in blocks]
    elif trouble is not None:
        lines.append(f"Its blocks were kept, and cannot be read: {visible(trouble, 10 * width)}")
    else:
        lines.append(
            "Its blocks were not kept one by one: wrap(..., trace=0.01) keeps those of one request in a hundred."
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _version(record: RequestRecord) -> str:
    return f" ({visible(record.policy_version, 60)})" if record.policy_version else ""


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _action(label: str, record: RequestRecord) -> str:
    sums = record.by_action[label]
    seconds = sums.draft_seconds + sums.verify_seconds + sums.correction_seconds + sums.emission_seconds
    rate = f"{sums.num_committed_tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    drafts = f", {sums.num_accepted_tokens} of {sums.num_draft_tokens} drafts accepted" if label != NONE else ""
    return f"  {visible(label, 40)}: {sums.blocks} blocks, {sums.num_committed_tokens} tokens{drafts}, {rate}".rstrip(
        ", "
    )


def _block(block: BlockOutcome, width: int) -> str:
    left = (
        f"{block.context_tokens:7} {visible(block.action.label, 20):20} {block.num_draft_tokens:3} "
        f"{block.num_accepted_tokens:3} {block.num_committed_tokens:3} {1000 * block.seconds:8.1f}  "
    )
    return left + visible(str(block.action.reason), max(20, 4 * width))
