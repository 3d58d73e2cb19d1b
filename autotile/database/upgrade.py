"""Upgrade a database to the current schema, and check its integrity."""

from __future__ import annotations

import fcntl
import math
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    inspect,
    text,
)
from sqlalchemy.schema import CreateTable

from autotile.database.engine import (
    LOCK_TIMEOUT_S,
    WRITE_OPTIONS,
    DamagedDatabaseError,
    Location,
    open_connections,
)
from autotile.database.migrations import BEST_VIEW
from autotile.database.paths import file_identity, has_wal
from autotile.database.queries import (
    SCHEMA_REVISION,
    VERSION_TABLE,
    Execute,
    differing_table,
    foreign_object,
    unknown_revision,
)
from autotile.database.schema import METADATA
from autotile.errors import DatabaseError

_MIGRATIONS = Path(__file__).with_name("migrations")

_MAX_CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked when they are opened for writing, which takes about 1 ms per MiB."""

UPGRADE_TIMEOUT_S = 600.0
"""Timeout of an upgrade by a command, in seconds."""

_LOCK_KEY = 0x6175746F74696C65
"""Key of the PostgreSQL advisory lock that is held while migrating: "autotile" in ASCII."""


def ensure_schema(engine: Engine, location: Location, timeout_s: float = UPGRADE_TIMEOUT_S) -> None:
    """Create the tables, or run the migrations that an older database lacks, in one transaction.

    Of several processes at the same time, one does it, and the others wait for it.

    Parameters
    ----------
    timeout_s
        Timeout of waiting for another process that does it, and on a server of each statement, in seconds.

    Raises
    ------
    DatabaseError
        The database was written by a newer autotile, or belongs to another program.
    """
    with engine.connect() as connection:
        if is_current(connection, location):
            return
    with engine.execution_options(**WRITE_OPTIONS).connect() as connection, _turn(connection, timeout_s):
        if not is_current(connection, location):  # another process may have been first
            if schema_revision(connection, location) is None:
                _create(connection)
            else:
                _migrate(connection)


@contextmanager
def _turn(connection: Connection, timeout_s: float) -> Iterator[None]:
    """Begin the transaction of an upgrade when no other process upgrades.

    It may take far longer than the statements of a session: an index of ten million trials takes half a minute. The
    locks on tables that others use are waited for no longer than by a session, since everyone else waits behind them.
    """
    if connection.dialect.name == "postgresql":
        with connection.begin():
            lock_timeout = connection.execute(text("SHOW lock_timeout")).scalar_one()
            set_local = text("SELECT set_config(:name, :value, true)")
            for name in ("statement_timeout", "lock_timeout"):
                connection.execute(set_local, {"name": name, "value": f"{math.ceil(1000 * timeout_s)}"})
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            connection.execute(set_local, {"name": "lock_timeout", "value": lock_timeout})
            yield
        return
    file = connection.connection.cursor()
    file.execute(f"PRAGMA busy_timeout={math.ceil(1000 * timeout_s)}")
    try:
        with connection.begin():
            yield
    finally:
        file.execute(f"PRAGMA busy_timeout={math.ceil(1000 * LOCK_TIMEOUT_S)}")
        file.close()


def is_current(connection: Connection, location: Location) -> bool:
    """Return whether the database has the current schema; False if it is empty or older.

    Raises
    ------
    DatabaseError
        The database was written by a newer autotile, belongs to another program, or was changed by one.
    """
    if fault := _foreign_object(connection, None):
        raise _refused(location, fault)
    revision = schema_revision(connection, location)
    if revision is None:
        _refuse_foreign(connection, location)
        return False
    if revision > SCHEMA_REVISION:
        raise DatabaseError(
            f"{location} was written by a newer autotile (schema {revision}; this version knows {SCHEMA_REVISION}): "
            "pip install --upgrade autotile, or name another database"
        )
    if fault := _foreign_object(connection, revision):
        raise _refused(location, fault)
    if revision == SCHEMA_REVISION and (fault := _differing_table(connection)):
        raise _refused(location, fault)
    return revision == SCHEMA_REVISION


def schema_revision(connection: Connection, location: Location | str) -> str | None:
    """Return the schema revision of a database; None if it has no tables of autotile.

    Raises
    ------
    DatabaseError
        It states no revision, several, or one that no version of autotile has written.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revisions = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2")).scalars().all()
    if fault := unknown_revision(revisions):
        raise _refused(location, fault)
    return str(revisions[0])


def _foreign_object(connection: Connection, revision: str | None) -> str:
    return foreign_object(_execute(connection), revision) if connection.dialect.name == "sqlite" else ""


