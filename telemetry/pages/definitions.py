"""What every number of the dashboard means: said once, for the pages, docs/dashboard.md and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.telemetry.engine_tables import COUNTED, SPAN
from autospec.telemetry.tables import DRAFTING, PREDICTED, SPEED, Column, phase_columns

OF_REPORT: tuple[Column[Any], ...] = (*SPEED, *DRAFTING, *PREDICTED, *COUNTED, *SPAN)

DEFINITIONS: Mapping[str, str] = {
    **{column.header.replace("\u00a0", " "): column.definition for column in OF_REPORT},
    **{f"{column.header} seconds": column.definition for column in phase_columns()},
    "verdict": "faster or slower when the 95 % interval of the speed-up excludes 1, else unclear; without enough "
    "requests on both sides there is none.",
    "trend": "speed-up against the control of the same stretch of time, oldest first, in the last 14 days of the time "
    "range; the line in the middle is 1. A gap: no request, or no control.",
    "without a fresh control": "share of the requests of these 14 days that are in segments without a control request "
    "in the last 7 of them: their speed-up may be out of date.",
    "tokens": "output tokens of the requests under a policy.",
    "measured from": "requests, read one by one, or sums by the hour where there are more than 2,000; sums know no "
    "pairs of a request and its own control.",
    "policy change": "the first hour in which a policy decoded requests of the segment, or the time at which new "
    "settings of one of these policies were stored.",
    "survival": "chance that a draft token and all before it in its block are accepted: the product of accepted / "
    "judged over the positions up to it.",
    "acceptance length": "tokens that one block committed, recovered or bonus token included.",
    "goodput": "tokens committed by blocks / seconds of drafting, verification, correction and emission in them; "
    "prefill is not in it.",
    "predicted goodput": "tokens expected by survival / seconds by the newest calibration of the device: drafting, one "
    "target forward, and the host's mean seconds for a block.",
    "share of blocks": "blocks of this kind / all blocks.",
    "blocks": "rounds of drafting, one target forward and choosing; a plain target step is one, too.",
    "block length": "draft tokens asked for in a block; 0 is a plain target step.",
    "position": "of a draft token in its block, from 1.",
    "committed tokens": "tokens that blocks added to the answer, recovered and bonus tokens included.",
    "seconds of blocks": "drafting, verification, correction and emission in them.",
    "seconds per output token": "seconds / output tokens: both are summed first.",
    "host seconds": "correction, emission and everything else that is neither drafting nor a forward.",
    "slowest requests": "those with the most seconds per output token among the newest 1,000 of the segment.",
    "plain decoding": "seconds that the cost model predicts for the request without speculation; no measurement.",
    "drafted": "draft tokens proposed for the block.",
    "accepted": "draft tokens kept.",
    "rejected": "the first draft token that the target does not take; at most one in a block.",
    "not judged": "draft tokens after a rejection, or cut off by the end of the answer.",
    "recovered": "the token that is drawn in place of a rejected one.",
    "bonus": "the token that the target adds when every draft token is accepted; of a block without drafts, its only "
    "one.",
    "reason": "what the policy said when it chose the block.",
    "control share": "control requests / all requests.",
    "exploration share": "blocks chosen to learn something (reasons explore and probe) / all blocks, of the newest "
    "1,000 requests.",
    "guard trips": "how often speculation was stopped in a segment because a test showed that it loses; of the "
    "policies saved last.",
    "evidence": "logarithm of the wealth of the guard's test under way; at 4.6 (a hundredfold) it stops speculation.",
    "plain blocks to go": "blocks that are still decoded plainly before speculation is tried again.",
    "calibration error": "predicted speed-up / measured speed-up of the same segment, less 1.",
    "speed-up in training": "over plain decoding, predicted on the recorded requests that were searched with; where a "
    "study of the storage tried just this policy.",
    "speed-up held out": "over plain decoding, predicted on recorded requests that had no part in the search, with its "
    "95 % interval; much below the one in training means overfitted.",
    "plain step": "mean seconds of the target's forward in blocks without drafts; when it drifts, so do the costs that "
    "decisions are made by.",
    "fallbacks": "newest requests that were left to the original generate, by reason.",
}
"""By name, as it stands on the pages."""


def definition(name: str) -> str:
    """Raises: KeyError: the number has none, which is a mistake in a page."""
    return DEFINITIONS[name]
