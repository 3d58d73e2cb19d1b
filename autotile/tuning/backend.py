"""Execution backends: a GPU of this machine, several of them, or a recording of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import ENERGY, GPU_SCALE, STEP_TIME, Measurement, Problem
from autotile.cuda.compiler import check_signatures, compile_job
from autotile.cuda.driver import device_count, device_uuid, has_driver, live_device
from autotile.errors import InputError, ToolchainError, WorkerError
from autotile.kernel.inputs import missing_input, with_captured_call
from autotile.kernel.library import Kernel, reference_source
from autotile.kernel.problem import check_memory
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.start import measures_energy, session_objective
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import CompileFarm, compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import SECOND_SEED, Candidate, Check, Entry, KernelSource, Race, Reading, Workload

if TYPE_CHECKING:
    from autotile.tuning.schedule import Lane
    from autotile.workers.python_reference import ExpectedFolder
    from autotile.workers.sanitizer import Finding, Sanitizer

_PROFILE = "h200"
"""Device profile for the checks without a GPU; the built-in recordings are of this GPU."""
_SANITIZER_S = 120.0
"""Timeout of one check under compute-sanitizer, in seconds. A check of a few thousand elements a side takes seconds."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A candidate that a GPU has evaluated.

    Attributes
    ----------
    candidate
        As it was submitted.
    reading
        Its outcome; of several GPUs, with times on the scale of the one that holds the finals.
    gpu
        UUID of the GPU; empty if it is not known.
    """

    candidate: Candidate
    reading: Reading
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Work of a GPU in a session.

    Attributes
    ----------
    uuid
        UUID of the GPU; empty if it is not known.
    trials
        Number of candidates that it evaluated.
    busy_s
        Time for which it loaded, verified and measured, in seconds.
    scale
        Factor of its times to those of the GPU that holds the finals; None if it was not measured.
    lost
        Reason why it was given up; empty if it was not.
    """

    uuid: str
    trials: int
    busy_s: float
    scale: float | None = None
    lost: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "uuid": self.uuid,
            "trials": self.trials,
            "busy_s": round(self.busy_s, 3),
            "scale": self.scale,
            "lost": self.lost or None,
        }


def gpu_notices(uses: Sequence[GpuUse]) -> tuple[str, ...]:
    """Return a line for each GPU that was lost."""
    left = sum(not use.lost for use in uses)
    return tuple(
        f"{use.uuid or 'a GPU'} was given up, and its candidates went to the other {left}: {use.lost}"
        for use in uses
        if use.lost
    )


def scaled(reading: Reading, scale: float | None) -> Reading:
    """Return a reading with its times multiplied by a factor, which its telemetry states; None for none."""
    measured = reading.measurement
    if measured is None or scale is None:
        return reading
    telemetry = {
        name: round(float(value) * scale, 3) if name.startswith(STEP_TIME) else value
        for name, value in reading.telemetry.items()
    }
    times = tuple(round(time_us * scale, 4) for time_us in measured.samples_us)
    measurement = Measurement(
        measured.time_us * scale, measured.low_us * scale, measured.high_us * scale, times, measured.l2
    )
    whole = round(scale * float(telemetry.get(GPU_SCALE, 1.0)), 6)  # that of a GPU to its session, of that to its study
    return replace(reading, measurement=measurement, telemetry={**telemetry, GPU_SCALE: whole})


