"""The database itself, an SQLite file or a PostgreSQL server of a team: its tables, connections and upgrades."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import socket
import sqlite3
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, quote_plus, unquote

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    QueuePool,
    String,
    Table,
    Text,
    UniqueConstraint,
    column,
    create_engine,
    event,
    inspect,
    make_url,
    table,
    text,
)
from sqlalchemy.engine.interfaces import DBAPIConnection, Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateTable, SchemaItem

from autotile.core.documents import json_cell, json_text
from autotile.core.forks import fork_guard
from autotile.database.migrations import BEST_VIEW, JSON_VALUE, columns
from autotile.database.paths import (
    EXAMPLE_CREDENTIALS,
    MASK,
    file_identity,
    has_wal,
    is_disk_full,
    looks_like_url,
    masked_message,
    network_file_system,
    unparsed_text,
)
from autotile.database.winners import RESOURCE_COLUMNS, SCHEMA_REVISION, VERSION_TABLE, VIEW_DIGESTS, foreign_object
from autotile.errors import DatabaseError, InputError
from autotile.settings import expand_path

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

METADATA = MetaData()


def _table(name: str, *parts: Column[Any] | SchemaItem) -> Table:
    return Table(name, METADATA, Column("id", Integer, primary_key=True), *parts)


STUDIES = _table(
    "studies",
    Column("digest", String(64), nullable=False, unique=True),
    *columns(Text, "kernel", "template_hash", "space_hash"),
    *columns(JSON_VALUE, "options"),
    *columns(Text, "dtype"),
    *columns(JSON_VALUE, "sizes"),
    *columns(Text, "gpu_name", "compute_capability"),
    *columns(Integer, "sm_count", "smem_per_block_optin_bytes"),
    *columns(Text, "nvrtc_version", "l2_mode", "source"),
    *columns(JSON_VALUE, "device", nullable=True),
    *columns(Text, "created_at"),
    Index("studies_by_kernel", "kernel"),
)
"""One row for each `TuningKey`, with the device's properties (null if an imported result does not state them)."""

RUNS = _table(
    "runs",
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    *columns(Text, "started_at"),
    *columns(Text, "ended_at", nullable=True),
    *columns(Text, "sampler"),
    Column("seed", BigInteger),
    *columns(JSON_VALUE, "settings"),
    *columns(Text, "driver", "host", "autotile_version"),
    *columns(JSON_VALUE, "gates", "summary"),
    Index("runs_by_study", "study_id"),
)
"""One row for each run; ``ended_at`` is null during the run, and stays null if it was killed."""

TRIALS = _table(
    "trials",
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("run_id", Integer, ForeignKey("runs.id"), nullable=False),
    *columns(Text, "phase"),
    *columns(Integer, "rank", nullable=True),
    *columns(Text, "config_key"),
    *columns(JSON_VALUE, "config"),
    *columns(Text, "outcome", "stage", "reason"),
    *columns(JSON_VALUE, "grid", "block", nullable=True),
    *columns(Integer, "dynamic_smem_bytes", *RESOURCE_COLUMNS, "blocks_per_sm", "warps_per_sm", nullable=True),
    *columns(Float(53), "occupancy", nullable=True),
    *columns(JSON_VALUE, "limited_by", "limits", nullable=True),
    *columns(Float(53), "time_us", "low_us", "high_us", nullable=True),
    *columns(JSON_VALUE, "samples_us", nullable=True),
    *columns(Text, "l2", nullable=True),
    *columns(Text, "cubin_hash"),
    *columns(JSON_VALUE, "telemetry", "seconds"),
    *columns(Text, "source"),
    Column("gpu", Text, nullable=False, server_default=""),
    *columns(Text, "created_at"),
    Index("trials_by_time", "study_id", "outcome", "time_us"),
    Index("trials_by_rank", "study_id", "phase", "rank"),
    Index("trials_of_run", "run_id", "id"),
)
"""One row for each trial. ``config`` keeps the order of the parameters; ``config_key`` is canonical, for look-ups."""
_OF_FINALS = Index("trials_of_finals", TRIALS.c.study_id, TRIALS.c.id)  # its condition: see `ensure_schema`

