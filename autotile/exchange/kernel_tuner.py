"""Cache files of Kernel Tuner: export for its simulation mode, and import of its results.

Kernel Tuner omits the last two braces until a session ends, so files of killed sessions are readable too. Nothing in a
file is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.dtypes import DTYPES
from autotile.core.model import Measurement, Outcome, Trial, config_key
from autotile.core.reading import read_regular
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.database.trials import StoredTrial
from autotile.errors import InputError
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.exchange.t4 import write_text
from autotile.kernel.problem import MAX_SIZE
from autotile.kernel.spec import Parameter

STAGES: Mapping[str, str] = {
    "compile": "compile_time",
    "verify": "verification_time",
    "measure": "benchmark_time",
    "search": "strategy_time",
    "framework": "framework_time",
}
"""Kernel Tuner's name for the time of each stage; stages that it lacks count as framework time."""

_RESERVED = frozenset({"grid_size_x", "grid_size_y", "grid_size_z", "time"})
"""Names that Kernel Tuner rejects for parameters: ``check_tune_params_list`` in its util.py."""

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

    The last trial of each configuration is written, so finals replace the search.

    Raises
    ------
    InputError
        A parameter has a name that Kernel Tuner reserves, or the file cannot be written.
    """
    names = [parameter.name for parameter in parameters]
    if taken := sorted(_RESERVED.intersection(names)):
        raise InputError(f"Kernel Tuner reserves the name {taken[0]!r}; rename the parameter to export results")
    head = {
        "device_name": key.gpu_name,
        "kernel_name": key.kernel,
        "problem_size": list(key.sizes.values()),
        "tune_params_keys": names,
        "tune_params": {parameter.name: list(parameter.values) for parameter in parameters},
        "objective": "time",
    }
    newest = {config_key(one.trial.config): one for one in trials if one.trial.outcome.is_finding}
    entries = [
        f"{json.dumps(','.join(str(one.trial.config[name]) for name in names))}: {json.dumps(_entry(one))}"
        for one in newest.values()
    ]
    # Kernel Tuner's own layout, since it recognizes a finished file by the last three characters.
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


_FAILURES: Mapping[str, tuple[Outcome, str, str]] = {
    "InvalidConfig": (Outcome.INFEASIBLE, "limits", "too many threads a block, or a restriction is not met"),
    "CompilationFailedConfig": (Outcome.COMPILE_FAILED, "compile", "compilation failed"),
    "RuntimeFailedConfig": (Outcome.RESOURCE_EXCEEDED, "load", "too many resources requested for launch"),
    "ErrorConfig": (Outcome.CRASHED, "measure", "failed for a reason that was not recorded"),
}
"""Meaning of Kernel Tuner's error marks: its core.py continues after these failures only."""

_OWN_ENTRIES = frozenset({"time", "times", "timestamp", "__error__", *STAGES.values()})

_EXPECTED = "expected a file that tune_kernel(..., cache=...) wrote"

_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class KernelTunerCache:
    """Content of a cache file."""

    path: Path
    kernel: str
    gpu_name: str
    device: DeviceProperties | None
    """Properties from the profile of that GPU; None if there is none."""
    problem_size: tuple[int, ...]
    """Empty if Kernel Tuner computed it with a function."""
    parameters: tuple[Parameter, ...]
    trials: tuple[Trial, ...]
    """One trial for each entry, with the source ``"replayed"``."""

    def key(self, sizes: Mapping[str, int] | None = None, dtype: str = "float32") -> TuningKey:
        """Return the key of these results, which equals no key of autotile's own since the template hash is unknown.

        Parameters
        ----------
        sizes
            Sizes by name; None to name the components of the problem size x, y and z.

        Raises
        ------
        InputError
            Neither ``sizes`` nor the file states the sizes, or a size or the dtype is invalid.
        """
        if sizes is None and not self.problem_size:
            raise InputError(f"{self.path} does not state its problem size; give the sizes, such as N=1024")
        if dtype not in DTYPES:
            raise InputError(f"there is no dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        named = dict(zip("xyz", self.problem_size, strict=False) if sizes is None else sizes)
        for name, value in named.items():
            if not 0 < value <= MAX_SIZE:
                raise InputError(f"size {name} is {value}, expected 1 to {MAX_SIZE}")
        device = self.device
        return TuningKey(
            kernel=self.kernel,
            template_hash="",
            space_hash="",
            options=(),
            dtype=dtype,
            sizes=named,
            gpu_name=self.gpu_name,
            compute_capability=device.compute_capability if device else "",
            sm_count=device.sm_count if device else 0,
            smem_per_block_optin_bytes=device.smem_per_block_optin_bytes if device else 0,
            nvrtc_version="",
            l2_mode="hot",  # Kernel Tuner repeats a launch without flushing the cache
            source="replayed",
        )


def read_cache(path: Path) -> KernelTunerCache:
    """Read a cache file without executing anything in it.

    Raises
    ------
    InputError
        The file cannot be read, or is not a cache file; the message names the entry.
    """
    data = _load(path)
    names = data.get("tune_params_keys")
    values = data.get("tune_params")
    entries = data.get("cache")
    if not (isinstance(names, list) and isinstance(values, dict) and isinstance(entries, dict)):
        raise _malformed(path, "it lacks 'tune_params_keys', 'tune_params' or 'cache'")
    gpu_name, kernel = data.get("device_name"), data.get("kernel_name")
    if not (isinstance(gpu_name, str) and isinstance(kernel, str)):
        raise _malformed(path, "its 'device_name' or 'kernel_name' is not a string")
    parameters = tuple(_parameter(path, name, values.get(name)) for name in names)
    return KernelTunerCache(
        path=path,
        kernel=kernel,
        gpu_name=gpu_name,
        device=_known_device(gpu_name),
        problem_size=_problem_size(path, data.get("problem_size", "callable")),
        parameters=parameters,
        trials=tuple(_trial(path, label, entry, parameters) for label, entry in entries.items()),
    )


def import_into_database(database: Database, cache: KernelTunerCache, key: TuningKey) -> int:
    """Store the results of a cache file as one finished run, and return the id of its study."""
    study = database.study(key, cache.device)
    run = database.start_run(study, sampler="kernel_tuner", settings={"imported_from": cache.path.name})
    database.add_trials(study, run, cache.trials)
    database.end_run(run, {"trials": len(cache.trials)})
    return study


def import_into_recording(path: Path, cache: KernelTunerCache, key: TuningKey) -> None:
    """Write the results of a cache file as a recording, for replay.

    Raises
    ------
    RecordingError
        The recording cannot be written.
    """
    header = RecordingHeader(
        key=replace(key, source="cuda"),
        parameters=cache.parameters,
        device=cache.device,
        settings={"imported_from": cache.path.name, "measured_with": "Kernel Tuner"},
        chosen="the entries of a Kernel Tuner cache file",
    )
    write_recording(path, header, cache.trials)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, _MAX_BYTES).decode().replace("\r\n", "\n").strip()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {_EXPECTED}") from None
    except UnicodeDecodeError:
        raise _malformed(path, "it is not UTF-8 text") from None
    closed = text.removesuffix(",") + "}\n}"
    without_last_line = text.rpartition("\n")[0].removesuffix(",") + "}\n}"
    for candidate in (text, closed, without_last_line):
        try:
            data = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict):
            return data
    raise _malformed(path, "it is not a JSON object")


