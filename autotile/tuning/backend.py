"""The GPU of a session: one of this machine, several of them, those of a cluster, or a recording of one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import ENERGY, ERROR, GPU_SCALE, STEP_TIME, Measurement, Outcome, Problem
from autotile.core.statistics import DISCARD_RATIO, discard_reason
from autotile.cuda.compiler import check_signatures, compile_job
from autotile.cuda.driver import device_count, device_uuid, has_driver, live_device
from autotile.database.keys import space_hash
from autotile.errors import InputError, RecordingError, ToolchainError, WorkerError
from autotile.exchange.recording import Recording, find_recording, list_recordings, read_recording
from autotile.kernel.inputs import missing_input, with_captured_call
from autotile.kernel.library import Kernel, reference_source
from autotile.kernel.problem import check_memory
from autotile.settings import Settings, user_path
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.start import measures_energy, session_objective
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Backend, Gpu, GpuUse
from autotile.workers.jobs import SECOND_SEED, Candidate, Check, Entry, Race, Reading, ReferenceSource, Workload

if TYPE_CHECKING:
    from autotile.tuning.schedule import Lane
    from autotile.workers.python_reference import ExpectedFolder

_PROFILE = "h200"
"""Device profile for the checks without a GPU; the built-in recordings are of this GPU."""
_SANITIZER_S = 120.0
"""Timeout of one check under compute-sanitizer. A check of a few thousand elements a side takes seconds."""


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


class ReplayBackend(Backend):
    """A recording of a GPU: results are looked up, and nothing runs.

    ``uuid`` is the name of the GPU among several that are simulated. A recording that does not state the properties of
    its GPU is a `RecordingError`.
    """

    source: Literal["cuda", "replayed"] = "replayed"

    def __init__(self, recording: Recording, notice: str = "", *, uuid: str = "") -> None:
        self.device = replace(_recorded_device(recording), source="replayed")
        self.notice = notice
        self.uuid = uuid
        self._recording = recording
        self._finished: deque[tuple[Candidate, Reading]] = deque()

    @property
    def has_result(self) -> bool:  # type: ignore[override]
        """Whether a candidate was submitted that has no result: it is looked up at once."""
        return bool(self._finished)

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return a mask over the rows that were recorded."""
        mask = np.zeros(len(space), dtype=np.bool_)
        rows = (space.row_of(self._recording.config(number)) for number in range(len(self._recording)))
        mask[[row for row in rows if row is not None]] = True
        return mask

    def submit(self, entry: Entry) -> None:
        """Look up the candidate, and prune it by its recorded time as a live measurement would."""
        assert entry.candidate is not None
        self._finished.append((entry.candidate, self._reading(entry)))

    def result(self) -> tuple[Candidate, Reading]:
        """Return the oldest result that was not returned."""
        return self._finished.popleft()

    def withdraw(self) -> None:
        """Forget the results that were not returned."""
        self._finished.clear()

    def race(self, job: Race, expected_s: float) -> list[Reading] | None:
        """Return None: nothing can be timed again."""
        return None

    def check(self, job: Check) -> Reading:
        """Return success: nothing can be run again, and the recorded outcome remains."""
        return Reading(Outcome.OK, stage="replay")

    def close(self) -> None:
        """Forget the results that were not returned; no resource is held."""
        self._finished.clear()

    def _reading(self, entry: Entry) -> Reading:
        assert entry.candidate is not None
        result, limit_us = self._recording.lookup(entry.candidate.config), entry.limit_us
        if result is None:
            reason = "the recording does not hold this configuration"
            return Reading(Outcome.NOT_AVAILABLE, reason, "replay", gpu=self.uuid)
        measured = result.measurement
        if limit_us is not None and measured is not None and measured.time_us > DISCARD_RATIO * limit_us:
            return Reading(Outcome.PRUNED, discard_reason(limit_us), result.stage, measured, gpu=self.uuid)
        return Reading(result.outcome, result.reason, result.stage, measured, gpu=self.uuid)


