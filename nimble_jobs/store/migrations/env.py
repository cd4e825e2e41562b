"""Alembic runs this file. The connection comes from `migrations.upgrade`; there is no alembic.ini."""

from __future__ import annotations

from alembic import context

from nimble_jobs.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
context.run_migrations()
