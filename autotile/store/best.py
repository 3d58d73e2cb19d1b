"""The best result of each study: the winner of the newest finished run's finals, else the fastest of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, select

from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Trial
from autotile.store.keys import TuningKey
from autotile.store.schema import BEST, RUNS, STUDIES, TRIALS
from autotile.store.studies import StoredRun, stored_device, stored_run
from autotile.store.trials import stored_trial
from autotile.store.winners import Winner


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