def _malformed(path: Path, problem: str) -> InputError:
    return InputError(f"{path} cannot be read as a cache file of Kernel Tuner: {problem}; {_EXPECTED}")


def _known_device(name: str) -> DeviceProperties | None:
    try:
        return device_profile(name)
    except InputError:
        return None


def _problem_size(path: Path, value: Any) -> tuple[int, ...]:
    if value == "callable":
        return ()
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise _malformed(path, f"its 'problem_size' is {value!r:.80}, expected integers")
    return tuple(numbers)


def _parameter(path: Path, name: Any, values: Any) -> Parameter:
    if not isinstance(name, str) or not isinstance(values, list) or not values:
        raise _malformed(path, f"'tune_params' lacks values for {name!r:.80}")
    for value in values:
        if not isinstance(value, int | str):
            raise _malformed(path, f"{name} has the value {value!r:.80}, expected integers, booleans or strings")
    return Parameter(name, tuple(dict.fromkeys(values)))


def _trial(path: Path, label: str, entry: Any, parameters: tuple[Parameter, ...]) -> Trial:
    if not isinstance(entry, dict):
        raise _malformed(path, f"the entry {label!r:.80} is not an object")
    for parameter in parameters:
        value = entry.get(parameter.name)
        if not any(value == listed and type(value) is type(listed) for listed in parameter.values):
            raise _malformed(path, f"the entry {label!r:.80} lacks a listed value of {parameter.name!r}")
    config = {parameter.name: entry[parameter.name] for parameter in parameters}
    extra = {name: value for name, value in entry.items() if name not in config and name not in _OWN_ENTRIES}
    mark = next((value for value in entry.values() if isinstance(value, str) and value in _FAILURES), None)
    outcome, stage, reason = _FAILURES[mark] if mark else (Outcome.OK, "measure", "")
    return Trial(
        config=config,
        outcome=outcome,
        reason=f"Kernel Tuner: {reason}" if reason else "",
        stage=stage,
        measurement=None if mark else _measurement(path, label, entry),
        source="replayed",
        seconds={stage: entry[name] / 1e3 for stage, name in STAGES.items() if _is_number(entry.get(name))},
        telemetry={name: value for name, value in extra.items() if _is_number(value) or isinstance(value, str)},
    )


def _measurement(path: Path, label: str, entry: Mapping[str, Any]) -> Measurement:
    """Return Kernel Tuner's time with the range of its runs, which for 6 or more holds the median with over 95 %."""
    time_ms = entry.get("time")
    if not _is_number(time_ms) or time_ms <= 0:
        raise _malformed(path, f"the entry {label!r:.80} has the time {time_ms!r:.80}, expected milliseconds")
    runs = entry.get("times")
    runs_ms = runs if isinstance(runs, list) and runs and all(map(_is_number, runs)) else []
    return Measurement(
        time_us=1e3 * time_ms,
        low_us=1e3 * min(runs_ms, default=time_ms),
        high_us=1e3 * max(runs_ms, default=time_ms),
        samples_us=tuple(1e3 * run_ms for run_ms in runs_ms),
        l2="hot",
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
