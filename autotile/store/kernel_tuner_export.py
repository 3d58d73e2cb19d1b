"""Export as a cache file of Kernel Tuner 1.5.0, which its simulation mode replays.

A cache file is JSON: a head with the device, kernel, problem size and parameters, then one entry a line for each
configuration, under its values joined by commas. Times are in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotile.ground.errors import InputError
from autotile.ground.model import Outcome, Trial, config_key
from autotile.ground.spec import Parameter
from autotile.store.keys import TuningKey
from autotile.store.t4 import write_text
from autotile.store.trials import StoredTrial

STAGES: Mapping[str, str] = {
    "compile": "compile_time",
    "verify": "verification_time",
    "measure": "benchmark_time",
    "search": "strategy_time",
    "framework": "framework_time",
}
"""Kernel Tuner's name for the time of each of our stages; those that it does not know are its framework's."""

_RESERVED = frozenset({"grid_size_x", "grid_size_y", "grid_size_z", "time"})
"""Names that Kernel Tuner refuses for parameters: ``check_tune_params_list`` in its util.py."""

_ERRORS: Mapping[Outcome, str] = {
    Outcome.INFEASIBLE: "InvalidConfig",
    Outcome.COMPILE_FAILED: "CompilationFailedConfig",
    Outcome.RESOURCE_EXCEEDED: "RuntimeFailedConfig",
    Outcome.WRONG_RESULT: "RuntimeFailedConfig",
    Outcome.OUT_OF_BOUNDS: "RuntimeFailedConfig",
    Outcome.CRASHED: "RuntimeFailedConfig",
    Outcome.TIMED_OUT: "RuntimeFailedConfig",
}


def write_cache(path: Path, key: TuningKey, parameters: Sequence[Parameter], trials: Sequence[StoredTrial]) -> None:
    """Write trials as a cache file that ``kernel_tuner.interface.tune_cache`` replays.

    Of several trials of a configuration the last one counts, so that finals replace the search.

    Raises
    ------
    InputError
        A parameter has a name that Kernel Tuner keeps for itself, or the file cannot be written.
    """
    names = [parameter.name for parameter in parameters]
    if taken := sorted(_RESERVED.intersection(names)):
        raise InputError(f"Kernel Tuner keeps the name {taken[0]!r} for itself; rename the parameter to export results")
    head = {
        "device_name": key.gpu_name,
        "kernel_name": key.kernel,
        "problem_size": list(key.sizes.values()),
        "tune_params_keys": names,
        "tune_params": {parameter.name: list(parameter.values) for parameter in parameters},
        "objective": "time",
    }
    newest = {config_key(one.trial.config): one for one in trials if one.trial.outcome is not Outcome.NOT_AVAILABLE}
    entries = [
        f"{json.dumps(','.join(str(one.trial.config[name]) for name in names))}: {json.dumps(_entry(one))}"
        for one in newest.values()
    ]
    # Laid out as Kernel Tuner does, because it looks at the last three characters to tell a finished file.
    text = json.dumps(head, indent="")[:-2] + ',\n"cache": {\n' + ",\n".join(entries) + "}\n}"
    write_text(path, text)


def _entry(stored: StoredTrial) -> dict[str, Any]:
    trial = stored.trial
    entry: dict[str, Any] = dict(trial.config)
    if trial.outcome in _ERRORS:
        entry["__error__"] = _ERRORS[trial.outcome]
    elif trial.measurement is not None:
        entry["time"] = trial.measurement.time_us / 1e3
        entry["times"] = [time_us / 1e3 for time_us in trial.measurement.samples_us]
    return {**entry, **_stage_times(trial), "timestamp": str(stored.created_at)}


def _stage_times(trial: Trial) -> dict[str, float]:
    times = dict.fromkeys(STAGES.values(), 0.0)
    for stage, seconds in trial.seconds.items():
        times[STAGES.get(stage, "framework_time")] += 1e3 * seconds
    return times
