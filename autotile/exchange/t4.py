"""Export in T4, a JSON format of the auto-tuning community for results, version 1.0.0.

The schema is defined in https://github.com/odgaard/TuningSchema (branch T4), which Kernel Tuner 1.5.0 ships and writes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.documents import encode_json
from autotile.core.model import Outcome, Trial
from autotile.database.paths import atomic_write
from autotile.database.trials import StoredTrial
from autotile.errors import InputError

SCHEMA_VERSION = "1.0.0"

_INVALIDITY: Mapping[Outcome, str] = {
    Outcome.OK: "correct",
    Outcome.PRUNED: "correct",
    Outcome.INFEASIBLE: "constraints",
    Outcome.RESOURCE_EXCEEDED: "constraints",
    Outcome.COMPILE_FAILED: "compile",
    Outcome.WRONG_RESULT: "correctness",
    Outcome.OUT_OF_BOUNDS: "correctness",
    Outcome.CRASHED: "runtime",
    Outcome.TIMED_OUT: "timeout",
}
"""The schema's term for each outcome; configurations that a recording lacks were never tried, and are left out."""

_TIMES = {"compile": "compilation", "verify": "validation", "measure": "benchmark", "search": "search_algorithm"}
"""Names under which Kernel Tuner 1.5.0 writes the time of each stage; it calls all others ``framework``."""


def t4_results(trials: Iterable[StoredTrial]) -> dict[str, Any]:
    """Return trials as a T4 results document; times are in milliseconds, as in Kernel Tuner."""
    return {
        "results": [_result(stored) for stored in trials if stored.trial.outcome in _INVALIDITY],
        "schema_version": SCHEMA_VERSION,
        "metadata": {"timeunit": "milliseconds"},
    }


def t4_metadata(device: DeviceProperties | None) -> dict[str, Any]:
    """Return the hardware and software as a T4 metadata document."""
    return {
        "metadata": {
            "hardware": {
                "hardware_description": [device.to_json()] if device else [],
                "operating_system": platform.system(),
            },
            "environment": {"device_query": {}, "requirements": [f"autotile=={__version__}"]},
        },
        "schema_version": SCHEMA_VERSION,
    }


def write_t4(path: Path, trials: Iterable[StoredTrial], device: DeviceProperties | None) -> tuple[Path, Path]:
    """Write both documents: the results to ``path``, the metadata beside it with ``-metadata`` before the suffix.

    Returns
    -------
    tuple of Path
        Paths of the two files.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    metadata = path.with_name(f"{path.stem}-metadata{path.suffix}")
    for target, document in ((path, t4_results(trials)), (metadata, t4_metadata(device))):
        write_text(target, encode_json(document, indent=1) + "\n")
    return path, metadata


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    try:
        with atomic_write(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None


def _result(stored: StoredTrial) -> dict[str, Any]:
    trial = stored.trial
    return {
        "timestamp": str(stored.created_at),
        "configuration": dict(trial.config),
        "times": _times(trial),
        "invalidity": _INVALIDITY[trial.outcome],
        "correctness": 0 if _INVALIDITY[trial.outcome] == "correctness" else 1,
        "measurements": _measurements(trial),
        "objectives": ["time"],
    }


def _times(trial: Trial) -> dict[str, Any]:
    times = dict.fromkeys((*_TIMES.values(), "framework"), 0.0)
    for stage, seconds in trial.seconds.items():
        times[_TIMES.get(stage, "framework")] += 1e3 * seconds
    samples_us = trial.measurement.samples_us if trial.measurement else ()
    # The schema names it compilation_time, Kernel Tuner compilation; both are written for readers of either.
    return {**times, "compilation_time": times["compilation"], "runtimes": [time_us / 1e3 for time_us in samples_us]}


def _measurements(trial: Trial) -> list[dict[str, Any]]:
    found: list[tuple[str, float | int | str, str]] = []
    if trial.measurement:
        interval = trial.measurement.low_us, trial.measurement.high_us
        found.append(("time", trial.measurement.time_us / 1e3, "ms"))
        found += [(name, value / 1e3, "ms") for name, value in zip(("time_low", "time_high"), interval, strict=True)]
    if trial.resources:
        found.append(("registers", trial.resources.registers, ""))
        found.append(("spill_bytes", trial.resources.spill_bytes, "B"))
        found.append(("static_smem_bytes", trial.resources.static_smem_bytes, "B"))
    if trial.occupancy:
        found.append(("occupancy", trial.occupancy.occupancy, ""))
    found += [(name, value, "") for name, value in trial.telemetry.items()]
    if trial.reason:
        found.append(("reason", trial.reason, ""))
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in found]
