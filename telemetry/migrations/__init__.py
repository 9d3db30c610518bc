"""The Alembic environment, run from code (autospec.telemetry.migrate): no alembic.ini is needed."""
