"""Records to rows and back. Everything that a database could choke on is settled here, the same for each database."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

import numpy as np

from autospec.errors import ConfigurationError
from autospec.telemetry import states
from autospec.telemetry.schema import ComparisonRow, DeploymentRow, RequestRow, to_microseconds
from autospec.types import (
    ActionTally,
    CalibrationSample,
    Comparison,
    Deployment,
    EngineCounters,
    PhaseSeconds,
    PolicyState,
    PolicyVersion,
    RequestRecord,
)

Record = RequestRecord | Comparison | PolicyVersion | CalibrationSample | PolicyState | EngineCounters

NAME_LIMIT = 255
"""Characters of a name that is indexed: PostgreSQL refuses index entries above 2,704 bytes."""

TEXT_LIMIT = 2_000
"""Characters of an error or a fallback reason."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # NUL (PostgreSQL) and lone surrogates (no UTF-8)


def clean_text(text: str, limit: int = NAME_LIMIT) -> str:
    """The text as it is stored.

    Args:
        text: any string, hostile ones included.
        limit: characters to keep.

    Returns:
        The text with NUL and lone surrogates replaced by U+FFFD. One that is too long is cut and ends in a
        digest of the whole, so that two long names stay two names.
    """
    text = _UNSTORABLE.sub("\ufffd", text)
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[: limit - 13]}\u2026{digest}"


def fingerprint(deployment: Deployment) -> str:
    """sha256 of the deployment's content: equal deployments share one row."""
    content: list[Any] = [
        deployment.host,
        deployment.device,
        deployment.target,
        deployment.dtype,
        list(deployment.drafts),
        dict(deployment.versions),
    ]
    if deployment.model_bytes is not None:
        content.append(deployment.model_bytes)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def deployment_to_row(deployment: Deployment) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint(deployment),
        "host": clean_text(deployment.host),
        "device": clean_text(deployment.device),
        "target": clean_text(deployment.target, TEXT_LIMIT),
        "dtype": clean_text(deployment.dtype),
        "drafts": [str(draft) for draft in deployment.drafts],
        "versions": {str(name): str(version) for name, version in deployment.versions.items()},
        "model_bytes": None if deployment.model_bytes is None else int(deployment.model_bytes),
    }


def row_to_deployment(row: DeploymentRow) -> Deployment:
    return Deployment(
        row.host, row.device, row.target, row.dtype, tuple(row.drafts), dict(row.versions), row.model_bytes
    )


def request_to_row(record: RequestRecord) -> dict[str, Any]:
    """The row of a record, without its deployment.

    Raises:
        ConfigurationError: `started_at` has no time zone, or a number of seconds is not finite.
    """
    if record.started_at.tzinfo is None:
        raise ConfigurationError(
            f"request {record.request_id!r}: started_at={record.started_at!r} has no time zone: "
            "give an aware datetime, as in datetime.now(UTC)"
        )
    predicted = record.predicted_control_seconds
    if not math.isfinite(record.total_seconds) or not math.isfinite(predicted or 0.0):
        raise ConfigurationError(f"request {record.request_id!r}: {record.seconds!r} must be finite numbers of seconds")
    return {
        "request_id": clean_text(record.request_id),
        "started_at": record.started_at,
        "segment": clean_text(record.segment),
        "policy": clean_text(record.policy),
        "is_control": bool(record.is_control),
        "do_sample": bool(record.do_sample),
        "decoding": clean_text(record.decoding),
        "prompt_tokens": int(record.prompt_tokens),
        "output_tokens": int(record.output_tokens),
        "blocks": int(record.blocks),
        "num_draft_tokens": int(record.num_draft_tokens),
        "num_judged_tokens": int(record.num_judged_tokens),
        "num_accepted_tokens": int(record.num_accepted_tokens),
        "prefill_seconds": float(record.seconds.prefill),
        "draft_seconds": float(record.seconds.draft),
        "verify_seconds": float(record.seconds.verify),
        "correction_seconds": float(record.seconds.correction),
        "emission_seconds": float(record.seconds.emission),
        "other_seconds": float(record.seconds.other),
        "total_seconds": float(record.total_seconds),
        "acceptance_lengths": {str(int(length)): int(n) for length, n in record.acceptance_lengths.items()},
        "at_risk": [int(n) for n in record.at_risk],
        "accepted": [int(n) for n in record.accepted],
        "actions": {str(label): int(n) for label, n in record.actions.items()},
        "fallback_reason": None if record.fallback_reason is None else clean_text(record.fallback_reason, TEXT_LIMIT),
        "notes": None if record.notes is None else clean_text(record.notes, TEXT_LIMIT),
        "error": None if record.error is None else clean_text(record.error, TEXT_LIMIT),
        "run": None if record.run is None else clean_text(record.run),
        "by_action": {clean_text(str(label)): _plain_tally(tally) for label, tally in record.by_action.items()},
        "decisions": {clean_text(str(key)): int(n) for key, n in record.decisions.items()},
        "policy_version": None if record.policy_version is None else clean_text(record.policy_version),
        "predicted_control_seconds": None if predicted is None else float(predicted),
        "peak_memory_bytes": None if record.peak_memory_bytes is None else int(record.peak_memory_bytes),
    }