CLAIMS = _table(
    "claims",
    Column("study_id", Integer, nullable=False),
    *columns(Text, "config_key", "owner"),
    Column("expires_at", Float(53), nullable=False),
    UniqueConstraint("study_id", "config_key", name="one_claim_a_configuration"),
)
"""One row for each configuration that a session is trying; ``expires_at`` is in seconds since 1970."""

MISSES = _table(
    "misses",
    *columns(Text, "kernel", "sizes", "dtype", "gpu_name", "tier"),
    Column("count", Integer, nullable=False),
    *columns(Text, "last_at"),
    UniqueConstraint("kernel", "sizes", "dtype", "gpu_name", "tier", name="one_row_a_miss"),
)
"""Requested problems that could not be served exactly; ``sizes`` is canonical JSON."""

FAMILIES = _table(
    "families",
    Column("digest", String(64), nullable=False, unique=True),
    *columns(Text, "kernel", "dtype"),
    *columns(JSON_VALUE, "key", "device", "family"),
    *columns(JSON_VALUE, "progress", "rule", nullable=True),
    *columns(Text, "learned_at", nullable=True),
    Index("families_by_kernel", "kernel"),
)
"""One row for each family of problems and device: ``key`` is a `TuningKey` without sizes, ``progress`` is null if no
tuning is unfinished, ``rule`` before the first is learned."""

MODELS = _table(
    "models",
    *columns(Text, "operation", "dtype", "gpu_name"),
    *columns(JSON_VALUE, "device", "model"),
    *columns(Text, "learned_at"),
    UniqueConstraint("operation", "dtype", "gpu_name", name="one_model_a_gpu"),
)
"""One row for each operation, element type and GPU: its newest model of time."""

CEILINGS = _table(
    "ceilings",
    Column("gpu_uuid", Text, nullable=False, unique=True),
    *columns(Text, "gpu_name", "compute_capability", "driver", "measured_at"),
    *columns(JSON_VALUE, "ceilings", "warnings"),
)
"""One row for each GPU: the newest measurement of its ceilings."""

_BEST_COLUMNS = (*map(column, ("study_id", "trial_id", "kernel", "time_us")), column("config", JSON_VALUE))
BEST = table("best", *_BEST_COLUMNS)
"""View of the best result of each study; its other columns are for people who open the database by hand."""


