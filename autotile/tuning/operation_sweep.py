"""Times of many configurations at many problems of an operation, from which a model of time is learned.

Each problem is one job of the GPU, `autotile.workers.jobs.Time` of a grid; the configurations of the next problem
compile meanwhile. Every result is stored as a trial of an ordinary study, so that a run that was killed goes on, and
what was measured is served. It is therefore verified as in a session of that study: at the ragged sizes, which are
those of the kernel's file, once for each code, at each problem before it is timed, and the fastest repeatedly.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Problem, Resources, Trial, config_key
from autotile.cuda.compiler import CompileJob
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.database.winners import UNVERIFIED_SAMPLER
from autotile.errors import InputError, ToolchainError
from autotile.families.operation_model import ModelCandidate
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library, Operation
from autotile.kernel.problem import resolve_problem
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.pipeline import Compiling, compiled_sizes
from autotile.tuning.schedule import Lane
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Candidate, Entry, LibraryCall, Reading, Time

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.tuning.cluster.gpus import FreeGpu

_SAMPLE_LIMIT_S = 2e-3
"""GPU time of the samples of a configuration beyond the first nine, in seconds."""
_SAMPLER = "family"
"""Name of these runs in the database; see `UNVERIFIED_SAMPLER` for those of earlier versions."""
FAULTS = (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes that, at any problem, exclude a configuration from the model."""

CandidateKey = tuple[str, str]
"""Name of a kernel, and `config_key` of its configuration."""


@dataclass(frozen=True, slots=True)
class SweptProblem:
    """A problem of an operation with the results there.

    Attributes
    ----------
    sizes
        Sizes and flags of the operation.
    kernels
        Sizes and flags by the names of each kernel that computes the problem.
    trials
        Trial of each configuration.
    libraries
        Time of each library, in microseconds.
    """

    sizes: Mapping[str, int]
    kernels: Mapping[str, Mapping[str, int]]
    trials: Mapping[CandidateKey, Trial]
    libraries: Mapping[str, float]


class _Job(NamedTuple):
    """A problem whose configurations are being compiled."""

    problem: Problem
    kernels: Mapping[str, Mapping[str, int]]
    candidates: Sequence[ModelCandidate]
    compilations: Sequence[Compiling]


def grid_gpu(lane: Lane, worker_pool: WorkerPool, options: TuneOptions) -> Gpu | FreeGpu:
    """Return the GPU of a sweep: that of this machine which the options name, or one of a cluster."""
    if lane.cluster is None:
        return Gpu(None, options.run_deadline_s, worker_pool=worker_pool, device_index=options.device_index)
    from autotile.tuning.cluster.gpus import FreeGpu  # imports Dask

    return FreeGpu(lane, options.run_deadline_s)


