"""One candidate's way from a row of the space to a trial, with compiling ahead of the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from autotile.device.compiler import CompileJob, compile_job
from autotile.files.library import Kernel
from autotile.ground.geometry import launch_geometry
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, LaunchGeometry, Outcome, Problem, Trial
from autotile.ground.resource_gate import compiled_occupancy, resource_fault
from autotile.process.compile_pool import Compiled, CompilePool
from autotile.process.messages import Candidate
from autotile.tuning.evaluator import Evaluator


@dataclass(frozen=True, slots=True)
class _Queued:
    row: int
    config: Config
    geometry: LaunchGeometry
    compiled: Future[Compiled]


class Pipeline:
    """Candidates are compiled in parallel and evaluated in the order they were proposed.

    Evaluating in order keeps a search repeatable: what the sampler knows at each proposal does not depend on which
    compilation happened to end first.

    Parameters
    ----------
    kernel, problem, device
        What is tuned, and for what.
    pool
        Compile workers.
    ahead
        Candidates that are proposed before the oldest of them is measured.
    """

    def __init__(
        self, kernel: Kernel, problem: Problem, device: DeviceProperties, pool: CompilePool, ahead: int
    ) -> None:
        self._kernel = kernel
        self._problem = problem
        self._device = device
        self._pool = pool
        self._ahead = ahead
        self._queue: deque[_Queued] = deque()

    def fill(self, propose: Callable[[], tuple[int, Config] | None], room: int | None = None) -> None:
        """Propose and start compiling until the queue is full, nothing is left, or it holds ``room`` candidates."""
        most = self._ahead if room is None else min(self._ahead, room)
        while len(self._queue) < most:
            proposed = propose()
            if proposed is None:
                return
            row, config = proposed
            geometry = launch_geometry(self._kernel.spec, config, self._problem.sizes, self._device)
            self._queue.append(_Queued(row, config, geometry, self._compile(config)))

    def compile_again(self, trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
        """Trials that ran before, ready to run again; one whose cubin is gone and cannot be had again is left out."""
        compiled = [self._compile(trial.config) for trial in trials]
        cubins = [future.result().cubin for future in compiled]
        pairs = zip(trials, cubins, strict=True)
        return [(trial, Candidate(trial.config, str(cubin.path))) for trial, cubin in pairs if cubin is not None]

    def next_trial(self, evaluator: Evaluator, best_us: float | None) -> tuple[int, Trial] | None:
        """The oldest queued candidate's row and trial; None when the queue is empty.

        Raises
        ------
        ToolchainError
            Nothing can be compiled at all.
        WorkerError
            The GPU workers keep dying.
        """
        if not self._queue:
            return None
        queued = self._queue.popleft()
        return queued.row, self._trial(queued, queued.compiled.result(), evaluator, best_us)

    def _trial(self, queued: _Queued, compiled: Compiled, evaluator: Evaluator, best_us: float | None) -> Trial:
        seconds = {"compile": round(compiled.seconds, 6)}
        cubin = compiled.cubin
        if cubin is None:
            return Trial(
                queued.config,
                compiled.outcome,
                compiled.reason,
                "compile",
                queued.geometry,
                source=evaluator.source,
                seconds=seconds,
            )
        occupancy = compiled_occupancy(queued.geometry, cubin.resources, self._device)
        fault = resource_fault(self._kernel.spec.limits, queued.geometry, cubin.resources, occupancy, self._device)
        outcome, reason, stage, measurement, telemetry = Outcome.RESOURCE_EXCEEDED, fault, "resources", None, {}
        if not fault:
            evaluation = evaluator.evaluate(Candidate(queued.config, str(cubin.path)), best_us)
            outcome, reason, stage = evaluation.outcome, evaluation.reason, evaluation.stage
            measurement, telemetry = evaluation.measurement, dict(evaluation.telemetry)
            seconds |= evaluation.seconds
        return Trial(
            queued.config,
            outcome,
            reason,
            stage,
            queued.geometry,
            cubin.resources,
            occupancy,
            measurement,
            cubin.cubin_hash,
            evaluator.source,
            seconds,
            telemetry,
        )

    def _compile(self, config: Config) -> Future[Compiled]:
        return self._pool.submit(lambda: self._job(config))

    def _job(self, config: Config) -> CompileJob:
        return compile_job(self._kernel, config, self._problem.dtype, self._device.architecture)
