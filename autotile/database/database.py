"""The tuning database: every trial is committed as it ends, and the best is read back from there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, select

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Problem, Trial, config_key
from autotile.database.engine import (
    WRITE_OPTIONS,
    DamagedDatabaseError,
    Location,
    parse_location,
    reporting_errors,
    server_engine,
    sqlite_engine,
)
from autotile.database.keys import TuningKey
from autotile.database.paths import check_readable, check_writable, identity, network_notice, refuse_other_files
from autotile.database.schema import TRIALS, now_text
from autotile.database.studies import (
    StoredBest,
    StoredMiss,
    StoredRun,
    StudySummary,
    count_miss,
    ensure_study,
    find_study,
    finish_run,
    insert_run,
    list_studies,
    read_best,
    read_misses,
    read_runs,
)
from autotile.database.trials import Phase, StoredTrial, insert_trial, insert_trials, read_trials, trial_row
from autotile.database.upgrade import (
    DatabaseCheck,
    check_database,
    ensure_schema,
    is_current,
    refuse_damage,
    schema_revision,
    set_aside,
)
from autotile.errors import DatabaseError

_OPENINGS = 5
"""Of a file that others find damaged at the same time: each of them may be in the middle of setting it aside."""


class Database:
    """An open tuning database; safe to use from several threads, and from several processes that each open their own.

    Open it with `Database.open` to write or `Database.open_readonly` to read; close it, or use it in a ``with`` block.
    Each method is one transaction, and raises `DatabaseError` when the database cannot be read or written.

    Attributes
    ----------
    location
        The path or URL, without a password.
    notices
        What the user should be told, such as that a damaged file was set aside.
    """

    def __init__(self, engine: Engine, location: Location, *, readonly: bool, notices: tuple[str, ...] = ()) -> None:
        self.location = str(location)
        self.notices = notices
        self._place = location
        self._readonly = readonly
        self._engine = engine
        self._writer = engine.execution_options(**WRITE_OPTIONS)
        self._process = os.getpid()

    @classmethod
    def open(cls, location: str | Path, *, set_damage_aside: bool = True) -> Self:
        """Open a database for writing; it is made where it is missing, and brought to the present schema.

        A damaged SQLite file is renamed and reported in `notices`, and a fresh one is begun.

        Parameters
        ----------
        location
            Path of an SQLite file, or ``postgresql+psycopg://user:password@host/name``.
        set_damage_aside
            False: raise where the file is damaged, and leave it as it is.

        Raises
        ------
        DatabaseError
            It cannot be made or written, is no database, belongs to another program or to a newer autotile, or the
            driver of the server is not installed.
        """
        place = parse_location(location)
        if not isinstance(place, Path):
            return cls._open_for_writing(place)
        check_writable(place)
        notices: tuple[str, ...] = ()
        for _ in range(_OPENINGS):
            seen = identity(place)
            try:
                if seen is not None:
                    check_readable(place)
                return cls._open_for_writing(place, notices)
            except DatabaseError as error:
                if seen is None or identity(place) != seen:
                    continue  # another process has set it aside meanwhile, or made it
                if not isinstance(error, DamagedDatabaseError):
                    raise
                refuse_other_files(place)
                if not set_damage_aside:
                    raise
                notices = set_aside(place, seen)
        return cls._open_for_writing(place, notices)

    @classmethod
    def open_readonly(cls, location: str | Path) -> Self | None:
        """Open a database for reading; None where there is none, or none with tables yet. No file is made.

        Raises
        ------
        DatabaseError
            It is there, but cannot be read or belongs to another program or to another version of autotile.
        """
        place = parse_location(location)
        if isinstance(place, Path):
            if not place.exists():
                return None
            check_readable(place)
        engine = _engine(place, readonly=True)
        try:
            with reporting_errors(place), engine.connect() as connection:
                revision = schema_revision(connection)
                current = is_current(connection, place)
        except BaseException as error:
            engine.dispose()
            if isinstance(error, DamagedDatabaseError) and isinstance(place, Path):
                refuse_other_files(place)
            raise
        if current:
            return cls(engine, place, readonly=True)
        engine.dispose()
        if revision is None:
            return None
        cls.open(location).close()  # an older database is brought up to date first
        return cls(_engine(place, readonly=True), place, readonly=True)

    @classmethod
    def _open_for_writing(cls, place: Location, notices: tuple[str, ...] = ()) -> Self:
        engine = _engine(place, readonly=False)
        try:
            with reporting_errors(place):
                ensure_schema(engine, place)
                if isinstance(place, Path):
                    refuse_damage(engine, place)
        except BaseException:
            engine.dispose()
            raise
        where = network_notice(place) if isinstance(place, Path) else ""
        return cls(engine, place, readonly=False, notices=(*notices, *filter(None, [where])))

    def close(self) -> None:
        """Let go of the database; a closed one opens itself again when it is used."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def study(self, key: TuningKey, device: DeviceProperties | None) -> int:
        """Number of the study of a key, made where it is missing.

        Parameters
        ----------
        device
            Kept with a new study; None where an imported result does not say.
        """
        with self.writing() as connection:
            return ensure_study(connection, key, device)

    def find_study(self, key: TuningKey) -> int | None:
        """Number of the study of a key, or None; nothing is made."""
        with self.reading() as connection:
            return find_study(connection, key)

    def studies(self, kernel: str | None = None) -> list[StudySummary]:
        """Every study, or those of one kernel, by kernel and then oldest first."""
        with self.reading() as connection:
            return list_studies(connection, kernel)

    def start_run(
        self,
        study_id: int,
        *,
        sampler: str,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        driver: str = "",
        host: str = "",
        gates: Mapping[str, Any] | None = None,
    ) -> int:
        """Record that a run begins, and return its number; settings and gates are kept as JSON."""
        row = {
            "study_id": study_id,
            "sampler": sampler,
            "seed": seed,
            "settings": dict(settings or {}),
            "driver": driver,
            "host": host,
            "gates": dict(gates or {}),
        }
        with self.writing() as connection:
            return insert_run(connection, row)

    def end_run(self, run_id: int, summary: Mapping[str, Any] | None = None) -> None:
        """Record that a run has finished; from now on the winner of its finals is the study's best."""
        with self.writing() as connection:
            found = finish_run(connection, run_id, summary or {})
        if not found:
            raise DatabaseError(f"{self.location} has no run {run_id}; expected a number that start_run gave")

    def runs(self, study_id: int) -> list[StoredRun]:
        """Runs of a study, oldest first."""
        with self.reading() as connection:
            return read_runs(connection, study_id)

    def add_trial(
        self, study_id: int, run_id: int, trial: Trial, *, phase: Phase = "search", rank: int | None = None
    ) -> int:
        """Commit one trial and return its number; when this returns, the death of the process cannot lose it.

        Parameters
        ----------
        rank
            Place within the run's finals, 1 for the winner.
        """
        place = {"study_id": study_id, "run_id": run_id, "phase": phase, "rank": rank, "created_at": now_text()}
        with self.writing() as connection:
            return insert_trial(connection, place | trial_row(trial))

    def add_trials(self, study_id: int, run_id: int, trials: Iterable[Trial]) -> None:
        """Commit many trials of a search in one transaction, as an import does."""
        place = {"study_id": study_id, "run_id": run_id, "phase": "search", "rank": None, "created_at": now_text()}
        rows = [place | trial_row(trial) for trial in trials]
        with self.writing() as connection:
            insert_trials(connection, rows)

    def stored_trials(
        self, study_id: int, *, run_id: int | None = None, phase: Phase | None = None
    ) -> list[StoredTrial]:
        """Trials of a study with where and when they were recorded, oldest first."""
        with self.reading() as connection:
            return read_trials(connection, study_id, run_id, phase)

    def trials(self, study_id: int, *, run_id: int | None = None, phase: Phase | None = None) -> list[Trial]:
        """Trials of a study, oldest first."""
        return [stored.trial for stored in self.stored_trials(study_id, run_id=run_id, phase=phase)]

    def tried(self, study_id: int) -> dict[str, Trial]:
        """Newest trial of each configuration of a study, by `config_key`, so that a killed run can go on."""
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
        """Best result of each study that matches what is given, newest first."""
        with self.reading() as connection:
            return read_best(connection, kernel, dtype=dtype, sizes=sizes, gpu_name=gpu_name, study_id=study_id)

    def record_miss(self, problem: Problem, gpu_name: str, tier: str, count: int = 1) -> None:
        """Count that a problem was asked for and that only ``tier`` could be served."""
        with self.writing() as connection:
            count_miss(connection, problem, gpu_name, tier, count)

    def misses(self, kernel: str | None = None) -> list[StoredMiss]:
        """Problems that were asked for in vain, most frequent first."""
        with self.reading() as connection:
            return read_misses(connection, kernel)

    def check(self) -> DatabaseCheck:
        """Look for damage and orphaned rows."""
        try:
            with self.reading() as connection:
                return check_database(connection, self.location)
        except DamagedDatabaseError as error:  # so damaged that SQLite cannot even look through it
            return DatabaseCheck.of_damage(self.location, [str(error)])

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction that reads."""
        self._leave_parents_connections()
        with reporting_errors(self._place), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that writes."""
        if self._readonly:
            raise DatabaseError(f"{self.location} was opened for reading only; expected Database.open to write")
        self._leave_parents_connections()
        with reporting_errors(self._place), self._writer.begin() as connection:
            yield connection

    def _leave_parents_connections(self) -> None:
        """After a fork, forget the parent's connections unclosed: https://sqlite.org/howtocorrupt.html, section 2.6."""
        if os.getpid() != self._process:
            self._engine.dispose(close=False)
            self._process = os.getpid()


