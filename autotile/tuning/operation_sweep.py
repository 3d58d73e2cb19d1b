"""Times of many configurations at many problems of an operation, from which a model of time is learned.

Each problem is one request to the GPU worker, see `autotile.workers.sweep`; the configurations of the next problem
compile meanwhile. Every result is stored as a trial of an ordinary study, so that a run that was killed goes on, and
what was measured is served. It is therefore verified as in a session of that study: at the ragged sizes, which are
those of the kernel's file, once for each layout, and at each problem before it is timed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.documents import convert
from autotile.core.model import Config, L2Mode, Outcome, Problem, Resources, Trial, config_key, config_text
from autotile.cuda.compiler import compile_job
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.keys import TuningKey, key_of, library_key
from autotile.database.winners import UNVERIFIED_SAMPLER
from autotile.errors import DataError, InputError, ToolchainError, WorkerError
from autotile.kernel.computed import computed_values
from autotile.kernel.inputs import ragged_problem
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Operation
from autotile.kernel.problem import resolve_problem
from autotile.space.limits import check_config
from autotile.tuning.backend import kernel_source
from autotile.tuning.contest import OperationLibrary
from autotile.tuning.pipeline import gated_trial
from autotile.tuning.problem_queue import Lane
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import Compiled, CompilePool
from autotile.workers.gpu import GPU_WORKER
from autotile.workers.protocol import (
    SWEEP_STAGE,
    Candidate,
    LibraryCall,
    SizedCubin,
    SweepKernel,
    SweepSetup,
    Swept,
    SweptTime,
)

if TYPE_CHECKING:
    from autotile.database.database import Database

_DEADLINE_S = 60.0
_DEADLINE_PER_CANDIDATE_S = 1.0
"""Time for one problem: its inputs and reference, and each candidate."""
_SAMPLER = "family"
"""Name of these runs in the database; see `UNVERIFIED_SAMPLER` for those of earlier versions."""
FAULTS = (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes that, at any problem, exclude a configuration from the model."""

CandidateKey = tuple[str, str]
"""Name of a kernel, and `config_key` of its configuration."""


class SweepCandidate(NamedTuple):
    """A configuration of a kernel."""

    kernel: str
    config: Config

    @property
    def key(self) -> CandidateKey:
        """What it is compared by."""
        return self.kernel, config_key(self.config)


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


class _Ragged(NamedTuple):
    """Ragged sizes of a problem, with the compilation for them where sizes are compiled in."""

    sizes: Mapping[str, int]
    compilation: Future[Compiled] | None


class _Job(NamedTuple):
    """A problem whose configurations are being compiled."""

    problem: Problem
    kernels: Mapping[str, Mapping[str, int]]
    candidates: Sequence[SweepCandidate]
    compilations: Sequence[Future[Compiled]]
    ragged: Sequence[_Ragged | None]
    """Where each configuration is verified first; None where it was, or need not be."""


class _Ready(NamedTuple):
    """A compiled configuration, with the sizes at which it is verified first."""

    one: SweepCandidate
    trial: Trial
    candidate: Candidate
    ragged: Mapping[str, int] | None


