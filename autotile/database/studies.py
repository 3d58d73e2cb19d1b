"""Studies, runs and the best result of each study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Label,
    ScalarSelect,
    Select,
    Table,
    and_,
    case,
    func,
    literal_column,
    select,
    update,
)

from autotile.core.device import DeviceProperties
from autotile.core.documents import Moment, Name, TimeUs, Whole, convert
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database.keys import TuningKey
from autotile.database.rows import (
    BadRow,
    BadRowError,
    Row,
    StoredTrial,
    Value,
    bad_row,
    parse_row,
    parsed_rows,
    stored_trial,
    warn_of,
)
from autotile.database.schema import BEST, RUNS, STUDIES, TRIALS, insert_for, now_text
from autotile.database.winners import UNVERIFIED_SAMPLER, Winner
from autotile.errors import DataError
from autotile.kernel.library import KernelName, held_kernel, load_kernel
from autotile.version import __version__


@dataclass(frozen=True, slots=True)
class StudySummary:
    """One study in a listing."""

    study_id: int
    key: TuningKey
    device: DeviceProperties | None
    created_at: datetime
    runs: int
    trials: int
    """Configurations that were tried, each counted once."""
    ok: int
    """Number of configurations that were verified and measured, and refused neither by finals nor since then."""
    last_at: datetime | None
    """Time at which the newest trial was recorded."""
    best_config: Config | None
    best_time_us: float | None


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


def find_study(connection: Connection, key: TuningKey) -> int | None:
    """Return the id of the study of a key, or None."""
    return connection.execute(select(STUDIES.c.id).where(STUDIES.c.digest == key.digest)).scalar_one_or_none()


def ensure_study(connection: Connection, key: TuningKey, device: DeviceProperties | None) -> int:
    """Return the id of the study of a key, created if it does not exist."""
    values = key.to_json() | {
        "digest": key.digest,
        "device": device.to_json() if device else None,
        "created_at": now_text(),
    }
    connection.execute(insert_for(connection, STUDIES).on_conflict_do_nothing(index_elements=["digest"]), values)
    return int(connection.execute(select(STUDIES.c.id).where(STUDIES.c.digest == key.digest)).scalar_one())


def insert_run(connection: Connection, values: Mapping[str, Any]) -> int:
    """Start a run and return its id."""
    row = {"started_at": now_text(), "autotile_version": __version__, "summary": {}, **values}
    return int(connection.execute(RUNS.insert().returning(RUNS.c.id), row).scalar_one())


def finish_run(connection: Connection, run_id: int, summary: Mapping[str, Any]) -> bool:
    """Mark a run as finished; return False if there is no such run."""
    change = update(RUNS).where(RUNS.c.id == run_id).values(ended_at=now_text(), summary=dict(summary))
    return connection.execute(change).rowcount == 1


def read_runs(connection: Connection, study_id: int) -> list[StoredRun]:
    """Return the runs of a study, oldest first."""
    return parsed_rows(connection, select(RUNS).where(RUNS.c.study_id == study_id).order_by(RUNS.c.id), stored_run)


def stored_run(row: Row) -> StoredRun:
    """Return the run in a row of the table; a `BadRowError` if it does not match the schema."""
    return parse_row("runs", row["id"], {**row, "run_id": row["id"]}, StoredRun)


def stored_study(row: Row) -> StoredStudy:
    """Return the study in a row of the table; a `BadRowError` if it does not match the schema."""
    found = parse_row("studies", row["id"], {**row, "study_id": row["id"], "key": row}, StoredStudy)
    if row["digest"] != found.key.digest:
        raise bad_row("studies", row["id"], DataError("it is not that of the key", field="digest"))
    return found


def list_studies(connection: Connection, kernel: str | None) -> list[StudySummary]:
    """Return the studies of one kernel, or of all, ordered by kernel and then oldest first."""
    query = select(STUDIES, *_study_counts()).order_by(STUDIES.c.kernel, STUDIES.c.id)
    if kernel is not None:
        query = query.where(STUDIES.c.kernel == kernel)
    winners = _best_times(connection, kernel)
    return parsed_rows(connection, query, lambda row: _summary(row, winners.get(row["id"])))


def _study_counts() -> Iterator[Label[Any]]:
    """Yield the numbers of runs and of configurations of a study, and the time of its newest trial.

    A configuration is ok if its newest trial is, as in `rows.standing_trials`. A run tries no configuration twice. So
    the trials of a study with one run are counted in the indexes, if its finals refused none: to compare
    configurations, each row of the table would have to be read.
    """

    def count(*conditions: ColumnElement[bool]) -> ScalarSelect[int]:
        return select(func.count()).where(TRIALS.c.study_id == STUDIES.c.id, *conditions).scalar_subquery()

    searched = count(TRIALS.c.phase == literal_column("'search'"))
    is_final = TRIALS.c.phase == literal_column("'final'")
    # the concatenation keeps SQLite from the index of times, in which finals are not apart from the others
    final_outcome = TRIALS.c.outcome.concat("")
    own = TRIALS.alias()
    last_ids = select(func.max(own.c.id)).where(own.c.study_id == STUDIES.c.id).correlate(STUDIES)
    last_ids = last_ids.group_by(own.c.config_key)
    runs = select(func.count()).where(RUNS.c.study_id == STUDIES.c.id).scalar_subquery()
    newest = select(func.max(TRIALS.c.id)).where(TRIALS.c.run_id == RUNS.c.id).scalar_subquery()
    last = select(func.max(newest)).where(RUNS.c.study_id == STUDIES.c.id).correlate(STUDIES).scalar_subquery()
    is_simple = and_(runs == 1, searched > 0, count(is_final, final_outcome != "ok") == 0)
    configurations = select(func.count(TRIALS.c.config_key.distinct())).where(TRIALS.c.study_id == STUDIES.c.id)
    yield runs.label("runs")
    yield case((is_simple, searched), else_=configurations.scalar_subquery()).label("trials")
    ok = count(TRIALS.c.outcome == "ok") - count(is_final, final_outcome == "ok")
    yield case((is_simple, ok), else_=count(TRIALS.c.outcome == "ok", TRIALS.c.id.in_(last_ids))).label("ok")
    yield select(TRIALS.c.created_at).where(TRIALS.c.id == last).scalar_subquery().label("last_at")


class _BestTime(msgspec.Struct):
    config: Config
    time_us: TimeUs


def _best_times(connection: Connection, kernel: str | None) -> dict[int, _BestTime]:
    """Return configuration and time of the best trial of each study, by the id of the study."""
    query = select(BEST.c.study_id, TRIALS.c.config, TRIALS.c.time_us).join(TRIALS, TRIALS.c.id == BEST.c.trial_id)
    if kernel is not None:
        query = query.join(STUDIES, STUDIES.c.id == BEST.c.study_id).where(STUDIES.c.kernel == kernel)
    rows = connection.execute(query).all()
    try:
        return {study: convert({"config": config, "time_us": time}, _BestTime) for study, config, time in rows}
    except DataError:  # `read_best` names the bad rows, and takes the next best
        found = {best.study_id: best.trial for best in read_best(connection, kernel)}
        return {study: _BestTime(one.config, one.time_us) for study, one in found.items() if one.time_us is not None}


def _summary(row: Row, best: _BestTime | None) -> StudySummary:
    study = stored_study(row)
    try:
        last_at = convert(row["last_at"], datetime) if row["last_at"] is not None else None
    except DataError:  # of a trial that does not match its schema
        last_at = None
    return StudySummary(
        study_id=study.study_id,
        key=study.key,
        device=study.device,
        created_at=study.created_at,
        runs=row["runs"],
        trials=row["trials"],
        ok=row["ok"],
        last_at=last_at,
        best_config=best.config if best is not None else None,
        best_time_us=best.time_us if best is not None else None,
    )


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

    @property
    def device(self) -> DeviceProperties | None:
        """The winner's device."""
        return self.winner.device

    @property
    def created_at(self) -> datetime:
        """Time at which the trial was recorded."""
        return self.winner.tuned_at


