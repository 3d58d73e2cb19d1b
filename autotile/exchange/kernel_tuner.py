"""Kernel Tuner's files, exported and imported: cache files, and results in the T4 format.

Kernel Tuner omits the last two braces until a session ends, so files of killed sessions are readable too. Nothing in a
file is executed.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import msgspec
from msgspec.structs import replace

from autotile.core.argument_types import check_value
from autotile.core.device import DeviceProperties, device_profile
from autotile.core.documents import Count, Name, NonNegative, Text, convert, decode_json, encode_json, read_regular
from autotile.core.dtypes import known_dtype
from autotile.core.model import L2Mode, Outcome, Trial, Value, config_key
from autotile.database.database import Database, StoredTrial
from autotile.database.keys import TuningKey
from autotile.database.paths import write_output
from autotile.errors import DataError, InputError
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.kernel.problem import MAX_SIZE
from autotile.kernel.spec import Parameter
from autotile.version import __version__

STAGES: Mapping[str, str] = {
    "compile": "compile_time",
    "verify": "verification_time",
    "measure": "benchmark_time",
    "search": "strategy_time",
    "framework": "framework_time",
}
"""Kernel Tuner's name for the time of each stage; stages that it lacks count as framework time."""
_T4_NAMES = ("compilation", "validation", "benchmark", "search_algorithm", "framework")
_T4_TIMES: Mapping[str, str] = dict(zip(_T4_NAMES, STAGES.values(), strict=True))
"""The same times by the names under which Kernel Tuner 1.5.0 writes them to T4 results."""

_OWN_ENTRIES = frozenset({"time", "times", "timestamp", "__error__", *STAGES.values()})
RESERVED = frozenset({"grid_size_x", "grid_size_y", "grid_size_z"}) | _OWN_ENTRIES
"""Names that Kernel Tuner rejects for parameters (``check_tune_params_list`` in its util.py), and those of its own
entries of a result, which would take the place of a parameter's value."""

_WORDS: Mapping[Outcome, tuple[str, str]] = {
    Outcome.OK: ("correct", ""),
    Outcome.PRUNED: ("correct", ""),
    Outcome.INFEASIBLE: ("constraints", "InvalidConfig"),
    Outcome.RESOURCE_EXCEEDED: ("constraints", "RuntimeFailedConfig"),
    Outcome.COMPILE_FAILED: ("compile", "CompilationFailedConfig"),
    Outcome.WRONG_RESULT: ("correctness", "RuntimeFailedConfig"),
    Outcome.OUT_OF_BOUNDS: ("correctness", "RuntimeFailedConfig"),
    Outcome.CRASHED: ("runtime", "RuntimeFailedConfig"),
    Outcome.TIMED_OUT: ("timeout", "RuntimeFailedConfig"),
}
"""Term of the T4 schema for each outcome, and error mark of a cache file; configurations of any other outcome were
never tried, and are left out."""


def write_cache(path: Path, key: TuningKey, parameters: Sequence[Parameter], trials: Sequence[StoredTrial]) -> None:
    """Write trials as a cache file that ``kernel_tuner.interface.tune_cache`` replays.

    There is one trial of each configuration. Raise `InputError` if a parameter has a name that Kernel Tuner reserves,
    or the file cannot be written.
    """
    names = [parameter.name for parameter in parameters]
    _check_names(names)
    head = {
        "device_name": key.gpu_name,
        "kernel_name": key.kernel,
        "problem_size": list(key.sizes.values()),
        "tune_params_keys": names,
        "tune_params": {parameter.name: list(parameter.values) for parameter in parameters},
        "objective": "time",
        "dtype": key.dtype,
        "l2_mode": key.l2_mode,
    }
    entries = []
    for one in trials:
        if one.trial.outcome in _WORDS:
            label = ",".join(str(one.trial.config[name]) for name in names)
            entries.append(f"{encode_json(label)}: {encode_json(_result(one))}")
    # Kernel Tuner's own layout, since it recognizes a finished file by the last three characters.
    text = encode_json(head, indent="")[:-2] + ',\n"cache": {\n' + ",\n".join(entries) + "}\n}"
    write_output(path, text)


def _check_names(names: Iterable[str]) -> None:
    if taken := sorted(RESERVED.intersection(names)):
        raise DataError(f"Kernel Tuner reserves the name {taken[0]!r}; rename the parameter to exchange results")


