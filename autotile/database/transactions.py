"""Short transactions of a running session, whose statements are text.

A session commits several for each batch of trials. On a file they go to SQLite's own module: SQLAlchemy would take ten
times as long as the statements themselves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

from sqlalchemy import JSON, Connection, TextClause, select, text

from autotile.core.documents import json_text
from autotile.core.forks import fork_guard
from autotile.database.database import Database
from autotile.database.engine import translated_errors
from autotile.database.rows import StoredTrial, insert_trials, parsed_rows, stored_trial
from autotile.database.schema import TRIALS

Values = Mapping[str, Any]

_COLUMNS = [column.name for column in TRIALS.c if not column.primary_key]
_JSON_COLUMNS = [column.name for column in TRIALS.c if isinstance(column.type, JSON)]
_INSERT = f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"


class Transaction(Protocol):
    """A transaction that has begun."""

    @property
    def is_server(self) -> bool:
        """Whether the database is on a server, where others write too, and each statement is a round trip."""

    def execute(self, statement: str, values: Values) -> Sequence[tuple[Any, ...]]:
        """Run a statement with values by their names, ``:name``; return its rows, none of one without ``RETURNING``."""

    def insert(self, rows: Sequence[Values]) -> None:
        """Insert trials, given by all of their columns but the id."""

    def trials(self, ids: Sequence[int]) -> list[StoredTrial]:
        """Return trials that other sessions have stored, in the order of their ids."""


class EngineTransaction:
    """A transaction through SQLAlchemy, of a file or a server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_server = connection.dialect.name == "postgresql"

    def execute(self, statement: str, values: Values) -> Sequence[tuple[Any, ...]]:
        """As for `Transaction`."""
        result = self._connection.execute(_prepared(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else ()

    def insert(self, rows: Sequence[Values]) -> None:
        """As for `Transaction`."""
        insert_trials(self._connection, rows)

    def trials(self, ids: Sequence[int]) -> list[StoredTrial]:
        """As for `Transaction`."""
        return _read(self._connection, ids)


@cache
def _prepared(statement: str) -> TextClause:
    return text(statement)


class FileTransaction:
    """A transaction on a connection to an SQLite file."""

    is_server = False

    def __init__(self, database: Database, connection: sqlite3.Connection) -> None:
        self._database = database
        self._connection = connection

    def execute(self, statement: str, values: Values) -> Sequence[tuple[Any, ...]]:
        """As for `Transaction`."""
        return self._connection.execute(statement, values).fetchall()

    def insert(self, rows: Sequence[Values]) -> None:
        """As for `Transaction`."""
        self._connection.executemany(_INSERT, [{**row, **_encoded(row)} for row in rows])

    def trials(self, ids: Sequence[int]) -> list[StoredTrial]:
        """As for `Transaction`; over another connection, as this one writes."""
        with self._database.reading() as connection:
            return _read(connection, ids)


def _encoded(row: Values) -> dict[str, str | None]:
    """Return the JSON columns of a row as SQLAlchemy stores them."""
    return {name: None if row[name] is None else json_text(row[name]) for name in _JSON_COLUMNS}


def _read(connection: Connection, ids: Sequence[int]) -> list[StoredTrial]:
    return parsed_rows(connection, select(TRIALS).where(TRIALS.c.id.in_(ids)).order_by(TRIALS.c.id), stored_trial)


@contextmanager
def short_transaction(database: Database, held: Connection | None) -> Iterator[Transaction]:
    """Begin a transaction that writes.

    Parameters
    ----------
    held
        Connection of `Database.connect` to a file, used for this and later transactions; None for one from the pool.

    Raises
    ------
    DatabaseError
        The database cannot be written.
    """
    driver = held.connection.driver_connection if held is not None else None
    if database.path is None or not isinstance(driver, sqlite3.Connection):
        with database.writing(held) as connection:
            yield EngineTransaction(connection)
        return
    with fork_guard.use(), translated_errors(database.path):
        driver.execute("BEGIN IMMEDIATE")
        try:
            yield FileTransaction(database, driver)
            driver.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # an error may have ended the transaction
                driver.execute("ROLLBACK")
            raise
