"""The costs of a target and its draft sources: from the disk where they were measured before, else measured now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autospec.costs.cache import costs_file, load, save
from autospec.costs.calibration import BUDGET_SECONDS, calibrate
from autospec.costs.fingerprint import describe
from autospec.costs.model import CostModel
from autospec.costs.table import CostTable
from autospec.drafts.base import DraftSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.backends.backend import Backend


MOST_SPREAD = 0.1
"""A calibration whose repeats lie further apart is used, and not kept on disk."""
MOST_FALL = 1.2
"""The same where one token costs this many times what more of them do."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A table and where it came from."""

    table: CostTable
    path: Path | None  # of the file that holds it; None where it could not be kept
    is_from_disk: bool
    seconds: float  # that it took


def measure(
    target: PreTrainedModel,
    sources: Mapping[str, DraftSource],
    *,
    fresh: bool = False,
    budget_seconds: float = BUDGET_SECONDS,
    backend: Backend | None = None,
) -> Measured:
    """The costs of a target and its sources.

    Args:
        target: the model that verifies.
        sources: draft sources by name, attached.
        fresh: measure also where costs are on disk, and replace them.
        budget_seconds: of the rounds of measurement.
        backend: how forwards run; None: as the models themselves run them.
    """
    started = time.perf_counter()
    description = describe(target, sources, backend)
    if not fresh and (table := load(description)) is not None:
        return Measured(table, costs_file(description), is_from_disk=True, seconds=time.perf_counter() - started)
    table = calibrate(target, sources, budget_seconds=budget_seconds, backend=backend)
    # what could not be timed now may be possible another time, and a busy machine is not always busy
    is_calm = table.spread <= MOST_SPREAD and not _is_upside_down(table)
    is_worth_keeping = set(table.drafts) == set(sources) and is_calm
    path = save(description, table) if is_worth_keeping else None
    return Measured(table, path, is_from_disk=False, seconds=time.perf_counter() - started)


def _is_upside_down(table: CostTable) -> bool:
    """Does a single token cost well more than several? Then the machine was busy while it was timed."""
    return any(row[0] > MOST_FALL * min(row) for row in table.verify.seconds)


def cost_model(
    target: PreTrainedModel, sources: Mapping[str, DraftSource], backend: Backend | None = None
) -> CostModel:
    """A model to ask and to teach. Args: as for `measure`."""
    return CostModel(measure(target, sources, backend=backend).table, is_asynchronous=target.device.type == "cuda")
