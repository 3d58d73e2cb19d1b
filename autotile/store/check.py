"""Whether a database is whole, for ``autotile db check``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Table, func, select

from autotile.store.schema import METADATA, RUNS, STUDIES, TRIALS
from autotile.store.upgrade import schema_revision

_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    """What was found."""

    location: str
    revision: str
    counts: Mapping[str, int]
    """Rows of each table."""
    unfinished_runs: int
    """Runs without an end: still going, or killed."""
    problems: tuple[str, ...]
    """One line a fault; empty when the database is whole."""

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @classmethod
    def of_damage(cls, location: str, problems: Sequence[str]) -> DatabaseCheck:
        """Report damage that makes the rest unreadable."""
        return cls(location, revision="unknown", counts={}, unfinished_runs=0, problems=tuple(problems))


def check_database(connection: Connection, location: str) -> DatabaseCheck:
    """Look for damaged pages, and for rows whose study or run is missing."""
    problems = _damaged_pages(connection)
    if problems:
        # Counting reads the damaged pages again, and would fail in place of reporting.
        return DatabaseCheck.of_damage(location, problems)
    counts = {name: _count(connection, table) for name, table in METADATA.tables.items()}
    unfinished = connection.execute(select(func.count()).where(RUNS.c.ended_at.is_(None))).scalar_one()
    return DatabaseCheck(
        location, schema_revision(connection) or "none", counts, unfinished, tuple(_orphans(connection))
    )


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
