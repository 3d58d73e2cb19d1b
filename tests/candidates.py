"""Verify and measure one candidate in this process, or tune and keep the trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autotile
from autotile.core.model import Outcome, Problem, Trial, Value
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.workers.bench import Bench, TaintedError
from autotile.workers.jobs import Candidate, Entry, Reading, Time


def evaluate(toml: Path, **values: Value) -> Reading:
    """Evaluate the default configuration, or another, of a kernel at its default sizes."""
    kernel, settings = load_kernel(str(toml)), read_settings()
    spec, config = kernel.spec, {**kernel.spec.default, **values}
    cache = CubinCache(settings.cache, settings.cache_limit_bytes)
    cubin = cache.get_or_compile(compile_job(kernel, config, spec.dtypes[0], live_device().architecture))
    candidate = Candidate(config, str(cubin.path), cubin.symbols)
    bench, readings = Bench(), list[Reading]()
    problem = Problem(spec.name, dict(spec.sizes), spec.dtypes[0])
    bench.open(workload_of(kernel, problem, settings, TuneOptions(sample_limit_s=0.05)))
    try:
        bench.run(Time((Entry(candidate),)), lambda stage: None, readings)
    except TaintedError as error:  # nothing has passed here before that could show the data to be intact
        readings += [error.reading] if error.reading is not None else []
    return readings[0]


def expect_ok(toml: Path, **values: Value) -> None:
    found = evaluate(toml, **values)
    assert found.outcome is Outcome.OK, found.reason


def expect_wrong(toml: Path, said: str, **values: Value) -> None:
    found = evaluate(toml, **values)
    assert found.outcome is Outcome.WRONG_RESULT
    assert said in found.reason


def tune_watched(toml: Path, options: TuneOptions, **request: Any) -> tuple[Any, list[Trial]]:
    """Tune a kernel, and return the result and the trials in their order."""
    trials: list[Trial] = []

    def observe(progress: Progress) -> None:
        if progress.last is not None:
            trials.append(progress.last)

    return autotile.tune(str(toml), options=options, observe=observe, **request), trials