def _engine(place: Location, *, readonly: bool) -> Engine:
    return sqlite_engine(place, readonly=readonly) if isinstance(place, Path) else server_engine(place)


@dataclass(frozen=True, slots=True)
class StudyTimes:
    """What was measured of one problem.

    Attributes
    ----------
    best
        `config_key` of the winner.
    times_us
        Newest time of each configuration that ran to its end, by `config_key`; the finals' goes before the search's.
    """

    key: TuningKey
    best: str
    times_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        """The winner's time."""
        return self.times_us[self.best]

    def loss(self, config: str) -> float | None:
        """Time of a configuration over the winner's, minus 1, at least 0; None where it was not measured."""
        time_us = self.times_us.get(config)
        return None if time_us is None else max(0.0, time_us / self.best_us - 1.0)


def study_times(database: Database, kernel: str) -> list[StudyTimes]:
    """Times of every study of a kernel that has a winner.

    Raises
    ------
    DatabaseError
        The database cannot be read.
    """
    return [
        StudyTimes(best.key, config_key(best.trial.config), _times(database, best.study_id))
        for best in database.best(kernel)
        if best.trial.time_us is not None
    ]


def _times(database: Database, study_id: int) -> dict[str, float]:
    query = (
        select(TRIALS.c.config_key, TRIALS.c.time_us)
        .where(TRIALS.c.study_id == study_id, TRIALS.c.outcome == str(Outcome.OK), TRIALS.c.time_us.is_not(None))
        .order_by(TRIALS.c.phase.desc(), TRIALS.c.id)  # the search's, then the finals'
    )
    with database.reading() as connection:
        return {row.config_key: row.time_us for row in connection.execute(query)}