def best_query(*selected: ColumnElement[Any] | Table) -> Select[Any]:
    """Return the query of columns of the best trial of each study, its study and its run, newest first.

    The newest is the one that was recorded last; dates depend on the clocks of the machines.
    """
    return (
        select(*selected)
        .select_from(STUDIES)
        .join(BEST, STUDIES.c.id == BEST.c.study_id)
        .join(TRIALS, TRIALS.c.id == BEST.c.trial_id)
        .join(RUNS, RUNS.c.id == TRIALS.c.run_id)
        .order_by(TRIALS.c.id.desc())
    )


def read_best(
    connection: Connection,
    kernel: str | None = None,
    *,
    dtype: str | None = None,
    sizes: Mapping[str, int] | None = None,
    gpu_name: str | None = None,
    study_id: int | None = None,
) -> list[StoredBest]:
    """Return the best result of each matching study, newest first."""
    filters = (
        (STUDIES.c.kernel, kernel),
        (STUDIES.c.dtype, dtype),
        (STUDIES.c.gpu_name, gpu_name),
        (STUDIES.c.id, study_id),
    )
    query = _BEST_ROWS.where(*(column == value for column, value in filters if value is not None))
    bad: list[BadRow] = []
    found = [best for row in connection.execute(query).all() if (best := _best(connection, row, bad))]
    warn_of(connection, bad)
    return [best for best in found if sizes is None or best.key.sizes == dict(sizes)]


