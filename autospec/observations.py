"""What is recorded besides what the decoder counts: predictions, memory, the policy's settings, measured costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime

import torch

from autospec.costs import CostModel, CostTable, Curve
from autospec.decoding.tally import Tally
from autospec.policies.base import CostEstimates, Policy
from autospec.types import CalibrationSample, Deployment, PolicyVersion

TARGET = "target"


def predicted_control_seconds(
    costs: CostEstimates | None, tally: Tally, prompt_tokens: int, output_tokens: int, total_seconds: float
) -> float | None:
    """What the request would have taken decoded plainly: plain steps in place of drafting and verification.

    Prefill, choosing tokens, emission and the rest are taken as they were, but for the time of deciding what to draft.
    The first token comes from the prompt's forward and needs no step.

    Returns:
        Seconds; None without measured costs or without an output token.
    """
    if costs is None or output_tokens < 1:
        return None
    steps = output_tokens - 1
    step_seconds = costs.verify_seconds(1, prompt_tokens + steps // 2)  # costs are linear between measured contexts
    speculation_seconds = tally.draft_seconds + tally.verify_seconds + tally.decision_seconds
    return total_seconds - speculation_seconds + steps * step_seconds


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory so far: of torch's allocator on an accelerator, else the process's resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024  # kilobytes on Linux


def policy_version(policy: Policy, made_by: str) -> PolicyVersion:
    """The policy's name and settings as they are now; equal ones have the same version."""
    settings = json.loads(json.dumps(dict(getattr(policy, "settings", {})), default=str, sort_keys=True))
    content = json.dumps([policy.name, settings], sort_keys=True)
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return PolicyVersion(policy.name, digest, settings, made_by, datetime.now(UTC))


def calibration_samples(costs: CostEstimates | None, deployment: Deployment) -> Iterator[CalibrationSample]:
    """Every measured point of a cost table."""
    table = costs.table if isinstance(costs, CostModel) else costs
    if not isinstance(table, CostTable):
        return
    measured_at = datetime.fromisoformat(table.measured_at) if table.measured_at else datetime.now(UTC)
    for source, curve in ((TARGET, table.verify), *table.drafts.items()):
        yield from _points(curve, source, deployment, measured_at)


def _points(curve: Curve, source: str, deployment: Deployment, measured_at: datetime) -> Iterator[CalibrationSample]:
    for context, row in zip(curve.contexts, curve.seconds, strict=True):
        for tokens, seconds in zip(curve.tokens, row, strict=True):
            if (context, tokens) not in curve.composed:
                yield CalibrationSample(deployment, measured_at, source, tokens, context, seconds)
