"""Compile candidates, verify and measure them in this process, or tune and keep the trials."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autotile
from autotile.core.model import Config, Outcome, Problem, Trial, Value
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.kernel.library import Kernel, load_kernel
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.workers.bench import Bench
from autotile.workers.jobs import Candidate, Entry, Reading, Time


def compiled(
    kernel: Kernel, config: Config, cache: CubinCache, sizes: Mapping[str, int] | None = None, dtype: str = "float32"
) -> Candidate:
    """Compile a configuration for this device, at sizes if the code depends on them."""
    cubin = cache.get_or_compile(compile_job(kernel, config, kernel.spec.at(sizes, dtype), live_device().architecture))
    return Candidate(config, str(cubin.path), cubin.symbols)


def evaluate_in_turn(toml: Path, *changes: Mapping[str, Value]) -> list[Reading]:
    """Evaluate a kernel at its default sizes in one process: its default configuration with each of the changes."""
    kernel, settings = load_kernel(str(toml)), read_settings()
    spec, cache = kernel.spec, CubinCache(settings.cache, settings.cache_limit_bytes)
    bench, readings = Bench(), list[Reading]()
    problem = Problem(spec.name, dict(spec.sizes), spec.dtypes[0])
    bench.open(workload_of(kernel, problem, settings, TuneOptions(sample_limit_s=0.05)))
    for values in changes:
        candidate = compiled(kernel, {**spec.default, **values}, cache, dtype=problem.dtype)
        found: list[Reading] = []
        assert bench.run(Time((Entry(candidate),)), lambda stage: None, found)  # a wrong one leaves the data intact
        readings += found
    return readings


def evaluate(toml: Path, **values: Value) -> Reading:
    """Evaluate the default configuration, or another, of a kernel at its default sizes."""
    return evaluate_in_turn(toml, values)[0]


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