def insert_for(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an insert with ``ON CONFLICT``, which SQLite and PostgreSQL share, in the connection's dialect."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def identity_of(table: Table) -> list[Column[Any]]:
    """Return the columns of a table of which no two rows have the same values."""
    return [column for one in table.constraints if isinstance(one, UniqueConstraint) for column in one]


def stored_moment(moment: datetime) -> str:
    """Return a time as it is stored, in UTC: text whose order is that of time in every database."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def now_text() -> str:
    """Return the current time as it is stored."""
    return stored_moment(datetime.now(UTC))


LOCK_TIMEOUT_S = 30.0
"""Timeout of a writer waiting for others, in seconds; each holds the lock for well under a millisecond. On a server it
is also the timeout of connecting and of each statement."""
_MAX_SHOWN_PATH = 60
"""Characters of a path that a message shows if the path is too long for the file system."""
RESTART_S = 60.0
"""Time for which a session waits for a server that restarts, in seconds."""
_READ_CONNECT_TIMEOUT_S = 3
"""Timeout of connecting to a server to read, in seconds: somebody waits for the answer."""
_ANNOUNCED_S = 1.0
"""Time of connecting after which a command says what it waits for, in seconds."""
_MIN_CONNECT_TIMEOUT_S = 2
"""The shortest that libpq takes."""
_IDLE_S = 1.0
"""Time for which a connection to a server was not used after which it is checked before the next use, in seconds."""
_KEEPALIVES = 3
"""Probes without an answer after which a connection counts as lost."""

_EXPECTED_LOCATION = (
    f"expected the path of an SQLite file, sqlite:///path or postgresql+psycopg://{EXAMPLE_CREDENTIALS}host/name"
)

_SHOWN_PARAMETERS = frozenset(
    {"application_name", "channel_binding", "connect_timeout", "dbname", "gssencmode", "host", "hostaddr", "keepalives"}
    | {"keepalives_count", "keepalives_idle", "keepalives_interval", "load_balance_hosts", "options", "passfile"}
    | {"port", "require_auth", "service", "sslcert", "sslcrl", "sslkey", "sslmode", "sslnegotiation", "sslrootcert"}
    | {"target_session_attrs", "tcp_user_timeout", "user"}
)
"""Query parameters whose values are shown; any other one could be a misspelt password. Names of libpq:
https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS."""

_PLAIN_VALUE = re.compile(r"[\w ./:,~+-]*")
_PLAIN_OPTIONS = re.compile(r"(-c *[\w.]+=[\w.,-]+ *)*")
"""Value of libpq's ``options`` that sets parameters of the session, such as ``-c search_path=team``."""

_USER = re.compile(r"[\w .@\\+-]*")
_HOST = re.compile(r"[\w.,:%-]*")
_NAME = re.compile(r"[\w .$~+-]*")
"""User, host and name of a database as far as they are plain: other text may be a password in the wrong place."""

_LOG = logging.getLogger(__name__)

WRITE_OPTIONS = {"autotile_write": True}
"""Execution options of an engine whose transactions write."""

_DISK_FULL = (
    "the disk is full; earlier results are intact: free some space and run the same command again, "
    "or name a database on another disk"
)

_NO_RIGHT = (
    "the role may not do this: reading needs SELECT, tuning also INSERT, UPDATE and DELETE, and the first use of a new "
    "database or of a newer autotile the owner of the tables; the guide has the SQL for each role"
)

_SLOW_SERVER = "the server is overloaded, or another process has held a lock for too long; try again later"

_REMEDIES = {
    "SQLITE_BUSY": f"another process has held it for more than {LOCK_TIMEOUT_S:.0f} s; try again when it has ended",
    "SQLITE_LOCKED": "another connection has locked it; try again when it has ended",
    "SQLITE_CORRUPT": "the file is damaged; `autotile db check` says where, and the next `autotile tune` sets it aside",
    "SQLITE_NOTADB": "the file is not a database; move it away, or name another database",
    "SQLITE_FULL": _DISK_FULL,
    "SQLITE_READONLY": "it cannot be written; change its permissions and its folder's, or name another database",
    "SQLITE_CANTOPEN": "it cannot be opened; check that its folder exists and is writable",
    "SQLITE_IOERR": "reading from or writing to the disk failed; check the disk, or name a database on another one",
    "42501": _NO_RIGHT,
    "25006": _NO_RIGHT,
    "57014": _SLOW_SERVER,
    "55P03": _SLOW_SERVER,
    "ConnectionTimeout": "the server does not answer; check that it is running and that its address is right",
}
"""Remedies for errors, by SQLite's error name (a prefix), PostgreSQL's error code or the name of psycopg's error."""

_LOST = ("08", "57P0", "53300")
"""PostgreSQL's error codes of lost connections, a server that stops or starts, and one with too many connections."""

_JSON_CODEC: Mapping[str, Any] = {"json_serializer": json_text, "json_deserializer": json_cell}
"""Arguments of an engine: a cell that is not JSON is a fault of its row, not of the query."""


class DamagedDatabaseError(DatabaseError):
    """The file is a damaged SQLite database, rather than a locked, full or inaccessible one."""


class LostServerError(DatabaseError):
    """The connection to a server was lost, or a server that restarts takes none yet."""


Result = TypeVar("Result")


def across_restarts(attempt: Callable[[], Result]) -> Result:
    """Call a function, again while it raises `LostServerError`, for up to `RESTART_S`.

    Whether a transaction was committed is unknown if the connection was lost at its end: the function must allow for
    that.
    """
    deadline = pause_s = 0.0
    while True:
        try:
            return attempt()
        except LostServerError:
            deadline = deadline or time.monotonic() + RESTART_S
            if time.monotonic() > deadline:
                raise
        pause_s = min(1.0, 2 * pause_s or 0.05)
        time.sleep(pause_s)


@dataclass(frozen=True, slots=True, repr=False)
class ServerLocation:
    """Location of a database on a server; its text masks every secret, which only `reveal` returns."""

    _url: URL

    def __str__(self) -> str:
        query: dict[str, str | tuple[str, ...]] = {}
        for key, values in self._url.normalized_query.items():
            shown = tuple(value if _is_shown(key, value) else MASK for value in values)
            query[key] = shown if len(shown) > 1 else shown[0]
        return self._url.set(query=query).render_as_string().replace(quote_plus(MASK), MASK)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def argument(self) -> str:
        """Return the URL without its secrets, for a command line, which takes none."""
        found = self._url.normalized_query.items()
        query = {key: values for key, values in found if all(_is_shown(key, value) for value in values)}
        return self._url.set(password=None, query=query).render_as_string()

    def reveal(self) -> URL:
        """Return the URL with its secrets, to connect with."""
        return self._url

    def masked(self, text: str) -> str:
        """Return a text, such as a driver's error, in which the secrets of this location are masked."""
        values = [self._url.password or ""]
        for key, found in self._url.normalized_query.items():
            values += (value for value in found if not _is_shown(key, value))
        for value in filter(None, values):
            for form in {value: None, quote(value, safe=""): None, quote_plus(value): None}:
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", MASK, text)
        return text


Location = Path | ServerLocation
"""Path of an SQLite file, or location on a server; the text of either can be shown."""


def parse_location(location: str | Path) -> Location:
    """Parse a path, ``sqlite:///path`` or a PostgreSQL URL; anything else is a `DatabaseError`."""
    text = str(location)
    if not looks_like_url(text):
        return _file_path(location)
    malformed = f"{unparsed_text(text)} is not a database URL"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"{malformed}; {_EXPECTED_LOCATION}") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        is_credential = "@" in text.partition("?")[2]  # of a misspelt URL, whose password would pass for a path
        is_path = url.database and not (url.host or url.username or url.password)
        if not url.database or not is_path or looks_like_url(url.database) or is_credential:
            raise DatabaseError(f"{malformed}; {_EXPECTED_LOCATION}")
        return _file_path(url.database)
    if backend not in ("postgresql", "postgres"):
        raise DatabaseError(f"a database of the kind {url.drivername!r} is not supported; {_EXPECTED_LOCATION}")
    # Each part must be able to be what it was taken for: none may be a password.
    user = url.username or ""
    is_plain = (
        _USER.fullmatch(user) is not None
        and ("@" not in user or "%40" in text)
        and _HOST.fullmatch(url.host or "") is not None
        and _NAME.fullmatch(unquote(url.database or "")) is not None
        and all(re.fullmatch(r"[A-Za-z]\w*", key) for key in url.query)
        and not any(set(";#") & set(value) for key in _SHOWN_PARAMETERS for value in url.normalized_query.get(key, ()))
    )
    if not is_plain:
        raise DatabaseError(
            f"{malformed}: characters such as @ ; # = in a user, a password or a name are percent-encoded (an @ in a "
            f"password is %40), and parameters follow ? and are separated by &; {_EXPECTED_LOCATION}"
        )
    # A password may also be given as a query parameter.
    password = (url.password, *url.normalized_query.get("password", ()))[-1]
    driver = f"postgresql+{url.drivername.partition('+')[2] or 'psycopg'}"
    found = ServerLocation(url.difference_update_query(["password"]).set(drivername=driver, password=password))
    try:
        known = not found.reveal().get_dialect().is_async
    except ArgumentError:
        known = False
    if not known:
        raise DatabaseError(f"no driver is available for {found}; {_EXPECTED_LOCATION}")
    return found