class Backend(ABC):
    """A device and the execution of candidates on it; as it stands, one GPU with nothing but that.

    The methods block, and are called by one thread at a time; only `close` may be called by another one meanwhile,
    which ends them. A backend of one GPU returns the results in the order of the candidates; several GPUs behind one
    backend (`autotile.tuning.gpu_group.GpuGroup`) return them as they end.

    Attributes
    ----------
    device
        Properties of the device.
    source
        Origin of the results: ``cuda`` if measured on this machine, ``replayed`` if read from a recording.
    notice
        One line for the user about the choice of the backend; empty where it is the expected one.
    farm
        Compilers of other machines that come with the device; None for none.
    uuid
        UUID of the GPU that holds races; empty if it is not known.
    gpu_count
        Number of GPUs that evaluate candidates at the same time.
    is_dead
        Whether a worker process died with the last candidate, and what was submitted after it has yet to run.
    has_result
        Whether `result` is certain not to wait; False where that is not known.
    uses
        What each of several GPUs did so far; empty for one.
    observe_wait
        Called with what is waited for beside results, and with an empty text when that is over.
    """

    device: DeviceProperties
    source: Literal["cuda", "replayed"] = "cuda"
    notice: str = ""
    farm: CompileFarm | None = None
    uuid: str = ""
    gpu_count: int = 1
    is_dead: bool = False
    has_result: bool = False
    uses: tuple[GpuUse, ...] = ()
    observe_wait: Callable[[str], None] = staticmethod(lambda _: None)

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return a mask over the rows of a space that can be run, shape (rows,); None for all."""
        return None

    def wait(self) -> None:  # noqa: B027 - a recording need not be waited for
        """Wait until candidates can be run.

        Raises
        ------
        InputError, ToolchainError
            As for `autotile.workers.gpu.Gpu.wait`.
        """

    @abstractmethod
    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Submit one candidate, to be loaded, verified and measured after those submitted before.

        Parameters
        ----------
        candidate
            The compiled configuration.
        best_us
            Best time so far in microseconds, against which a clearly slower candidate is pruned; None for no pruning.
        """

    @abstractmethod
    def result(self) -> Finished:
        """Wait for a candidate that was submitted, and return its evaluation.

        Raises
        ------
        WorkerError
            As for `autotile.workers.gpu.Gpu.result`.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """Forget the candidates that were submitted and have no result; their evaluations are never returned."""

    @abstractmethod
    def race(self, job: Race, expected_s: float) -> list[Reading] | None:
        """Race entries on one GPU; None where no race is possible.

        Parameters
        ----------
        job, expected_s
            As for `autotile.workers.gpu.Gpu.race`.
        """

    @abstractmethod
    def check(self, job: Check) -> Reading:
        """Verify one candidate repeatedly, without measuring it.

        Raises
        ------
        InputError
            A second set of inputs was asked for, and cannot be drawn.
        ToolchainError, WorkerError
            The worker died.
        """

    def spare(self) -> Backend | None:
        """Return the backend of a second GPU, to confirm what the first has found; None if there is none."""
        return None

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run candidates under compute-sanitizer; return one row of findings for each, empty if it is not enabled."""
        return [[] for _ in candidates]

    @abstractmethod
    def close(self) -> None:
        """Release the device; closing twice is harmless."""


