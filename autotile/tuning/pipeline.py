"""The path of a candidate from a row of the space to a trial, compiled ahead of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from autotile.core.device import DeviceProperties
from autotile.core.model import SAME_CODE, Config, Outcome, Problem, Trial, config_key, config_text
from autotile.core.timeline import NO_TIMELINE, Timeline
from autotile.cuda.compiler import CompileJob, check_signatures, compile_job
from autotile.kernel.computed import computed_values
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names
from autotile.kernel.library import Kernel
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config, compiled_steps
from autotile.tuning.backend import Backend, Finished, scaled
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.jobs import Candidate, SizedCubin

_LOOK_S = 0.01
"""Interval at which a wait for the compilers looks for results of several GPUs, in seconds."""


class Proposer(Protocol):
    """Source of candidates: `autotile.search.search.Shortlist`, or `GivenCandidates`."""

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next row to compile and its configuration; None while enough candidates wait."""

    def ready(self) -> list[int]:
        """Return the rows of which one is tried next; empty while the results of those chosen before are awaited."""

    def waiting(self) -> list[int]:
        """Return all rows that were proposed and not chosen, the oldest first."""

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the row to measure."""

    def tell(self, row: int, trial: Trial) -> None:
        """Take note of the trial of a row that was chosen, or that was ready and rejected."""

    def leave(self, row: int) -> None:
        """Leave a row that was chosen, or was ready and rejected, to another session."""


class GivenCandidates:
    """Proposes given configurations; they are measured in the order in which they have compiled.

    Their row numbers are negative, so that they differ from those of a search that shares the pipeline.

    Parameters
    ----------
    configs
        Valid configurations; of equal ones, the first counts.
    queued
        Candidates that the device is given beside one that it runs.

    Attributes
    ----------
    left
        Configurations that are left to another session.
    """

    def __init__(self, configs: Iterable[Config], queued: int = 1) -> None:
        self._queued = queued
        distinct = {config_key(config): dict(config) for config in configs}
        self._unproposed: dict[int, Config] = dict(
            zip(range(-1, -len(distinct) - 1, -1), distinct.values(), strict=True)
        )
        self._waiting: dict[int, Config] = {}
        self._running: dict[int, Config] = {}
        self.left: list[Config] = []

    @property
    def is_open(self) -> bool:
        """Whether a candidate has not ended."""
        return bool(self._unproposed or self._waiting or self._running)

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next configuration to compile; None after the last."""
        if not self._unproposed:
            return None
        row = next(iter(self._unproposed))
        self._waiting[row] = self._unproposed.pop(row)
        return row, self._waiting[row]

    def ready(self) -> list[int]:
        """Return the oldest candidate that waits; none while the device has enough."""
        return [] if len(self._running) > self._queued else list(self._waiting)[:1]

    def waiting(self) -> list[int]:
        """Return all candidates that wait."""
        return list(self._waiting)

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the oldest of the compiled candidates."""
        row = next(row for row in self._waiting if row in compiled)
        self._running[row] = self._waiting.pop(row)
        return row

    def tell(self, row: int, trial: Trial) -> None:
        """Take note that the trial of a candidate has ended, or was rejected before it could run."""
        self._waiting.pop(row, None)
        self._running.pop(row, None)

    def leave(self, row: int) -> None:
        """Leave a candidate that was chosen, or was ready and rejected, to another session."""
        self.left += [found for queue in (self._waiting, self._running) if (found := queue.pop(row, None)) is not None]


@dataclass(eq=False, slots=True)
class Compiling:
    """A configuration that is being compiled: for its problem, and for the others of its verification.

    Attributes
    ----------
    kernel, problem, config
        Kernel, problem and configuration.
    device
        Device that it is compiled for.
    main
        The compilation for the problem.
    others
        The further problems of the verification for which it is compiled apart, with their compilations.
    source
        Origin of its result, as for `Trial`.
    """

    kernel: Kernel
    problem: Problem
    config: Config
    device: DeviceProperties
    main: Future[Compiled]
    others: Sequence[tuple[Mapping[str, int], Future[Compiled]]]
    source: Literal["cuda", "replayed"] = "cuda"
    _trial: Trial | None = None

    @classmethod
    def begin(
        cls,
        kernel: Kernel,
        problem: Problem,
        config: Config,
        device: DeviceProperties,
        *,
        submit: Callable[[Callable[[], CompileJob]], Future[Compiled]],
        other_sizes: Sequence[Mapping[str, int]] = (),
        source: Literal["cuda", "replayed"] = "cuda",
    ) -> Compiling:
        """Start to compile a configuration.

        Parameters
        ----------
        submit
            Starts a job, such as `autotile.workers.compile_pool.CompilePool.submit`.
        other_sizes
            From `compiled_sizes`; those for which the configuration is not valid are left out.
        """

        def at(sizes: Mapping[str, int]) -> Future[Compiled]:
            return submit(lambda: compile_job(kernel, config, problem.dtype, device.architecture, sizes))

        main = at(problem.sizes)
        valid = [one for one in other_sizes if not check_config(kernel.spec, config, one, device, problem.dtype)]
        return cls(kernel, problem, config, device, main, [(sizes, at(sizes)) for sizes in valid], source)

    def trial(self) -> Trial:
        """Wait, and return the trial up to the second gate; one that fails at another problem has failed.

        Raises
        ------
        ToolchainError
            Nothing can be compiled at all.
        SpecError
            A function takes other parameters than the declared arguments.
        """
        if self._trial is None:
            compiled = self.main.result()
            for sizes, other in self.others:
                if compiled.cubin is not None and (found := other.result()).cubin is None:
                    reason = f"at {config_text(sizes)}: {found.reason}"
                    compiled = replace(found, reason=reason, seconds=compiled.seconds)
            plan = LaunchPlan.of(self.kernel.spec, self.config, self.problem.sizes, self.device)
            trial = gated_trial(self.kernel, self.problem, self.config, compiled, plan=plan, device=self.device)
            self._trial = replace(trial, source=self.source)
        return self._trial

    def candidate(self) -> Candidate | None:
        """Wait, and return the compiled configuration as a GPU takes it; None if it does not compile."""
        cubin = self.main.result().cubin
        if cubin is None:
            return None
        others = tuple(
            SizedCubin(sizes, str(other.path), other.symbols)
            for sizes, compilation in self.others
            if (other := compilation.result().cubin) is not None
        )
        computed = computed_values(self.kernel.spec.computed, self.config)
        return Candidate(self.config, str(cubin.path), cubin.symbols, computed, others)


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A candidate after compilation and the second gate.

    Attributes
    ----------
    row
        Row of the space.
    trial
        Trial up to this point; any outcome but ``ok`` is final, and the candidate is not launched.
    compilation
        Its compilation, which has ended.
    """

    row: int
    trial: Trial
    compilation: Compiling


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
        self._queue: dict[int, Compiling] = {}
        self._prefetched: dict[str, Compiling] = {}
        self._measured: dict[tuple[str, LaunchPlan, LaunchData], Trial] = {}
        self._other_sizes = compiled_sizes(kernel.spec, problem, verify_sizes) if backend.source == "cuda" else []
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
            prefetched = self._prefetched.pop(config_key(config), None) if self._prefetched else None
            self._queue[row] = prefetched or self._submit(config)
        if self._timeline.is_recording:
            compiling = sum(not queued.main.done() for queued in self._queue.values())
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
            compiled = {row: one.trial() for row, one in queued.items()}
        if not compiled:
            return None
        failed = (row for row, trial in compiled.items() if trial.outcome is not Outcome.OK)
        row = next(failed, None)
        if row is None:
            with self._timeline.span("session", "choose", among=len(compiled)):
                row = proposer.choose(compiled)
        return CompiledCandidate(row, compiled[row], self._queue.pop(row))

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
        trial = candidate.trial
        if trial.outcome is not Outcome.OK:
            return trial
        twin = self._measured.get(self._launch_of(trial)) if self._backend.source == "cuda" else None
        if twin is not None:
            return self._score(_with_result_of(twin, trial))
        given = candidate.compilation.candidate()
        assert given is not None
        if not Path(given.cubin_path).exists():  # trimmed from the cache while the candidate waited
            given = self._submit(trial.config).candidate() or given
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
        given = self._submit(trial.config).candidate()
        times_us: list[float] = []
        for _ in range(count if given is not None else 0):
            assert given is not None
            self._backend.submit(given, None)
            measured = self._backend.result().reading.measurement
            times_us += [measured.time_us] if measured is not None else []
        return times_us

    def recompile(self, trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
        """Return finished trials with their compiled candidates; trials that no longer compile are left out.

        Candidates that still wait are discarded: no further trial can begin.
        """
        for queued in self._queue.values():
            queued.main.cancel()
        self._queue.clear()
        compilations = [self._submit(trial.config) for trial in trials]
        candidates = [compilation.candidate() for compilation in compilations]
        return [(trial, one) for trial, one in zip(trials, candidates, strict=True) if one is not None]

    def _compiled_rows(self, proposer: Proposer) -> list[int]:
        """Return the rows to choose among; on a GPU, after as many have compiled as are ready."""
        ready = proposer.ready()
        if not ready or self._backend.source == "replayed":
            return ready
        rows = {self._queue[row].main: row for row in proposer.waiting()}
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

    def _launch_of(self, trial: Trial) -> tuple[str, LaunchPlan, LaunchData]:
        """Return all that distinguishes the launch of one configuration from that of another."""
        spec, problem = self._kernel.spec, self._problem
        plan = LaunchPlan.of(spec, trial.config, problem.sizes, self._device)
        names = known_names(spec, trial.config, problem.sizes, self._device)
        return trial.cubin_hash, plan, LaunchData.of(spec, problem.dtype, names)

    def _submit(self, config: Config) -> Compiling:
        of = self._kernel, self._problem, config, self._device
        submit, source = self._compile_pool.submit, self._backend.source
        return Compiling.begin(*of, submit=submit, other_sizes=self._other_sizes, source=source)


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
        self._first: tuple[float, float, float] | None = None
        """Seconds by the clock, of compiling and on the GPUs, as the first trial ended."""
        self._last: tuple[float, float, float] | None = None
        self._newest: tuple[float, float, float] | None = None
        self._gpu_s = 0.0

    def add(self, trial: Trial) -> None:
        """Register a trial that has just ended."""
        now = time.perf_counter()
        if self._first is not None:
            self._gpu_s += sum(trial.seconds.get(stage, 0.0) for stage in _GPU_STAGES)
        reading = now, self._compile_pool.busy_s, self._gpu_s
        self._newest = reading
        if self._first is None:
            self._first = reading
        if self._last is None or self._last[0] < self._compile_pool.begun_at:
            self._last = reading

    def read(self) -> Load | None:
        """Return the load; None before two trials have ended."""
        first, last = self._first, self._newest if self._last is self._first else self._last
        if first is None or last is None or first is last:
            return None
        wall_s, compiled_s = last[0] - first[0], last[1] - first[1]
        return Load(last[2] / wall_s / self._gpu_count, compiled_s / wall_s / self._workers)