def _is_shown(key: str, value: str) -> bool:
    """Return True if the value of a query parameter can be no secret."""
    plain = _PLAIN_OPTIONS if key == "options" else _PLAIN_VALUE
    return key in _SHOWN_PARAMETERS and plain.fullmatch(value) is not None and masked_message(value) == value


def _file_path(path: str | Path) -> Path:
    try:
        expanded = expand_path(path, "a database")
        for file in (expanded, f"{expanded}-journal"):  # SQLite's, whose name is longer
            with suppress(FileNotFoundError):
                os.stat(file)  # noqa: PTH116 - Path.exists hides a loop of links
        if expanded.is_symlink() and expanded.is_file():
            expanded = expanded.resolve()  # beside which SQLite keeps its log
    except InputError as error:
        raise DatabaseError(str(error)) from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            name = str(path) if len(str(path)) <= _MAX_SHOWN_PATH else f"{str(path)[:_MAX_SHOWN_PATH]}..."
            raise DatabaseError(f"{name!r} is not the path of a database: {error.strerror}; name a file") from None
    except ValueError:  # of characters that the file system cannot encode
        raise DatabaseError(f"{str(path)[:_MAX_SHOWN_PATH]!r} is not the path of a database; name a file") from None
    return expanded


class _FileConnection(sqlite3.Connection):
    """Connection to a file, of the process that opened it."""

    path: Path

    def close(self) -> None:
        _connections.discard(self)
        super().close()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_connections: weakref.WeakSet[_FileConnection] = weakref.WeakSet()