class LiveBackend(Backend):
    """A GPU of this machine, behind a worker process.

    Parameters
    ----------
    gpu
        Handle on the worker process.
    device
        Properties of the GPU.
    sanitizer
        Runs finalists under compute-sanitizer; None to skip that.
    expected
        Results of a reference in Python, deleted with the backend.
    """

    def __init__(
        self,
        gpu: Gpu,
        device: DeviceProperties,
        sanitizer: Sanitizer | None = None,
        expected: ExpectedFolder | None = None,
        *,
        uuid: str = "",
    ) -> None:
        self.device = device
        self.uuid = uuid
        self._expected = expected
        self._gpu = gpu
        self._sanitizer = sanitizer
        self._submitted: deque[Candidate] = deque()
        """Candidates without a result, oldest first."""

    @classmethod
    def start(
        cls, kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, worker_pool: WorkerPool | None
    ) -> Self | None:
        """Start the GPU worker, and return without waiting for it; None if the machine has no CUDA device.

        The worker starts before anything is known about the device, as its imports take as long as all that follows
        here.
        """
        with ExitStack() as opened:
            expected = expected_folder(kernel, problem, options)
            if expected is not None:
                opened.callback(expected.close)
            folder = str(expected.path) if expected is not None else ""
            workload = replace(workload_of(kernel, problem, settings, options), reference_folder=folder)
            sanitizer = None
            if options.sanitize:
                from autotile.workers.sanitizer import Sanitizer, find_sanitizer

                sanitizer = Sanitizer(workload, find_sanitizer(settings.sanitizer), _SANITIZER_S)
            gpu = Gpu(workload, options.run_deadline_s, worker_pool=worker_pool)
            opened.callback(gpu.close)
            device = live_device(options.device_index) if device_count() else None
            if device is None:
                return None
            opened.pop_all()
        return cls(gpu, device, sanitizer, expected, uuid=device_uuid(options.device_index))

    @property
    def is_dead(self) -> bool:  # type: ignore[override]
        """Whether the worker died with the last candidate."""
        return self._gpu.is_dead

    def wait(self) -> None:
        """Wait until the worker has laid out the problem."""
        self._gpu.wait()

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Send the candidate to the worker, which runs it when it has finished those before."""
        self._submitted.append(candidate)
        self._gpu.submit(Entry(candidate, limit_us=best_us))

    def result(self) -> Finished:
        """Wait for the worker; a crash or a hang is an outcome."""
        reading = self._gpu.result()
        return Finished(self._submitted.popleft(), reading, self.uuid)

    def withdraw(self) -> None:
        """Forget the candidates without a result; a worker that runs one is ended."""
        self._submitted.clear()
        self._gpu.withdraw()

    def race(self, job: Race, expected_s: float) -> list[Reading] | None:
        """Race entries; None if the worker died."""
        try:
            return self._gpu.race(job, expected_s=expected_s)
        except WorkerError:
            return None

    def check(self, job: Check) -> Reading:
        """Verify the candidate repeatedly; a crash or a hang is an outcome."""
        return self._gpu.check(job)[0]

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run each candidate in processes of its own, if the sanitizer is enabled."""
        return [[] for _ in candidates] if self._sanitizer is None else self._sanitizer.check_all(candidates)

    def close(self) -> None:
        """End the worker, or return it to the worker pool."""
        self._gpu.close()
        if self._expected is not None:
            self._expected.close()


def choose_backend(
    kernel: Kernel,
    problem: Problem,
    settings: Settings,
    options: TuneOptions,
    worker_pool: WorkerPool | None = None,
    *,
    lane: Lane | None = None,
) -> Backend:
    """Return the GPU if there is one and no replay was requested, and a recording otherwise.

    Parameters
    ----------
    kernel, problem
        Kernel and problem to run.
    settings, options
        Settings of the installation and options of the session.
    worker_pool
        Source of worker processes, see `autotile.workers.gpu.Gpu`.
    lane
        GPUs of a cluster to use; None for those that the options name.

    Raises
    ------
    InputError
        There is neither a GPU nor a recording; the requested recording belongs to another problem, kernel version or L2
        mode, or lacks an objective; or a sanitizer was requested in replay.
    ToolchainError
        The requested sanitizer is not installed.
    """
    if options.scheduler:
        from autotile.tuning.cluster.gpus import cluster_backend

        return cluster_backend(kernel, problem, settings, options, lane)
    if options.replay is None and has_driver():
        live = _start_gpus(kernel, problem, settings, options, worker_pool)
        if live is not None:
            return live
    if options.sanitize:
        raise InputError("--sanitize runs the finalists on a GPU, and launches are replayed here; leave it out")
    from autotile.tuning.replay import ReplayBackend, SimulatedGpu, open_recording, replay_notice

    try:
        recording = open_recording(kernel, problem, options, settings.recording_folders)
    except InputError:
        check_without_gpu(kernel, problem, settings, options)
        raise
    notice = replay_notice(recording, options)
    if len(options.devices) < 2:
        return ReplayBackend(recording, notice)
    from autotile.tuning.gpu_group import GpuGroup

    simulated = [SimulatedGpu(recording, notice, uuid=f"simulated-{index}") for index in options.devices]
    return GpuGroup(simulated, options.run_deadline_s)


