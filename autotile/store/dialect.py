"""The two things that the databases and SQL's standard do not agree on: upserts and times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Table

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite


def insert_for(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An insert that knows ``ON CONFLICT``, spelled alike in SQLite and PostgreSQL."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def now_text() -> str:
    """The time in UTC, as it is stored: text that sorts by time in every database."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