def _result(stored: StoredTrial) -> dict[str, Any]:
    """Return a trial as a result of `tune_kernel`: parameters, times in milliseconds, the mark of a failure."""
    trial = stored.trial
    result: dict[str, Any] = dict(trial.config)
    if mark := _WORDS[trial.outcome][1]:
        result["__error__"] = mark
    elif trial.measurement is not None:
        result["time"] = trial.measurement.time_us / 1e3
        result["times"] = [time_us / 1e3 for time_us in trial.measurement.samples_us]
    result |= dict.fromkeys(STAGES.values(), 0.0)
    for stage, seconds in trial.seconds.items():
        result[STAGES.get(stage, "framework_time")] += 1e3 * seconds
    return {**result, "timestamp": str(stored.created_at)}


_FAILURES: Mapping[str, tuple[Outcome, str, str]] = {
    "InvalidConfig": (Outcome.INFEASIBLE, "limits", "a limit or a restriction is not met, or a wrong result"),
    "CompilationFailedConfig": (Outcome.COMPILE_FAILED, "compile", "compilation failed"),
    "RuntimeFailedConfig": (
        Outcome.RESOURCE_EXCEEDED,
        "load",
        "too many resources, another failed launch, or a wrong result",
    ),
    "ErrorConfig": (Outcome.CRASHED, "measure", "failed for a reason that was not recorded"),
}
"""Meaning of Kernel Tuner's error marks: its core.py continues after these failures only."""

_INVALID: Mapping[str, tuple[Outcome, str, str]] = {
    "constraints": _FAILURES["InvalidConfig"],
    "compile": _FAILURES["CompilationFailedConfig"],
    "runtime": _FAILURES["RuntimeFailedConfig"],
    "correctness": (Outcome.WRONG_RESULT, "verify", "a wrong result"),
    "timeout": (Outcome.TIMED_OUT, "measure", "it did not end in time"),
}
"""Meaning of each term of the T4 schema but ``correct``, as Kernel Tuner uses them."""

_BOUNDS = ("time_low", "time_high")
"""Measurements of autotile's T4 files: the interval of the time, in milliseconds."""

ImportFormat = Literal["kernel-tuner", "t4"]
_KINDS: Mapping[ImportFormat, tuple[str, str]] = {
    "kernel-tuner": ("a cache file of Kernel Tuner", "a file that tune_kernel(..., cache=...) wrote"),
    "t4": ("T4 results", "a file that store_output_file or `autotile export` wrote"),
}
"""Name of each format and of what writes it, for messages."""

_MAX_BYTES = 2**30
CACHE_END = "}\n}"
"""End of a cache file, which Kernel Tuner writes when a call ends."""


class CacheDocument(msgspec.Struct):
    """Schema of a cache file; the last two fields are autotile's own."""

    device_name: Name
    kernel_name: Name
    tune_params_keys: tuple[Name, ...]
    tune_params: dict[Name, tuple[Value, ...]]
    cache: dict[Text, dict[Name, Any]]
    problem_size: Count | Text | tuple[Count | Text, ...] | dict[Name, Count] = "callable"
    dtype: Name = "float32"
    l2_mode: L2Mode = "hot"  # Kernel Tuner repeats a launch without flushing the cache


class T4Result(msgspec.Struct):
    """Schema of a result in the T4 format; times are in milliseconds."""

    configuration: dict[Name, Value]
    times: dict[Name, Any]
    invalidity: Literal["correct", "constraints", "compile", "runtime", "correctness", "timeout"]
    measurements: tuple[dict[Name, Any], ...] = ()


