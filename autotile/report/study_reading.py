"""Reads a study from a database, again and again while a session adds to it, or from a recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy import select

from autotile.core.ceilings import DeviceCeilings
from autotile.core.documents import convert
from autotile.core.model import Occupancy, Trial
from autotile.database.database import (
    Database,
    StoredRun,
    StoredStudy,
    StoredTrial,
    StudySummary,
    parsed_rows,
    stored_trial,
)
from autotile.database.engine import TRIALS
from autotile.database.learned import read_ceilings
from autotile.errors import DataError
from autotile.exchange.recording import Recording
from autotile.report.study_data import RunData, RunSettings, RunSummary, StudyData


def read_study(database: Database, study: StudySummary) -> StudyData:
    """Read a study that `Database.studies` listed.

    Raises
    ------
    DatabaseError
        The database cannot be read.
    """
    return StudyReader(database, study).read()


class StudyReader:
    """Reads a study again and again, as a session adds trials to it; each trial is read once.

    Parameters
    ----------
    database
        An open database.
    study
        Study that `Database.studies` listed.
    """

    def __init__(self, database: Database, study: StudySummary | StoredStudy) -> None:
        self._database = database
        self._study = study
        self._trials: list[StoredTrial] = []
        self._last = 0

    def read(self) -> StudyData:
        """Return the study with all trials that are stored now.

        Raises
        ------
        DatabaseError
            The database cannot be read.
        """
        study, database = study_without_trials(self._database, self._study), self._database
        newer = select(TRIALS).where(TRIALS.c.study_id == study.study_id, TRIALS.c.id > self._last)
        with database.reading() as connection:
            self._trials += parsed_rows(connection, newer.order_by(TRIALS.c.id), stored_trial)
        self._last = max((one.trial_id for one in self._trials), default=0)
        finals = tuple(one for one in self._trials if one.phase == "final")  # all that `clean` leaves of a study
        return replace(
            study,
            trials=tuple(one for one in self._trials if one.phase == "search") or finals,
            final_trials=finals,
        )


def study_without_trials(database: Database, study: StudySummary | StoredStudy) -> StudyData:
    """Return a study without its trials: its device, its runs and the ceilings of the GPU."""
    return StudyData(
        key=study.key,
        device=study.device,
        location=database.location,
        runs=tuple(map(run_data, database.runs(study.study_id))),
        trials=(),
        final_trials=(),
        ceilings=ceilings_for(database, study.key.gpu_name),
        study_id=study.study_id,
    )


def study_of_recording(recording: Recording, location: str) -> StudyData:
    """Return a recording as a study: each configuration is a trial, in the order of the recording."""
    header = recording.header
    trials = tuple(
        StoredTrial(row + 1, 0, 0, "search", None, header.created_at, _recorded_trial(recording, row))
        for row in range(len(recording))
    )
    return StudyData(header.key, header.device, location, (), trials, (), valid=header.valid_configs)


def _recorded_trial(recording: Recording, row: int) -> Trial:
    found, device = recording.result(row), recording.header.device
    occupancy = None
    if device is not None and found.resources is not None:
        warps = round(found.occupancy * device.max_warps_per_sm)
        occupancy = Occupancy(found.blocks_per_sm, warps, found.occupancy, (), {})
    return Trial(
        config=recording.config(row),
        outcome=found.outcome,
        reason=found.reason,
        stage=found.stage,
        resources=found.resources,
        occupancy=occupancy,
        measurement=found.measurement,
        seconds={"all": found.seconds},
    )


def run_data(run: StoredRun) -> RunData:
    """Return a run with the parts of its settings and its summary that match their schemas."""
    return RunData(run, run_settings(run.settings), _lenient(run.summary, RunSummary))


def run_settings(settings: Mapping[str, Any]) -> RunSettings:
    """Return the parts of a run's stored settings that match their schemas."""
    found: RunSettings = _lenient(settings, RunSettings)
    return found


def ceilings_for(database: Database, gpu_name: str) -> DeviceCeilings | None:
    """Return the newest ceilings that were measured on a GPU of a name; None if none were."""
    return next(iter(read_ceilings(database, gpu_name)), None)


def _lenient(value: Mapping[str, Any], schema: Callable[..., Any]) -> Any:
    """Parse a document field by field; a field that does not match has its default."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(schema):  # type: ignore[arg-type]
        if field.name in value:
            try:
                found[field.name] = convert(value[field.name], field.type)
            except DataError:
                continue
    return schema(**found)
