"""The path of a candidate from a row of the space to a trial, compiled ahead of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autotile.core.device import DeviceProperties
from autotile.core.model import SAME_CODE, Config, Outcome, Problem, Trial, config_key, config_text
from autotile.core.timeline import NO_TIMELINE, Timeline
from autotile.cuda.compiler import CompileJob, compile_job
from autotile.cuda.cubin_cache import CachedCubin, check_signatures
from autotile.kernel.computed import computed_values
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names
from autotile.kernel.library import Kernel
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config, compiled_steps
from autotile.tuning.backend import Backend, Finished
from autotile.tuning.gpu_comparison import scaled
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.jobs import Candidate, SizedCubin

_LOOK_S = 0.01
"""Interval at which a wait for the compilers looks for results of several GPUs, in seconds."""


class Proposer(Protocol):
    """Source of candidates, see `autotile.search.shortlist.Shortlist`.

    A row that was chosen, or was ready and failed before it could be measured, is told to the proposer when its trial
    has ended.
    """

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next row to compile and its configuration; None while enough candidates wait."""

    def ready(self) -> list[int]:
        """Return the rows of which one is tried next; empty while the results of those chosen before are awaited."""

    def waiting(self) -> list[int]:
        """Return all rows that were proposed and not chosen, the oldest first."""

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the row to measure."""


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A candidate after compilation and the second gate.

    Attributes
    ----------
    row
        Row of the space.
    trial
        Trial up to this point; any outcome but ``ok`` is final, and the candidate is not launched.
    cubin
        Compiled code; None where the compilation failed.
    """

    row: int
    trial: Trial
    cubin: CachedCubin | None


@dataclass(slots=True)
class _Queued:
    config: Config
    plan: LaunchPlan
    compilation: Future[Compiled]
    trial: Trial | None = None
    """Trial after the second gate; None until the compilation was waited for."""


