"""One recorded request: what was asked and answered as token ids, how, when, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from autospec.types import PhaseSeconds, RecordedTokens, RequestRecord

MAX_TOKEN_ID = 2**32


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The rest of a conversation that nobody has answered yet, as text."""

    messages: tuple[Mapping[str, str], ...]  # that the prompt was made of
    turns: tuple[str, ...]  # what the user says next, each once the one before is answered


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request as traffic keeps it. Without an output it waits to be completed."""

    request_id: str
    started_at: datetime  # UTC
    segment: str
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)  # of `generate`, plain JSON values
    decoding: str = ""  # as in `greedy` or `sample temperature=0.8 logits_processor`; empty where not known
    policy: str | None = None  # under which the seconds were measured
    is_control: bool = False  # decoded plainly throughout
    fallback_reason: str | None = None  # why it was left to the original `generate`
    total_seconds: float | None = None
    seconds: PhaseSeconds | None = None  # by phase, where known
    acceptance_lengths: Mapping[int, int] = field(default_factory=dict)  # acceptance length (+1 included) -> blocks
    num_draft_tokens: int = 0
    conversation: str | None = None
    turn: int = 0  # of those that were asked one after the other from one entry of a log
    origin: str = "wrap"  # what wrote it: `wrap`, `complete`, or `import:` and a format
    is_arrival_known: bool = True  # False: `started_at` only keeps the order
    follow_up: FollowUp | None = None
    revision: int = 0  # of the records with one id, the highest counts

    @property
    def is_pending(self) -> bool:
        """Does it wait for an answer?"""
        return not self.output

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what has its default value is left out."""
        content: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or value == each.default or value == {}:
                continue
            content[each.name] = value
        content["started_at"] = self.started_at.astimezone(UTC).isoformat()
        content["prompt"], content["output"] = list(self.prompt), list(self.output)
        if self.acceptance_lengths:
            content["acceptance_lengths"] = {str(length): count for length, count in self.acceptance_lengths.items()}
        if self.seconds is not None:
            content["seconds"] = asdict(self.seconds)
        if self.follow_up is not None:
            messages = [dict(message) for message in self.follow_up.messages]
            content["follow_up"] = {"messages": messages, "turns": list(self.follow_up.turns)}
        return content

    @classmethod
    def from_json(cls, content: Any) -> TrafficRequest:
        """The request that `to_json` was made of; keys of later versions are left out.

        Raises:
            ValueError: it is no such request.
        """
        try:
            return cls._from_json(dict(content))
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"no request: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> TrafficRequest:
        seconds, later = content.get("seconds"), content.get("follow_up")
        started_at = datetime.fromisoformat(content["started_at"])
        if started_at.tzinfo is None:
            raise ValueError(f"started_at {content['started_at']!r} has no time zone")
        total = content.get("total_seconds")
        return cls(
            request_id=_text(content["request_id"]),
            started_at=started_at.astimezone(UTC),
            segment=_text(content["segment"]),
            prompt=_ids(content["prompt"]),
            output=_ids(content["output"]),
            options=dict(content.get("options", {})),
            decoding=_text(content.get("decoding", "")),
            policy=_text_or_none(content.get("policy")),
            is_control=bool(content.get("is_control", False)),
            fallback_reason=_text_or_none(content.get("fallback_reason")),
            total_seconds=None if total is None else float(total),
            seconds=None if seconds is None else PhaseSeconds(**{key: float(value) for key, value in seconds.items()}),
            acceptance_lengths={int(key): int(value) for key, value in content.get("acceptance_lengths", {}).items()},
            num_draft_tokens=int(content.get("num_draft_tokens", 0)),
            conversation=_text_or_none(content.get("conversation")),
            turn=int(content.get("turn", 0)),
            origin=_text(content.get("origin", "wrap")),
            is_arrival_known=bool(content.get("is_arrival_known", True)),
            follow_up=None if later is None else FollowUp(tuple(map(dict, later["messages"])), tuple(later["turns"])),
            revision=int(content.get("revision", 0)),
        )


def request_of(record: RequestRecord, tokens: RecordedTokens) -> TrafficRequest:
    """What traffic keeps of a wrapped call."""
    return TrafficRequest(
        request_id=record.request_id,
        started_at=record.started_at,
        segment=record.segment,
        prompt=tokens.prompt,
        output=tokens.output,
        options=tokens.options,
        decoding=record.decoding,
        policy=record.policy,
        is_control=record.is_control,
        fallback_reason=record.fallback_reason,
        total_seconds=record.total_seconds,
        seconds=record.seconds,
        acceptance_lengths=record.acceptance_lengths,
        num_draft_tokens=record.num_draft_tokens,
    )


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in value):
        raise ValueError(f"{value!r:.40} is no list of token ids")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
