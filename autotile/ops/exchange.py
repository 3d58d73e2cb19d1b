"""Write results to files, and read those of other tools."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotile.api.targets import open_problem
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem, config_key
from autotile.core.text import sizes_text, source_text
from autotile.database.database import Database
from autotile.database.opening import open_for_reading
from autotile.database.studies import StudySummary
from autotile.database.trials import StoredTrial
from autotile.errors import InputError
from autotile.exchange.kernel_tuner import import_into_database, import_into_recording, read_cache, write_cache
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.exchange.t4 import write_t4
from autotile.kernel.library import Kernel
from autotile.report.transfer import TransferReport
from autotile.settings import read_settings

ExportFormat = Literal["t4", "kernel-tuner", "optuna", "recording"]

_OPTUNA_TABLE = "version_info"
"""Every storage of Optuna's has it."""


@dataclass(frozen=True, slots=True)
class _Export:
    """What a writer of a format is given."""

    path: Path
    kernel: Kernel
    study: StudySummary
    trials: Sequence[StoredTrial]


def export_study(
    kernel: str,
    sizes: Mapping[str, int],
    path: Path,
    file_format: ExportFormat,
    *,
    dtype: str | None = None,
    device: str | None = None,
    database: str | None = None,
) -> TransferReport:
    """Write the trials of a tuned problem to a file.

    Parameters
    ----------
    kernel, sizes, dtype
        The problem.
    path
        File to write.
    file_format
        ``t4``, ``kernel-tuner``, ``optuna`` or ``recording``.
    device
        Only results of this GPU, by the name that CUDA gives it or a profile's; None for the newest of any.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        The problem was not tuned, or the file cannot be written.
    """
    loaded, problem = open_problem(kernel, sizes, dtype)
    opened = open_for_reading(database)
    if opened is None:
        raise InputError("nothing is tuned yet, so nothing can be exported; run `autotile tune` first")
    with opened:
        study = _newest_study(opened.studies(problem.kernel), problem, device)
        trials = opened.stored_trials(study.study_id)
    _WRITERS[file_format](_Export(path, loaded, study, trials))
    where = source_text(study.key.gpu_name, study.key.source)
    configurations = len({config_key(stored.trial.config) for stored in trials})
    return TransferReport("exported", str(path), file_format, problem, where, configurations, {"study": study.study_id})


def import_kernel_tuner(
    path: Path,
    sizes: Mapping[str, int],
    *,
    dtype: str = "float32",
    recording: Path | None = None,
    database: str | None = None,
) -> TransferReport:
    """Read a cache file of Kernel Tuner into the database, or into a recording.

    The results can be listed and compared, but are never served: the file does not say which source they are of.

    Parameters
    ----------
    path
        The cache file.
    sizes
        The problem's sizes by name; where there are none, those of the file are named x, y and z.
    dtype
        Element type of the problem.
    recording
        Write a recording here in place of adding to the database.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        The file cannot be read, or the database or recording cannot be written.
    """
    cache = read_cache(path)
    key = cache.key(dict(sizes) or None, dtype)
    if recording is not None:
        import_into_recording(recording, cache, key)
        more: dict[str, object] = {"recording": str(recording)}
    else:
        with Database.open(database or read_settings().database) as opened:
            more = {"study": import_into_database(opened, cache, key), "database": opened.location}
            more |= {"note": "; ".join(opened.notices)} if opened.notices else {}
    return TransferReport("imported", str(path), "kernel-tuner", key.problem, key.gpu_name, len(cache.trials), more)


def _newest_study(studies: Sequence[StudySummary], problem: Problem, device: str | None) -> StudySummary:
    wanted = device_profile(device).name if device is not None else None
    fits = [
        study
        for study in studies
        if study.trials
        and dict(study.key.sizes) == dict(problem.sizes)
        and study.key.dtype == problem.dtype
        and wanted in (None, study.key.gpu_name)
    ]
    if fits:
        return max(fits, key=lambda study: (study.last_at is not None, study.last_at, study.study_id))
    tuned = dict.fromkeys(f"{sizes_text(study.key.sizes)} on {study.key.gpu_name}" for study in studies)
    known = f"tuned are: {'; '.join(tuned)}" if tuned else f"nothing is tuned of {problem.kernel}"
    raise InputError(f"{problem} was not tuned{f' on {wanted}' if wanted else ''}; {known}")


def _write_t4(export: _Export) -> None:
    write_t4(export.path, export.trials, export.study.device)


def _write_kernel_tuner(export: _Export) -> None:
    write_cache(export.path, export.study.key, export.kernel.spec.parameters, export.trials)


def _write_optuna(export: _Export) -> None:
    from autotile.search.study import study_of_trials, study_to_storage

    _refuse_other_databases(export.path)
    trials = [stored.trial for stored in export.trials if stored.phase == "search"]
    name = f"{export.study.key.problem} on {export.study.key.gpu_name}"
    study_to_storage(study_of_trials(export.kernel.spec.parameters, trials, name), export.path)


def _refuse_other_databases(path: Path) -> None:
    """Optuna would lay its tables beside those of another program, such as a tuning database.

    Raises
    ------
    InputError
        The file is an SQLite database, but not one of Optuna's.
    """
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return  # no database, which Optuna says itself
    if tables and _OPTUNA_TABLE not in tables:
        raise InputError(f"{path} is a database of something else than Optuna's studies; name another file")


def _write_recording(export: _Export) -> None:
    if export.study.key.source == "replayed":
        raise InputError("these results were replayed from a recording already; expected ones that a GPU measured")
    trials = [stored.trial for stored in export.trials if stored.trial.outcome is not Outcome.NOT_AVAILABLE]
    header = RecordingHeader(
        key=export.study.key,
        parameters=export.kernel.spec.parameters,
        device=export.study.device,
        settings={"exported_from": "the tuning database"},
        chosen="those that a search tried",
    )
    write_recording(export.path, header, trials)


_WRITERS: Mapping[ExportFormat, Callable[[_Export], None]] = {
    "t4": _write_t4,
    "kernel-tuner": _write_kernel_tuner,
    "optuna": _write_optuna,
    "recording": _write_recording,
}
