"""The tuning database: every trial is committed when it ends, and the best results are read from the trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, text

from autotile.core.device import DeviceProperties
from autotile.core.forks import fork_guard
from autotile.core.model import Problem, Trial, config_key
from autotile.database.engine import (
    LOCK_TIMEOUT_S,
    WRITE_OPTIONS,
    DamagedDatabaseError,
    Location,
    ServerLocation,
    open_connections,
    parse_location,
    server_engine,
    sqlite_engine,
    translated_errors,
)
from autotile.database.keys import TuningKey
from autotile.database.paths import check_is_database, check_readable, check_writable, file_identity, network_notice
from autotile.database.queries import ADD_MISSES, MISSES, WINNER, WINNERS, Miss, Query, StoredMiss, Value
from autotile.database.rows import (
    LOCATION_OPTION,
    Phase,
    StoredTrial,
    bad_row,
    insert_trials,
    read_trials,
    standing_trials,
    trial_row,
    warn_of,
)
from autotile.database.schema import now_text
from autotile.database.studies import (
    StoredBest,
    StoredRun,
    StudySummary,
    ensure_study,
    find_study,
    finish_run,
    insert_run,
    list_studies,
    read_best,
    read_runs,
)
from autotile.database.upgrade import (
    UPGRADE_TIMEOUT_S,
    check_integrity,
    ensure_schema,
    is_current,
    schema_revision,
    set_aside,
)
from autotile.database.winners import Winner
from autotile.errors import DatabaseError, DataError
from autotile.settings import read_settings

_MAX_RETRIES = 5
"""Retries of opening a damaged file, which other processes may be replacing at the same time."""


class Database:
    """An open tuning database; safe to use from several threads, and from several processes that each open their own.

    Open it with `Database.open` to write or `Database.open_readonly` to read, and close it or use it in a ``with``
    block. Each method is one transaction, and raises `DatabaseError` if the database cannot be read or written.

    Attributes
    ----------
    location
        The path or URL, without a password.
    notices
        Messages for the user, such as that a damaged file was set aside.
    """

    def __init__(self, engine: Engine, location: Location, *, readonly: bool, notices: tuple[str, ...] = ()) -> None:
        self.location = str(location)
        self.notices = notices
        self._location = location = location.absolute() if isinstance(location, Path) else location
        self._identity = file_identity(location) if isinstance(location, Path) else None
        self._readonly = readonly
        options = {LOCATION_OPTION: self.location}
        # On a server a transaction that reads sees each commit anyway, and costs two round trips.
        reads = {"isolation_level": "AUTOCOMMIT"} if isinstance(location, ServerLocation) else {}
        self._engine = engine.execution_options(**options, **reads)
        self._writer = engine.execution_options(**options, **WRITE_OPTIONS)

    @classmethod
    def open(
        cls, location: str | Path, *, set_damage_aside: bool = True, server_timeout_s: float = LOCK_TIMEOUT_S
    ) -> Self:
        """Open a database for writing; create it if it does not exist, and upgrade it to the current schema.

        A damaged SQLite file is renamed and reported in `notices`, and a new one is created.

        Parameters
        ----------
        location
            Path of an SQLite file, or ``postgresql+psycopg://user:password@host/name``.
        set_damage_aside
            Whether to replace a damaged file; if False, raise instead and leave it unchanged.
        server_timeout_s
            Timeout of connecting to a server (at least 2 s), of each statement and of each lock there, in seconds.

        Raises
        ------
        DatabaseError
            It cannot be created or written, is not a database, belongs to another program or a newer version of
            autotile, or the driver of the server is not installed.
        """
        parsed = parse_location(location)
        if isinstance(parsed, ServerLocation):
            return cls._open_for_writing(parsed, server_timeout_s=server_timeout_s)
        check_writable(parsed)
        notices: tuple[str, ...] = ()
        for _ in range(_MAX_RETRIES):
            seen = file_identity(parsed)
            try:
                if seen is not None:
                    check_readable(parsed)
                return cls._open_for_writing(parsed, notices)
            except DatabaseError as error:
                if seen is None or file_identity(parsed) != seen:
                    continue  # meanwhile another process has set it aside or created it
                if not isinstance(error, DamagedDatabaseError):
                    raise
                with fork_guard.use():
                    _check_is_database(parsed)
                    if not set_damage_aside:
                        raise
                    notices = set_aside(parsed, seen)
        return cls._open_for_writing(parsed, notices)

    @classmethod
    def open_readonly(
        cls, location: str | Path, *, server_timeout_s: float = LOCK_TIMEOUT_S, upgrade: bool = True
    ) -> Self | None:
        """Open a database for reading; return None if there is none, or none with tables. No file is created.

        Parameters
        ----------
        location, server_timeout_s
            As for `open`.
        upgrade
            Whether to upgrade a database of an older version of autotile rather than to raise an error.

        Raises
        ------
        DatabaseError
            The database cannot be read, or belongs to another program or a newer version of autotile.
        """
        parsed = parse_location(location)
        if isinstance(parsed, Path):
            if not parsed.exists():
                return None
            check_readable(parsed)
        engine = _engine(parsed, readonly=True, server_timeout_s=server_timeout_s)
        try:
            with fork_guard.use(), translated_errors(parsed), engine.connect() as connection:
                current = is_current(connection, parsed)
                revision = schema_revision(connection, parsed)
        except BaseException as error:
            engine.dispose()
            if isinstance(error, DamagedDatabaseError) and isinstance(parsed, Path):
                _check_is_database(parsed)
            raise
        if current:
            return cls(engine, parsed, readonly=True)
        engine.dispose()
        if revision is None:
            return None
        if not upgrade:
            raise DatabaseError(
                f"{parsed} was written by an older autotile; the next command that opens it upgrades it"
            )
        cls.open(location, server_timeout_s=server_timeout_s).close()  # upgrades an older database
        return cls(_engine(parsed, readonly=True, server_timeout_s=server_timeout_s), parsed, readonly=True)

    @classmethod
    def _open_for_writing(
        cls, location: Location, notices: tuple[str, ...] = (), *, server_timeout_s: float = LOCK_TIMEOUT_S
    ) -> Self:
        engine = _engine(location, readonly=False, server_timeout_s=server_timeout_s)
        try:
            with fork_guard.use(), translated_errors(location):
                is_session = server_timeout_s >= LOCK_TIMEOUT_S  # a program that is served does not wait for an upgrade
                ensure_schema(engine, location, UPGRADE_TIMEOUT_S if is_session else server_timeout_s)
                if isinstance(location, Path):
                    check_integrity(engine, location)
        except BaseException:
            engine.dispose()
            raise
        network = network_notice(location) if isinstance(location, Path) else ""
        return cls(engine, location, readonly=False, notices=(*notices, *filter(None, [network])))

    def close(self) -> None:
        """Close all connections; using the database afterwards opens new ones."""
        with fork_guard.use():
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path | None:
        """Path of the SQLite file; None for a database on a server."""
        return self._location if isinstance(self._location, Path) else None

    @property
    def argument(self) -> str:
        """The path, or the URL without any secret, for a command line."""
        return self._location.argument() if isinstance(self._location, ServerLocation) else self.location

    def check_in_place(self) -> None:
        """Raise unless the path still leads to the file that was opened.

        SQLite goes on writing to a file that was deleted or moved.

        Raises
        ------
        DatabaseError
            The file is gone, or another one is in its place.
        """
        if isinstance(self._location, Path) and (found := file_identity(self._location)) != self._identity:
            change = "was deleted or moved" if found is None else "was replaced by another file"
            raise DatabaseError(f"the database {self.location} {change} during the run")

    def check_integrity(self) -> None:
        """Check the file as it is on the disk: close all connections, which writes the log into it, and read it anew.

        Raises
        ------
        DatabaseError
            The file cannot be read, or is of moderate size and SQLite finds damage.
        """
        self.close()
        if isinstance(self._location, Path):
            with fork_guard.use(), translated_errors(self._location):
                check_integrity(self._engine, self._location)

    def study(self, key: TuningKey, device: DeviceProperties | None) -> int:
        """Return the id of the study of a key, created if it does not exist.

        Parameters
        ----------
        device
            Stored with a new study; None if an imported result does not state it.
        """
        with self.writing() as connection:
            return ensure_study(connection, key, device)

    def find_study(self, key: TuningKey) -> int | None:
        """Return the id of the study of a key, or None; nothing is created."""
        with self.reading() as connection:
            return find_study(connection, key)

    def studies(self, kernel: str | None = None) -> list[StudySummary]:
        """Return the studies of one kernel, or of all, ordered by kernel and then oldest first."""
        with self.reading() as connection:
            return list_studies(connection, kernel)

    def add_run(
        self,
        study: TuningKey | int,
        trials: Iterable[Trial],
        *,
        sampler: str,
        device: DeviceProperties | None = None,
        phase: Phase = "search",
        is_ranked: bool = False,
        created_at: str | None = None,
        summary: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> int:
        """Store a run that has ended, with its trials, in one transaction; return the id of its study.

        Parameters
        ----------
        study
            Key of the study, which is created if it does not exist, or its id.
        device
            Stored with a new study.
        phase, is_ranked
            Phase of the trials, and whether they are the finals' ranking, the winner first. A trial of the finals
            without a rank is a verdict on its configuration.
        created_at
            Date of the trials; None for now.
        summary, fields
            Columns of the table ``runs``, and the summary stored at its end.
        """
        moment = created_at or now_text()
        with self.writing() as connection:
            study_id = study if isinstance(study, int) else ensure_study(connection, study, device)
            run_id = insert_run(connection, _run_row(study_id, sampler, **fields))
            position = {"study_id": study_id, "run_id": run_id, "phase": phase, "created_at": moment}
            rows = [
                {**position, "rank": rank if is_ranked else None, **trial_row(trial)}
                for rank, trial in enumerate(trials, start=1)
            ]
            insert_trials(connection, rows)
            finish_run(connection, run_id, summary or {})
        return study_id

    def runs(self, study_id: int) -> list[StoredRun]:
        """Return the runs of a study, oldest first."""
        with self.reading() as connection:
            return read_runs(connection, study_id)

    def stored_trials(
        self, study_id: int, *, run_id: int | None = None, phase: Phase | None = None
    ) -> list[StoredTrial]:
        """Return the trials of a study with their positions in the database and times, oldest first."""
        with self.reading() as connection:
            return read_trials(connection, study_id, run_id, phase)

    def standing_trials(self, study_id: int) -> list[StoredTrial]:
        """Return one trial of each configuration, as it is shown and exported; see `rows.standing_trials`."""
        return standing_trials(self.stored_trials(study_id))

    def trials(self, study_id: int, *, run_id: int | None = None, phase: Phase | None = None) -> list[Trial]:
        """Return the trials of a study, oldest first."""
        return [stored.trial for stored in self.stored_trials(study_id, run_id=run_id, phase=phase)]

    def tried(self, study_id: int) -> dict[str, Trial]:
        """Return the newest trial of each configuration, by `config_key`, from which a killed run is resumed."""
        return {config_key(trial.config): trial for trial in self.trials(study_id)}

    def best(
        self,
        kernel: str | None = None,
        *,
        dtype: str | None = None,
        sizes: Mapping[str, int] | None = None,
        gpu_name: str | None = None,
        study_id: int | None = None,
    ) -> list[StoredBest]:
        """Return the best result of each matching study, newest first."""
        with self.reading() as connection:
            return read_best(connection, kernel, dtype=dtype, sizes=sizes, gpu_name=gpu_name, study_id=study_id)

    def read(self, query: Query[Value], **parameters: str | None) -> list[Value]:
        """Run a query of serving.

        Raises
        ------
        DataError
            A row does not match its schema. If the query names its table, the row is skipped instead, with a warning.
        """
        found, bad = [], []
        with self.reading() as connection:
            for row in connection.execute(text(query.sql), parameters).mappings():
                values = {str(name): value for name, value in row.items()}  # plain strings, which a schema needs
                try:
                    found.append(query.parse(values))
                except DataError as error:
                    if query.table is None:
                        raise
                    bad.append(bad_row(query.table, values["id"], error).row)
            warn_of(connection, bad)
        return found

    def winners(self, kernel: str, dtype: str) -> list[Winner]:
        """Return the winner of each study of a kernel, newest first, without reading the rest of its trial and run."""
        try:
            return self.read(WINNERS, kernel=kernel, dtype=dtype)
        except DataError:  # `best` names the bad row, and takes the next best
            return [best.winner for best in self.best(kernel, dtype=dtype)]

    def winner(self, key: TuningKey) -> Winner | None:
        """Return the winner of the study of a key; None if there is none."""
        try:
            found = self.read(WINNER, digest=key.digest)
        except DataError:
            study_id = self.find_study(key)
            found = [best.winner for best in self.best(study_id=study_id)] if study_id is not None else []
        return found[0] if found else None

    def record_miss(self, problem: Problem, gpu_name: str, tier: str, count: int = 1) -> None:
        """Count requests of a problem that were served by ``tier`` instead of an exact result."""
        self.add_misses([Miss(problem, gpu_name, tier, count)])

    def add_misses(self, misses: Iterable[Miss]) -> None:
        """Add to the counts of misses, in one transaction."""
        with self.writing() as connection:
            connection.execute(text(ADD_MISSES), [miss.row() for miss in misses])

    def misses(self, kernel: str | None = None) -> list[StoredMiss]:
        """Return the requested problems that were not served exactly, most frequent first."""
        return self.read(MISSES, kernel=kernel)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Begin a transaction that reads."""
        with fork_guard.use(), translated_errors(self._location), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, connection: Connection | None = None) -> Iterator[Connection]:
        """Begin a transaction that writes, over a connection of `connect` or another one."""
        if self._readonly:
            raise DatabaseError(f"{self.location} is open for reading only; open it with Database.open to write")
        with fork_guard.use(), translated_errors(self._location):
            if connection is None:
                with self._writer.begin() as begun:
                    yield begun
            else:
                with connection.begin():
                    yield connection

    def connect(self) -> Connection:
        """Open a connection for many transactions that write, one after the other; the caller closes it.

        It is closed before each fork of the process: use it inside of `autotile.core.forks.fork_guard` only, and open
        another one when the guard's generation has changed.
        """
        with fork_guard.use(), translated_errors(self._location):
            return self._writer.connect()


