"""The tuning database: studies, runs and trials as they are stored and read. The best results are read from the trials.

Each row is parsed by the schema of its table; one that does not match is skipped and named once. The names of most
columns are those of the fields that they become, so that a row is a valid document of several dataclasses at once.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, Self

from msgspec import structs
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Label,
    Select,
    Table,
    TableClause,
    literal_column,
    select,
    text,
    update,
)

from autotile.core.device import DeviceProperties
from autotile.core.documents import Count, Moment, Name, NonNegative, TimeUs, Whole, convert, json_text, storable
from autotile.core.forks import fork_guard
from autotile.core.model import Config, LaunchGeometry, Occupancy, Outcome, Sizes, Trial
from autotile.database.engine import (
    BEST,
    LOCK_TIMEOUT_S,
    RUNS,
    STUDIES,
    TRIALS,
    UPGRADE_TIMEOUT_S,
    WRITE_OPTIONS,
    DamagedDatabaseError,
    Location,
    ServerLocation,
    check_integrity,
    ensure_schema,
    insert_for,
    is_current,
    now_text,
    open_connections,
    open_engine,
    parse_location,
    set_aside,
    stored_moment,
    translated_errors,
)
from autotile.database.keys import TuningKey
from autotile.database.paths import (
    check_is_database,
    check_readable,
    check_writable,
    file_identity,
    network_file_system,
)
from autotile.database.winners import (
    ADD_MISSES,
    MEASUREMENT_COLUMNS,
    RESOURCE_COLUMNS,
    RULES,
    STORED_MISSES,
    UNVERIFIED_SAMPLER,
    WINNER,
    WINNERS,
    Query,
    Row,
    StoredMiss,
    StoredRule,
    Value,
    Winner,
    part_of,
)
from autotile.errors import DatabaseError, DataError, DataWarning
from autotile.kernel.library import KernelName, held_kernel, load_kernel
from autotile.settings import read_settings
from autotile.version import __version__

_LOCATION_OPTION = "autotile_location"
"""Execution option of a connection that holds the location of the database, for warnings."""

_NAMED_ROWS = 3
"""Rows that a warning names; `autotile db check` names all."""
_MAX_FAULT = 200
_PARTS = re.compile(r"\A(?:(?:key|problem|trial|geometry|resources|occupancy|measurement)\.)+")
"""Parts of the objects that a row becomes, which are no columns."""


class BadRowError(DataError):
    """Row that does not match the schema of its table; ``field`` is a column, with the path of a value inside it."""

    def __init__(self, table: str, row_id: int, error: DataError) -> None:
        column = _PARTS.sub("", error.field) if table != "families" else error.field
        super().__init__(error.fault[:_MAX_FAULT], field=column)
        self.table = table
        self.row_id = row_id

    def __str__(self) -> str:
        return f"{self.table} {self.row_id}: {super().__str__()}"


def row_of(table: Table | str) -> Callable[[Callable[[Row], Value]], Callable[[Row], Value]]:
    """Let a function of a row, with its id, raise a `BadRowError` in place of each other `DataError`."""

    def named(parse: Callable[[Row], Value]) -> Callable[[Row], Value]:
        @wraps(parse)
        def parsed(row: Row) -> Value:
            try:
                return parse(row)
            except DataError as error:
                raise BadRowError(str(table), row["id"], error) from None

        return parsed

    return named


def parsed_rows(
    connection: Connection,
    query: Executable,
    parse: Callable[[Row], Value],
    bad: list[BadRowError] | None = None,
    parameters: Row | None = None,
) -> list[Value]:
    """Run a query and parse its rows; those that raise a `BadRowError` go to ``bad``, or are warned of."""
    found: list[Value] = []
    refused: list[BadRowError] = [] if bad is None else bad
    for row in rows_of(connection, query, parameters):
        try:
            found.append(parse(row))
        except BadRowError as error:
            refused.append(error)
    if bad is None:
        warn_of(connection, refused)
    return found


def matching(query: Select[Any], table: TableClause, **values: object) -> Select[Any]:
    """Return a query for the rows whose columns in a table have the given values; None selects all."""
    return query.where(*(table.c[name] == value for name, value in values.items() if value is not None))


def rows_of(connection: Connection, query: Executable, parameters: Row | None = None) -> Iterator[Row]:
    """Run a query, and yield its rows as dictionaries with plain strings as keys, which a schema needs."""
    result = connection.execute(query, parameters)
    names = [str(name) for name in result.keys()]  # noqa: SIM118 - it is no dictionary
    for row in result:
        yield dict(zip(names, row, strict=True))


_named: set[tuple[str, str]] = set()
"""Rows that this process has named, with the location of their database."""


def warn_of(connection: Connection, rows: Iterable[BadRowError]) -> None:
    """Warn of rows that are skipped, unless this process has done so already."""
    location = connection.get_execution_options().get(_LOCATION_OPTION, "the database")
    new = [row for row in dict.fromkeys(map(str, rows)) if (location, row) not in _named]
    if not new:
        return
    _named.update((location, row) for row in new)
    more = f"; and {len(new) - _NAMED_ROWS:,} more" if len(new) > _NAMED_ROWS else ""
    warnings.warn(
        f"{location}: skipped {len(new):,} unusable {'row' if len(new) == 1 else 'rows'}: "
        f"{'; '.join(new[:_NAMED_ROWS])}{more}; `autotile db check` lists all",
        DataWarning,
        stacklevel=2,
    )


Phase = Literal["search", "final"]

_COLUMNS_OF: Mapping[str, tuple[str, ...]] = {
    "geometry": LaunchGeometry.__struct_fields__,
    "resources": RESOURCE_COLUMNS,
    "occupancy": Occupancy.__struct_fields__,
    "measurement": ("samples_us", *MEASUREMENT_COLUMNS),
}
"""Columns of the parts of a trial; all of a part that it lacks are null."""
_FIGURES = ("energy_mj", "max_error", "reference_us", "repeats")
"""Telemetry that other modules calculate with."""


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with its position in the database and the time at which it was recorded."""

    trial_id: Whole
    study_id: Whole
    run_id: Whole
    phase: Phase
    rank: Count | None
    """Rank in the run's finals, 1 for the winner; None for trials of the search."""
    created_at: Moment
    trial: Trial

    @property
    def is_refusal(self) -> bool:
        """Whether finals have rejected the configuration, which the trials before it cannot win with any more."""
        return self.phase == "final" and self.trial.outcome is not Outcome.OK


