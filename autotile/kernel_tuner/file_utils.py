"""Files of results and metadata in the T4 format, as Kernel Tuner's scripts write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotile.exchange.kernel_tuner import t4_metadata, write_text
from autotile.kernel_tuner.util import NpEncoder

_TIMES = {
    "compile_time": "compilation",
    "benchmark_time": "benchmark",
    "framework_time": "framework",
    "strategy_time": "search_algorithm",
    "verification_time": "validation",
}
_INVALIDITY = {"CompilationFailedConfig": "compile", "RuntimeFailedConfig": "runtime", "InvalidConfig": "constraints"}
_SCHEMA = "1.0.0"


def get_t4_results(
    results: Iterable[Mapping[str, Any]], tune_params: Mapping[str, Any], objective: str = "time"
) -> dict[str, Any]:
    """Return the results of `tune_kernel` as a T4 document."""
    return {
        "results": [_t4_result(result, tune_params, objective) for result in results],
        "schema_version": _SCHEMA,
        "metadata": {"timeunit": "milliseconds"},
    }


def store_output_file(
    output_filename: str | Path,
    results: Iterable[Mapping[str, Any]],
    tune_params: Mapping[str, Any],
    objective: str = "time",
) -> None:
    """Write the results of `tune_kernel` to a T4 file; ``.json`` is appended if it is missing."""
    _write(output_filename, get_t4_results(results, tune_params, objective))


def get_t4_metadata(target: str = "nvidia") -> dict[str, Any]:
    """Return the machine, its first GPU and its software as the T4 format states them."""
    from autotile.cuda.driver import device_count, live_device

    return t4_metadata(live_device(0) if device_count() else None)


def store_metadata_file(metadata_filename: str | Path, target: str = "nvidia") -> None:
    """Write the metadata of the machine to a T4 file; ``.json`` is appended if it is missing."""
    _write(metadata_filename, get_t4_metadata(target))


def _t4_result(result: Mapping[str, Any], tune_params: Mapping[str, Any], objective: str) -> dict[str, Any]:
    error = result.get("__error__")
    measured = result.keys() - tune_params.keys() - _TIMES.keys() - {"timestamp", "times", "__error__"}
    return {
        "timestamp": result.get("timestamp", ""),
        "configuration": {name: result[name] for name in tune_params if name in result},
        "times": {**{t4: result.get(name, 0) for name, t4 in _TIMES.items()}, "runtimes": result.get("times", [])},
        "invalidity": "correct" if error is None else _INVALIDITY.get(type(error).__name__, "runtime"),
        "correctness": 1,
        "measurements": [
            {"name": name, "value": value, "unit": "ms" if name.startswith("time") else ""}
            for name, value in result.items()
            if name in measured
        ],
        "objectives": [objective],
    }


def _write(filename: str | Path, document: Mapping[str, Any]) -> None:
    name = str(filename)
    path = Path(name if name.endswith(".json") else f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, cls=NpEncoder, indent=1) + "\n")
