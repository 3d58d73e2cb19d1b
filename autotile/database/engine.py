"""Where a database lies and how it is connected to: an SQLite file, or a PostgreSQL server that a team shares."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from autotile.database.paths import has_log, is_full, network_file_system
from autotile.errors import DatabaseError

LOCK_TIMEOUT_S = 30.0
"""How long a writer waits for the others; each holds the lock for well under a millisecond."""

Location = Path | URL
"""An SQLite file, or a server; both print well, and SQLAlchemy keeps a URL's password out of its text."""

_EXPECTED_LOCATION = "expected the path of an SQLite file or postgresql+psycopg://user:password@host/name"

WRITE_OPTIONS = {"autotile_write": True}
"""Execution options of an engine whose transactions write."""

_FULL = (
    "the disk is full; what was stored before is kept: make room and give the same command again, "
    "or name a database on another disk"
)

_CURES = {
    "SQLITE_BUSY": f"another process has held it for more than {LOCK_TIMEOUT_S:.0f} s; try again when that has ended",
    "SQLITE_LOCKED": "another connection holds it; try again when that has ended",
    "SQLITE_CORRUPT": "the file is damaged; `autotile db check` says where, and the next `autotile tune` sets it aside",
    "SQLITE_NOTADB": "the file is not a database; move it away, or name another database",
    "SQLITE_FULL": _FULL,
    "SQLITE_READONLY": "it cannot be written; change its permissions and its folder's, or name another database",
    "SQLITE_CANTOPEN": "it cannot be opened; check that its folder exists and may be written",
    "SQLITE_IOERR": "the disk refused to read or write; check the disk, or name a database on another one",
}


class DamagedDatabaseError(DatabaseError):
    """The file is an SQLite database that is damaged, rather than locked, full or out of reach."""


def parse_location(location: str | Path) -> Location:
    """Tell a path (or ``sqlite:///path``) from a PostgreSQL URL.

    Raises
    ------
    DatabaseError
        A URL of any other kind.
    """
    if isinstance(location, Path) or "://" not in location:
        return Path(location).expanduser()
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"{location.split('@')[-1]!r} is no database URL; {_EXPECTED_LOCATION}") from None
    backend = url.get_backend_name()
    if backend == "sqlite" and url.database:
        return Path(url.database).expanduser()
    if backend in ("postgresql", "postgres"):
        driver = url.drivername if "+" in url.drivername else "postgresql+psycopg"
        # A password may also stand behind the question mark, where SQLAlchemy would print it.
        password = (url.password, *url.normalized_query.get("password", ()))[-1]
        return url.difference_update_query(["password"]).set(drivername=driver, password=password)
    raise DatabaseError(f"a database of the kind {url.drivername!r} is not supported; {_EXPECTED_LOCATION}")


def sqlite_engine(path: Path, *, readonly: bool) -> Engine:
    """Engine of an SQLite file whose transactions take the write lock at once where `WRITE_OPTIONS` are set.

    A transaction that reads first and asks for the lock later can be refused without waiting; one that begins with
    ``BEGIN IMMEDIATE`` waits its turn: https://sqlite.org/lang_transaction.html.
    """
    journal = "DELETE" if network_file_system(path) else "WAL"

    def connect() -> sqlite3.Connection:
        return _connect_to_read(path) if readonly else _connect(path, "mode=rwc", journal)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, json_serializer=_compact_json)
    event.listen(engine, "begin", _begin)
    return engine


def server_engine(url: URL) -> Engine:
    """Engine of a PostgreSQL server.

    Raises
    ------
    DatabaseError
        The driver is not installed.
    """
    try:
        return create_engine(url, pool_pre_ping=True, json_serializer=_compact_json)
    except ModuleNotFoundError as error:
        package = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary"}.get(error.name or "", error.name)
        raise DatabaseError(f"{url} needs the Python package {error.name!r}: pip install '{package}'") from None
    except ArgumentError:
        raise DatabaseError(f"no driver is known for {url}; {_EXPECTED_LOCATION}") from None


@contextmanager
def reporting_errors(location: Location) -> Iterator[None]:
    """Turn a driver's error into a `DatabaseError` that says what to do."""
    try:
        yield
    except DBAPIError as error:
        code = getattr(error.orig, "sqlite_errorname", "")
        cure = _cure(code, location)
        reason = str(error.orig).strip() or type(error.orig).__name__
        kind = DamagedDatabaseError if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) else DatabaseError
        raise kind(f"database {location}: {reason}" + (f": {cure}" if cure else "")) from error
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {location}: {error}") from error


def _connect(path: Path, access: str, journal: str | None = None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{access}",
        uri=True,
        timeout=LOCK_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        _configure(connection, journal)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Connect to a file that need not be writable.

    On a read-only medium or a full disk SQLite cannot make the files that WAL needs even to read; where no log lies
    beside it, the file is complete and is read as it is.
    """
    if not has_log(path) and not os.access(path.parent, os.W_OK):
        return _connect(path, "immutable=1")
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        connection.close()
        if has_log(path) or not error.sqlite_errorname.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_FULL")):
            raise
        return _connect(path, "immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _cure(code: str, location: Location) -> str:
    """What helps against an SQLite error; where the disk is full, SQLite does not always say so."""
    if isinstance(location, Path) and code.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
        with suppress(OSError):
            if has_log(location) and not os.access(location.parent, os.W_OK):
                return (
                    f"its newest entries are in {location.name}-wal, which cannot be read where nothing can be "
                    "written: copy both files to a folder of your own and name the copy"
                )
            if is_full(location.parent):
                return _FULL
    return next((cure for prefix, cure in _CURES.items() if code.startswith(prefix)), "")


def _configure(connection: sqlite3.Connection, journal: str | None) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    if journal is not None:
        _set_journal(connection, journal)
        # In WAL mode a commit survives the death of the process, and a power cut leaves the file whole.
        connection.execute(f"PRAGMA synchronous={'NORMAL' if journal == 'WAL' else 'FULL'}")


def _set_journal(connection: sqlite3.Connection, journal: str) -> None:
    """Set the journal mode, waiting for others: a change of mode is refused at once while another process reads."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode={journal}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("autotile_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
