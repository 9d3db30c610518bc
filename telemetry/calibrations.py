"""What steps cost, as engines have written it."""

from __future__ import annotations

from sqlalchemy import select

from autospec.telemetry.schema import CalibrationRow, DeploymentRow
from autospec.telemetry.store import Store
from autospec.types import Deployment


def newest_steps(
    store: Store, source: str, *, device: str = "%", like: Deployment | None = None
) -> list[tuple[int, float]]:
    """Tokens and seconds of one engine's steps, as it saw them last, ascending; of the engine that saw last.

    Args:
        source: as in `CalibrationSample.source`.
        device: of the engine, as SQL's LIKE takes it.
        like: only engines with the same device, target and dtype.
    """
    query = (
        select(CalibrationRow.deployment_id, CalibrationRow.measured_at)
        .join(DeploymentRow, DeploymentRow.id == CalibrationRow.deployment_id)
        .where(CalibrationRow.source == source, DeploymentRow.device.like(device))
        .order_by(CalibrationRow.measured_at.desc())
        .limit(1)
    )
    if like is not None:
        query = query.where(
            DeploymentRow.device == like.device, DeploymentRow.target == like.target, DeploymentRow.dtype == like.dtype
        )
    with store.reading() as connection:
        newest = connection.execute(query).first()
        if newest is None:
            return []
        points = connection.execute(
            select(CalibrationRow.tokens, CalibrationRow.seconds)
            .where(
                CalibrationRow.source == source,
                CalibrationRow.deployment_id == newest.deployment_id,
                CalibrationRow.measured_at == newest.measured_at,
            )
            .order_by(CalibrationRow.tokens)
        )
        return [(int(row.tokens), float(row.seconds)) for row in points]
