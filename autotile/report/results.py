"""What the database holds: studies with their best, and the trials of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing
from autotile.core.model import config_text
from autotile.core.text import NOTHING, interval_text, moment_text, percent_text, sizes_text, source_text, time_text
from autotile.database.keys import TuningKey, key_text
from autotile.database.studies import StudySummary
from autotile.database.trials import StoredTrial
from autotile.exchange.recording import RecordingFile


@dataclass(frozen=True, slots=True)
class StudiesReport:
    """Studies; ``location`` names the database where there are none."""

    studies: Sequence[StudySummary]
    location: str

    def to_json(self) -> list[dict[str, Any]]:
        """One row a study."""
        return [_study_document(study) for study in self.studies]

    def __rich__(self) -> RenderableType:
        """One entry a study."""
        if not self.studies:
            return Text(f"nothing is tuned yet in {self.location}; `autotile tune` does it")
        figures = (f"{RIGHT}tried", f"{RIGHT}ok", f"{RIGHT}best")
        headings = ("kernel", "problem", "device", *figures, "configuration", "last trial")
        return Listing(headings, list(map(_study_row, self.studies)), ("configuration", "last trial", "device"))


@dataclass(frozen=True, slots=True)
class RecordingsReport:
    """Recordings that can be replayed, damaged ones with their problem."""

    recordings: Sequence[RecordingFile]

    def to_json(self) -> list[dict[str, Any]]:
        """One row a recording."""
        return [_recording_document(found) for found in self.recordings]

    def __rich__(self) -> RenderableType:
        """One entry a recording."""
        if not self.recordings:
            return Text("no recording is installed; `autotile record` makes one on a machine with a GPU")
        headings = ("kernel", "problem", "device", f"{RIGHT}valid", "recorded", "made", "file")
        return Listing(headings, list(map(_recording_row, self.recordings)), ("file", "made", "device"))


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """A trial with the key of its study."""

    key: TuningKey
    stored: StoredTrial


@dataclass(frozen=True, slots=True)
class TrialsReport:
    """Trials, fastest first, then those without a time in the order they were tried."""

    trials: Sequence[StudyTrial]

    def to_json(self) -> list[dict[str, Any]]:
        """One row a trial."""
        return [_trial_document(entry) for entry in self.trials]

    def __rich__(self) -> RenderableType:
        """One entry a trial."""
        if not self.trials:
            return Text("no such trial is stored")
        several = len({entry.stored.study_id for entry in self.trials}) > 1
        figures = (f"{RIGHT}time", "95 % interval, us", f"{RIGHT}registers", f"{RIGHT}occupancy")
        headings = ("outcome", *figures, "configuration", "remark", *(["problem"] if several else []))
        rows = [(*_trial_row(entry.stored), *([_problem_text(entry.key)] if several else [])) for entry in self.trials]
        return Listing(headings, rows, ("configuration", "remark", "problem"))


def _study_row(study: StudySummary) -> tuple[str, ...]:
    key = study.key
    return (
        key.kernel,
        key_text(key),
        source_text(key.gpu_name, key.source),
        f"{study.trials:,}",
        f"{study.ok:,}",
        time_text(study.best_time_us),
        config_text(study.best_config) if study.best_config is not None else NOTHING,
        moment_text(study.last_at),
    )


def _recording_row(found: RecordingFile) -> tuple[str, ...]:
    header = found.header
    if header is None:
        return "damaged", NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, found.problem
    return (
        header.key.kernel,
        f"{sizes_text(header.key.sizes)} {header.key.dtype}",
        header.key.gpu_name,
        f"{header.valid_configs:,}",
        header.chosen,
        moment_text(header.created_at),
        str(found.path),
    )


def _study_document(study: StudySummary) -> dict[str, Any]:
    key = study.key
    best = None
    if study.best_config is not None:
        best = {"config": dict(study.best_config), "time_us": study.best_time_us}
    return {
        "study": study.study_id,
        **_key_document(key),
        "nvrtc_version": key.nvrtc_version,
        "runs": study.runs,
        "trials": study.trials,
        "ok": study.ok,
        "best": best,
        "created_at": study.created_at.isoformat(),
        "last_at": study.last_at.isoformat() if study.last_at is not None else None,
    }


def _recording_document(found: RecordingFile) -> dict[str, Any]:
    header = found.header
    if header is None:
        return {"file": str(found.path), "problem": found.problem}
    return {
        **_key_document(header.key),
        "valid": header.valid_configs,
        "recorded": header.chosen,
        "created_at": header.created_at.isoformat(),
        "file": str(found.path),
    }


def _trial_document(entry: StudyTrial) -> dict[str, Any]:
    stored, trial = entry.stored, entry.stored.trial
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    return {
        "trial": stored.trial_id,
        "study": stored.study_id,
        "run": stored.run_id,
        **_key_document(entry.key),
        "phase": stored.phase,
        "rank": stored.rank,
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": trial.reason,
        "time_us": trial.time_us,
        "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
        "samples": len(measured.samples_us) if measured is not None else 0,
        "registers": resources.registers if resources is not None else None,
        "spill_bytes": resources.spill_bytes if resources is not None else None,
        "static_smem_bytes": resources.static_smem_bytes if resources is not None else None,
        "occupancy": occupancy.occupancy if occupancy is not None else None,
        "limited_by": list(occupancy.limited_by) if occupancy is not None else [],
        "seconds": dict(trial.seconds),
        "telemetry": dict(trial.telemetry),
        "created_at": stored.created_at.isoformat(),
    }


def _key_document(key: TuningKey) -> dict[str, Any]:
    return {
        "kernel": key.kernel,
        "problem": dict(key.sizes),
        "dtype": key.dtype,
        "device": {"name": key.gpu_name, "source": key.source},
        "source": key.source,
        "l2": key.l2_mode,
    }


def _problem_text(key: TuningKey) -> str:
    return f"{key_text(key)}, {source_text(key.gpu_name, key.source)}"


def _trial_row(stored: StoredTrial) -> tuple[str, ...]:
    trial = stored.trial
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    remarks = [f"finals, place {stored.rank}"] if stored.phase == "final" else []
    if trial.source == "replayed":
        remarks.append("replayed")
    if trial.reason:
        remarks.append(trial.reason.splitlines()[0])
    return (
        str(trial.outcome),
        time_text(trial.time_us),
        interval_text(measured.low_us, measured.high_us) if measured is not None else NOTHING,
        str(resources.registers) if resources is not None else NOTHING,
        percent_text(occupancy.occupancy) if occupancy is not None else NOTHING,
        config_text(trial.config),
        ", ".join(remarks),
    )