class MeasuredEntry(msgspec.Struct):
    """Times of an entry that has no error mark, in milliseconds."""

    time: NonNegative
    times: tuple[NonNegative, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedResults:
    """Content of a cache file or a file of T4 results."""

    path: Path
    format: ImportFormat
    document: CacheDocument
    """The content as that of a cache file."""
    device: DeviceProperties | None
    """Properties from the profile of its GPU; None if there is none."""
    problem_size: tuple[int, ...]
    """Empty if the file does not state it, or Kernel Tuner computed it with a function or an expression."""
    parameters: tuple[Parameter, ...]
    trials: tuple[Trial, ...]
    """One trial for each entry, with the source ``"replayed"``."""

    def key(self, sizes: Mapping[str, int] | None = None, dtype: str | None = None) -> TuningKey:
        """Return the key of these results, which equals no key of autotile's own since the template hash is unknown.

        Without sizes, flags of 0 among them if the file has any, those of the file are taken, named x, y and z if it
        does not name them; without a dtype, the file's. It is an `InputError` if the file does not state them, or a
        size or the dtype is invalid; a `DataError` if the file contradicts the sizes.
        """
        document, device = self.document, self.device
        names = tuple(document.problem_size) if isinstance(document.problem_size, dict) else ()
        if sizes is None and not (names or 1 <= len(self.problem_size) <= 3):
            what = "its problem size in one to three numbers"
            raise InputError(f"{self.path} does not state {what}; give the sizes, such as N=1024")
        stated = dict(zip(names or "xyz", self.problem_size, strict=False))
        named = dict(stated if sizes is None else sizes)
        least = int((sizes is None and not names) or 0 not in self.problem_size)
        for name, value in named.items():
            check_value(f"size {name}", value, int)
            if not least <= value <= MAX_SIZE:
                raise InputError(f"size {name} is {value}, expected {least} to {MAX_SIZE}")
        # Kernel Tuner's problem size is that of the grid: sizes, such as those of a matrix, or products of some.
        is_given = all(_is_product(extent, named.values()) for extent in stated.values())
        if any(named.get(name) != stated[name] for name in names) or not is_given:
            given = ", ".join(f"{name}={value}" for name, value in named.items())
            raise DataError(
                f"{self.path} has results of the problem size {' x '.join(map(str, self.problem_size))}, which {given} "
                "contradicts, as no product of sizes gives it; give the sizes of the file, or none to take its own"
            )
        return TuningKey(
            kernel=document.kernel_name,
            template_hash="",
            space_hash="",
            options=(),
            dtype=known_dtype(dtype or document.dtype),
            sizes=named,
            gpu_name=document.device_name,
            compute_capability=device.compute_capability if device else "",
            sm_count=device.sm_count if device else 0,
            smem_per_block_optin_bytes=device.smem_per_block_optin_bytes if device else 0,
            nvrtc_version="",
            l2_mode=document.l2_mode,
            source="replayed",
        )


def _is_product(extent: int, sizes: Iterable[int]) -> bool:
    reached = {1}
    for size in filter(None, sizes if extent > 1 else ()):
        reached |= {size * product for product in reached if extent % (size * product) == 0}
    return extent == 0 or extent in reached


def read_results(
    path: Path, file_format: ImportFormat | None = None, *, kernel: str | None = None, gpu_name: str | None = None
) -> ImportedResults:
    """Read a cache file or a file of T4 results without executing anything in it.

    The format, the kernel and the GPU are those of the file unless they are given; T4 results without a kernel are of
    the one that the file is named after. Raise `InputError` if the file cannot be read, is of another format or does
    not name the GPU; the message names the entry.
    """
    kind = file_format or "kernel-tuner"
    try:
        # Observers may have measured NaN, which is read as null.
        read = read_open_json(path, lambda _: None)
        if file_format is None and "results" in read and "cache" not in read:
            kind = "t4"
        if kind == "t4":
            if "results" not in read:
                raise DataError("it has no results")
            read = _cache_of_t4(read, path.stem)
        stated = {"kernel_name": kernel, "device_name": gpu_name}
        read |= {name: value for name, value in stated.items() if value is not None}
        document = decode_json(json.dumps(read), CacheDocument)
        if lacking := [name for name in stated if not getattr(document, name)]:
            raise DataError(f"{lacking[0]} is empty; give the name of the {lacking[0].removesuffix('_name')}")
        listed = {name: document.tune_params.get(name, ()) for name in document.tune_params_keys}
        if (empty := next((name for name, values in listed.items() if not values), None)) is not None:
            raise DataError(f"'tune_params' lacks values for {empty!r:.80}")
        _check_names(listed)
        parameters = tuple(Parameter(name, tuple(dict.fromkeys(values))) for name, values in listed.items())
        trials = tuple(_trial(label, entry, parameters, document.l2_mode) for label, entry in document.cache.items())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; expected {_KINDS[kind][1]}") from None
    except (UnicodeDecodeError, DataError) as error:
        problem = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        what, writer = _KINDS[kind]
        raise DataError(f"{path} cannot be read as {what}: {problem}; expected {writer}") from None
    device = None
    with suppress(InputError):
        device = device_profile(document.device_name)
    size = document.problem_size
    extents = tuple(size.values()) if isinstance(size, dict) else size if isinstance(size, tuple) else (size,)
    numbers = tuple(one for one in extents if isinstance(one, int))
    size = numbers if len(numbers) == len(extents) else ()
    return ImportedResults(path, kind, document, device, size, parameters, trials)


def import_into_database(database: Database, results: ImportedResults, key: TuningKey) -> tuple[int, int]:
    """Store the results of a file as one finished run; return the id of its study, and the number of results.

    Those that the study has already, of the same file or a shorter one, are not stored again.
    """
    study = database.study(key, results.device)
    known = {trial.config_key: trial for trial in database.trials(study)}
    added = [trial for trial in results.trials if known.get(config_key(trial.config)) != trial]
    if added:
        origin = {"imported_from": results.path.name}
        database.add_run(study, added, sampler="kernel_tuner", settings=origin, summary={"trials": len(added)})
    return study, len(added)


def import_into_recording(path: Path, results: ImportedResults, key: TuningKey) -> None:
    """Write the results of a file as a recording, for replay."""
    header = RecordingHeader(
        key=replace(key, source="cuda"),
        parameters=results.parameters,
        device=results.device,
        settings={"imported_from": results.path.name, "measured_with": "Kernel Tuner"},
        chosen=f"the entries of {_KINDS[results.format][0]}",
    )
    write_recording(path, header, results.trials)


def read_open_json(path: Path, parse_constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the object in a file, whose end an interrupted call may have left away; as for `json.loads`.

    It is an `OSError` or a `UnicodeDecodeError` if the file cannot be read, a `DataError` if it holds no object.
    """
    text = read_regular(path, _MAX_BYTES).decode().replace("\r\n", "\n").strip()
    whole = (one.removesuffix(",") + CACHE_END for one in (text, text.rpartition("\n")[0]))
    for candidate in (text, *whole):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(candidate, parse_constant=parse_constant), dict):
                return found
    raise DataError("it is not a JSON object")


def _cache_of_t4(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return T4 results as the content of a cache file; ``name`` is the kernel's if they do not state it."""
    head = {"kernel_name": name, "device_name": "", "timeunit": "milliseconds"}
    head |= convert(document.get("metadata", {}), dict[Name, Any])
    if (unit := head.pop("timeunit")) != "milliseconds":
        raise DataError(f"its times are in {unit!r:.80}, expected 'milliseconds'")
    values: dict[str, list[Value]] = {}
    cache = {}
    for number, result in enumerate(convert(document["results"], tuple[T4Result, ...]), start=1):
        for parameter, value in result.configuration.items():
            values.setdefault(parameter, []).append(value)
        times = {name: result.times.get(theirs) for theirs, name in _T4_TIMES.items()}
        measured = {str(one.get("name")): one.get("value") for one in result.measurements}
        timed = {"__error__": result.invalidity, "times": result.times.get("runtimes") or (), **times}
        cache[f"result {number}"] = {**measured, **timed, **result.configuration}
    return {**head, "tune_params_keys": list(values), "tune_params": values, "cache": cache}


def _trial(label: str, entry: Mapping[str, Any], parameters: tuple[Parameter, ...], l2: L2Mode) -> Trial:
    for parameter in parameters:
        value = entry.get(parameter.name)
        if not any(value == listed and type(value) is type(listed) for listed in parameter.values):
            raise DataError(f"the entry {label!r:.80} lacks a listed value of {parameter.name!r}")
    config = {parameter.name: entry[parameter.name] for parameter in parameters}
    own = {*config, *_OWN_ENTRIES, *_BOUNDS}
    # Old files have the mark in place of a time.
    failure = _INVALID.get(str(entry.get("__error__"))) or next(
        (_FAILURES[value] for value in entry.values() if isinstance(value, str) and value in _FAILURES), None
    )
    outcome, stage, reason = failure or (Outcome.OK, "measure", "")
    trial: dict[str, Any] = {
        "config": config,
        "outcome": outcome,
        "reason": f"Kernel Tuner: {reason}" if reason else "",
        "stage": stage,
        "source": "replayed",
        "seconds": {stage: entry[name] / 1e3 for stage, name in STAGES.items() if _is_number(entry.get(name))},
        "telemetry": {k: v for k, v in entry.items() if k not in own and (_is_number(v) or isinstance(v, str))},
    }
    try:
        if failure is None:
            found = convert(entry, MeasuredEntry)
            low, high = map(entry.get, _BOUNDS)
            if not (_is_number(low) and _is_number(high) and 0 < low <= found.time <= high):
                # The range of the runs, which for 6 or more holds the median with over 95 %, with the time.
                runs = [found.time, *found.times]
                low, high = min(runs), max(runs)
            trial["measurement"] = {
                "time_us": 1e3 * found.time,
                "low_us": 1e3 * low,
                "high_us": 1e3 * high,
                "samples_us": [1e3 * run_ms for run_ms in found.times],
                "l2": l2,
            }
        return convert(trial, Trial)
    except DataError as error:
        raise DataError(f"the entry {label!r:.80}: {error}") from None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


SCHEMA_VERSION = "1.0.0"

_TERMS = {"InvalidConfig": "constraints", "CompilationFailedConfig": "compile"}
"""Terms of the T4 schema for Kernel Tuner's error marks, ``runtime`` for all others."""
_UNITS = {"spill_bytes": "B", "static_smem_bytes": "B"}


def t4_results(
    results: Iterable[Mapping[str, Any]], parameters: Iterable[str], objective: str = "time", **stated: Any
) -> dict[str, Any]:
    """Return results, as `tune_kernel` returns them, as a T4 document with further metadata.

    The mark of a failure may be a term of the schema.
    """
    names, entries = list(parameters), []
    hidden = {*names, *_OWN_ENTRIES} - {"time"}
    for result in results:
        mark = result.get("__error__", "correct")
        invalidity = mark if mark in ("correct", *_INVALID) else _TERMS.get(mark, "runtime")
        times = {theirs: result.get(name, 0.0) for theirs, name in _T4_TIMES.items()}
        entry = {
            "timestamp": result.get("timestamp", ""),
            "configuration": {name: result[name] for name in names if name in result},
            # The schema names it compilation_time, Kernel Tuner compilation; both are written for readers of either.
            "times": {**times, "compilation_time": times["compilation"], "runtimes": result.get("times", [])},
            "invalidity": invalidity,
            "correctness": int(invalidity != "correctness"),
            "measurements": [
                {"name": name, "value": value, "unit": "ms" if name.startswith("time") else _UNITS.get(name, "")}
                for name, value in result.items()
                if name not in hidden
            ],
            "objectives": [objective],
        }
        entries.append(entry)
    return {"results": entries, "schema_version": SCHEMA_VERSION, "metadata": {"timeunit": "milliseconds", **stated}}


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


def write_t4(path: Path, key: TuningKey, trials: Sequence[StoredTrial], device: DeviceProperties | None) -> Path | None:
    """Write the results to a path and the metadata beside it, with ``-metadata`` before the suffix; return its path.

    All trials have the same parameters. Beside a special file, such as ``/dev/stdout``, there is none. It is an
    `InputError` if a parameter has a name that Kernel Tuner reserves, a file cannot be written, or the metadata would
    replace a file beside which no results are.
    """
    names = list(trials[0].trial.config) if trials else []
    _check_names(names)
    metadata = path.with_name(f"{path.stem}-metadata{path.suffix}")
    if metadata.exists() and not path.exists():
        raise InputError(f"the metadata of {path} would replace {metadata}; name another file, or move that one away")
    results: list[Mapping[str, Any]] = []
    for stored in trials:
        if (trial := stored.trial).outcome not in _WORDS:
            continue
        found: dict[str, Any] = {}
        if trial.measurement:
            found |= zip(_BOUNDS, (trial.measurement.low_us / 1e3, trial.measurement.high_us / 1e3), strict=True)
        if trial.resources:
            found |= {name: getattr(trial.resources, name) for name in ("registers", *_UNITS)}
        if trial.occupancy:
            found["occupancy"] = trial.occupancy.occupancy
        if trial.reason:
            found["reason"] = trial.reason
        found["__error__"] = _WORDS[trial.outcome][0]
        results.append({**trial.telemetry, **_result(stored), **found, **trial.config})
    # The format has no place for what results are of: it is stated in the free part, by the names of a cache file.
    stated: dict[str, Any] = {"device_name": key.gpu_name, "kernel_name": key.kernel, "problem_size": dict(key.sizes)}
    document = t4_results(results, names, **stated, dtype=key.dtype, l2_mode=key.l2_mode)
    write_output(path, encode_json(document, indent=1) + "\n")
    if not path.is_file():
        return None
    write_output(metadata, encode_json(t4_metadata(device), indent=1) + "\n")
    return metadata
