"""Studies, runs and the best result of each study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, func, select, update

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Trial
from autotile.database.keys import TuningKey
from autotile.database.schema import BEST, RUNS, STUDIES, TRIALS, insert_for, now_text
from autotile.database.trials import stored_trial
from autotile.database.winners import Winner


@dataclass(frozen=True, slots=True)
class StudySummary:
    """One study, as it is listed."""

    study_id: int
    key: TuningKey
    device: DeviceProperties | None
    created_at: datetime
    runs: int
    trials: int
    """Configurations that were tried, however often each was measured."""
    ok: int
    """Those of them that were verified and measured."""
    last_at: datetime | None
    """When the newest trial was recorded."""
    best_config: Config | None
    best_time_us: float | None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One tune command."""

    run_id: int
    study_id: int
    started_at: datetime
    ended_at: datetime | None
    """None while it runs, and for good when it was killed."""
    sampler: str
    seed: int | None
    settings: Mapping[str, Any]
    driver: str
    host: str
    autotile_version: str
    gates: Mapping[str, Any]
    """Configurations that were left after each gate."""
    summary: Mapping[str, Any]


def find_study(connection: Connection, key: TuningKey) -> int | None:
    """Number of the study of a key, if there is one."""
    return connection.execute(select(STUDIES.c.id).where(STUDIES.c.digest == key.digest)).scalar_one_or_none()


def make_study(connection: Connection, key: TuningKey, device: DeviceProperties | None) -> int:
    """Number of the study of a key, made where it is missing."""
    values = key.to_json() | {
        "digest": key.digest,
        "device": device.to_json() if device else None,
        "created_at": now_text(),
    }
    connection.execute(insert_for(connection, STUDIES).on_conflict_do_nothing(index_elements=["digest"]), values)
    return int(connection.execute(select(STUDIES.c.id).where(STUDIES.c.digest == key.digest)).scalar_one())


def insert_run(connection: Connection, values: Mapping[str, Any]) -> int:
    """Begin a run and return its number."""
    row = {"started_at": now_text(), "autotile_version": __version__, "summary": {}, **values}
    return int(connection.execute(RUNS.insert().returning(RUNS.c.id), row).scalar_one())


def finish_run(connection: Connection, run_id: int, summary: Mapping[str, Any]) -> bool:
    """Mark a run as finished; False where there is no such run."""
    change = update(RUNS).where(RUNS.c.id == run_id).values(ended_at=now_text(), summary=dict(summary))
    return connection.execute(change).rowcount == 1


def read_runs(connection: Connection, study_id: int) -> list[StoredRun]:
    """Runs of a study, oldest first."""
    rows = connection.execute(select(RUNS).where(RUNS.c.study_id == study_id).order_by(RUNS.c.id))
    return [stored_run(row) for row in rows.mappings()]


def stored_run(row: Mapping[Any, Any]) -> StoredRun:
    """A run from a row of the table."""
    ended_at = row["ended_at"]
    return StoredRun(
        run_id=row["id"],
        study_id=row["study_id"],
        started_at=datetime.fromisoformat(row["started_at"]),
        ended_at=datetime.fromisoformat(ended_at) if ended_at else None,
        **{name: row[name] for name in _PLAIN_RUN_COLUMNS},
    )


_PLAIN_RUN_COLUMNS = ("sampler", "seed", "settings", "driver", "host", "autotile_version", "gates", "summary")


def stored_device(row: Mapping[Any, Any]) -> DeviceProperties | None:
    """Device of a study's row; None where an imported result does not say."""
    return DeviceProperties.from_json(row["device"]) if row["device"] else None


def list_studies(connection: Connection, kernel: str | None) -> list[StudySummary]:
    """Studies of one kernel, or of all, by kernel and then oldest first."""
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
        device=stored_device(row),
        created_at=datetime.fromisoformat(row["created_at"]),
        runs=row["runs"],
        trials=row["trials"],
        ok=row["ok"],
        last_at=datetime.fromisoformat(row["last_at"]) if row["last_at"] else None,
        best_config=row["best_config"],
        best_time_us=row["best_time_us"],
    )


@dataclass(frozen=True, slots=True)
class StoredBest:
    """What a study would serve, and where it comes from."""

    study_id: int
    key: TuningKey
    device: DeviceProperties | None
    trial: Trial
    confirmed: bool
    """Whether it won a finished run's finals; otherwise it is only the fastest that a search has seen."""
    run: StoredRun
    created_at: datetime

    @property
    def winner(self) -> Winner:
        """What dispatch needs of it."""
        trial, device = self.trial, self.device
        if device is not None and self.run.driver:
            device = replace(device, driver=self.run.driver)  # a study may outlive the driver that it was begun with
        return Winner(self.key, device, trial.config, trial.resources, trial.measurement, self.created_at)


def read_best(
    connection: Connection,
    kernel: str | None,
    *,
    dtype: str | None = None,
    sizes: Mapping[str, int] | None = None,
    gpu_name: str | None = None,
    study_id: int | None = None,
) -> list[StoredBest]:
    """Best result of each study that matches, newest first."""
    query = (
        select(STUDIES, TRIALS, RUNS)
        .join(BEST, BEST.c.study_id == STUDIES.c.id)
        .join(TRIALS, TRIALS.c.id == BEST.c.trial_id)
        .join(RUNS, RUNS.c.id == TRIALS.c.run_id)
        .order_by(TRIALS.c.created_at.desc())
    )
    filters = (
        (STUDIES.c.kernel, kernel),
        (STUDIES.c.dtype, dtype),
        (STUDIES.c.gpu_name, gpu_name),
        (STUDIES.c.id, study_id),
    )
    query = query.where(*(column == value for column, value in filters if value is not None))
    found = [_stored_best(row) for row in connection.execute(query).mappings()]
    return [best for best in found if sizes is None or best.key.sizes == dict(sizes)]


def _stored_best(row: RowMapping) -> StoredBest:
    study, trial = _columns_of(STUDIES, row), stored_trial(_columns_of(TRIALS, row))
    return StoredBest(
        study_id=trial.study_id,
        key=TuningKey.from_json(study),
        device=stored_device(study),
        trial=trial.trial,
        confirmed=trial.phase == "final",
        run=stored_run(_columns_of(RUNS, row)),
        created_at=trial.created_at,
    )


def _columns_of(table: Table, row: RowMapping) -> dict[str, Any]:
    return {column.name: row[column] for column in table.c}