class Pipeline:
    """Compilation of candidates in parallel, and their evaluation on the device, one after the other.

    The device is given the next candidate while it runs one, so that it does not wait for the search.

    In replay, the order of the trials does not depend on which compilation ends first: every candidate among which the
    next one is chosen is waited for, so that a search is repeatable. On a GPU, whose times vary anyway, as many
    candidates are waited for, but any of those that wait: a slow compilation does not hold up the others.

    Parameters
    ----------
    kernel, problem
        Kernel and problem to tune.
    backend
        Device that candidates are compiled for and run on.
    compile_pool
        Compile workers.
    timeline
        Records the waits for compilations, and what the device does.
    verify_sizes
        Further problems on which candidates are verified. Where sizes are compiled in, each candidate is compiled for
        each of them.
    score
        Function that adds the objective and metrics to a trial that was measured.

    Attributes
    ----------
    scale
        Factor of the device's times to those of the study; None for none.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        backend: Backend,
        compile_pool: CompilePool,
        timeline: Timeline = NO_TIMELINE,
        *,
        verify_sizes: Sequence[Mapping[str, int]] = (),
        score: Callable[[Trial], Trial] = lambda trial: trial,
    ) -> None:
        self.scale: float | None = None
        self._score = score
        self._kernel = kernel
        self._problem = problem
        self._backend = backend
        self._device = backend.device
        self._compile_pool = compile_pool
        self._timeline = timeline
        self._queue: dict[int, _Queued] = {}
        self._prefetched: dict[str, Future[Compiled]] = {}
        self._measured: dict[_Launch, Trial] = {}
        self._other_sizes = compiled_sizes(kernel.spec, problem, verify_sizes) if backend.source == "cuda" else []
        self._others: dict[str, list[tuple[Mapping[str, int], Future[Compiled]]]] = {}
        """Compilations of each configuration for the other problems of its verification."""
        self._running: dict[int, tuple[Candidate, CompiledCandidate]] = {}
        """Candidates that were submitted to the device and have no result, by the ids of what it was given."""

    @property
    def running(self) -> int:
        """Number of candidates that the device was given and that have not ended."""
        return len(self._running)

    def remember(self, trials: Iterable[Trial]) -> None:
        """Register earlier trials, so that identical code is not measured again; a replay looks all of it up anyway."""
        for trial in trials if self._backend.source == "cuda" else ():
            if trial.outcome.has_time and trial.cubin_hash and trial.geometry is not None and trial.stage == "measure":
                self._measured[self._launch_of(trial)] = trial

    def prefetch(self, config: Config) -> None:
        """Start the compilation of a configuration that is certain to be proposed."""
        self._prefetched[config_key(config)] = self._submit(config)

    def compile_ahead(self, proposer: Proposer, room: int | None = None) -> None:
        """Start the compilation of all candidates that are proposed while ``room`` trials may still begin."""
        while (proposed := self._propose(proposer, room)) is not None:
            row, config = proposed
            self._queue[row] = _Queued(config, self._plan(config), self._compile(config))
        if self._timeline.is_recording:
            compiling = sum(not queued.compilation.done() for queued in self._queue.values())
            self._timeline.count("candidates", compiling=compiling, compiled=len(self._queue) - compiling)

    def next_candidate(self, proposer: Proposer) -> CompiledCandidate | None:
        """Wait for the candidates that are ready, and return one of them; None where none is, or a result comes first.

        A candidate that does not compile or does not fit on the device comes first, as it takes no time on the GPU.

        Raises
        ------
        ToolchainError
            Nothing can be compiled at all.
        SpecError
            A function takes other parameters than the declared arguments.
        """
        with self._timeline.span("session", "wait for the compilers"):
            queued = {row: self._queue[row] for row in self._compiled_rows(proposer)}
            compiled = {row: one.trial or self._apply_second_gate(one) for row, one in queued.items()}
        if not compiled:
            return None
        failed = (row for row, trial in compiled.items() if trial.outcome is not Outcome.OK)
        row = next(failed, None)
        if row is None:
            with self._timeline.span("session", "choose", among=len(compiled)):
                row = proposer.choose(compiled)
        return CompiledCandidate(row, compiled[row], self._queue.pop(row).compilation.result().cubin)

    def begin(self, candidate: CompiledCandidate, best_us: float | None) -> Trial | None:
        """Submit a candidate to the device, and return None; return its trial if there is nothing to measure.

        That is so if it failed before, or if its code and launch equal those of a measured one, whose result it takes
        over.

        Parameters
        ----------
        candidate
            From `next_candidate`.
        best_us
            As for `autotile.tuning.backend.Backend.submit`.
        """
        trial, cubin = candidate.trial, candidate.cubin
        if cubin is None or trial.outcome is not Outcome.OK:
            return trial
        twin = self._measured.get(self._launch_of(trial)) if self._backend.source == "cuda" else None
        if twin is not None:
            return self._score(_with_result_of(twin, trial))
        if not cubin.path.exists():  # trimmed from the cache while the candidate waited
            cubin = self._submit(trial.config).result().cubin or cubin
        given = self.candidate(trial, cubin)
        self._running[id(given)] = given, candidate
        self._backend.submit(given, best_us / self.scale if best_us is not None and self.scale else best_us)
        return None

    def end_next(self) -> tuple[CompiledCandidate, Trial]:
        """Wait for a running candidate, of one GPU the oldest; return it with its trial.

        Raises
        ------
        WorkerError
            The GPU workers die repeatedly.
        """
        with self._timeline.span("session", "wait for the GPU"):
            finished = self._backend.result()
        _, candidate = self._running.pop(id(finished.candidate))
        reading = scaled(finished.reading, self.scale)
        self._record(finished, candidate.trial.config)
        trial = replace(
            candidate.trial,
            outcome=reading.outcome,
            reason=reading.reason,
            stage=reading.stage,
            measurement=reading.measurement,
            seconds={**candidate.trial.seconds, **reading.seconds},
            telemetry=reading.telemetry,
            gpu=finished.gpu,
        )
        if reading.captured:
            trial = self._inspected(trial, Path(reading.captured))
        trial = self._score(trial)
        self.remember([trial])
        return candidate, trial

    def _inspected(self, trial: Trial, folder: Path) -> Trial:
        """Return a trial after the check of its outputs by a function of the user's."""
        assert self._kernel.inspection is not None
        with self._timeline.span("session", "inspect"):
            wrong, telemetry = self._kernel.inspection.inspect(trial.config, folder)
        trial = replace(trial, telemetry={**trial.telemetry, **telemetry})
        if not wrong:
            return trial
        return replace(trial, outcome=Outcome.WRONG_RESULT, reason=wrong, stage="verify", measurement=None)

    def measure_again(self, trial: Trial, count: int) -> list[float]:
        """Measure the configuration of a finished trial while nothing runs; return times in us, none if it fails."""
        cubin = self._submit(trial.config).result().cubin
        times_us: list[float] = []
        for _ in range(count if cubin is not None else 0):
            assert cubin is not None
            self._backend.submit(self.candidate(trial, cubin), None)
            measured = self._backend.result().reading.measurement
            times_us += [measured.time_us] if measured is not None else []
        return times_us

    def recompile(self, trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
        """Return finished trials with their compiled candidates; trials that no longer compile are left out.

        Candidates that still wait are discarded: no further trial can begin.
        """
        for queued in self._queue.values():
            queued.compilation.cancel()
        self._queue.clear()
        compilations = [self._compile(trial.config) for trial in trials]
        cubins = [compilation.result().cubin for compilation in compilations]
        pairs = zip(trials, cubins, strict=True)
        return [(trial, self.candidate(trial, cubin)) for trial, cubin in pairs if cubin is not None]

    def candidate(self, trial: Trial, cubin: CachedCubin) -> Candidate:
        """Return a compiled trial as the device takes it."""
        computed = computed_values(self._kernel.spec.computed, trial.config)
        others = tuple(
            SizedCubin(sizes, str(other.path), other.symbols)
            for sizes, compilation in self._others_of(trial.config)
            if (other := compilation.result().cubin) is not None
        )
        return Candidate(trial.config, str(cubin.path), cubin.symbols, computed, others=others)

    def _compiled_rows(self, proposer: Proposer) -> list[int]:
        """Return the rows to choose among; on a GPU, after as many have compiled as are ready."""
        ready = proposer.ready()
        if not ready or self._backend.source == "replayed":
            return ready
        rows = {self._queue[row].compilation: row for row in proposer.waiting()}
        compiled = {future for future in rows if future.done()}
        limit_s = _LOOK_S if self._backend.gpu_count > 1 else None
        while len(compiled) < len(ready):
            if limit_s is not None and self._backend.has_result:
                return []  # a result, which another GPU waits for, comes first
            compiled |= wait(rows.keys() - compiled, limit_s, return_when=FIRST_COMPLETED).done
        return [row for future, row in rows.items() if future in compiled]

    def _propose(self, proposer: Proposer, room: int | None) -> tuple[int, Config] | None:
        with self._timeline.span("session", "propose"):
            return proposer.propose(room)

    def _record(self, finished: Finished, config: Config) -> None:
        """Record the stages of an reading, which follow one another without a pause."""
        reading = finished.reading
        start_s = reading.began_at
        if not start_s or not self._timeline.is_recording:
            return
        track = f"GPU worker {finished.gpu}" if self._backend.gpu_count > 1 else "GPU worker"
        for stage, seconds in reading.seconds.items():
            self._timeline.add(track, stage, start_s, start_s + seconds, config=config_text(config))
            start_s += seconds

    def _apply_second_gate(self, queued: _Queued) -> Trial:
        """Wait for a compilation, and check the compiled resources against the device."""
        queued.trial = self._gated_trial(queued.config, queued.plan, queued.compilation.result())
        return queued.trial

    def _plan(self, config: Config) -> LaunchPlan:
        return LaunchPlan.of(self._kernel.spec, config, self._problem.sizes, self._device)

    def _gated_trial(self, config: Config, plan: LaunchPlan, compiled: Compiled) -> Trial:
        for sizes, compilation in self._others_of(config):
            if compiled.cubin is not None and (other := compilation.result()).cubin is None:
                compiled = replace(other, reason=f"at {config_text(sizes)}: {other.reason}", seconds=compiled.seconds)
        trial = gated_trial(self._kernel, self._problem, config, compiled, plan=plan, device=self._device)
        return replace(trial, source=self._backend.source)

    def _launch_of(self, trial: Trial) -> _Launch:
        spec, problem = self._kernel.spec, self._problem
        names = known_names(spec, trial.config, problem.sizes, self._device)
        return _Launch(trial.cubin_hash, self._plan(trial.config), LaunchData.of(spec, problem.dtype, names))

    def _others_of(self, config: Config) -> Sequence[tuple[Mapping[str, int], Future[Compiled]]]:
        """Return the compilations of a configuration for the other problems of its verification."""
        return self._others.get(config_key(config), ()) if self._others else ()

    def _compile(self, config: Config) -> Future[Compiled]:
        prefetched = self._prefetched.pop(config_key(config), None) if self._prefetched else None
        return prefetched if prefetched is not None else self._submit(config)

    def _submit(self, config: Config) -> Future[Compiled]:
        compilation = self._compile_pool.submit(lambda: self._job(config, self._problem.sizes))
        if self._other_sizes:
            spec, dtype = self._kernel.spec, self._problem.dtype
            self._others[config_key(config)] = [
                (sizes, self._compile_pool.submit(partial(self._job, config, sizes)))
                for sizes in self._other_sizes
                if not check_config(spec, config, sizes, self._device, dtype)
            ]
        return compilation

    def _job(self, config: Config, sizes: Mapping[str, int]) -> CompileJob:
        return compile_job(self._kernel, config, self._problem.dtype, self._device.architecture, sizes)


def gated_trial(
    kernel: Kernel, problem: Problem, config: Config, compiled: Compiled, *, plan: LaunchPlan, device: DeviceProperties
) -> Trial:
    """Return the trial of a configuration up to the second gate: its compiled resources fit on the device.

    Raises
    ------
    SpecError
        A function takes other parameters than the declared arguments.
    """
    seconds = {"compile": round(compiled.seconds, 6)}
    trial = Trial(config, compiled.outcome, compiled.reason, "compile", plan.main.geometry, seconds=seconds)
    cubin = compiled.cubin
    if cubin is None:
        return trial
    check_signatures(kernel, problem.dtype, cubin)
    resources = {entry: function.resources for entry, function in cubin.functions.items()}
    steps = compiled_steps(kernel.spec, plan, resources, device)
    main = steps[0]
    trial = replace(trial, resources=main.resources, occupancy=main.occupancy, cubin_hash=cubin.cubin_hash)
    fault = next((step.fault for step in steps if step.fault), "")
    return replace(trial, outcome=Outcome.RESOURCE_EXCEEDED, reason=fault, stage="resources") if fault else trial


def compiled_sizes(
    spec: KernelSpec, problem: Problem, verify_sizes: Sequence[Mapping[str, int]]
) -> list[Mapping[str, int]]:
    """Return the further problems of a verification whose cubins differ from that of the problem."""
    compiled = spec.compiled_names
    tuned = {name: problem.sizes[name] for name in compiled}
    others = [spec.ragged_sizes(problem.sizes), *verify_sizes]
    return [sizes for sizes in others if {name: sizes[name] for name in compiled} != tuned]


class _Launch(NamedTuple):
    """All that distinguishes the launch of one configuration from that of another."""

    cubin_hash: str
    plan: LaunchPlan
    data: LaunchData


def _with_result_of(twin: Trial, trial: Trial) -> Trial:
    return replace(
        trial,
        outcome=twin.outcome,
        reason=f"the same code as {config_text(twin.config)}, which was measured",
        stage=SAME_CODE,
        measurement=twin.measurement,
        telemetry=twin.telemetry,
        gpu=twin.gpu,
    )


_GPU_STAGES = ("load", "verify", "measure")


@dataclass(frozen=True, slots=True)
class Load:
    """Utilization during the search, from the first trial to the start of the last compilation.

    Where all compilations began before the first trial, as in a small space, it is that up to the last trial.

    Attributes
    ----------
    gpu_busy
        Share of the wall time in which the GPU workers load, verify or measure, 0 to 1; of several, the mean.
    compilers_busy
        Mean share of the compile workers that are compiling, 0 to 1.
    """

    gpu_busy: float
    compilers_busy: float

    @property
    def binds(self) -> str:
        """The bottleneck of the search: ``gpu`` or ``compilers``."""
        return "gpu" if self.gpu_busy >= self.compilers_busy else "compilers"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "gpu_busy": round(self.gpu_busy, 3),
            "compilers_busy": round(self.compilers_busy, 3),
            "binds": self.binds,
        }


