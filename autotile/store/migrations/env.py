"""Alembic's way in: run the steps on the connection, and inside the transaction, that the caller holds."""

from __future__ import annotations

from alembic import context

from autotile.store.revision import VERSION_TABLE
from autotile.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
)
context.run_migrations()
