"""Results of a tuning session in Kernel Tuner's form: a dictionary a configuration, and one of the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import OUTPUT_DIGEST, Outcome, Trial, non_dominated
from autotile.kernel_tuner.observation import Observation
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.util import (
    CompilationFailedConfig,
    ErrorConfig,
    InvalidConfig,
    RuntimeFailedConfig,
    get_best_config,
    get_config_string,
    process_metrics,
)


class Result(dict[str, Any]):
    """The result of a configuration.

    One that failed has no key ``time``, but its time reads as infinite, so that the minimum by ``result["time"]``
    is the fastest.
    """

    def __missing__(self, name: str) -> float:
        if name == "time" and "__error__" in self:
            return math.inf
        raise KeyError(name)


_STAGE_TIMES = {"compile_time": ("compile",), "verification_time": ("verify",), "benchmark_time": ("load", "measure")}
_TOTALS = ("framework_time", "strategy_time", "compile_time", "verification_time", "benchmark_time")
_INVALID = (Outcome.INFEASIBLE, Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS)
_NOT_COMPILED = (Outcome.COMPILE_FAILED, Outcome.NOT_COMPILED)
_COMPILER_STAGES = ("compile", "resources")
_RESERVED_TELEMETRY = frozenset({"reference_us", "event_floor_us", "max_error", "throttle_reasons", OUTPUT_DIGEST})
_OWN_TELEMETRY = _RESERVED_TELEMETRY | {"sm_clock_mhz", "power_w", "temperature_c", "energy_mj", "energy_source"}
"""Telemetry of autotile's own, as against what observers of the output added."""

UNITS = {"time": "ms"}


def error_of(trial: Trial) -> ErrorConfig | None:
    """Return Kernel Tuner's mark of a failure; None if the configuration has a time."""
    if trial.outcome.has_time and trial.measurement is not None:
        return None
    if trial.outcome in _INVALID:
        return InvalidConfig()
    is_compilers = trial.outcome in _NOT_COMPILED or trial.stage in _COMPILER_STAGES
    return CompilationFailedConfig() if is_compilers else RuntimeFailedConfig()


class ResultList:
    """The results of a call, in the order in which they became known.

    Parameters
    ----------
    metrics
        Metrics of the user.
    observation
        Observers.
    quiet, verbose
        Whether nothing is printed, and whether configurations without a time are.
    store
        Called with each result and its parameters.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any] | None,
        observation: Observation,
        *,
        quiet: bool = False,
        verbose: bool = False,
        store: Callable[[Mapping[str, Any], Result], None] | None = None,
    ) -> None:
        self._metrics = metrics
        self._observation = observation
        self._quiet = quiet
        self._verbose = verbose
        self._store = store
        self._known: dict[str, Result] = {}

    @property
    def all(self) -> list[Result]:
        """Results so far."""
        return list(self._known.values())

    def find(self, codec: ParameterCodec, params: Mapping[str, Any]) -> Result | None:
        """Return the result of a configuration."""
        return self._known.get(codec.key(params))

    def add_cached(self, codec: ParameterCodec, entry: Mapping[str, Any]) -> Result:
        """Add a result that was measured by an earlier call; its compilation and measurement take no time now."""
        result = Result({**entry, "compile_time": 0, "verification_time": 0, "benchmark_time": 0})
        if "__error__" not in result:
            process_metrics(result, self._metrics)
        self._known[codec.key(entry)] = result
        return result

    def add(self, codec: ParameterCodec, trial: Trial) -> Result:
        """Add the trial of a configuration, and return its result; a second trial of it is left out."""
        params = {name: value for name, value in codec.decode(dict(trial.config)).items() if name in codec.values}
        key = codec.key(params)
        if key not in self._known:
            self._known[key] = result = self._result(params, trial)
            self._print(codec, params, result, trial)
            if self._store is not None:
                self._store(params, result)
        return self._known[key]

    def _result(self, params: Mapping[str, Any], trial: Trial) -> Result:
        result = Result(params)
        error = error_of(trial)
        if error is not None:
            result["__error__"] = error
        elif trial.measurement is not None:
            samples = trial.measurement.samples_us or (trial.measurement.time_us,)
            result |= {"time": trial.measurement.time_us / 1e3, "times": [time_us / 1e3 for time_us in samples]}
            result |= {name: _number(v) for name, v in trial.telemetry.items() if name not in _OWN_TELEMETRY}
            result |= self._observation.results(params, trial)
        result |= {
            name: 1e3 * sum(trial.seconds.get(stage, 0.0) for stage in stages) for name, stages in _STAGE_TIMES.items()
        }
        result |= {"strategy_time": 0.0, "framework_time": 0.0}
        if error is None:
            process_metrics(result, self._metrics)
        result["timestamp"] = str(datetime.now(UTC))
        return result

    def _print(self, codec: ParameterCodec, params: Mapping[str, Any], result: Result, trial: Trial) -> None:
        if self._quiet:
            return
        if "__error__" not in result:
            print(get_config_string(result, [*codec.values, "time", *(self._metrics or ())], UNITS))
        elif self._verbose:
            print(f"skipping config {'_'.join(map(str, params.values()))}, reason: {trial.outcome}: {trial.reason}")


def _number(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


def best_results(
    results: Sequence[Result], objectives: Sequence[str], higher_is_better: Sequence[bool]
) -> Result | list[Result] | None:
    """Return the best result, or the Pareto front of several objectives; None without a result that has a time."""
    timed = [result for result in results if "__error__" not in result and all(name in result for name in objectives)]
    if not timed:
        return None
    if len(objectives) == 1:
        return Result(get_best_config(timed, objectives[0], higher_is_better[0]))
    signs = np.array([-1.0 if higher else 1.0 for higher in higher_is_better])
    points = np.array([[float(result[name]) for name in objectives] for result in timed]) * signs
    return [
        Result({**result, "optimal": True}) for result, kept in zip(timed, non_dominated(points), strict=True) if kept
    ]


def environment(
    device: DeviceProperties, iterations: int, compiler_options: Any, nvrtc: str, **extra: Any
) -> dict[str, Any]:
    """Return the machine as Kernel Tuner's second result states it, as JSON values."""
    return {
        "device_name": device.name,
        "cuda_version": nvrtc,
        "compute_capability": device.compute_capability.replace(".", ""),
        "iterations": iterations,
        "compiler_options": None if callable(compiler_options) else list(compiler_options or []),
        "device_properties": device.to_json(),
        **extra,
    }


def add_totals(env: dict[str, Any], results: Sequence[Result], seconds: float) -> None:
    """Add the times of all configurations in milliseconds, and what remains of the wall time.

    Configurations compile in parallel, so that the total may exceed the wall time; the remainder is 0 then.
    """
    for name in _TOTALS:
        env[f"total_{name}"] = sum(result.get(name, 0) for result in results)
    env["overhead_time"] = max(0.0, 1e3 * seconds - sum(env[f"total_{name}"] for name in _TOTALS))
