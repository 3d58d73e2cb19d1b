"""Alembic's environment: run the migrations on the caller's connection, inside its transaction."""

from __future__ import annotations

from alembic import context

from autotile.database.engine import METADATA
from autotile.database.winners import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
context.run_migrations()
