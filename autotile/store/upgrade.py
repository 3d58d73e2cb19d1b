"""Bring a database to the present schema; the common case, that it is there already, costs one small query."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from autotile.ground.errors import DatabaseError
from autotile.store.engine import WRITE_OPTIONS, DamagedDatabaseError, Location
from autotile.store.places import identity
from autotile.store.revision import SCHEMA_REVISION, VERSION_TABLE
from autotile.store.schema import METADATA

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