def row_to_request(row: RequestRow, deployment: Deployment | None) -> RequestRecord:
    return RequestRecord(
        request_id=row.request_id,
        started_at=row.started_at,
        segment=row.segment,
        policy=row.policy,
        is_control=row.is_control,
        do_sample=row.do_sample,
        decoding=row.decoding,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        seconds=PhaseSeconds(
            prefill=row.prefill_seconds,
            draft=row.draft_seconds,
            verify=row.verify_seconds,
            correction=row.correction_seconds,
            emission=row.emission_seconds,
            other=row.other_seconds,
        ),
        blocks=row.blocks,
        num_draft_tokens=row.num_draft_tokens,
        num_judged_tokens=row.num_judged_tokens,
        num_accepted_tokens=row.num_accepted_tokens,
        acceptance_lengths={int(length): n for length, n in row.acceptance_lengths.items()},
        at_risk=tuple(row.at_risk),
        accepted=tuple(row.accepted),
        actions=dict(row.actions),
        fallback_reason=row.fallback_reason,
        notes=row.notes,
        error=row.error,
        run=row.run,
        deployment=deployment,
        by_action={label: _to_tally(fields) for label, fields in (row.by_action or {}).items()},
        decisions=dict(row.decisions or {}),
        policy_version=row.policy_version,
        predicted_control_seconds=row.predicted_control_seconds,
        peak_memory_bytes=row.peak_memory_bytes,
    )


def _plain_tally(tally: ActionTally) -> dict[str, Any]:
    numbers = {
        name: float(value) if name.endswith("seconds") else int(value)
        for name, value in asdict(tally).items()
        if name not in ("at_risk", "accepted")
    }
    if not all(math.isfinite(value) for value in numbers.values()):
        raise ConfigurationError(f"{tally!r} must hold finite numbers")
    return {**numbers, "at_risk": [int(n) for n in tally.at_risk], "accepted": [int(n) for n in tally.accepted]}


def _to_tally(fields: dict[str, Any]) -> ActionTally:
    return ActionTally(**{**fields, "at_risk": tuple(fields["at_risk"]), "accepted": tuple(fields["accepted"])})


def comparison_to_row(comparison: Comparison) -> dict[str, Any]:
    gap = comparison.logit_gap
    return {
        "control_request_id": clean_text(comparison.control_request_id),
        "request_id": clean_text(comparison.request_id),
        "is_identical": None if comparison.is_identical is None else bool(comparison.is_identical),
        "first_difference": None if comparison.first_difference is None else int(comparison.first_difference),
        "logit_gap": float(gap) if gap is not None and math.isfinite(gap) else None,
        "is_tie": None if comparison.is_tie is None else bool(comparison.is_tie),
    }


