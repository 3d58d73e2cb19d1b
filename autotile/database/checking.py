"""Checks of a database: damaged pages, rows that refer to none, and rows that do not match their schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Table, func, select

from autotile.database.database import Database
from autotile.database.engine import DamagedDatabaseError
from autotile.database.learned_store import check_family, check_model, stored_ceilings
from autotile.database.queries import MISSES
from autotile.database.rows import BadRow, BadRowError, Row, bad_row, rows_of, stored_trial, warn_of
from autotile.database.schema import METADATA, RUNS, STUDIES, TRIALS
from autotile.database.studies import stored_run, stored_study
from autotile.database.upgrade import schema_revision
from autotile.errors import DataError

_PARSERS: Mapping[str, Callable[[Row], object]] = {
    "studies": stored_study,
    "runs": stored_run,
    "trials": stored_trial,
    "misses": MISSES.parse,
    "families": check_family,
    "models": check_model,
    "ceilings": stored_ceilings,
}
"""Function that parses a row of each table; parents before the tables that refer to them."""

_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    """Result of an integrity check."""

    location: str
    revision: str
    counts: Mapping[str, int]
    """Number of rows by table."""
    unfinished_runs: int
    """Runs without an end: in progress, or killed."""
    problems: tuple[str, ...]
    """One line for each fault of the file; empty if there is none."""
    bad_rows: tuple[BadRow, ...] = ()
    """Rows that do not match their schema, which everything else skips."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.problems and not self.bad_rows

    @classmethod
    def damaged(cls, location: str, problems: Sequence[str]) -> DatabaseCheck:
        """Return the result for damage that makes the rest unreadable."""
        return cls(location, revision="unknown", counts={}, unfinished_runs=0, problems=tuple(problems))


def check_database(database: Database) -> DatabaseCheck:
    """Check for damaged pages, for rows whose study or run is missing, and for rows that do not match their schema."""
    try:
        with database.reading() as connection:
            return _checked(connection, database.location)
    except DamagedDatabaseError as error:  # so damaged that SQLite's check itself fails
        return DatabaseCheck.damaged(database.location, [str(error)])


def _checked(connection: Connection, location: str) -> DatabaseCheck:
    problems = _damaged_pages(connection)
    if problems:
        # Counting would read the damaged pages again and raise.
        return DatabaseCheck.damaged(location, problems)
    counts = {name: _count(connection, table) for name, table in METADATA.tables.items()}
    unfinished = connection.execute(select(func.count()).where(RUNS.c.ended_at.is_(None))).scalar_one()
    revision = schema_revision(connection, location) or "none"
    bad_rows = tuple(_bad_rows(connection))
    return DatabaseCheck(location, revision, counts, unfinished, tuple(_orphans(connection)), bad_rows)


def _damaged_pages(connection: Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return []
    lines = connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_PROBLEMS})").scalars()
    return [line for line in lines if line != "ok"]


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def _orphans(connection: Connection) -> list[str]:
    problems = []
    for child, column, parent in ((RUNS, "study_id", STUDIES), (TRIALS, "study_id", STUDIES), (TRIALS, "run_id", RUNS)):
        lost = child.outerjoin(parent, child.c[column] == parent.c.id)
        query = select(func.count()).select_from(lost).where(parent.c.id.is_(None))
        if number := connection.execute(query).scalar_one():
            problems.append(f"{number} rows of {child.name} name a row of {parent.name} that is missing")
    return problems


def usable_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> list[Row]:
    """Return the rows of a table that match its schema, as they are stored; the others are skipped with a warning."""
    bad: list[BadRow] = []
    found = list(_matching(connection, table, bad, *conditions))
    warn_of(connection, bad)
    return found


def _bad_rows(connection: Connection) -> list[BadRow]:
    """Return the rows of all tables that do not match their schemas."""
    bad: list[BadRow] = []
    for name in _PARSERS:
        for _ in _matching(connection, METADATA.tables[name], bad):
            pass
    return bad


def _matching(
    connection: Connection, table: Table, bad: list[BadRow], *conditions: ColumnElement[bool]
) -> Iterator[Row]:
    for row in rows_of(connection, select(table).where(*conditions).order_by(table.c.id)):
        try:
            _PARSERS[table.name](row)
        except DataError as error:
            bad.append((error if isinstance(error, BadRowError) else bad_row(table.name, row["id"], error)).row)
        else:
            yield row
