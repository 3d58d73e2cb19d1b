"""A trial as a row of the database, and back, with nothing lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, select

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial, config_key
from autotile.database.fast_read import resources_of
from autotile.database.schema import TRIALS

Phase = Literal["search", "final"]


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with where and when it was recorded."""

    trial_id: int
    study_id: int
    run_id: int
    phase: Phase
    rank: int | None
    """Place within the run's finals, 1 for the winner; None in the search."""
    created_at: datetime
    trial: Trial


def trial_row(trial: Trial) -> dict[str, Any]:
    """Columns of the table ``trials`` that come from the trial itself."""
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
    """Inverse of `trial_row`, for a whole row of the table."""
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
            resources=resources_of(row),
            occupancy=_occupancy(row),
            measurement=_measurement(row),
            cubin_hash=row["cubin_hash"],
            source=row["source"],
            seconds=row["seconds"],
            telemetry=row["telemetry"],
        ),
    )


def insert_trial(connection: Connection, row: Mapping[str, Any]) -> int:
    """Insert one trial and return its number."""
    return int(connection.execute(TRIALS.insert().returning(TRIALS.c.id), row).scalar_one())


def insert_trials(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert many trials."""
    if rows:
        connection.execute(TRIALS.insert(), rows)


def read_trials(connection: Connection, study_id: int, run_id: int | None, phase: Phase | None) -> list[StoredTrial]:
    """Trials of a study, of one run or phase where given, oldest first."""
    query = select(TRIALS).where(TRIALS.c.study_id == study_id).order_by(TRIALS.c.id)
    if run_id is not None:
        query = query.where(TRIALS.c.run_id == run_id)
    if phase is not None:
        query = query.where(TRIALS.c.phase == phase)
    return [stored_trial(row) for row in connection.execute(query).mappings()]


def _storable(text: str) -> str:
    """Text that every database takes: a compiler's log may hold lone surrogates, and PostgreSQL refuses NUL."""
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
    names = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes")
    return {name: getattr(resources, name) if resources else None for name in names}


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


def _measurement(row: Mapping[Any, Any]) -> Measurement | None:
    if row["time_us"] is None:
        return None
    return Measurement(row["time_us"], row["low_us"], row["high_us"], tuple(row["samples_us"]), row["l2"])
