"""Which schema this autotile writes, known without loading an SQL engine."""

SCHEMA_REVISION = "0003"
"""The newest migration. Revisions are four-digit numbers in order, so that a newer database can be told."""

VERSION_TABLE = "autotile_schema"
"""Where Alembic keeps the revision; its usual name would let another program's database pass for ours."""