def _start_gpus(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, worker_pool: WorkerPool | None
) -> Backend | None:
    """Start the workers of the GPUs of a session; None if the machine has no CUDA device."""
    if len(options.devices) < 2:
        return LiveBackend.start(kernel, problem, settings, options, worker_pool)
    from autotile.tuning.gpu_group import GpuGroup

    with ExitStack() as opened:
        backends: list[Backend] = []
        for index in options.devices:
            one = LiveBackend.start(kernel, problem, settings, replace(options, device_index=index), worker_pool)
            if one is None:
                return None
            opened.callback(one.close)
            backends.append(one)
        opened.pop_all()
    return GpuGroup(backends, options.run_deadline_s)


def check_without_gpu(kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions) -> None:
    """Raise if the kernel or the problem is at fault.

    A missing GPU is reported only after this check: otherwise that message would hide an error of the user's input.

    Raises
    ------
    InputError
        The problem does not fit in a large GPU's memory, no configuration is valid for it, or the default
        configuration does not compile.
    """
    device = device_profile(_PROFILE)
    check_memory(kernel.spec, problem, device)
    feasible_space(kernel.spec, problem.sizes, device, problem.dtype)
    job = compile_job(kernel, kernel.spec.default, problem.dtype, device.architecture, problem.sizes)
    try:
        compiled = compile_in_worker(job, settings, options.compile_deadline_s)
    except (ToolchainError, WorkerError):
        return
    if compiled.cubin is None:
        raise InputError(f"{kernel.spec.source}: the default configuration does not compile: {compiled.reason}")
    check_signatures(kernel, problem.dtype, compiled.cubin)


def workload_of(kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions) -> Workload:
    """Return the problem as the GPU worker sets it up, without the folder of `expected_folder`."""
    if kernel.spec.reference.comparison is not None and kernel.inspection is None:
        raise InputError(
            f"{kernel.spec.source}: [reference] comparison {kernel.spec.reference.comparison!r} is a Python function; "
            "tune the kernel from Python, with autotile.kernel(..., verify=...)"
        )
    return Workload(
        spec_text=kernel.spec.text,
        spec_source=kernel.spec.source,
        spec_folder=kernel.spec.folder,
        captured_call=options.captured or "",
        sizes=problem.sizes,
        dtype=problem.dtype,
        l2=options.l2,
        cache=str(settings.cache),
        cache_limit_bytes=settings.cache_limit_bytes,
        sample_limit_s=options.sample_limit_s,
        device_index=options.device_index,
        verify_sizes=options.verify_sizes,
        energy=ENERGY in options.objectives or measures_energy(kernel.spec, session_objective(kernel.spec, options)),
        reference_source=kernel_source(kernel),
        captured=kernel.inspection.buffers if kernel.inspection is not None else (),
        capture_folder=kernel.inspection.folder if kernel.inspection is not None else "",
    )


def expected_folder(kernel: Kernel, problem: Problem, options: TuneOptions) -> ExpectedFolder | None:
    """Make a folder with the results of a reference in Python for every set of inputs that verification may use.

    Without a reference, the folder takes the outputs on which configurations agree.
    """
    if kernel.reference_function is None and not kernel.spec.reference.is_agreement:
        return None
    from autotile.workers.python_reference import ExpectedFolder, InputSet, shaped_problems

    spec = with_captured_call(kernel.spec, Path(options.captured)) if options.captured else kernel.spec
    if kernel.reference_function is None:
        return ExpectedFolder(spec, problem.dtype)
    inputs = [
        InputSet(sizes, seed, check=check)
        for given, seed, check in (
            (spec.ragged_sizes(problem.sizes), 0, True),
            (problem.sizes, 0, False),
            (problem.sizes, SECOND_SEED, False),
            *((sizes, 0, True) for sizes in options.verify_sizes),
        )
        if not missing_input(spec, given, problem.dtype)
        for sizes in shaped_problems(spec, given)
    ]
    return ExpectedFolder(spec, problem.dtype, kernel.reference_function, inputs)


def kernel_source(kernel: Kernel) -> KernelSource | None:
    """Return the source of a kernel's reference kernel; None if its reference is none."""
    found = reference_source(kernel)
    if found is None:
        return None
    folders, names = tuple(map(str, found.include_folders)), tuple(sorted(found.template_names))
    return KernelSource(found.source, str(found.template_path), found.source_hash, folders, names)
