"""Studies, runs and the best result of each study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Table, func, literal_column, select, update

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Trial
from autotile.database.keys import TuningKey
from autotile.database.schema import BEST, METADATA, RUNS, STUDIES, TRIALS, insert_for, now_text
from autotile.database.trials import stored_trial
from autotile.database.winners import CHECK_COLUMNS, WINNER_COLUMNS, Check, Winner


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
    """Number of configurations that were verified and measured."""
    last_at: datetime | None
    """Time at which the newest trial was recorded."""
    best_config: Config | None
    best_time_us: float | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run: a tuning session, an import, a merge or a verification."""

    run_id: int
    study_id: int
    started_at: datetime
    ended_at: datetime | None
    """None during the run, and permanently if it was killed."""
    sampler: str
    seed: int | None
    settings: Mapping[str, Any]
    driver: str
    host: str
    autotile_version: str
    gates: Mapping[str, Any]
    """Number of configurations that passed each gate."""
    summary: Mapping[str, Any]


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
    rows = connection.execute(select(RUNS).where(RUNS.c.study_id == study_id).order_by(RUNS.c.id))
    return [_run(row) for row in rows.mappings()]


_PLAIN_RUN_COLUMNS = ("sampler", "seed", "settings", "driver", "host", "autotile_version", "gates", "summary")


def _run(row: Mapping[Any, Any]) -> StoredRun:
    ended_at = row["ended_at"]
    return StoredRun(
        run_id=row["id"],
        study_id=row["study_id"],
        started_at=datetime.fromisoformat(row["started_at"]),
        ended_at=datetime.fromisoformat(ended_at) if ended_at else None,
        **{name: row[name] for name in _PLAIN_RUN_COLUMNS},
    )


def list_studies(connection: Connection, kernel: str | None) -> list[StudySummary]:
    """Return the studies of one kernel, or of all, ordered by kernel and then oldest first."""
    searched, configurations = TRIALS.c.phase == "search", func.count(TRIALS.c.config_key.distinct())
    counts = (
        select(
            TRIALS.c.study_id,
            configurations.filter(searched).label("trials"),
            configurations.filter(searched, TRIALS.c.outcome == "ok").label("ok"),
            func.max(TRIALS.c.created_at).label("last_at"),
        )
        .group_by(TRIALS.c.study_id)
        .subquery()
    )
    runs = select(func.count()).where(RUNS.c.study_id == STUDIES.c.id).scalar_subquery().label("runs")
    query = (
        select(
            STUDIES,
            runs,
            func.coalesce(counts.c.trials, 0).label("trials"),
            func.coalesce(counts.c.ok, 0).label("ok"),
            counts.c.last_at,
            TRIALS.c.config.label("best_config"),
            TRIALS.c.time_us.label("best_time_us"),
        )
        .outerjoin(counts, counts.c.study_id == STUDIES.c.id)
        .outerjoin(BEST, BEST.c.study_id == STUDIES.c.id)
        .outerjoin(TRIALS, TRIALS.c.id == BEST.c.trial_id)
        .order_by(STUDIES.c.kernel, STUDIES.c.id)
    )
    if kernel is not None:
        query = query.where(STUDIES.c.kernel == kernel)
    return [_summary(row) for row in connection.execute(query).mappings()]


def _summary(row: Mapping[Any, Any]) -> StudySummary:
    return StudySummary(
        study_id=row["id"],
        key=TuningKey.from_json(row),
        device=_device(row["device"]),
        created_at=datetime.fromisoformat(row["created_at"]),
        runs=row["runs"],
        trials=row["trials"],
        ok=row["ok"],
        last_at=datetime.fromisoformat(row["last_at"]) if row["last_at"] else None,
        best_config=row["best_config"],
        best_time_us=row["best_time_us"],
    )


def _device(value: Mapping[str, Any] | None) -> DeviceProperties | None:
    return DeviceProperties.from_json(value) if value else None


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
    kernel: str | None,
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
    query = best_query(STUDIES, TRIALS, RUNS)
    query = query.where(*(column == value for column, value in filters if value is not None))
    found = [_best(row) for row in connection.execute(query).mappings()]
    return [best for best in found if sizes is None or best.key.sizes == dict(sizes)]


def _selection(columns: Mapping[str, tuple[str, ...]]) -> tuple[ColumnElement[Any], ...]:
    return tuple(METADATA.tables[table].c[name] for table, names in columns.items() for name in names)


WINNER_SELECTION = _selection(WINNER_COLUMNS)


def checks_query(kernel: str, dtype: str) -> Select[Any]:
    """Return the query of the verdicts on unranked configurations of a kernel, oldest first."""
    return (
        select(*_selection(CHECK_COLUMNS))
        .select_from(STUDIES)
        .join(TRIALS, STUDIES.c.id == TRIALS.c.study_id)
        .where(
            STUDIES.c.kernel == kernel,
            STUDIES.c.dtype == dtype,
            TRIALS.c.phase == literal_column("'final'"),
            TRIALS.c.rank.is_(None),
        )
        .order_by(TRIALS.c.id)
    )


def read_checks(connection: Connection, kernel: str, dtype: str) -> list[Check]:
    """Return the verdicts of finals and verifications on configurations of a kernel that are not ranked."""
    return [Check.from_row(row) for row in connection.execute(checks_query(kernel, dtype)).mappings()]


def _best(row: RowMapping) -> StoredBest:
    stored = stored_trial(_columns_of(TRIALS, row))
    columns = {column.name: row[column] for column in WINNER_SELECTION}
    return StoredBest(
        study_id=stored.study_id,
        winner=Winner.from_row(columns, _device(columns["device"])),
        trial=stored.trial,
        confirmed=stored.phase == "final",
        run=_run(_columns_of(RUNS, row)),
    )


def _columns_of(table: Table, row: RowMapping) -> dict[str, Any]:
    return {column.name: row[column] for column in table.c}