class SimulatedGpu(ReplayBackend):
    """One of several GPUs that replay a recording, with the time that each candidate takes.

    Parameters
    ----------
    recording, notice, uuid
        As for `ReplayBackend`.
    slowness
        Factor of its times to the recorded ones, 1.03 for a GPU that is 3 % slower.
    seconds
        Time that it takes for a candidate.
    fails_after
        Number of candidates after which every launch fails and no worker can be started; None for never.
    hangs_after
        Number of candidates after which it gives no sign; None for never.
    """

    has_result = False
    """Each candidate takes its time."""

    def __init__(
        self,
        recording: Recording,
        notice: str = "",
        *,
        uuid: str = "",
        slowness: float = 1.0,
        seconds: float = 0.0,
        fails_after: int | None = None,
        hangs_after: int | None = None,
    ) -> None:
        super().__init__(recording, notice, uuid=uuid)
        self._slowness = slowness
        self._seconds = seconds
        self._fails_after = fails_after
        self._hangs_after = hangs_after
        self._done = 0
        self._closed = threading.Event()

    def submit(self, entry: Entry) -> None:
        """Look up the candidate, with the times of this GPU."""
        assert entry.candidate is not None
        limit_us = entry.limit_us / self._slowness if entry.limit_us is not None else None
        reading = scaled(self._reading(replace(entry, limit_us=limit_us)), self._slowness)
        telemetry = {name: value for name, value in reading.telemetry.items() if name != GPU_SCALE}
        reading = replace(reading, telemetry=telemetry, seconds={"measure": self._seconds})
        self._finished.append((entry.candidate, reading))

    def result(self) -> tuple[Candidate, Reading]:
        """Return the oldest result after the time that it takes.

        Raises
        ------
        WorkerError
            The GPU has failed.
        """
        self._done += 1
        if self._hangs_after is not None and self._done > self._hangs_after:
            self._closed.wait()
        if self._seconds:
            self._closed.wait(self._seconds)
        if self._closed.is_set():
            raise WorkerError("the backend is closed")
        if self._fails_after is not None and self._done > self._fails_after:
            raise WorkerError("CUDA_ERROR_NO_DEVICE: the GPU has fallen off the bus")
        return super().result()

    def race(self, job: Race, expected_s: float) -> list[Reading] | None:
        """Return the recorded times of each candidate, as this GPU takes them."""
        times = [self._reading(replace(one, limit_us=None)).measurement for one in job.entries if one.candidate]
        if any(one is None for one in times) or len(times) < len(job.entries):
            return None
        rounds = [(self._slowness * one.time_us,) * job.rounds for one in times if one is not None]
        return [Reading(Outcome.OK, stage="race", rounds_us=one) for one in rounds]

    def close(self) -> None:
        """End what another thread waits for."""
        self._closed.set()


def open_recording(kernel: Kernel, problem: Problem, options: TuneOptions, folders: Sequence[Path]) -> Recording:
    """Read the recording that a session replays: the one that is asked for, or the newest of the problem.

    Raises
    ------
    InputError
        There is none, or it belongs to another problem, kernel version or L2 mode, or lacks an objective.
    """
    if options.replay not in (None, "auto"):
        recording = read_recording(user_path(str(options.replay), "a recording"), kernel=problem.kernel)
    elif (found := find_recording(folders, problem.kernel, problem.sizes, problem.dtype)) is not None:
        recording = read_recording(found.path)
    else:
        headers = [entry.header for entry in list_recordings(folders) if entry.header is not None]
        known = [str(header.problem) for header in headers if header.problem.kernel == problem.kernel]
        recorded = f"recorded are: {'; '.join(known)}" if known else f"nothing is recorded of {problem.kernel}"
        where = "no CUDA device here and no" if options.replay is None else "no"
        raise InputError(f"there is {where} recording of {problem}; {recorded}. See `autotile doctor`")
    key, l2 = recording.header.key, options.l2
    if recording.header.problem != problem:
        raise RecordingError(
            f"the recording is of {recording.header.problem}, expected {problem}; name the sizes that it holds"
        )
    is_imported = not key.template_hash  # files of other tuners do not identify the kernel
    if not is_imported and (key.template_hash, key.space_hash) != (kernel.source_hash, space_hash(kernel.spec)):
        raise RecordingError(
            f"the recording of {problem} was made with another version of the kernel; "
            "its times say nothing of this one: `autotile export --format recording --measure` makes another on a GPU"
        )
    if key.l2_mode != l2:
        raise RecordingError(
            f"the recording of {problem} was measured with a {key.l2_mode} L2 cache, expected {l2}; "
            f"replay it with --l2 {key.l2_mode}, or record it with --l2 {l2}"
        )
    lacking = [name for name in options.objectives if name in (ENERGY, ERROR)]
    if lacking:
        raise RecordingError(
            f"the recording of {problem} holds no {' and no '.join(lacking)} of its configurations, "
            "only times, and the compiler says registers; leave that objective out, or tune on a GPU"
        )
    return recording


