"""Alembic's environment: run the migrations on the caller's connection, inside its transaction."""

from __future__ import annotations

from alembic import context

from autotile.database.schema import METADATA
from autotile.database.structure import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
)
context.run_migrations()