_BEST_ROWS = best_query(STUDIES, TRIALS, RUNS)  # a statement of so many columns takes longer to build than to run


def _best(connection: Connection, row: Sequence[Any], bad: list[BadRow]) -> StoredBest | None:
    """Return the best result in a row of `_BEST_ROWS`, or the next best of its study if the row cannot be used.

    It cannot if it is damaged, or of a run of `UNVERIFIED_SAMPLER`.
    """
    study_row, trial_row, run_row = _rows_of_tables(row, (STUDIES, TRIALS, RUNS))
    try:
        study = stored_study(study_row)
    except BadRowError as error:
        bad.append(error.row)
        return None
    try:
        run = stored_run(run_row)
        if run.sampler != UNVERIFIED_SAMPLER:
            return _stored_best(study, stored_trial(trial_row), run)
    except BadRowError as error:
        bad.append(error.row)
    return _next_best(connection, study, bad)


def _next_best(connection: Connection, study: StoredStudy, bad: list[BadRow]) -> StoredBest | None:
    """Return the best result of a study among the rows that can be used, by the order of the view ``best``."""
    trials_query = select(TRIALS).where(TRIALS.c.study_id == study.study_id).order_by(TRIALS.c.id)
    runs_query = select(RUNS).where(RUNS.c.study_id == study.study_id)
    trials = parsed_rows(connection, trials_query, stored_trial, bad)
    runs = {run.run_id: run for run in parsed_rows(connection, runs_query, stored_run, bad)}
    refused = {config_key(one.trial.config): one.trial_id for one in trials if one.is_refusal}
    usable = [
        one
        for one in trials
        if one.trial.outcome is Outcome.OK
        and one.trial.measurement is not None
        and one.run_id in runs
        and refused.get(config_key(one.trial.config), 0) < one.trial_id
    ]
    finals = [one for one in usable if one.phase == "final" and one.rank == 1 and runs[one.run_id].ended_at is not None]
    verified = [one for one in usable if runs[one.run_id].sampler != UNVERIFIED_SAMPLER]
    best = finals[-1] if finals else min(verified, key=lambda one: (one.trial.cost, one.trial_id), default=None)
    return _stored_best(study, best, runs[best.run_id]) if best is not None else None


def _stored_best(study: StoredStudy, stored: StoredTrial, run: StoredRun) -> StoredBest:
    trial, device = stored.trial, study.device
    if device is not None and run.driver:  # a study may outlive the driver that it was started with
        device = replace(device, driver=run.driver)
    measurement = replace(trial.measurement, samples_us=()) if trial.measurement is not None else None
    winner = Winner(study.key, device, trial.config, trial.resources, measurement, stored.created_at)
    return StoredBest(study.study_id, winner, trial, stored.phase == "final", run)


def _rows_of_tables(row: Sequence[Any], tables: Sequence[Table]) -> Iterator[dict[str, Any]]:
    """Split a row of all columns of several tables."""
    start = 0
    for table in tables:
        names = [str(name) for name in table.c.keys()]  # noqa: SIM118 - plain strings, which a schema needs
        yield dict(zip(names, row[start : start + len(names)], strict=True))
        start += len(names)


def rows_of_kernel(read: Callable[[str | None], Sequence[Value]], kernel: KernelName | None) -> Sequence[Value]:
    """Return the rows of a kernel, even if the kernel's files have been deleted since.

    Parameters
    ----------
    read
        Query by the kernel's name; None selects all kernels.
    kernel
        Name, path of a search-space file, or an object that holds the kernel; None for all kernels.

    Raises
    ------
    InputError
        The query finds nothing under this name, and there is no such kernel either.
    """
    if kernel is None:
        return read(None)
    if held := held_kernel(kernel):
        return read(held.name)
    return read(str(kernel)) or read(load_kernel(kernel).name)
