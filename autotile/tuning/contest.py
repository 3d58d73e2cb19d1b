"""The last race of an operation: the best configuration of each kernel, and libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Problem, Trial
from autotile.errors import InputError, WorkerError
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library
from autotile.settings import Settings
from autotile.tuning.backend import Backend, LiveBackend, expected_folder, workload_of
from autotile.tuning.finals import race_rounds, with_times
from autotile.tuning.options import TuneOptions
from autotile.tuning.pipeline import Pipeline, open_compile_pool
from autotile.tuning.problem_queue import Lane
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import CompilePool
from autotile.workers.gpu import GPU_WORKER, Gpu
from autotile.workers.jobs import LIBRARY_VERSION, Candidate, Entry, LibraryCall, Race, Reading, Workload

if TYPE_CHECKING:
    from autotile.tuning.cluster.gpus import RemoteGpu

_CHECKS = 4
"""Verifications of a candidate or a library before the race; a kernel's own finals verified its winner repeatedly."""


Finalist = tuple[Kernel, Problem, Trial]
"""A kernel with its problem and the trial of its best configuration."""


@dataclass(frozen=True, slots=True)
class RacedTrial:
    """A trial with its time in the race, or its fault, and the times of the rounds in microseconds.

    ``version`` is that of a library on another machine, empty otherwise.
    """

    trial: Trial
    times_us: tuple[float, ...]
    version: str = ""


def hold_contest(
    finalists: Sequence[Finalist],
    libraries: Sequence[Library],
    problem: Problem,
    *,
    device: DeviceProperties,
    settings: Settings,
    options: TuneOptions,
    worker_pool: WorkerPool,
    lane: Lane,
) -> list[RacedTrial]:
    """Verify and race configurations of several kernels, and libraries, in interleaved rounds.

    Libraries that an operation file names run in the GPU worker. A Python function cannot be sent there; with one, the
    whole race is held in this process, among candidates that finals have verified.

    Parameters
    ----------
    finalists
        Kernels with their best configurations, one at least.
    libraries
        Libraries.
    problem
        Problem of the operation.
    device
        The device that the kernels were tuned on.
    settings, options, worker_pool, lane
        As in the sessions; a race on a GPU of a cluster leaves out Python functions.

    Returns
    -------
    list of RacedTrial
        Of the finalists, then of the libraries.

    Raises
    ------
    WorkerError
        The worker died.
    InputError, ToolchainError
        The problems do not fit in memory beside one another, or the device does not work.
    """
    with ExitStack() as stack:
        workloads = []
        for kernel, own_problem, _ in finalists:
            folder = expected_folder(kernel, own_problem, options)
            if folder is not None:
                stack.callback(folder.close)
            workload = workload_of(kernel, own_problem, settings, options)
            workloads.append(replace(workload, reference_folder=str(folder.path) if folder is not None else ""))
        backend: Backend
        if lane.cluster is not None:
            backend = stack.enter_context(closing(_remote_gpu(lane, finalists[0], workloads[0], options)))
        else:
            gpu = stack.enter_context(closing(Gpu(workloads[0], options.run_deadline_s, worker_pool=worker_pool)))
            backend = LiveBackend(gpu, device)
        with closing(open_compile_pool(settings, options, worker_pool)) as pool:
            candidates = [_compiled(one, backend, pool) for one in finalists]
        round_us = sum(trial.time_us or 0.0 for _, _, trial in finalists) * (1 + len(libraries) / len(finalists))
        rounds = race_rounds(max(round_us, 1.0))
        expected_s = 1e-6 * rounds * round_us
        raced_kernels = [Entry(one, workload=laid_out) for one, laid_out in zip(candidates, workloads, strict=True)]
        calls = [LibraryCall(library.name, problem.sizes, problem.dtype) for library in libraries]
        raced_libraries = [Entry(library=call, workload=workloads[0]) for call in calls]
        job = Race((*raced_kernels, *raced_libraries), rounds, options.seed, checks=_CHECKS)
        own = {library.name: library.call for library in libraries if library.call is not None}
        if own and lane.cluster is None:
            gpu.close()
            if idle := worker_pool.acquire_idle(GPU_WORKER, str(options.device_index)):
                idle.close()  # frees its memory
            raced = _race_here(job, own, options)
        elif lane.cluster is None:
            raced = gpu.race(job, expected_s=expected_s)
        else:
            found = backend.race(job, expected_s)
            if found is None or len(found) != len(job.entries):
                raise WorkerError(f"the reply of {backend.uuid} holds no times")
            raced = found
    known = [*(trial for _, _, trial in finalists), *(Trial({}, Outcome.OK) for _ in libraries)]
    return [
        _raced(trial, reading, options, is_elsewhere=lane.cluster is not None)
        for trial, reading in zip(known, raced, strict=True)
    ]


def _remote_gpu(lane: Lane, first: Finalist, workload: Workload, options: TuneOptions) -> RemoteGpu:
    from autotile.tuning.cluster.client import RemoteWork  # imports Dask
    from autotile.tuning.cluster.gpus import free_gpu

    return free_gpu(lane, RemoteWork(first[0].name, workload, options.run_deadline_s))


def _compiled(one: Finalist, backend: Backend, pool: CompilePool) -> Candidate:
    """Return the candidate of a finalist, whose cubin is in the cache unless it was trimmed."""
    kernel, problem, trial = one
    compiled = Pipeline(kernel, problem, backend, pool).recompile([trial])
    if not compiled:
        raise InputError(f"{kernel.name}: the best configuration does not compile any more")
    return compiled[0][1]


def _race_here(job: Race, own: Mapping[str, Callable[..., Any]], options: TuneOptions) -> list[Reading]:
    """Hold the race in this process."""
    from autotile.cuda.toolchain import load_cupy
    from autotile.workers.bench import Bench

    cuda = load_cupy().cuda
    readings: list[Reading] = []
    try:
        with cuda.Device(options.device_index):
            Bench(own).run(job, lambda _: None, readings)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError) as error:
        raise WorkerError(f"the race failed: {error}") from None
    return readings


def _raced(trial: Trial, reading: Reading, options: TuneOptions, *, is_elsewhere: bool) -> RacedTrial:
    if reading.outcome is not Outcome.OK:
        fault = replace(trial, outcome=reading.outcome, reason=reading.reason, stage="finals", measurement=None)
        return RacedTrial(fault, ())
    timed = with_times(trial, reading.rounds_us)
    assert timed.measurement is not None
    version = str(reading.telemetry.get(LIBRARY_VERSION, "")) if is_elsewhere else ""
    return RacedTrial(replace(timed, measurement=replace(timed.measurement, l2=options.l2)), reading.rounds_us, version)