def _differing_table(connection: Connection) -> str:
    tables = {name: table.c.keys() for name, table in METADATA.tables.items()}
    return differing_table(_execute(connection), tables) if connection.dialect.name == "sqlite" else ""


def _execute(connection: Connection) -> Execute:
    return lambda statement: connection.exec_driver_sql(statement).all()


def _refused(location: Location | str, fault: str) -> DatabaseError:
    return DatabaseError(
        f"the database {location} was changed by another program: {fault}; remove it with sqlite3, restore a copy of "
        "the file, or name another database"
    )


def check_integrity(engine: Engine, path: Path) -> None:
    """Raise if a file of moderate size is damaged, so that a tuning session does not start on it.

    Raises
    ------
    DamagedDatabaseError
        SQLite's quick check finds a fault.
    """
    if path.stat().st_size > _MAX_CHECKED_BYTES:
        return
    with engine.connect() as connection:
        finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if finding != "ok":
        raise DamagedDatabaseError(f"database {path} is damaged: {finding}")


def set_aside(path: Path, seen: tuple[int, int]) -> tuple[str, ...]:
    """Rename a damaged file, with its log, so that a new one can be created; nothing is deleted.

    Parameters
    ----------
    seen
        `file_identity` of the damaged file. If another process has replaced it since, nothing is done.

    Returns
    -------
    tuple of str
        A notice for the user; empty if nothing was done, as another process has replaced the file, or it is healthy.

    Raises
    ------
    DatabaseError
        The file cannot be renamed, or is in use.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    try:
        # The folder is locked, not the file: closing a descriptor of the file would end SQLite's locks on it.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # If several processes found it damaged, one renames it and the others then see another identity.
            fcntl.flock(folder, fcntl.LOCK_EX)
            if file_identity(path) != seen or is_healthy(path):
                return ()
            end = time.monotonic() + _VISIT_S
            while (user := _user_of(path)) and time.monotonic() < end:
                time.sleep(0.02)
            if user:
                raise DatabaseError(
                    f"the database {path} is damaged, and {user} uses it; it is left as it is: end that process, then "
                    "run the same command again, or name another database"
                )
            for suffix in ("-wal", "-shm", ""):  # the file last: a new one must not find the old log
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
        finally:
            os.close(folder)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DatabaseError(
            f"the database {path} is damaged and cannot be renamed: {error.strerror}; move it away, or name another one"
        ) from None
    return (f"the database {path} was damaged: it is kept as {aside}, and a new one was created",)


def is_healthy(path: Path) -> bool:
    """Return whether SQLite reads all of a file over a new connection and finds no damage."""
    access = "mode=ro" if has_wal(path) else "immutable=1"  # which makes no files beside it
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?{access}", uri=True)) as connection:
            return connection.execute("PRAGMA integrity_check(1)").fetchall() == [("ok",)]
    except sqlite3.Error:
        return False


_VISIT_S = 2.0
"""Time for which a process may use a damaged database before it counts as in use: others look at it at the same time,
find the damage, and close it."""
_LOCK_BYTES = (0x40000000, 512)
"""Place and length of SQLite's lock bytes (sqlite3.c, PENDING_BYTE): whoever has a file open in WAL mode holds a shared
lock on some of them, and others do in a transaction."""
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux: type, whence, start, length and process."""


def _user_of(path: Path) -> str:
    """Return who has a database open, for a message; empty if nobody has."""
    if open_connections(path):
        return "this process"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_LOCK_BYTES, 0)
        kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return "" if kind == fcntl.F_UNLCK else f"process {process}"


def _refuse_foreign(connection: Connection, location: Location) -> None:
    """Raise if a file has tables of another program, or a server's database a foreign table with a name of ours."""
    tables = set(inspect(connection).get_table_names())
    foreign = sorted(tables if isinstance(location, Path) else tables & METADATA.tables.keys())
    if foreign:
        raise DatabaseError(
            f"{location} belongs to another program (it has a table {foreign[0]!r}): name another database"
        )


def _create(connection: Connection) -> None:
    """Create what the migrations would leave, without loading Alembic, which takes longer than the rest."""
    METADATA.create_all(connection, checkfirst=False)
    connection.exec_driver_sql(BEST_VIEW)
    key = PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc")  # as Alembic names it
    version = Table(VERSION_TABLE, MetaData(), Column("version_num", String(32), nullable=False), key)
    connection.execute(CreateTable(version))
    connection.execute(version.insert().values(version_num=SCHEMA_REVISION))


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")
