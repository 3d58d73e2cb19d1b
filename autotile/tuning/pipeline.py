"""One candidate's way from a row of the space to a trial, compiling ahead of the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from autotile.core.device import DeviceProperties
from autotile.core.model import SAME_CODE, Config, LaunchGeometry, Outcome, Problem, Trial, config_key, config_text
from autotile.cuda.compiler import CompileJob, compile_job
from autotile.kernel.launch import LaunchData, known_names, launch_geometry
from autotile.kernel.library import Kernel
from autotile.space.limits import compiled_occupancy, resource_violation
from autotile.tuning.backend import Evaluator
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.protocol import Candidate

_ON_GPU = ("load", "verify", "measure")


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the search's wall time while candidates remain: from its first trial to its last compilation's start.

    Attributes
    ----------
    gpu_busy
        Loading, verifying and measuring in the GPU worker, 0 to 1.
    compilers_busy
        Mean share of the compile workers that compiled, 0 to 1.
    """

    gpu_busy: float
    compilers_busy: float

    @property
    def binds(self) -> str:
        """What a faster one of would have made the search faster: ``gpu`` or ``compilers``."""
        return "gpu" if self.gpu_busy >= self.compilers_busy else "compilers"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {
            "gpu_busy": round(self.gpu_busy, 3),
            "compilers_busy": round(self.compilers_busy, 3),
            "binds": self.binds,
        }


class LoadMeter:
    """Adds up a search's load.

    Parameters
    ----------
    pool
        The compile workers.
    workers
        How many they are.
    """

    def __init__(self, pool: CompilePool, workers: int) -> None:
        self._pool = pool
        self._workers = workers
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._gpu_s = 0.0

    def add(self, trial: Trial) -> None:
        """Note that a trial has ended now."""
        now = time.perf_counter()
        if self._first is not None:
            self._gpu_s += sum(trial.seconds.get(stage, 0.0) for stage in _ON_GPU)
        mark = _Mark(now, self._pool.busy_s, self._gpu_s)
        if self._first is None:
            self._first = mark
        if self._last is None or self._last.time_s < self._pool.begun_at:
            self._last = mark

    def read(self) -> Load | None:
        """The load while candidates remained; None before there are two trials."""
        if self._first is None or self._last is None or self._first is self._last:
            return None
        wall_s = self._last.time_s - self._first.time_s
        compiled_s = self._last.compiled_s - self._first.compiled_s
        return Load(self._last.gpu_s / wall_s, compiled_s / wall_s / self._workers)


class _Mark(NamedTuple):
    time_s: float
    compiled_s: float
    gpu_s: float


class Proposals(Protocol):
    """Where candidates come from, see `autotile.search.search.Shortlist`."""

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """The next row to compile with its configuration; None where enough wait."""

    def ready(self) -> list[int]:
        """Rows of which one is to be tried next."""

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """The row to measure."""


@dataclass(slots=True)
class _Queued:
    config: Config
    geometry: LaunchGeometry
    compiled: Future[Compiled]
    trial: Trial | None = None
    """As far as it came when it was compiled."""