def to_entry(item: Record) -> dict[str, Any]:
    """The record as plain JSON values, times in microseconds, as it waits for the database.

    Raises:
        ConfigurationError: it cannot be stored, or is something else.
    """
    match item:
        case RequestRecord():
            row = request_to_row(item)
            entry: dict[str, Any] = {
                "request": {**row, "started_at": to_microseconds(row["started_at"])},
                "deployment": None if item.deployment is None else deployment_to_row(item.deployment),
            }
            if item.trace is not None:
                entry["trace"] = base64.b64encode(item.trace).decode("ascii")
            if item.tokens is not None:
                entry["recording"] = {
                    "prompt": base64.b64encode(pack_tokens(item.tokens.prompt)).decode("ascii"),
                    "output": base64.b64encode(pack_tokens(item.tokens.output)).decode("ascii"),
                    "options": _plain(dict(item.tokens.options)),
                }
            return entry
        case Comparison():
            return {"comparison": comparison_to_row(item)}
        case PolicyVersion():
            return {"policy_version": _policy_version_to_row(item)}
        case CalibrationSample():
            return {"calibration": _calibration_to_row(item), "deployment": deployment_to_row(item.deployment)}
        case PolicyState():
            row = {**states.to_row(item), "policy": clean_text(item.policy)}
            return {"policy_state": row, "deployment": deployment_to_row(item.deployment)}
        case EngineCounters():
            return {"engine": _engine_to_row(item)}
    raise ConfigurationError(f"{type(item).__name__} is no record")


def _plain(value: Any) -> Any:
    """JSON values that every database takes: what is no number is its name, what is no JSON its text."""
    if isinstance(value, dict):
        return {clean_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return clean_text(str(value), TEXT_LIMIT)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids of 4 bytes each, little-endian, compressed."""
    return zlib.compress(np.asarray(tokens, dtype="<u4").tobytes(), 6)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(zlib.decompress(data), dtype="<u4").tolist())


def _policy_version_to_row(item: PolicyVersion) -> dict[str, Any]:
    return {
        "version": clean_text(item.version),
        "name": clean_text(item.name),
        "settings": _plain(dict(item.settings)),
        "made_by": clean_text(item.made_by),
        "made_at": to_microseconds(item.made_at),
    }


def _calibration_to_row(item: CalibrationSample) -> dict[str, Any]:
    if not math.isfinite(item.seconds):
        raise ConfigurationError(f"calibration of {item.source!r}: {item.seconds!r} is no number of seconds")
    return {
        "measured_at": to_microseconds(item.measured_at),
        "source": clean_text(item.source),
        "tokens": int(item.tokens),
        "context_tokens": int(item.context_tokens),
        "seconds": float(item.seconds),
    }


def _engine_to_row(item: EngineCounters) -> dict[str, Any]:
    counts = {name: value for name, value in asdict(item).items() if isinstance(value, (int, float))}
    if not all(math.isfinite(value) and 0 <= value < 1 << 63 for value in (*counts.values(), *item.accepted)):
        raise ConfigurationError(f"{item!r} must hold counts")
    scraped_at = to_microseconds(item.scraped_at)
    return {
        **asdict(item),
        **{name: clean_text(getattr(item, name)) for name in ("engine", "target", "device", "source")},
        "began_at": None if item.began_at is None else to_microseconds(item.began_at),
        "hour": scraped_at - scraped_at % 3_600_000_000,
        "scraped_at": scraped_at,
        "accepted": list(item.accepted),
    }


def row_to_comparison(row: ComparisonRow) -> Comparison:
    return Comparison(
        control_request_id=row.control_request_id,
        request_id=row.request_id,
        is_identical=row.is_identical,
        first_difference=row.first_difference,
        logit_gap=row.logit_gap,
        is_tie=row.is_tie,
    )
