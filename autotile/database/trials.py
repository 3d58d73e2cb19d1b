"""Lossless conversion between trials and rows of the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, select

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, config_key
from autotile.database.schema import TRIALS
from autotile.database.winners import RESOURCE_COLUMNS, measurement_from_row, resources_from_row

Phase = Literal["search", "final"]


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with its position in the database and the time at which it was recorded."""

    trial_id: int
    study_id: int
    run_id: int
    phase: Phase
    rank: int | None
    """Rank in the run's finals, 1 for the winner; None for trials of the search."""
    created_at: datetime
    trial: Trial


def trial_row(trial: Trial) -> dict[str, Any]:
    """Return the columns of the table ``trials`` that the trial itself determines."""
    return {
        "config_key": config_key(trial.config),
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": _storable(trial.reason),
        "cubin_hash": trial.cubin_hash,
        "telemetry": dict(trial.telemetry),
        "seconds": dict(trial.seconds),
        "source": trial.source,
        **_geometry_columns(trial.geometry),
        **_resource_columns(trial.resources),
        **_occupancy_columns(trial.occupancy),
        **_measurement_columns(trial.measurement),
    }


def stored_trial(row: Mapping[Any, Any]) -> StoredTrial:
    """Invert `trial_row`, for a complete row of the table."""
    return StoredTrial(
        trial_id=row["id"],
        study_id=row["study_id"],
        run_id=row["run_id"],
        phase=row["phase"],
        rank=row["rank"],
        created_at=datetime.fromisoformat(row["created_at"]),
        trial=Trial(
            config=row["config"],
            outcome=Outcome(row["outcome"]),
            reason=row["reason"],
            stage=row["stage"],
            geometry=_geometry(row),
            resources=resources_from_row(row),
            occupancy=_occupancy(row),
            measurement=measurement_from_row(row, tuple(row["samples_us"] or ())),
            cubin_hash=row["cubin_hash"],
            source=row["source"],
            seconds=row["seconds"],
            telemetry=row["telemetry"],
        ),
    )


def insert_trial(connection: Connection, row: Mapping[str, Any]) -> int:
    """Insert one trial and return its id."""
    return int(connection.execute(TRIALS.insert().returning(TRIALS.c.id), row).scalar_one())


def insert_trials(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert trials."""
    if rows:
        connection.execute(TRIALS.insert(), rows)


def read_trials(connection: Connection, study_id: int, run_id: int | None, phase: Phase | None) -> list[StoredTrial]:
    """Return the trials of a study, optionally of one run or one phase, oldest first."""
    query = select(TRIALS).where(TRIALS.c.study_id == study_id).order_by(TRIALS.c.id)
    if run_id is not None:
        query = query.where(TRIALS.c.run_id == run_id)
    if phase is not None:
        query = query.where(TRIALS.c.phase == phase)
    return [stored_trial(row) for row in connection.execute(query).mappings()]


def _storable(text: str) -> str:
    """Return text that every database accepts: a compiler log may hold lone surrogates, and PostgreSQL rejects NUL."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _geometry_columns(geometry: LaunchGeometry | None) -> dict[str, Any]:
    return {
        "grid": list(geometry.grid) if geometry else None,
        "block": list(geometry.block) if geometry else None,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes if geometry else None,
    }


def _geometry(row: Mapping[Any, Any]) -> LaunchGeometry | None:
    if row["grid"] is None:
        return None
    return LaunchGeometry(tuple(row["grid"]), tuple(row["block"]), row["dynamic_smem_bytes"])


def _resource_columns(resources: Resources | None) -> dict[str, Any]:
    return {name: getattr(resources, name) if resources else None for name in RESOURCE_COLUMNS}


def _occupancy_columns(occupancy: Occupancy | None) -> dict[str, Any]:
    return {
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
        "warps_per_sm": occupancy.warps_per_sm if occupancy else None,
        "occupancy": occupancy.occupancy if occupancy else None,
        "limited_by": list(occupancy.limited_by) if occupancy else None,
        "limits": dict(occupancy.limits) if occupancy else None,
    }


def _occupancy(row: Mapping[Any, Any]) -> Occupancy | None:
    if row["blocks_per_sm"] is None:
        return None
    return Occupancy(
        blocks_per_sm=row["blocks_per_sm"],
        warps_per_sm=row["warps_per_sm"],
        occupancy=row["occupancy"],
        limited_by=tuple(row["limited_by"]),
        limits=row["limits"],
    )


def _measurement_columns(measurement: Measurement | None) -> dict[str, Any]:
    return {
        "time_us": measurement.time_us if measurement else None,
        "low_us": measurement.low_us if measurement else None,
        "high_us": measurement.high_us if measurement else None,
        "samples_us": list(measurement.samples_us) if measurement else None,
        "l2": measurement.l2 if measurement else None,
    }