class Pipeline:
    """Candidates are compiled in parallel and evaluated one at a time.

    Which of them is next does not depend on which compilation happened to end first: those that it is chosen from are
    waited for. So a search repeats.

    Parameters
    ----------
    kernel, problem, device
        What is tuned, and for what.
    pool
        Compile workers.
    """

    def __init__(self, kernel: Kernel, problem: Problem, device: DeviceProperties, pool: CompilePool) -> None:
        self._kernel = kernel
        self._problem = problem
        self._device = device
        self._pool = pool
        self._queue: dict[int, _Queued] = {}
        self._started: dict[str, Future[Compiled]] = {}
        self._measured: dict[tuple[str, LaunchGeometry, LaunchData], Trial] = {}
        """What ran, by its code, its launch, and what else its configuration decides of its arguments."""

    def start(self, config: Config) -> None:
        """Begin to compile a configuration that is sure to be proposed."""
        self._started[config_key(config)] = self._pool.submit(lambda: self._job(config))

    def recall(self, trials: Iterable[Trial]) -> None:
        """Take note of what ran before, so that the same code need not run again."""
        for trial in trials:
            self._remember(trial)

    def fill(self, proposals: Proposals, room: int | None = None) -> None:
        """Start compiling what is proposed while ``room`` trials may still begin."""
        while (proposed := proposals.propose(room)) is not None:
            row, config = proposed
            geometry = launch_geometry(self._kernel.spec, config, self._problem.sizes, self._device)
            self._queue[row] = _Queued(config, geometry, self._compile(config))

    def compile_again(self, trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
        """Trials that ran before, ready to run again; one whose cubin is gone and cannot be had again is left out.

        Nothing else is to be tried any more: candidates that still wait for a compile worker are given up.
        """
        for queued in self._queue.values():
            queued.compiled.cancel()
        self._queue.clear()
        compiled = [self._compile(trial.config) for trial in trials]
        cubins = [future.result().cubin for future in compiled]
        pairs = zip(trials, cubins, strict=True)
        return [(trial, Candidate(trial.config, str(cubin.path))) for trial, cubin in pairs if cubin is not None]

    def next_trial(self, proposals: Proposals, evaluator: Evaluator, best_us: float | None) -> tuple[int, Trial] | None:
        """Row and trial of one of the candidates that are ready; None where none is.

        One that does not compile or does not fit comes first, for it needs no GPU.

        Raises
        ------
        ToolchainError
            Nothing can be compiled at all.
        WorkerError
            The GPU workers keep dying.
        """
        compiled = {row: self._compiled(self._queue[row], evaluator) for row in proposals.ready()}
        if not compiled:
            return None
        failed = next((row for row, trial in compiled.items() if trial.outcome is not Outcome.OK), None)
        if failed is not None:
            del self._queue[failed]
            return failed, compiled[failed]
        row = proposals.choose(compiled)
        return row, self._evaluate(self._queue.pop(row), compiled[row], evaluator, best_us)

    def _compiled(self, queued: _Queued, evaluator: Evaluator) -> Trial:
        """The trial as far as compiling and the second gate take it."""
        if queued.trial is None:
            queued.trial = self._gated(queued, queued.compiled.result(), evaluator)
        return queued.trial

    def _gated(self, queued: _Queued, compiled: Compiled, evaluator: Evaluator) -> Trial:
        cubin = compiled.cubin
        trial = Trial(
            queued.config,
            compiled.outcome,
            compiled.reason,
            "compile",
            queued.geometry,
            source=evaluator.source,
            seconds={"compile": round(compiled.seconds, 6)},
        )
        if cubin is None:
            return trial
        occupancy = compiled_occupancy(queued.geometry, cubin.resources, self._device)
        trial = replace(trial, resources=cubin.resources, occupancy=occupancy, cubin_hash=cubin.cubin_hash)
        fault = resource_violation(self._kernel.spec.limits, queued.geometry, cubin.resources, occupancy, self._device)
        return replace(trial, outcome=Outcome.RESOURCE_EXCEEDED, reason=fault, stage="resources") if fault else trial

    def _evaluate(self, queued: _Queued, trial: Trial, evaluator: Evaluator, best_us: float | None) -> Trial:
        code = (trial.cubin_hash, queued.geometry, self._data(queued.config))
        twin = self._measured.get(code) if evaluator.source == "cuda" else None
        if twin is not None:
            return _like(trial, twin)
        cubin = queued.compiled.result().cubin
        assert cubin is not None
        if not cubin.path.exists():  # it waited for so long that the cache was trimmed
            cubin = self._pool.submit(lambda: self._job(queued.config)).result().cubin or cubin
        evaluation = evaluator.evaluate(Candidate(queued.config, str(cubin.path)), best_us)
        trial = replace(
            trial,
            outcome=evaluation.outcome,
            reason=evaluation.reason,
            stage=evaluation.stage,
            measurement=evaluation.measurement,
            seconds={**trial.seconds, **evaluation.seconds},
            telemetry=evaluation.telemetry,
        )
        self._remember(trial)
        return trial

    def _remember(self, trial: Trial) -> None:
        if trial.outcome.has_time and trial.cubin_hash and trial.geometry is not None and trial.stage == "measure":
            self._measured[trial.cubin_hash, trial.geometry, self._data(trial.config)] = trial

    def _data(self, config: Config) -> LaunchData:
        spec, problem = self._kernel.spec, self._problem
        return LaunchData.of(spec, problem.dtype, known_names(spec, config, problem.sizes, self._device))

    def _compile(self, config: Config) -> Future[Compiled]:
        started = self._started.pop(config_key(config), None)
        return started if started is not None else self._pool.submit(lambda: self._job(config))

    def _job(self, config: Config) -> CompileJob:
        problem = self._problem
        return compile_job(self._kernel, config, problem.dtype, self._device.architecture, problem.sizes)


def _like(trial: Trial, twin: Trial) -> Trial:
    """The trial of a configuration that compiled to the code of another, which was measured."""
    return replace(
        trial,
        outcome=twin.outcome,
        reason=f"the same code as {config_text(twin.config)}, which was measured",
        stage=SAME_CODE,
        measurement=twin.measurement,
        telemetry=twin.telemetry,
    )