class LoadMeter:
    """Measures the load of a search.

    Parameters
    ----------
    compile_pool
        Compile workers.
    workers
        Number of compile workers.
    gpu_count
        Number of GPUs.
    """

    def __init__(self, compile_pool: CompilePool, workers: int, gpu_count: int = 1) -> None:
        self._compile_pool = compile_pool
        self._workers = workers
        self._gpu_count = gpu_count
        self._first: _Reading | None = None
        self._last: _Reading | None = None
        self._newest: _Reading | None = None
        self._gpu_s = 0.0

    def add(self, trial: Trial) -> None:
        """Register a trial that has just ended."""
        now = time.perf_counter()
        if self._first is not None:
            self._gpu_s += sum(trial.seconds.get(stage, 0.0) for stage in _GPU_STAGES)
        reading = _Reading(now, self._compile_pool.busy_s, self._gpu_s)
        self._newest = reading
        if self._first is None:
            self._first = reading
        if self._last is None or self._last.time_s < self._compile_pool.begun_at:
            self._last = reading

    def read(self) -> Load | None:
        """Return the load; None before two trials have ended."""
        first, last = self._first, self._newest if self._last is self._first else self._last
        if first is None or last is None or first is last:
            return None
        wall_s, compiled_s = last.time_s - first.time_s, last.compiled_s - first.compiled_s
        return Load(last.gpu_s / wall_s / self._gpu_count, compiled_s / wall_s / self._workers)


class _Reading(NamedTuple):
    time_s: float
    compiled_s: float
    gpu_s: float