def _recorded_device(recording: Recording) -> DeviceProperties:
    if recording.header.device is None:
        raise RecordingError(
            f"the recording names the GPU {recording.header.key.gpu_name!r}, of which nothing is known; "
            "replay needs the device's properties"
        )
    return recording.header.device


def replay_notice(recording: Recording, options: TuneOptions) -> str:
    """Return the line for the user that says what is replayed, and why."""
    reason = "replay was asked for" if options.replay is not None else "there is no CUDA device here"
    name = _recorded_device(recording).name
    notice = f"{reason}: launches are replayed from measurements recorded on {name}"
    if not recording.header.key.template_hash:
        notice += ", imported: of which version of the kernel is not known"
    if options.verify_sizes:
        notice += "; nothing runs at the problems of --verify-problem"
    return notice


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

    ``lane`` are the GPUs of a cluster to use; None for those that the options name.

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
        return _start_gpu(kernel, problem, settings, options, worker_pool)
    from autotile.tuning.gpu_group import GpuGroup

    with ExitStack() as opened:
        backends: list[Backend] = []
        for index in options.devices:
            one = _start_gpu(kernel, problem, settings, replace(options, device_index=index), worker_pool)
            if one is None:
                return None
            opened.callback(one.close)
            backends.append(one)
        opened.pop_all()
    return GpuGroup(backends, options.run_deadline_s)


def _start_gpu(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, worker_pool: WorkerPool | None
) -> Gpu | None:
    """Start a GPU worker, and return without waiting for it; None if the machine has no CUDA device.

    The worker starts before anything is known about the device, as its imports take as long as all that follows here.
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
        gpu = Gpu(workload, options.run_deadline_s, worker_pool=worker_pool, sanitizer=sanitizer, expected=expected)
        opened.callback(gpu.close)
        if not device_count():
            return None
        gpu.device = live_device(options.device_index)
        gpu.uuid = device_uuid(options.device_index)
        opened.pop_all()
    return gpu


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
        reference_source=sent_reference(kernel),
        captured=kernel.inspection.buffers if kernel.inspection is not None else (),
        capture_folder=kernel.inspection.folder if kernel.inspection is not None else "",
    )


def expected_folder(kernel: Kernel, problem: Problem, options: TuneOptions) -> ExpectedFolder | None:
    """Make a folder with the results of a reference in Python for every set of inputs that verification may use.

    Without a reference, the folder takes the outputs on which configurations agree.
    """
    if kernel.reference_function is None and not kernel.spec.reference.is_agreement:
        return None
    from autotile.workers.python_reference import DrawnInputs, ExpectedFolder, shaped_problems

    spec = with_captured_call(kernel.spec, Path(options.captured)) if options.captured else kernel.spec
    if kernel.reference_function is None:
        return ExpectedFolder(spec, problem.dtype)
    inputs = [
        DrawnInputs(sizes, seed, check=check)
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


def sent_reference(kernel: Kernel) -> ReferenceSource | None:
    """Return the source of a kernel's reference kernel, as a worker takes it; None if its reference is none."""
    found = reference_source(kernel)
    if found is None:
        return None
    folders, names = tuple(map(str, found.include_folders)), tuple(sorted(found.template_names))
    return ReferenceSource(found.source, str(found.template_path), found.source_hash, folders, names)