def _check_is_database(path: Path) -> None:
    """Check the start of a file, unless this process has it open: closing a descriptor would end SQLite's locks."""
    if not open_connections(path):
        check_is_database(path)


def _engine(location: Location, *, readonly: bool, server_timeout_s: float) -> Engine:
    if isinstance(location, Path):
        return sqlite_engine(location, readonly=readonly)
    return server_engine(location, server_timeout_s, readonly=readonly)


def database_location(database: str | Path | None) -> str | Path:
    """Return the given path or URL, or the location of the user's own database if it is None."""
    return database if database is not None else read_settings().database


def location_text(database: str | Path | None) -> str:
    """Return the location of a database as it may be shown: the password of a URL is masked.

    Raises
    ------
    DatabaseError
        The URL is of an unsupported kind.
    """
    return str(parse_location(database_location(database)))


def open_for_reading(database: str | Path | None) -> Database | None:
    """Open a database for reading; return None if the user's own does not exist yet.

    Parameters
    ----------
    database
        Path or URL; None for the user's own.

    Raises
    ------
    DatabaseError
        It cannot be read, or a database given by name does not exist: a mistyped path must not pass for an empty
        database.
    """
    return open_existing(database) if database is not None else Database.open_readonly(read_settings().database)


def open_existing(database: str | Path) -> Database:
    """Open the database at a path or URL for reading.

    Raises
    ------
    DatabaseError
        It does not exist, or cannot be read.
    """
    opened = Database.open_readonly(database)
    if opened is None:
        location = parse_location(database)
        missing = isinstance(location, Path) and not location.exists()
        fault = f"there is no database {location}" if missing else f"{location} holds no tuning results and no tables"
        raise DatabaseError(f"{fault}; check its {'path' if isinstance(location, Path) else 'URL'}")
    return opened


def _run_row(
    study_id: int,
    sampler: str,
    *,
    seed: int | None = None,
    driver: str = "",
    host: str = "",
    settings: Mapping[str, Any] | None = None,
    gates: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    documents = {"settings": dict(settings or {}), "gates": dict(gates or {})}
    return {"study_id": study_id, "sampler": sampler, "seed": seed, "driver": driver, "host": host, **documents}