_left: list[object] = []
"""Connections of the parent process, which a child neither uses nor closes: closing one tells the server, or changes
the log beside a file."""


def open_connections(path: Path) -> int:
    """Return the number of connections of this process to a file."""
    with suppress(OSError):
        return sum(connection.path.samefile(path) for connection in list(_connections))
    return 0


def _close_files() -> None:
    """Close all connections to files, none of which runs a statement; their engines open new ones."""
    for connection in list(_connections):
        if not connection.in_transaction:  # of the thread that forks, in the middle of one
            connection.close()
    for engine in list(_engines):
        if engine.dialect.name == "sqlite":
            engine.dispose()


def _leave_to_parent() -> None:
    _left.extend(_connections)
    _connections.clear()
    for engine in list(_engines):
        _left.append(engine.pool)
        engine.dispose(close=False)


fork_guard.on_fork(_close_files, _leave_to_parent)


def open_engine(location: Location, timeout_s: float = LOCK_TIMEOUT_S, *, readonly: bool = False) -> Engine:
    """Return the engine of a database; with `WRITE_OPTIONS`, transactions on a file take the write lock at their start.

    On a server, ``timeout_s`` is the timeout of connecting (at least 2 s), of each statement and of each lock; a
    connection over which nothing comes back for as long counts as lost. Statements of look-ups, ``readonly``, are
    planned once a connection there. It is a `DatabaseError` if the driver of the server is not installed.
    """
    if not isinstance(location, Path):
        return _server_engine(location, timeout_s, readonly=readonly)
    path = location.absolute()  # connections that are opened later are to the same file
    journal = "DELETE" if network_file_system(path) else "WAL"
    connect = partial(_connect_to_read, path) if readonly else partial(_connect, path, "mode=rwc", journal)
    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, **_JSON_CODEC)
    _engines.add(engine)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and requests the lock later can fail without waiting; one that begins with
        # BEGIN IMMEDIATE waits for the lock: https://sqlite.org/lang_transaction.html.
        writes = connection.get_execution_options().get("autotile_write")
        driver: Any = connection.connection.driver_connection
        try:
            driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        except BaseException:  # such as Ctrl-C while it waits for the lock, which it then holds
            driver.rollback()
            raise

    return engine