class Sweep:
    """Measures problems of an operation, and stores the results.

    Parameters
    ----------
    operation, dtype
        Operation, and element type of its problems.
    kernels
        Its kernels, by name.
    libraries
        Libraries that the operation file names.
    settings, options
        Settings of the installation and options of the run.
    device
        The device.
    database
        Open for writing.
    compile_pool
        Processes that compile.
    gpu
        The GPU.

    Raises
    ------
    InputError
        The reference of a kernel cannot be computed in the GPU worker alone.
    """

    def __init__(
        self,
        operation: Operation,
        dtype: str,
        kernels: Mapping[str, Kernel],
        libraries: Sequence[Library],
        *,
        settings: Settings,
        options: TuneOptions,
        device: DeviceProperties,
        database: Database,
        compile_pool: CompilePool,
        gpu: Gpu | FreeGpu,
    ) -> None:
        for kernel in kernels.values():
            reference = kernel.spec.reference
            if reference.function is not None or reference.comparison is not None or reference.is_agreement:
                raise InputError(
                    f"{kernel.spec.source}: a family of an operation needs references that are expressions or kernels"
                )
        self._operation = operation
        self._dtype = dtype
        self._kernels = kernels
        self._libraries = libraries
        self._settings = settings
        self._options = replace(options, sample_limit_s=_SAMPLE_LIMIT_S, captured=None)
        self._device = device
        self._database = database
        self._compile_pool = compile_pool
        self._gpu = gpu
        self._compiled: dict[str, Future[Compiled]] = {}
        self.banned: dict[CandidateKey, str] = {}
        """Configurations that failed at any problem, with the reason."""
        self.resources: dict[CandidateKey, Resources] = {}
        """Resources of each configuration that was compiled."""

    def prepare(
        self, problem: Problem, kernels: Mapping[str, Mapping[str, int]], candidates: Sequence[ModelCandidate]
    ) -> _Job:
        """Start the compilation of the configurations that are valid for a problem, best first."""
        valid = [
            one
            for one in candidates
            if one.kernel in kernels
            and one.key not in self.banned
            and not check_config(
                self._kernels[one.kernel].spec, one.config, kernels[one.kernel], self._device, problem.dtype
            )
        ]
        return _Job(problem, kernels, valid, [self._compile(one, kernels[one.kernel]) for one in valid])

    def run(self, job: _Job) -> SweptProblem | None:
        """Measure a prepared problem, and store the results; None if it cannot be laid out or nothing was measured.

        Raises
        ------
        WorkerError
            The worker cannot be started.
        ToolchainError
            Nothing can be compiled.
        """
        trials: dict[CandidateKey, Trial] = {}
        ready: list[tuple[ModelCandidate, Trial, Candidate]] = []
        for one, compilation in zip(job.candidates, job.compilations, strict=True):
            trial, candidate = compilation.trial(), compilation.candidate()
            if trial.resources is not None:
                self.resources.setdefault(one.key, trial.resources)
            if trial.outcome is Outcome.OK and candidate is not None:
                ready.append((one, trial, candidate))
            else:
                trials[one.key] = trial
        libraries, measured = self._measure(job, ready)
        trials |= measured
        for key, trial in measured.items():
            if trial.outcome in FAULTS:
                self.banned[key] = trial.reason
        if not any(trial.outcome.has_time for trial in measured.values()) and not libraries:
            return None
        self._store(job, trials, libraries)
        times = {name: found.measurement.time_us for name, found in libraries.items() if found.measurement is not None}
        sizes = {name: size for name, size in job.problem.sizes.items() if name not in self._operation.conditions}
        return SweptProblem(sizes, job.kernels, trials, times)

    def stored(
        self, problem: Problem, kernels: Mapping[str, Mapping[str, int]], studies: Mapping[str, int]
    ) -> SweptProblem | None:
        """Return the results of an earlier run at a problem; None if there are none.

        Parameters
        ----------
        studies
            Id of each study in the database, by the digest of its key.
        """
        trials: dict[CandidateKey, Trial] = {}
        swept = False
        for name, sizes in kernels.items():
            study_id = studies.get(self._key(name, Problem(name, sizes, problem.dtype)).digest)
            if study_id is None:
                continue
            samplers = {run.run_id: run.sampler for run in self._database.runs(study_id)}
            swept = swept or _SAMPLER in samplers.values()
            stored = self._database.stored_trials(study_id)
            usable = [one.trial for one in stored if samplers.get(one.run_id) != UNVERIFIED_SAMPLER]
            for trial in {config_key(trial.config): trial for trial in usable}.values():
                key = name, config_key(trial.config)
                trials[key] = trial
                if trial.resources is not None:
                    self.resources.setdefault(key, trial.resources)
                if trial.outcome in FAULTS:
                    self.banned[key] = trial.reason
        libraries = {}
        for library in self._libraries:
            study_id = studies.get(self._library_key(problem, library).digest)
            best = self._database.best(study_id=study_id) if study_id is not None else []
            if best and best[0].trial.time_us is not None:
                libraries[library.name] = best[0].trial.time_us
        if not swept:
            return None
        proper = {name: size for name, size in problem.sizes.items() if name not in self._operation.conditions}
        return SweptProblem(proper, kernels, trials, libraries)

    def _compile(self, one: ModelCandidate, sizes: Mapping[str, int]) -> Compiling:
        """Start a compilation; one of the same code, of another problem too, is not started again."""
        kernel, problem = self._kernels[one.kernel], Problem(one.kernel, sizes, self._dtype)

        def submit(make_job: Callable[[], CompileJob]) -> Future[Compiled]:
            job = make_job()
            if job.key not in self._compiled:
                self._compiled[job.key] = self._compile_pool.submit(lambda: job)
            return self._compiled[job.key]

        others = compiled_sizes(kernel.spec, problem, ())
        return Compiling.begin(kernel, problem, one.config, self._device, submit=submit, other_sizes=others)

    def _measure(
        self, job: _Job, ready: Sequence[tuple[ModelCandidate, Trial, Candidate]]
    ) -> tuple[dict[str, Reading], dict[CandidateKey, Trial]]:
        """Measure libraries and candidates; there is nothing of a problem that cannot be laid out."""
        workloads = {
            name: workload_of(
                self._kernels[name], Problem(name, sizes, job.problem.dtype), self._settings, self._options
            )
            for name, sizes in job.kernels.items()
        }
        buffers = next(iter(workloads.values()))
        calls = [LibraryCall(one.name, job.problem.sizes, job.problem.dtype) for one in self._libraries]
        entries = (
            *(Entry(library=call, workload=buffers) for call in calls),
            *(Entry(candidate, workload=workloads[one.kernel]) for one, _, candidate in ready),
        )
        try:
            readings = self._gpu.time(Time(entries, grid=True))
        except InputError:  # it does not fit in memory
            return {}, {}
        libraries = dict(zip([one.name for one in self._libraries], readings, strict=False))
        for library in self._libraries:
            self._check_version(library, libraries[library.name])
        measured = {
            one.key: _with_result(trial, reading)
            for (one, trial, _), reading in zip(ready, readings[len(calls) :], strict=True)
        }
        return libraries, measured

    @staticmethod
    def _check_version(library: Library, reading: Reading) -> None:
        """Raise if another machine has another version of a library: their times are not comparable."""
        version = reading.telemetry.get(LIBRARY_VERSION)
        if version is not None and version != library.version:
            raise ToolchainError(
                f"the GPU's machine has {library.name} {version or 'not installed'}, and the session {library.version}"
            )

    def _key(self, name: str, problem: Problem) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self._options.l2
        return key_of(self._kernels[name], problem, self._device, nvrtc_version=nvrtc, l2_mode=l2)

    def _library_key(self, problem: Problem, library: Library) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self._options.l2
        name, version = library.name, library.version
        return library_key(self._operation, problem, self._device, name, version, nvrtc_version=nvrtc, l2_mode=l2)

    def _store(self, job: _Job, trials: Mapping[CandidateKey, Trial], libraries: Mapping[str, Reading]) -> None:
        """Commit the trials of a problem, in one transaction a kernel."""
        for name, sizes in job.kernels.items():
            own = [trial for (kernel, _), trial in trials.items() if kernel == name]
            if own:
                self._add_run(self._key(name, Problem(name, sizes, job.problem.dtype)), own)
        for library in self._libraries:
            found = libraries.get(library.name)
            if found is not None and found.measurement is not None:
                trial = _with_result(Trial({}, Outcome.OK), found)
                self._add_run(self._library_key(job.problem, library), [trial], phase="final", is_ranked=True)

    def _add_run(self, key: TuningKey, trials: Sequence[Trial], **fields: Any) -> None:
        device, host = self._device, platform.node()
        self._database.add_run(
            key, trials, sampler=_SAMPLER, device=device, driver=device.driver or "", host=host, **fields
        )


def problem_of(
    operation: Operation, kernels: Mapping[str, Kernel], problem: Problem, device: DeviceProperties
) -> dict[str, dict[str, int]]:
    """Return the kernels that compute a problem, each with its sizes and flags."""
    return {
        member.name: dict(resolve_problem(kernels[member.name].spec, sizes, problem.dtype).sizes)
        for member, sizes in operation.fitting(problem, device)
        if member.name in kernels
    }


def _with_result(trial: Trial, reading: Reading) -> Trial:
    return replace(
        trial,
        outcome=reading.outcome,
        reason=reading.reason,
        stage="measure" if reading.outcome.has_time else "verify",
        measurement=reading.measurement,
        telemetry={**trial.telemetry, **reading.telemetry},
    )
