"""The report as plain data."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any

from autospec.telemetry.rows import Prediction, Report, SegmentRow

if TYPE_CHECKING:
    from autospec.telemetry.engines import EngineSums


def to_dict(report: Report) -> dict[str, Any]:
    """The report for `json.dumps`: plain numbers, None where a ratio has nothing to divide by, the same keys always."""
    return {
        "group_by": list(report.group_by),
        "resamples": report.resamples,
        "seed": report.seed,
        "measured": list(report.measured),
        "unmatched_comparisons": report.unmatched_comparisons,
        "basis": report.basis,
        "segments": [_row(row) for row in report.segments],
        "all": _row(report.all),
        "engines": [_engine(row) for row in report.engines],
    }


def _row(row: SegmentRow) -> dict[str, Any]:
    return {
        "group": dict(row.group),
        "requests": row.requests,
        "control_requests": row.control_requests,
        "failed_requests": row.failed_requests,
        "fallback_requests": row.fallback_requests,
        "output_tokens": row.output_tokens,
        "control_output_tokens": row.control_output_tokens,
        "tokens_per_second": row.tokens_per_second,
        "control_tokens_per_second": row.control_tokens_per_second,
        "speed_up": row.speed_up,
        "speed_up_low": row.speed_up_low,
        "speed_up_high": row.speed_up_high,
        "verdict": row.verdict,
        "interval_method": row.interval_method,
        "note": row.note,
        "paired_requests": row.paired_requests,
        "slower_requests": row.slower_requests,
        "share_slower": row.share_slower,
        "blocks": row.blocks,
        "mean_acceptance_length": row.mean_acceptance_length,
        "num_draft_tokens": row.num_draft_tokens,
        "num_judged_tokens": row.num_judged_tokens,
        "num_accepted_tokens": row.num_accepted_tokens,
        "acceptance_by_position": list(row.acceptance_by_position),
        "at_risk": list(row.at_risk),
        "accepted": list(row.accepted),
        "usual_action": row.usual_action,
        "actions": dict(row.actions),
        "greedy_compared": row.greedy_compared,
        "greedy_identical": row.greedy_identical,
        "greedy_ties": row.greedy_ties,
        "greedy_different": row.greedy_different,
        "sampled_compared": row.sampled_compared,
        "sampled_identical": row.sampled_identical,
        "seconds": {**asdict(row.seconds), "total": row.seconds.total},
        "control_seconds": {**asdict(row.control_seconds), "total": row.control_seconds.total},
        "prediction": _prediction(row.prediction),
        "peak_memory_bytes": row.peak_memory_bytes,
        "model_bytes": row.model_bytes,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {**asdict(prediction), "speed_up": prediction.speed_up, "share_slower": prediction.share_slower}


def _engine(row: EngineSums) -> dict[str, Any]:
    return {
        **asdict(row),
        "first": row.first.astimezone(UTC).isoformat(),
        "last": row.last.astimezone(UTC).isoformat(),
        "accepted": list(row.accepted),
        "tokens_per_second": row.tokens_per_second,
        "tokens_per_step": row.tokens_per_step,
        "mean_acceptance_length": row.mean_acceptance_length,
        "share_accepted": list(row.share_accepted),
    }
