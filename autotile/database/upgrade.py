"""Bring a database to the current schema, and check that it is whole."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, func, inspect, select, text

from autotile.database.engine import WRITE_OPTIONS, DamagedDatabaseError, Location
from autotile.database.fast_read import SCHEMA_REVISION, VERSION_TABLE
from autotile.database.paths import identity
from autotile.database.schema import METADATA, RUNS, STUDIES, TRIALS
from autotile.errors import DatabaseError

_MIGRATIONS = Path(__file__).with_name("migrations")

_CHECKED_BYTES = 64 * 2**20
"""Files up to this size are looked through when they are opened for writing, which takes about 1 ms a MiB."""

_LOCK_NUMBER = 0x6175746F74696C65
"""PostgreSQL advisory lock held while migrating: "autotile" in ASCII."""


def ensure_schema(engine: Engine, location: Location) -> None:
    """Make the tables, or run the steps that an older database lacks, in one transaction.

    Raises
    ------
    DatabaseError
        The database was written by a newer autotile, or belongs to another program.
    """
    with engine.connect() as connection:
        if is_current(connection, location):
            return
    with engine.execution_options(**WRITE_OPTIONS).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
        if not is_current(connection, location):  # another process may have been first
            _migrate(connection)


def is_current(connection: Connection, location: Location) -> bool:
    """Whether the database has the present schema; False where it is empty or older.

    Raises
    ------
    DatabaseError
        The database was written by a newer autotile, or belongs to another program.
    """
    revision = schema_revision(connection)
    if revision is None:
        _refuse_foreign(connection, location)
        return False
    if revision > SCHEMA_REVISION:
        raise DatabaseError(
            f"{location} was written by a newer autotile (schema {revision}; this version knows {SCHEMA_REVISION}): "
            "pip install --upgrade autotile, or name another database"
        )
    return revision == SCHEMA_REVISION


def schema_revision(connection: Connection) -> str | None:
    """Revision that the database says it has; None where it has none of our tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def refuse_damage(engine: Engine, path: Path) -> None:
    """Look through a file that is not too large, so that a tuning session does not begin on a damaged one.

    Raises
    ------
    DamagedDatabaseError
        SQLite finds a page that is not as it should be.
    """
    if path.stat().st_size > _CHECKED_BYTES:
        return
    with engine.connect() as connection:
        finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if finding != "ok":
        raise DamagedDatabaseError(f"database {path} is damaged: {finding}")


def set_aside(path: Path, seen: tuple[int, int]) -> tuple[str, ...]:
    """Rename a damaged file, with its log, so that a fresh one can be made; nothing is deleted.

    Parameters
    ----------
    seen
        Identity of the file that was found damaged. Where another process has replaced it since, nothing is done.

    Returns
    -------
    tuple of str
        A sentence for the user, or nothing where nothing was done.

    Raises
    ------
    DatabaseError
        It cannot be renamed.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    try:
        with path.open("rb") as file:
            # Of several processes that found it damaged one renames it; the others then see that it is gone.
            fcntl.flock(file, fcntl.LOCK_EX)
            if identity(path) != seen:
                return ()
            for suffix in ("-wal", "-shm", ""):  # the file last: a new one must not find the old one's log
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DatabaseError(
            f"the database {path} is damaged and cannot be renamed: {error.strerror}; move it away, or name another one"
        ) from None
    return (f"the database {path} was damaged: it is kept as {aside}, and a new one was begun",)


def _refuse_foreign(connection: Connection, location: Location) -> None:
    """A server's database may be shared with other programs, as long as no table's name is taken; a file may not."""
    tables = set(inspect(connection).get_table_names())
    foreign = sorted(tables if isinstance(location, Path) else tables & METADATA.tables.keys())
    if foreign:
        raise DatabaseError(
            f"{location} belongs to another program (it has a table {foreign[0]!r}): name another database"
        )


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")


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