class SweepWorker(Protocol):
    """A GPU worker, here or on another machine."""

    def request(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply; errors as for `autotile.workers.child.Child.request`."""

    def kill(self) -> None:
        """End the worker."""


Worker = TypeVar("Worker", bound=SweepWorker)


class SweepWorkers(Protocol[Worker]):
    """Where GPU workers come from, such as `autotile.workers.child.WorkerPool`."""

    def acquire(self, module: str) -> Worker:
        """Return a worker that runs a module."""

    def release(self, child: Worker) -> None:
        """Take a worker back."""


def gpu_workers(lane: Lane, worker_pool: WorkerPool, libraries: Sequence[OperationLibrary]) -> SweepWorkers[Any]:
    """Return where the GPU worker of a sweep comes from: this machine or, with the same libraries, a cluster."""
    if lane.cluster is None:
        return worker_pool
    from autotile.tuning.cluster.remote_sweep import RemoteSweepWorkers  # imports Dask

    return RemoteSweepWorkers(lane, {library.name: library.version for library in libraries})


class Sweep:
    """Measures problems of an operation, and stores the results.

    Parameters
    ----------
    operation, dtype
        Operation, and element type.
    kernels
        Its kernels, by name.
    libraries
        Libraries that the operation file names.
    setup
        What all requests to the GPU worker have in common, with the kernels in their order.
    device
        The device.
    database
        Open for writing.
    compile_pool, worker_pool
        Processes that compile, and that the GPU worker is taken from.
    module
        Module that the GPU worker runs.
    """

    def __init__(
        self,
        operation: Operation,
        kernels: Mapping[str, Kernel],
        libraries: Sequence[OperationLibrary],
        setup: SweepSetup,
        device: DeviceProperties,
        *,
        database: Database,
        compile_pool: CompilePool,
        worker_pool: SweepWorkers[Any],
        module: str = GPU_WORKER,
    ) -> None:
        self._module = module
        self._operation = operation
        self._kernels = kernels
        self._libraries = libraries
        self._setup = setup
        self._device = device
        self._database = database
        self._compile_pool = compile_pool
        self._worker_pool = worker_pool
        self._child: SweepWorker | None = None
        self._compiled: dict[tuple[Any, ...], Future[Compiled]] = {}
        self._verified: set[tuple[CandidateKey, tuple[tuple[str, int], ...]]] = set()
        """Configurations that passed at the ragged sizes of a layout."""
        self.banned: dict[CandidateKey, str] = {}
        """Configurations that failed at any problem, with the reason."""
        self.resources: dict[CandidateKey, Resources] = {}
        """Resources of each configuration that was compiled."""

    @staticmethod
    def setup_of(
        kernels: Mapping[str, Kernel], dtype: str, l2: L2Mode, *, cache: str, limit_bytes: int, device_index: int
    ) -> SweepSetup:
        """Return the setup of kernels, in their order.

        Raises
        ------
        InputError
            The reference of a kernel cannot be computed in the GPU worker alone.
        """
        for kernel in kernels.values():
            reference = kernel.spec.reference
            if reference.function is not None or reference.comparison is not None or reference.is_agreement:
                raise InputError(
                    f"{kernel.spec.source}: a family of an operation needs references that are expressions or kernels"
                )
        parts = tuple(
            SweepKernel(k.spec.text, k.spec.source, k.spec.folder, kernel_source(k)) for k in kernels.values()
        )
        return SweepSetup(parts, dtype, l2, cache, limit_bytes, device_index)

    def prepare(
        self, problem: Problem, kernels: Mapping[str, Mapping[str, int]], candidates: Sequence[SweepCandidate]
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
        compilations = [self._compile(one, kernels[one.kernel]) for one in valid]
        ragged = [self._ragged(one, kernels[one.kernel]) for one in valid]
        return _Job(problem, kernels, valid, compilations, ragged)

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
        ready: list[_Ready] = []
        for one, compilation, planned in zip(job.candidates, job.compilations, job.ragged, strict=True):
            is_verified = planned is not None and (one.key, tuple(planned.sizes.items())) in self._verified
            ragged = None if is_verified else planned  # another problem may have been measured meanwhile
            kernel, sizes, compiled = self._kernels[one.kernel], job.kernels[one.kernel], compilation.result()
            other = ragged.compilation.result() if ragged is not None and ragged.compilation is not None else None
            if compiled.cubin is not None and ragged is not None and other is not None and other.cubin is None:
                reason = f"at {config_text(ragged.sizes)}: {other.reason}"
                compiled = replace(other, reason=reason, seconds=compiled.seconds)
            plan = LaunchPlan.of(kernel.spec, one.config, sizes, self._device)
            own = Problem(one.kernel, sizes, job.problem.dtype)
            trial = gated_trial(kernel, own, one.config, compiled, plan=plan, device=self._device)
            if trial.resources is not None:
                self.resources.setdefault(one.key, trial.resources)
            if trial.outcome is Outcome.OK and compiled.cubin is not None:
                computed = computed_values(kernel.spec.computed, one.config)
                cubin, others = compiled.cubin, tuple[SizedCubin, ...]()
                if ragged is not None and other is not None and other.cubin is not None:
                    others = (SizedCubin(ragged.sizes, str(other.cubin.path), other.cubin.symbols),)
                candidate = Candidate(one.config, str(cubin.path), cubin.symbols, computed, others=others)
                ready.append(_Ready(one, trial, candidate, ragged.sizes if ragged is not None else None))
            else:
                trials[one.key] = trial
        libraries, measured = self._measure(job, ready)
        trials |= measured
        for key, trial in measured.items():
            if trial.outcome in FAULTS:
                self.banned[key] = trial.reason
        for each in ready:
            if each.ragged is not None and each.one.key in measured and measured[each.one.key].outcome.has_time:
                self._verified.add((each.one.key, tuple(each.ragged.items())))
        if not any(trial.outcome.has_time for trial in measured.values()) and not libraries:
            return None
        self._store(job, trials, libraries)
        times = {name: swept.measurement.time_us for name, swept in libraries.items() if swept.measurement is not None}
        sizes = {name: size for name, size in job.problem.sizes.items() if name not in self._operation.conditions}
        return SweptProblem(sizes, job.kernels, trials, times)

    def stored(
        self, problem: Problem, kernels: Mapping[str, Mapping[str, int]], studies: Mapping[str, int]
    ) -> SweptProblem | None:
        """Return what an earlier run has measured at a problem; None if it measured nothing.

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
                ragged = ragged_problem(self._kernels[name].spec, sizes, problem.dtype)
                if trial.outcome.has_time and ragged is not None:
                    self._verified.add((key, tuple(ragged.items())))
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

    def close(self) -> None:
        """Return the GPU worker to the pool."""
        child, self._child = self._child, None
        if child is not None:
            self._worker_pool.release(child)

    def _ragged(self, one: SweepCandidate, sizes: Mapping[str, int]) -> _Ragged | None:
        """Return where a configuration is to be verified before a problem, in sizes of its kernel."""
        spec, dtype = self._kernels[one.kernel].spec, self._setup.dtype
        ragged = ragged_problem(spec, sizes, dtype)
        if ragged is None or (one.key, tuple(ragged.items())) in self._verified:
            return None
        if check_config(spec, one.config, ragged, self._device, dtype):
            return None
        is_same = all(ragged[name] == sizes[name] for name in spec.compiled_names)
        return _Ragged(ragged, None if is_same else self._compile(one, ragged))

    def _compile(self, one: SweepCandidate, sizes: Mapping[str, int]) -> Future[Compiled]:
        kernel = self._kernels[one.kernel]
        compiled_in = tuple(sizes[name] for name in kernel.spec.compiled_names)
        key = (*one.key, compiled_in)
        found = self._compiled.get(key)
        if found is None:
            job = compile_job(kernel, one.config, self._setup.dtype, self._device.architecture, sizes)
            found = self._compiled[key] = self._compile_pool.submit(lambda: job)
        return found

    def _measure(self, job: _Job, ready: Sequence[_Ready]) -> tuple[dict[str, SweptTime], dict[CandidateKey, Trial]]:
        """Measure candidates; without one that breaks the worker, the others are measured again by the next one."""
        libraries: dict[str, SweptTime] = {}
        measured: dict[CandidateKey, Trial] = {}
        left_libraries, left = list(self._libraries), list(ready)
        names = list(self._kernels)
        while left or left_libraries:
            request = {
                "op": "sweep",
                "setup": asdict(self._setup),
                "sizes": [dict(job.kernels[name]) if name in job.kernels else None for name in names],
                "libraries": [
                    LibraryCall(one.name, job.problem.sizes, job.problem.dtype).to_json() for one in left_libraries
                ],
                "entries": [
                    {
                        "kernel": names.index(each.one.kernel),
                        **each.candidate.to_json(),
                        "ragged": dict(each.ragged) if each.ragged is not None else None,
                    }
                    for each in left
                ],
            }
            results = self._request(request, _DEADLINE_S + _DEADLINE_PER_CANDIDATE_S * len(left))
            of_libraries = {n: one for n, one in results.items() if n < len(left_libraries)}
            libraries |= {left_libraries[n].name: one for n, one in of_libraries.items()}
            of_candidates = {n - len(left_libraries): one for n, one in results.items() if n not in of_libraries}
            measured |= {left[n].one.key: _with_result(left[n].trial, one) for n, one in of_candidates.items()}
            left_libraries = [one for n, one in enumerate(left_libraries) if n not in of_libraries]
            left = [each for n, each in enumerate(left) if n not in of_candidates]
            if not results:
                break  # the problem cannot be laid out
        return libraries, measured

    def _request(self, request: Mapping[str, Any], deadline_s: float) -> dict[int, SweptTime]:
        """Return results by their numbers: all, or only that of the one that broke the worker, or none."""
        if self._child is None:
            self._child = self._worker_pool.acquire(self._module)
        try:
            reply = self._child.request(request, deadline_s)
        except WorkerError as error:
            self._drop()
            if not error.stage.startswith(SWEEP_STAGE):
                return {}
            outcome = Outcome.TIMED_OUT if "no answer" in str(error) else Outcome.CRASHED
            return {int(error.stage.removeprefix(SWEEP_STAGE)): SweptTime(outcome, str(error))}
        if reply.pop("last", False):
            self._drop()
        if reply.get("kind") == "toolchain":
            raise ToolchainError(str(reply.get("error")))
        try:
            found = convert(reply, Swept)
        except DataError:  # an error that concerns the problem: it does not fit in memory
            return {}
        if found.failed:
            number = len(found.swept) if found.number is None else found.number
            return {number: SweptTime(found.outcome, found.failed)}
        return dict(enumerate(found.swept))

    def _drop(self) -> None:
        if self._child is not None:
            with suppress(WorkerError):
                self._child.kill()
            self._child = None

    def _key(self, name: str, problem: Problem) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self._setup.l2
        return key_of(self._kernels[name], problem, self._device, nvrtc_version=nvrtc, l2_mode=l2)

    def _library_key(self, problem: Problem, library: OperationLibrary) -> TuningKey:
        nvrtc, l2 = nvrtc_version(), self._setup.l2
        name, version = library.name, library.version
        return library_key(self._operation, problem, self._device, name, version, nvrtc_version=nvrtc, l2_mode=l2)

    def _store(self, job: _Job, trials: Mapping[CandidateKey, Trial], libraries: Mapping[str, SweptTime]) -> None:
        """Commit the trials of a problem, in one transaction a kernel."""
        for name, sizes in job.kernels.items():
            own = [trial for (kernel, _), trial in trials.items() if kernel == name]
            if own:
                study_id = self._database.study(self._key(name, Problem(name, sizes, job.problem.dtype)), self._device)
                run_id = self._start_run(study_id)
                self._database.add_trials(study_id, run_id, own)
                self._database.end_run(run_id)
        for library in self._libraries:
            swept = libraries.get(library.name)
            if swept is not None and swept.measurement is not None:
                study_id = self._database.study(self._library_key(job.problem, library), self._device)
                run_id = self._start_run(study_id)
                trial = _with_result(Trial({}, Outcome.OK), swept)
                self._database.add_trial(study_id, run_id, trial, phase="final", rank=1)
                self._database.end_run(run_id)

    def _start_run(self, study_id: int) -> int:
        host = platform.node()
        return self._database.start_run(study_id, sampler=_SAMPLER, driver=self._device.driver, host=host)


def problem_of(
    operation: Operation, kernels: Mapping[str, Kernel], problem: Problem, device: DeviceProperties
) -> dict[str, dict[str, int]]:
    """Return the kernels that compute a problem, each with its sizes and flags."""
    return {
        member.name: dict(resolve_problem(kernels[member.name].spec, sizes, problem.dtype).sizes)
        for member, sizes in operation.fitting(problem, device)
        if member.name in kernels
    }


def _with_result(trial: Trial, swept: SweptTime) -> Trial:
    stage = "measure" if swept.outcome.has_time else "verify"
    telemetry = {"max_error": swept.max_error} if swept.outcome.has_time else {}
    return replace(
        trial,
        outcome=swept.outcome,
        reason=swept.reason,
        stage=stage,
        measurement=swept.measurement,
        telemetry={**trial.telemetry, **telemetry},
    )