def trial_row(trial: Trial) -> Row:
    """Return the columns of the table ``trials`` that the trial itself determines."""
    columns = {name: getattr(getattr(trial, part), name, None) for part, names in _COLUMNS_OF.items() for name in names}
    if trial.occupancy is not None:
        columns["limits"] = dict(trial.occupancy.limits)
    # JSON has no infinity and no NaN
    telemetry = {n: v for n, v in trial.telemetry.items() if not isinstance(v, float) or math.isfinite(v)}
    return {
        "config_key": trial.config_key,
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": storable(trial.reason),
        "cubin_hash": trial.cubin_hash,
        "telemetry": telemetry,
        "seconds": dict(trial.seconds),
        "source": trial.source,
        "gpu": trial.gpu,
        **columns,
    }


@row_of(TRIALS)
def stored_trial(row: Row) -> StoredTrial:
    """Return the trial in a complete row of the table."""
    columns = {**row, "samples_us": row["samples_us"] if row["samples_us"] is not None else ()}
    parts = {part: columns if part_of(row, names) else None for part, names in _COLUMNS_OF.items()}
    value = {**columns, "trial_id": row["id"], "trial": {**columns, **parts}}
    found = convert(value, StoredTrial)
    for name in _FIGURES:
        try:
            convert(found.trial.telemetry.get(name, 0.0), NonNegative)
        except DataError as error:
            raise DataError(error.fault, field=f"telemetry.{name}") from None
    if row["config_key"] != found.trial.config_key:
        raise DataError("it is not that of the configuration", field="config_key")
    return found


_COLUMNS = [column.name for column in TRIALS.c if not column.primary_key]
_JSON_COLUMNS = [column.name for column in TRIALS.c if isinstance(column.type, JSON)]
_INSERT = f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"
_PARAMETER = re.compile(r"(?<!:):(\w+)")


