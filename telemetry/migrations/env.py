"""Run by Alembic; the connection, inside its transaction, comes from autospec.telemetry.migrate."""

from __future__ import annotations

from alembic import context

from autospec.telemetry.schema import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
