"""The two things that the databases and SQL's standard do not agree on: upserts and times."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_for(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An insert that knows ``ON CONFLICT``, spelled alike in SQLite and PostgreSQL."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def now_text() -> str:
    """The time in UTC, as it is stored: text that sorts by time in every database."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