def run_text(connection: Connection, statement: str, values: Row | Sequence[Row]) -> Sequence[tuple[Any, ...]]:
    """Run a statement with values by their names, ``:name``; return its rows, none of one without ``RETURNING``.

    A session commits several short transactions for each batch of trials. SQLAlchemy's statements would take several
    times as long as the database itself.
    """
    if connection.dialect.name == "postgresql":
        result = connection.exec_driver_sql(_server_text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else ()
    driver: Any = connection.connection.driver_connection
    run = driver.execute if isinstance(values, Mapping) else driver.executemany
    rows: Sequence[tuple[Any, ...]] = run(statement, values).fetchall()
    return rows


@cache
def _server_text(statement: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", statement)


def insert_trials(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert trials, given by all of their columns but the id."""
    if rows:
        encoded = (
            {name: None if row[name] is None else json_text(row[name]) for name in _JSON_COLUMNS} for row in rows
        )
        run_text(connection, _INSERT, [{**row, **cells} for row, cells in zip(rows, encoded, strict=True)])


def standing_trials(stored: Iterable[StoredTrial]) -> list[StoredTrial]:
    """Return one trial of each configuration, the one to show, in the order in which they were first tried.

    A study has several rows of a configuration that was in the finals, was tried by several sessions or was measured
    anew. The newest finals stand, as they compare the times in turn, unless the configuration was tried again since
    then and either of both failed. The given trials are of one study, oldest first.
    """
    found: dict[str, StoredTrial] = {}
    for one in stored:
        key = one.trial.config_key
        before = found.get(key)
        is_kept = before is not None and before.phase == "final" and one.phase == "search"
        if not (is_kept and before is not None and before.trial.outcome is one.trial.outcome is Outcome.OK):
            found[key] = one
    return list(found.values())


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run: a tuning session, an import, a merge or a verification."""

    run_id: Whole
    study_id: Whole
    started_at: Moment
    ended_at: Moment | None
    """None during the run, and permanently if it was killed."""
    sampler: Name
    seed: Whole | None
    settings: Mapping[str, Any]
    driver: Name
    host: Name
    autotile_version: Name
    gates: Mapping[str, Any]
    """Number of configurations that passed each gate."""
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """One study: its key, and the device that it was started on."""

    study_id: Whole
    key: TuningKey
    device: DeviceProperties | None
    """None if an imported result does not state it."""
    created_at: Moment


@dataclass(frozen=True, slots=True)
class StudySummary(StoredStudy):
    """One study in a listing."""

    runs: int
    trials: int
    """Configurations that were tried, each counted once."""
    ok: int
    """Number of configurations that were verified and measured, and refused neither by finals nor since then."""
    last_at: datetime | None
    """Time at which the newest trial was recorded."""
    best_config: Config | None
    best_time_us: float | None


@row_of(RUNS)
def stored_run(row: Row) -> StoredRun:
    """Return the run in a row of the table."""
    return convert({**row, "run_id": row["id"]}, StoredRun)


@row_of(STUDIES)
def stored_study(row: Row) -> StoredStudy:
    """Return the study in a row of the table."""
    found = convert({**row, "study_id": row["id"], "key": row}, StoredStudy)
    if row["digest"] != found.key.digest:
        raise DataError("it is not that of the key", field="digest")
    return found


def ensure_study(connection: Connection, key: TuningKey, device: DeviceProperties | None) -> int:
    """Return the id of the study of a key, created if it does not exist."""
    values = key.to_json() | {
        "digest": key.digest,
        "device": device.to_json() if device else None,
        "created_at": now_text(),
    }
    connection.execute(insert_for(connection, STUDIES).on_conflict_do_nothing(index_elements=["digest"]), values)
    found = study_with(connection, key.digest)
    assert found is not None
    return found


def study_with(connection: Connection, digest: str) -> int | None:
    """Return the id of the study whose key has a digest, or None."""
    rows = run_text(connection, "SELECT id FROM studies WHERE digest = :digest", {"digest": digest})
    return int(rows[0][0]) if rows else None


def insert_run(connection: Connection, values: Row) -> int:
    """Start a run and return its id."""
    documents: Row = {"settings": {}, "gates": {}, "summary": {}}
    row = {"started_at": now_text(), "autotile_version": __version__, "driver": "", "host": "", **documents, **values}
    return int(connection.execute(RUNS.insert().returning(RUNS.c.id), row).scalar_one())


def finish_run(connection: Connection, run_id: int, summary: Mapping[str, Any]) -> bool:
    """Mark a run as finished; return False if there is no such run."""
    change = update(RUNS).where(RUNS.c.id == run_id).values(ended_at=now_text(), summary=dict(summary))
    return connection.execute(change).rowcount == 1


_RUNS_OF = "(SELECT count(*) FROM runs WHERE runs.study_id = studies.id)"
_TRIALS_OF = "(SELECT count({}) FROM trials WHERE trials.study_id = studies.id{})"
_TRIED = _TRIALS_OF.format("DISTINCT config_key", "")
_SEARCHED = _TRIALS_OF.format("*", " AND phase = 'search'")
_OK = _TRIALS_OF.format("*", " AND outcome = 'ok'")
# the concatenation keeps SQLite from the index of times, in which finals are not apart from the others
_OK_FINALS = _TRIALS_OF.format("*", " AND phase = 'final' AND outcome || '' = 'ok'")
_REFUSED = _TRIALS_OF.format("*", " AND phase = 'final' AND outcome || '' <> 'ok'")
_NEWEST = "SELECT max(own.id) FROM trials AS own WHERE own.study_id = studies.id GROUP BY own.config_key"
_NEWEST_OK = _TRIALS_OF.format("*", f" AND outcome = 'ok' AND trials.id IN ({_NEWEST})")
_NEWEST_OF_RUN = "SELECT max(trials.id) FROM trials WHERE trials.run_id = runs.id"
_LAST = f"SELECT max(({_NEWEST_OF_RUN})) FROM runs WHERE runs.study_id = studies.id"
_IS_SIMPLE = f"{_RUNS_OF} = 1 AND {_SEARCHED} > 0 AND {_REFUSED} = 0"
_STUDY_COUNTS = {
    "runs": _RUNS_OF,
    "trials": f"CASE WHEN {_IS_SIMPLE} THEN {_SEARCHED} ELSE {_TRIED} END",
    "ok": f"CASE WHEN {_IS_SIMPLE} THEN {_OK} - {_OK_FINALS} ELSE {_NEWEST_OK} END",
    "last_at": f"(SELECT created_at FROM trials WHERE trials.id = ({_LAST}))",
}
"""Numbers of runs and of configurations of a study, and the time of its newest trial, in SQL.

A configuration is ok if its newest trial is, as in `standing_trials`. The trials of a study with one run, which tries
none twice, are counted in the indexes, if its finals refused none.
"""


CONTEST = "contest"
"""Sampler of the runs that hold a race of the kernels of an operation with its libraries."""


@dataclass(frozen=True, slots=True)
class StoredBest:
    """The best result of a study, with its trial and run."""

    study_id: int
    winner: Winner
    trial: Trial
    confirmed: bool
    """Whether it won the finals of a finished run; otherwise it is only the fastest configuration of a search."""
    run: StoredRun

    @property
    def key(self) -> TuningKey:
        """The study's key."""
        return self.winner.key


_BEST_ROWS = (
    select(STUDIES, TRIALS, RUNS)
    .select_from(STUDIES)
    .join(BEST, STUDIES.c.id == BEST.c.study_id)
    .join(TRIALS, TRIALS.c.id == BEST.c.trial_id)
    .join(RUNS, RUNS.c.id == TRIALS.c.run_id)
    .order_by(TRIALS.c.id.desc())
)
"""Best trial of each study with its study and its run, newest first. Made once, which takes longer than to run it."""


def _next_best(connection: Connection, study: StoredStudy, bad: list[BadRowError]) -> StoredBest | None:
    """Return the best result of a study among the rows that can be used, by the order of the view ``best``."""
    trials_query = select(TRIALS).where(TRIALS.c.study_id == study.study_id).order_by(TRIALS.c.id)
    runs_query = select(RUNS).where(RUNS.c.study_id == study.study_id)
    trials = parsed_rows(connection, trials_query, stored_trial, bad)
    runs = {run.run_id: run for run in parsed_rows(connection, runs_query, stored_run, bad)}
    refused = {one.trial.config_key: one.trial_id for one in trials if one.is_refusal}
    usable = [
        one
        for one in trials
        if one.trial.outcome is Outcome.OK
        and one.trial.measurement is not None
        and one.run_id in runs
        and refused.get(one.trial.config_key, 0) < one.trial_id
    ]
    finals = [one for one in usable if one.phase == "final" and one.rank == 1 and runs[one.run_id].ended_at is not None]
    verified = [one for one in usable if runs[one.run_id].sampler != UNVERIFIED_SAMPLER]
    best = finals[-1] if finals else min(verified, key=lambda one: (one.trial.cost, one.trial_id), default=None)
    return _stored_best(study, best, runs[best.run_id]) if best is not None else None


def _stored_best(study: StoredStudy, stored: StoredTrial, run: StoredRun) -> StoredBest:
    trial, device = stored.trial, study.device
    if device is not None and run.driver:  # a study may outlive the driver that it was started with
        device = structs.replace(device, driver=run.driver)
    measurement = replace(trial.measurement, samples_us=()) if trial.measurement is not None else None
    winner = Winner(study.key, device, trial.config, trial.resources, measurement, stored.created_at)
    return StoredBest(study.study_id, winner, trial, stored.phase == "final", run)


_MAX_RETRIES = 5
"""Retries of opening a damaged file, which other processes may be replacing at the same time."""


class Database(AbstractContextManager["Database"]):
    """An open tuning database; safe to use from several threads, and from several processes that each open their own.

    Open it with `Database.open` to write or `Database.open_readonly` to read, and close it or use it in a ``with``
    block. Each method is one transaction, and raises `DatabaseError` if the database cannot be read or written.
    """

    def __init__(self, engine: Engine, location: Location, *, readonly: bool, notices: tuple[str, ...] = ()) -> None:
        self.location = str(location)
        """The path or URL, without a password."""
        self.notices = notices
        """Messages for the user, such as that a damaged file was set aside."""
        self.argument = location.argument() if isinstance(location, ServerLocation) else self.location
        """The path, or the URL without any secret, for a command line."""
        self.path = location.absolute() if isinstance(location, Path) else None
        """Path of the SQLite file; None for a database on a server."""
        self._location = self.path or location
        self.place = str(self._location)
        """The location with an absolute path, for what is kept: the working directory may change."""
        self._identity = file_identity(self.path) if self.path is not None else None
        self._readonly = readonly
        options = {_LOCATION_OPTION: self.location}
        # On a server a transaction that reads sees each commit anyway, and costs two round trips.
        reads = {"isolation_level": "AUTOCOMMIT"} if isinstance(location, ServerLocation) else {}
        self._engine = engine.execution_options(**options, **reads)
        self._writer = engine.execution_options(**options, **WRITE_OPTIONS)

    @classmethod
    def open(
        cls, location: str | Path, *, set_damage_aside: bool = True, server_timeout_s: float = LOCK_TIMEOUT_S
    ) -> Self:
        """Open a database for writing; create it if it does not exist, and upgrade it to the current schema.

        A damaged SQLite file is renamed and reported in `notices`, and a new one is created; without
        ``set_damage_aside``, that is an error and the file is left unchanged. ``server_timeout_s`` is as for
        `open_engine`. One that belongs to another program or a newer autotile is a `DatabaseError`.
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
                    if not open_connections(parsed):  # closing a descriptor would end SQLite's locks
                        check_is_database(parsed)
                    if not set_damage_aside:
                        raise
                    notices = set_aside(parsed, seen)
        return cls._open_for_writing(parsed, notices)

    @classmethod
    def open_readonly(
        cls, location: str | Path, *, server_timeout_s: float = LOCK_TIMEOUT_S, upgrade: bool = True
    ) -> Self | None:
        """Open a database for reading; return None if there is none, or none with tables. No file is created.

        Without ``upgrade``, a database of an older autotile is a `DatabaseError`; others are as for `open`.
        """
        parsed = parse_location(location)
        if isinstance(parsed, Path):
            if not parsed.exists():
                return None
            check_readable(parsed)
        engine = open_engine(parsed, server_timeout_s, readonly=True)
        try:
            with translated_errors(parsed), engine.connect() as connection:
                current = is_current(connection, parsed)
        except BaseException as error:
            engine.dispose()
            if isinstance(error, DamagedDatabaseError) and isinstance(parsed, Path) and not open_connections(parsed):
                check_is_database(parsed)
            raise
        if current:
            return cls(engine, parsed, readonly=True)
        engine.dispose()
        if current is None:
            return None
        if not upgrade:
            raise DatabaseError(
                f"{parsed} was written by an older autotile; the next command that opens it upgrades it"
            )
        cls.open(location, server_timeout_s=server_timeout_s).close()  # upgrades an older database
        return cls(open_engine(parsed, server_timeout_s, readonly=True), parsed, readonly=True)

    @classmethod
    def _open_for_writing(
        cls, location: Location, notices: tuple[str, ...] = (), *, server_timeout_s: float = LOCK_TIMEOUT_S
    ) -> Self:
        engine = open_engine(location, server_timeout_s)
        try:
            with translated_errors(location):
                is_session = server_timeout_s >= LOCK_TIMEOUT_S  # a program that is served does not wait for an upgrade
                ensure_schema(engine, location, UPGRADE_TIMEOUT_S if is_session else server_timeout_s)
                if isinstance(location, Path):
                    check_integrity(engine, location)
        except BaseException:
            engine.dispose()
            raise
        if isinstance(location, Path) and (kind := network_file_system(location)):
            notices = (
                *notices,
                f"the database {location} lies on a network file system ({kind}): it is used without write-ahead "
                "logging, so readers wait for writers; for several hosts at once, use a PostgreSQL server",
            )
        return cls(engine, location, readonly=False, notices=notices)

    def close(self) -> None:
        """Close all connections; using the database afterwards opens new ones."""
        with fork_guard.use():
            self._engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_in_place(self) -> None:
        """Raise `DatabaseError` if the file that was opened is gone, or another one is in its place.

        SQLite goes on writing to a file that was deleted or moved.
        """
        if self.path is not None and (found := file_identity(self.path)) != self._identity:
            change = "was deleted or moved" if found is None else "was replaced by another file"
            raise DatabaseError(f"the database {self.location} {change} during the run")

    def check_integrity(self) -> None:
        """Check the file on the disk: close all connections, which writes the log into it, and read it anew."""
        self.close()
        if self.path is not None:
            with translated_errors(self.path):
                check_integrity(self._engine, self.path)

    def study(self, key: TuningKey, device: DeviceProperties | None) -> int:
        """Return the id of the study of a key; with a new one, the device is stored, None if it is not known."""
        with self.writing() as connection:
            return ensure_study(connection, key, device)

    def find_study(self, key: TuningKey) -> int | None:
        """Return the id of the study of a key, or None; nothing is created."""
        with self.reading() as connection:
            return study_with(connection, key.digest)

    def studies(self, kernel: str | None = None) -> list[StudySummary]:
        """Return the studies of one kernel, or of all, ordered by kernel and then oldest first."""
        counts: list[Label[Any]] = [literal_column(sql).label(name) for name, sql in _STUDY_COUNTS.items()]
        query = matching(select(STUDIES, *counts).order_by(STUDIES.c.kernel, STUDIES.c.id), STUDIES, kernel=kernel)
        fastest = matching(select(BEST.c.study_id, BEST.c.config, BEST.c.time_us), BEST, kernel=kernel)
        winners: dict[int, tuple[Config, float]] = {}
        with self.reading() as connection:
            rows = connection.execute(fastest).all()
            try:
                winners = {study: convert((config, time_us), tuple[Config, TimeUs]) for study, config, time_us in rows}
            except DataError:  # `best` names the bad rows, and takes the next best
                for best in self.best(kernel):
                    if best.trial.time_us is not None:
                        winners[best.study_id] = best.trial.config, best.trial.time_us

            def summary(row: Row) -> StudySummary:
                study = stored_study(row)
                last_at = None
                with suppress(DataError):  # of a trial that does not match its schema
                    last_at = convert(row["last_at"], datetime) if row["last_at"] is not None else None
                identity = (study.study_id, study.key, study.device, study.created_at)
                counts = (row["runs"], row["trials"], row["ok"], last_at)
                return StudySummary(*identity, *counts, *winners.get(study.study_id, (None, None)))

            return parsed_rows(connection, query, summary)

    def add_run(
        self,
        study: TuningKey | int,
        trials: Iterable[Trial],
        *,
        sampler: str,
        device: DeviceProperties | None = None,
        phase: Phase = "search",
        is_ranked: bool = False,
        created_at: datetime | None = None,
        **columns: Any,
    ) -> int:
        """Store a run that has ended, with its trials, in one transaction; return the id of its study.

        The study of a key is created if it does not exist, with the device. Ranked trials are the finals' ranking, the
        winner first; a trial of the finals without a rank is a verdict on its configuration. ``created_at`` is the date
        of the trials, None for now; ``columns`` are those of the table ``runs``, the driver that of the device if it is
        not given.
        """
        now = now_text()
        moment = stored_moment(created_at) if created_at is not None else now
        own = {"started_at": now, "ended_at": now, "driver": device.driver if device is not None else ""}
        with self.writing() as connection:
            study_id = study if isinstance(study, int) else ensure_study(connection, study, device)
            run_id = insert_run(connection, {"study_id": study_id, "sampler": sampler, **own, **columns})
            position = {"study_id": study_id, "run_id": run_id, "phase": phase, "created_at": moment}
            rows = [
                {**position, "rank": rank if is_ranked else None, **trial_row(trial)}
                for rank, trial in enumerate(trials, start=1)
            ]
            insert_trials(connection, rows)
        return study_id

    def rows(
        self, table: Table, parse: Callable[[Row], Value], *order: ColumnElement[Any], **columns: object
    ) -> list[Value]:
        """Return the parsed rows of a table with the given columns, oldest first after an order; None selects all."""
        query = matching(select(table).order_by(*order, table.c.id), table, **columns)
        with self.reading() as connection:
            return parsed_rows(connection, query, parse)

    def runs(self, study_id: int) -> list[StoredRun]:
        """Return the runs of a study, oldest first."""
        return self.rows(RUNS, stored_run, study_id=study_id)

    def stored_trials(self, study_id: int, *, phase: Phase | None = None) -> list[StoredTrial]:
        """Return the trials of a study with their positions in the database and times, oldest first."""
        return self.rows(TRIALS, stored_trial, study_id=study_id, phase=phase)

    def trials(self, study_id: int, *, phase: Phase | None = None) -> list[Trial]:
        """Return the trials of a study, oldest first."""
        return [stored.trial for stored in self.stored_trials(study_id, phase=phase)]

    def best(
        self,
        kernel: str | None = None,
        *,
        study_id: int | None = None,
        sizes: Sizes | None = None,
        **columns: str | None,
    ) -> list[StoredBest]:
        """Return the best result of each study with the given columns, newest first; None selects all.

        In place of a row that cannot be used, the next best of its study is taken: of one that is damaged, or of a run
        of `UNVERIFIED_SAMPLER`.
        """
        query = matching(_BEST_ROWS, STUDIES, kernel=kernel, id=study_id, **columns)
        bad: list[BadRowError] = []
        found: list[StoredBest] = []
        with self.reading() as connection:
            for row in connection.execute(query).all():
                cells = iter(row)
                # plain strings, which a schema needs
                parts = [{str(name): next(cells) for name in table.c.keys()} for table in (STUDIES, TRIALS, RUNS)]  # noqa: SIM118
                try:
                    study = stored_study(parts[0])
                except BadRowError as error:
                    bad.append(error)
                    continue
                best = None
                try:
                    run = stored_run(parts[2])
                    if run.sampler != UNVERIFIED_SAMPLER:
                        best = _stored_best(study, stored_trial(parts[1]), run)
                except BadRowError as error:
                    bad.append(error)
                best = best or _next_best(connection, study, bad)
                if best is not None and (sizes is None or best.key.sizes == dict(sizes)):
                    found.append(best)
            warn_of(connection, bad)
        return found

    def read(self, query: Query[Value], **parameters: str | None) -> list[Value]:
        """Run a query of serving; a row that does not match raises, or is skipped if the query names its table.

        In place of a winner that does not match, the next best of its study is taken.
        """
        parse = query.parse if query.table is None else row_of(query.table)(query.parse)
        try:
            with self.reading() as connection:
                return parsed_rows(connection, text(query.sql), parse, parameters=parameters)
        except DataError:
            if query not in (WINNER, WINNERS):
                raise
            columns: Any = parameters
            found: Any = [best.winner for best in self.best(**columns)]  # which names the bad row
            return list(found)

    def add_misses(self, rows: Sequence[Row]) -> None:
        """Add to the counts of misses, in one transaction."""
        with self.writing() as connection:
            connection.execute(text(ADD_MISSES), rows)

    def rules(self, kernel: str | None = None, dtype: str | None = None) -> list[StoredRule]:
        """Return the rules of the families of a kernel, or of all, newest first."""
        return self.read(RULES, kernel=kernel, dtype=dtype)

    def misses(self, kernel: str | None = None) -> list[StoredMiss]:
        """Return the requested problems that were not served exactly, most frequent first."""
        return self.read(STORED_MISSES, kernel=kernel)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Begin a transaction that reads."""
        with translated_errors(self._location), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, connection: Connection | None = None) -> Iterator[Connection]:
        """Begin a transaction that writes, over a connection of `connect` or another one."""
        if self._readonly:
            raise DatabaseError(f"{self.location} is open for reading only; open it with Database.open to write")
        with (
            translated_errors(self._location),
            nullcontext(connection) if connection is not None else self._writer.connect() as used,
            used.begin(),
        ):
            yield used

    def connect(self) -> Connection:
        """Open a connection for many transactions that write, one after the other; the caller closes it.

        It is closed before each fork of the process: use it inside of `autotile.core.forks.fork_guard` only, and open
        another one when the guard's generation has changed.
        """
        with translated_errors(self._location):
            return self._writer.connect()


def database_location(database: str | Path | None) -> str | Path:
    """Return the given path or URL, or the location of the user's own database if it is None."""
    return database if database is not None else read_settings().database


def location_text(database: str | Path | None) -> str:
    """Return the location of a database as it may be shown: the password of a URL is masked."""
    return str(parse_location(database_location(database)))


@contextmanager
def open_for_reading(database: str | Path | None) -> Iterator[Database | None]:
    """Provide a database for reading; None if it is None and the user's own does not exist yet.

    One that is given by name must exist: a mistyped path must not pass for an empty database.
    """
    opened = open_existing(database) if database is not None else Database.open_readonly(read_settings().database)
    with opened or nullcontext():
        yield opened


def open_existing(database: str | Path) -> Database:
    """Open the database at a path or URL for reading; a `DatabaseError` if it does not exist, or cannot be read."""
    opened = Database.open_readonly(database)
    if opened is None:
        location = parse_location(database)
        missing = isinstance(location, Path) and not location.exists()
        fault = f"there is no database {location}" if missing else f"{location} holds no tuning results and no tables"
        raise DatabaseError(f"{fault}; check its {'path' if isinstance(location, Path) else 'URL'}")
    return opened


def rows_of_kernel(read: Callable[[str | None], Sequence[Value]], kernel: KernelName | None) -> Sequence[Value]:
    """Return the rows of a kernel, even if the kernel's files have been deleted since; of all kernels for None.

    ``read`` takes the kernel's name. An `InputError` is raised if it finds nothing, and there is no such kernel either.
    """
    if kernel is None:
        return read(None)
    if held := held_kernel(kernel):
        return read(held.name)
    return read(str(kernel)) or read(load_kernel(kernel).name)