def _server_engine(location: ServerLocation, timeout_s: float, *, readonly: bool) -> Engine:
    url = location.reveal()
    limit_s, network, set_up = _server_limits(url, timeout_s, readonly=readonly)
    try:
        engine = create_engine(url, **_JSON_CODEC, connect_args=network)
    except ModuleNotFoundError as error:
        package = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary"}.get(error.name or "", error.name)
        raise DatabaseError(f"{location} needs the Python package {error.name!r}: pip install '{package}'") from None
    except (ArgumentError, TypeError, ValueError) as error:  # a query parameter that the driver does not take
        raise DatabaseError(f"database {location}: {_masked(str(error), location)}") from None
    _engines.add(engine)
    announced = location if timeout_s >= LOCK_TIMEOUT_S else None  # a command, rather than a program that is served

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Dialect, _: object, arguments: list[Any], parameters: dict[str, Any]) -> DBAPIConnection:
        """Connect, and set the connection up: a pooler connects to no server before the first statement."""
        is_cut = threading.Event()

        def cut() -> None:  # libpq has no limit of waiting for an answer while the server's network answers
            with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
                is_cut.set()
                duplicate.shutdown(socket.SHUT_RDWR)

        with _announced(announced, parameters.get("connect_timeout")):
            connection: Any = dialect.connect(*arguments, **parameters)
            try:
                with _timer(limit_s, cut), closing(connection.cursor()) as cursor:
                    cursor.execute(set_up)
                    connection.commit()
            except dialect.loaded_dbapi.Error as error:
                if is_cut.is_set():
                    message = f"no answer to the first statement for {limit_s} s: {_REMEDIES['ConnectionTimeout']}"
                    raise dialect.loaded_dbapi.OperationalError(message) from error
                raise
        return connection  # type: ignore[no-any-return]

    @event.listens_for(engine, "checkin")
    def note_use(_: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def check(connection: DBAPIConnection, record: ConnectionPoolEntry, _: object) -> None:
        """Have a connection replaced that the server has closed; to ask takes as long as a short statement."""
        if time.monotonic() - record.info.get("used_at", math.inf) > _IDLE_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                raise DisconnectionError from error

    return engine


@contextmanager
def _timer(time_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread if what is done meanwhile takes longer."""
    timer = threading.Timer(time_s, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announced(location: ServerLocation | None, limit_s: Any) -> AbstractContextManager[None]:
    """Log a warning if what is done meanwhile takes long; without a location, do not."""
    limit = f" for up to {limit_s} s" if limit_s else ""
    # Without a logging configuration, Python prints warnings on standard error.
    warning = partial(_LOG.warning, "waiting%s for the database %s", limit, location)
    return _timer(_ANNOUNCED_S, warning) if location is not None else nullcontext()


def _server_limits(url: URL, timeout_s: float, *, readonly: bool) -> tuple[int, dict[str, int], str]:
    """Return the limit of connecting in seconds, parameters of libpq, and a statement that sets a connection up.

    What the URL states stays. Startup options in place of the statement would be refused by some connection poolers.
    """
    connect_s = min(timeout_s, _READ_CONNECT_TIMEOUT_S) if readonly else timeout_s
    stated = str(url.query.get("connect_timeout", ""))
    limit_s = int(stated) if stated.isdecimal() and int(stated) else max(_MIN_CONNECT_TIMEOUT_S, math.ceil(connect_s))
    network = {  # https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
        "connect_timeout": limit_s,
        "tcp_user_timeout": math.ceil(1000 * timeout_s),
        "keepalives_idle": max(1, math.ceil(timeout_s / 2)),
        "keepalives_interval": max(1, math.ceil(timeout_s / 2 / _KEEPALIVES)),
        "keepalives_count": _KEEPALIVES,
    }
    uses_libpq = url.get_driver_name() in ("psycopg", "psycopg2")
    timeout_ms = str(math.ceil(1000 * timeout_s))
    settings = {"statement_timeout": timeout_ms, "lock_timeout": timeout_ms, "jit": "off"}  # it takes 60 ms to begin
    if readonly:
        settings["plan_cache_mode"] = "force_generic_plan"
    options = str(url.query.get("options", ""))
    calls = (f"set_config('{name}', '{value}', false)" for name, value in settings.items() if name not in options)
    parameters = {name: value for name, value in network.items() if uses_libpq and name not in url.query}
    return limit_s, parameters, f"SELECT {', '.join(calls) or 1}"


@contextmanager
def translated_errors(location: Location) -> Iterator[None]:
    """Use a database, for which a fork waits; turn errors into a `DatabaseError` that names a remedy."""
    try:
        with fork_guard.use():
            yield
    except (DBAPIError, sqlite3.Error) as error:
        original = error.orig if isinstance(error, DBAPIError) else error
        state = getattr(original, "sqlstate", "")
        code = getattr(original, "sqlite_errorname", "") or state or type(original).__name__
        reason = str(original).strip() or type(original).__name__
        kind = DatabaseError
        if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            kind = DamagedDatabaseError
        elif not isinstance(location, Path) and isinstance(error, DBAPIError):
            is_lost = error.connection_invalidated or code.startswith(_LOST)
            if is_lost or (isinstance(error, OperationalError) and not state):
                kind = LostServerError
        shown = _masked(reason, location)
        remedy = next((remedy for prefix, remedy in _REMEDIES.items() if code.startswith(prefix)), "")
        if isinstance(location, Path) and code.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
            with suppress(OSError):
                if has_wal(location) and not os.access(location.parent, os.W_OK):
                    remedy = (
                        f"its newest entries are in {location.name}-wal, which cannot be read in a folder that is not "
                        "writable: copy both files to a writable folder and name the copy"
                    )
                elif is_disk_full(location.parent):  # SQLite does not always report it as such
                    remedy = _DISK_FULL
        cause = error if shown == reason else None  # whose text holds a secret is not shown by a traceback either
        raise kind(f"database {location}: {shown}" + (f": {remedy}" if remedy else "")) from cause
    except UnicodeEncodeError:  # of a name on a command line that is not UTF-8
        raise DatabaseError(f"database {location}: a name has characters that are not UTF-8; correct it") from None
    except UnicodeDecodeError as error:  # of SQLite's message about a damaged schema, which quotes it
        raise DamagedDatabaseError(f"database {location}: {_REMEDIES['SQLITE_CORRUPT']}") from error
    except SQLAlchemyError as error:
        shown = _masked(str(error), location)
        raise DatabaseError(f"database {location}: {shown}") from (error if shown == str(error) else None)


def _masked(text: str, location: Location) -> str:
    return text if isinstance(location, Path) else masked_message(location.masked(text))


def _connect(path: Path, access: str, journal: str | None = None) -> sqlite3.Connection:
    if any(isinstance(one, _FileConnection) and one.path == path for one in _left):
        raise sqlite3.OperationalError(
            "this process was forked in the middle of a transaction on the file; open it in a process of its own"
        )
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{access}",
        uri=True,
        timeout=LOCK_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        factory=_FileConnection,
    )
    connection.path = path
    try:
        connection.text_factory = _text
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA trusted_schema=OFF")  # a view of someone else calls no function that has effects
        if journal is not None:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables or VERSION_TABLE in tables:  # a file of another program is left alone
                _set_journal(connection, journal)
            # In WAL mode a commit survives the death of the process, and a power failure leaves the file consistent.
            connection.execute(f"PRAGMA synchronous={'NORMAL' if journal == 'WAL' else 'FULL'}")
    except BaseException:
        connection.close()
        raise
    _connections.add(connection)
    return connection


def _set_journal(connection: sqlite3.Connection, journal: str) -> None:
    """Set the journal mode, with retries: SQLite refuses the change without waiting while another process reads."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode={journal}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _text(data: bytes) -> str | bytes:
    """Return the text of a cell, or its bytes if they are not UTF-8, for the schema of the row to refuse."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Connect to a file that need not be writable.

    On a read-only medium or a full disk SQLite cannot create the files that WAL needs even for reading. Without a log
    beside it the file is complete, and is read as immutable.
    """
    if not has_wal(path) and not os.access(path.parent, os.W_OK):
        return _connect(path, "immutable=1")
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("PRAGMA schema_version")
    except BaseException as error:
        connection.close()
        name = error.sqlite_errorname if isinstance(error, sqlite3.OperationalError) else ""
        if has_wal(path) or not name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_FULL")):
            raise
        return _connect(path, "immutable=1")
    return connection


_MIGRATIONS = Path(__file__).with_name("migrations")

_MAX_CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked when they are opened for writing, which takes about 1 ms per MiB."""

UPGRADE_TIMEOUT_S = 600.0
"""Timeout of an upgrade by a command, in seconds."""

_LOCK_KEY = 0x6175746F74696C65
"""Key of the PostgreSQL advisory lock that is held while migrating: "autotile" in ASCII."""


def ensure_schema(engine: Engine, location: Location, timeout_s: float = UPGRADE_TIMEOUT_S) -> None:
    """Create the tables, or run the migrations that an older database lacks, in one transaction.

    Others wait for it for up to ``timeout_s``, which on a server is the timeout of each of its statements, too.
    """
    with engine.connect() as connection:
        if is_current(connection, location):
            return
    with engine.execution_options(**WRITE_OPTIONS).connect() as connection, _turn(connection, timeout_s):
        found = is_current(connection, location)  # another process may have been first
        if found is not None:
            if not found:
                _migrate(connection)
            return
        # What the migrations would leave, without loading Alembic, which takes longer than the rest.
        # A condition that was declared with the index would import all drivers of PostgreSQL in every process.
        _OF_FINALS.dialect_options[connection.dialect.name]["where"] = text("phase = 'final'")
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


def is_current(connection: Connection, location: Location) -> bool | None:
    """Return True if the database has the current schema, False if it is older, None if it is empty, else raise."""

    def execute(statement: str) -> Any:
        return connection.exec_driver_sql(statement).all()

    is_file = connection.dialect.name == "sqlite"
    if is_file and (fault := foreign_object(execute, None)):
        raise _refused(location, fault)
    revision = schema_revision(connection, location)
    if revision is None:
        # A file must be empty; a server's database may have other tables, unless one has a name of ours.
        tables = set(inspect(connection).get_table_names())
        foreign = sorted(tables if isinstance(location, Path) else tables & METADATA.tables.keys())
        if foreign:
            raise DatabaseError(
                f"{location} belongs to another program (it has a table {foreign[0]!r}): name another database"
            )
        return None
    if revision > SCHEMA_REVISION:
        raise DatabaseError(
            f"{location} was written by a newer autotile (schema {revision}; this version knows {SCHEMA_REVISION}): "
            "pip install --upgrade autotile, or name another database"
        )
    if is_file and (fault := foreign_object(execute, revision)):
        raise _refused(location, fault)
    if is_file and revision == SCHEMA_REVISION:
        for name, ours in METADATA.tables.items():
            found = [str(column) for _, column, *_ in execute(f"PRAGMA table_xinfo({name})")]
            if not found:
                raise _refused(location, f"it lacks the table {name!r}")
            if differing := sorted({*found} ^ {*ours.c.keys()}):
                fault = f"its table {name!r} has other columns than autotile's: {differing[0]!r:.80}"
                raise _refused(location, fault)
    return revision == SCHEMA_REVISION


def schema_revision(connection: Connection, location: Location | str) -> str | None:
    """Return the schema revision of a database, one that a version of autotile writes; None if it has no tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revisions = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2")).scalars().all()
    if len(revisions) != 1:
        raise _refused(location, f"its table {VERSION_TABLE} has {len(revisions)} rows, expected one")
    (found,) = revisions
    if not isinstance(found, str) or re.fullmatch("[0-9]{4}", found) is None:
        raise _refused(location, f"its schema has the revision {found!r:.40}, expected one such as {SCHEMA_REVISION!r}")
    if found <= SCHEMA_REVISION and found not in VIEW_DIGESTS:
        raise _refused(location, f"its schema has the revision {found!r}, which no version of autotile has written")
    return found


def _refused(location: Location | str, fault: str) -> DatabaseError:
    return DatabaseError(
        f"the database {location} was changed by another program: {fault}; undo that with sqlite3, restore a copy of "
        "the file, or name another database"
    )


def check_integrity(engine: Engine, path: Path) -> None:
    """Raise `DamagedDatabaseError` if SQLite's quick check finds a fault in a file of moderate size."""
    if path.stat().st_size > _MAX_CHECKED_BYTES:
        return
    with engine.connect() as connection:
        finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if finding != "ok":
        raise DamagedDatabaseError(f"database {path} is damaged: {finding}")


def set_aside(path: Path, seen: tuple[int, int]) -> tuple[str, ...]:
    """Rename a damaged file of an identity, with its log, so that a new one can be created; nothing is deleted.

    Return a notice for the user; none if nothing was done, as another process has replaced the file, or it is healthy.
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
    """Return True if SQLite reads all of a file over a new connection and finds no damage."""
    access = "mode=ro" if has_wal(path) else "immutable=1"  # which makes no files beside it
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?{access}", uri=True)) as connection:
            return connection.execute("PRAGMA integrity_check(1)").fetchall() == [("ok",)]
    except (sqlite3.Error, UnicodeDecodeError):
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
