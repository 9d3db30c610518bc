"""Records to rows and back. Everything that a database could choke on is settled here, the same for each database."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from autospec.errors import ConfigurationError
from autospec.telemetry.schema import ComparisonRow, DeploymentRow, RequestRow
from autospec.types import Comparison, Deployment, PhaseSeconds, RequestRecord

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
    content = [
        deployment.host,
        deployment.device,
        deployment.target,
        deployment.dtype,
        list(deployment.drafts),
        dict(deployment.versions),
    ]
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
    }


def row_to_deployment(row: DeploymentRow) -> Deployment:
    return Deployment(row.host, row.device, row.target, row.dtype, tuple(row.drafts), dict(row.versions))


def request_to_row(record: RequestRecord, deployment_id: int | None) -> dict[str, Any]:
    """The row of a record.

    Raises:
        ConfigurationError: `started_at` has no time zone, or a number of seconds is not finite.
    """
    if record.started_at.tzinfo is None:
        raise ConfigurationError(
            f"request {record.request_id!r}: started_at={record.started_at!r} has no time zone: "
            "give an aware datetime, as in datetime.now(UTC)"
        )
    if not math.isfinite(record.total_seconds):
        raise ConfigurationError(f"request {record.request_id!r}: {record.seconds!r} must be finite numbers of seconds")
    return {
        "request_id": clean_text(record.request_id),
        "deployment_id": deployment_id,
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
    )


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


def row_to_comparison(row: ComparisonRow) -> Comparison:
    return Comparison(
        control_request_id=row.control_request_id,
        request_id=row.request_id,
        is_identical=row.is_identical,
        first_difference=row.first_difference,
        logit_gap=row.logit_gap,
        is_tie=row.is_tie,
    )
