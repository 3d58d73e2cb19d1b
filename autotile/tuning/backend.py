"""Execution backends: a GPU of this machine, or a recording of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import L2Mode, Outcome, Problem
from autotile.core.objectives import ENERGY, ERROR
from autotile.cuda.compiler import compile_job
from autotile.cuda.cubin_cache import check_signatures
from autotile.cuda.driver import device_count, has_driver, live_device
from autotile.cuda.timing import DISCARD_RATIO, discard_reason
from autotile.database.keys import space_hash
from autotile.errors import InputError, RecordingError, ToolchainError, WorkerError
from autotile.exchange.recording import Recording, find_recording, list_recordings, read_recording
from autotile.kernel.inputs import missing_input, with_captured_call
from autotile.kernel.library import Kernel, reference_source
from autotile.kernel.problem import check_memory
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.scoring import measures_energy, session_objective
from autotile.workers.child import WorkerPool
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.protocol import Candidate, Evaluation, KernelSource, RaceTimes, Workload
from autotile.workers.python_reference import ExpectedFolder, InputSet, shaped_problems
from autotile.workers.sanitizer import Finding, Sanitizer, find_sanitizer

SECOND_SEED = 1
"""Seed of the second set of inputs, with which finalists are verified."""
_PROFILE = "h200"
"""Device profile for the checks without a GPU; the built-in recordings are of this GPU."""
_SANITIZER_S = 120.0
"""Timeout of one check under compute-sanitizer, in seconds. A check of a few thousand elements a side takes seconds."""


class Backend(Protocol):
    """A device and the execution of candidates on it.

    Attributes
    ----------
    device
        Properties of the device.
    source
        Origin of the results: ``cuda`` if measured on this machine, ``replayed`` if read from a recording.
    notice
        One line for the user about the choice of the backend; empty where it is the expected one.
    """

    device: DeviceProperties
    source: Literal["cuda", "replayed"]
    notice: str

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return a mask over the rows of a space that can be run, shape (rows,); None for all."""

    def wait(self) -> None:
        """Wait until candidates can be run.

        Raises
        ------
        InputError, ToolchainError
            As for `autotile.workers.gpu.Gpu.wait`.
        """

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Submit one candidate, to be loaded, verified and measured after those submitted before.

        Parameters
        ----------
        candidate
            The compiled configuration.
        best_us
            Best time so far in microseconds, against which a clearly slower candidate is pruned; None for no pruning.
        """

    def result(self) -> Evaluation:
        """Wait for the oldest candidate that was submitted, and return its evaluation.

        Raises
        ------
        WorkerError
            As for `autotile.workers.gpu.Gpu.result`.
        """

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int, expected_s: float
    ) -> list[RaceTimes] | None:
        """Return interleaved times and the verdict on timed launches of each candidate; None where no race is possible.

        Parameters
        ----------
        candidates, rounds, seed, expected_s
            As for `autotile.workers.gpu.Gpu.race`.
        """

    def draw_second_inputs(self, seed: int) -> None:
        """Draw a second set of inputs, with which `verify` alternates.

        Raises
        ------
        InputError, ToolchainError
            As for `autotile.workers.gpu.Gpu.draw_second_inputs`.
        """

    def verify(self, candidate: Candidate, repeats: int, limit_s: float | None) -> Evaluation:
        """Verify one candidate repeatedly, without measuring it.

        Parameters
        ----------
        candidate, repeats, limit_s
            As for `autotile.workers.gpu.Gpu.verify`.
        """

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run candidates under compute-sanitizer; return one row of findings for each, empty if it is not enabled."""

    def close(self) -> None:
        """Release the device; closing twice is harmless."""


class LiveBackend:
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

    source: Literal["cuda", "replayed"] = "cuda"
    notice = ""

    def __init__(
        self,
        gpu: Gpu,
        device: DeviceProperties,
        sanitizer: Sanitizer | None = None,
        expected: ExpectedFolder | None = None,
    ) -> None:
        self.device = device
        self._expected = expected
        self._gpu = gpu
        self._sanitizer = sanitizer

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
            tool = find_sanitizer(settings.sanitizer) if options.sanitize else None
            sanitizer = Sanitizer(workload, tool, _SANITIZER_S) if tool is not None else None
            gpu = Gpu(workload, options.run_deadline_s, worker_pool=worker_pool)
            opened.callback(gpu.close)
            device = live_device(options.device_index) if device_count() else None
            if device is None:
                return None
            opened.pop_all()
        return cls(gpu, device, sanitizer, expected)

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return None: every row can be run."""
        return None

    def wait(self) -> None:
        """Wait until the worker has laid out the problem."""
        self._gpu.wait()

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Send the candidate to the worker, which runs it when it has finished those before."""
        self._gpu.submit(candidate, best_us)

    def result(self) -> Evaluation:
        """Wait for the worker; a crash or a hang is an outcome."""
        return self._gpu.result()

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int, expected_s: float
    ) -> list[RaceTimes] | None:
        """Time the candidates interleaved; None if the worker died."""
        try:
            return self._gpu.race(candidates, rounds, seed, expected_s=expected_s)
        except WorkerError:
            return None

    def draw_second_inputs(self, seed: int) -> None:
        """Draw a second set of inputs in the worker."""
        self._gpu.draw_second_inputs(seed)

    def verify(self, candidate: Candidate, repeats: int, limit_s: float | None) -> Evaluation:
        """Run the candidate up to ``repeats`` times; a crash or a hang is an outcome."""
        return self._gpu.verify(candidate, repeats, limit_s)

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run each candidate in processes of its own, if the sanitizer is enabled."""
        return [[] for _ in candidates] if self._sanitizer is None else self._sanitizer.check_all(candidates)

    def close(self) -> None:
        """End the worker, or return it to the worker pool."""
        self._gpu.close()
        if self._expected is not None:
            self._expected.close()


class ReplayBackend:
    """A recording of a GPU: results are looked up, and nothing runs.

    Parameters
    ----------
    recording
        Recorded results.
    notice
        One line for the user.

    Raises
    ------
    RecordingError
        The recording does not state the properties of its GPU.
    """

    source: Literal["cuda", "replayed"] = "replayed"

    def __init__(self, recording: Recording, notice: str = "") -> None:
        self.device = replace(_recorded_device(recording), source="replayed")
        self.notice = notice
        self._recording = recording
        self._evaluations: deque[Evaluation] = deque()

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return a mask over the rows that were recorded."""
        mask = np.zeros(len(space), dtype=np.bool_)
        rows = (space.row_of(self._recording.config(number)) for number in range(len(self._recording)))
        mask[[row for row in rows if row is not None]] = True
        return mask

    def wait(self) -> None:
        """Return at once: the recording is in memory."""

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Look up the candidate, and prune it by its recorded time as a live measurement would."""
        self._evaluations.append(self._evaluation(candidate, best_us))

    def result(self) -> Evaluation:
        """Return the oldest result that was not returned."""
        return self._evaluations.popleft()

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int, expected_s: float
    ) -> list[RaceTimes] | None:
        """Return None: nothing can be timed again."""
        return None

    def draw_second_inputs(self, seed: int) -> None:
        """Do nothing: no inputs are needed."""

    def verify(self, candidate: Candidate, repeats: int, limit_s: float | None) -> Evaluation:
        """Return success: nothing can be run again, and the recorded outcome remains in force."""
        return Evaluation(Outcome.OK, stage="replay")

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Return no findings."""
        return [[] for _ in candidates]

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _evaluation(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        result = self._recording.lookup(candidate.config)
        if result is None:
            return Evaluation(Outcome.NOT_AVAILABLE, "the recording does not hold this configuration", "replay")
        measured = result.measurement
        if best_us is not None and measured is not None and measured.time_us > DISCARD_RATIO * best_us:
            return Evaluation(Outcome.PRUNED, discard_reason(best_us), result.stage, measured)
        return Evaluation(result.outcome, result.reason, result.stage, measured)


def choose_backend(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, worker_pool: WorkerPool | None = None
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

    Raises
    ------
    InputError
        There is neither a GPU nor a recording; the requested recording belongs to another problem, kernel version or L2
        mode, or lacks an objective; or a sanitizer was requested in replay.
    ToolchainError
        The requested sanitizer is not installed.
    """
    if options.replay is None and has_driver():
        live = LiveBackend.start(kernel, problem, settings, options, worker_pool)
        if live is not None:
            return live
    if options.sanitize:
        raise InputError("--sanitize runs the finalists on a GPU, and launches are replayed here; leave it out")
    try:
        recording = _select_recording(problem, options, settings.recording_folders)
        _check_version(recording, kernel, problem, options.l2)
        _check_objectives(recording, options.objectives)
    except InputError:
        check_without_gpu(kernel, problem, settings, options)
        raise
    return ReplayBackend(recording, _replay_notice(recording, options))


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
    spec = with_captured_call(kernel.spec, Path(options.captured)) if options.captured else kernel.spec
    if kernel.reference_function is None:
        return ExpectedFolder(spec, problem.dtype) if spec.reference.is_agreement else None
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


def _select_recording(problem: Problem, options: TuneOptions, folders: Sequence[Path]) -> Recording:
    """Read the requested recording, or the newest one of the problem."""
    if options.replay not in (None, "auto"):
        return read_recording(Path(str(options.replay)), kernel=problem.kernel)
    found = find_recording(folders, problem.kernel, problem.sizes, problem.dtype)
    if found is not None:
        return read_recording(found.path)
    headers = [entry.header for entry in list_recordings(folders) if entry.header is not None]
    known = [str(header.problem) for header in headers if header.problem.kernel == problem.kernel]
    recorded = f"recorded are: {'; '.join(known)}" if known else f"nothing is recorded of {problem.kernel}"
    where = "no CUDA device here and no" if options.replay is None else "no"
    raise InputError(f"there is {where} recording of {problem}; {recorded}. See `autotile doctor`")


def _check_version(recording: Recording, kernel: Kernel, problem: Problem, l2: L2Mode) -> None:
    """Raise if a recording belongs to another problem, another version of the kernel, or another L2 mode."""
    key = recording.header.key
    if recording.header.problem != problem:
        raise RecordingError(
            f"the recording is of {recording.header.problem}, expected {problem}; name the sizes that it holds"
        )
    is_imported = not key.template_hash  # files of other tuners do not identify the kernel
    if not is_imported and (key.template_hash, key.space_hash) != (kernel.source_hash, space_hash(kernel.spec)):
        raise RecordingError(
            f"the recording of {problem} was made with another version of the kernel; "
            "its times say nothing of this one: measure it anew with `autotile record` on a GPU"
        )
    if key.l2_mode != l2:
        raise RecordingError(
            f"the recording of {problem} was measured with a {key.l2_mode} L2 cache, expected {l2}; "
            f"replay it with --l2 {key.l2_mode}, or record it with --l2 {l2}"
        )


def _check_objectives(recording: Recording, objectives: Sequence[str]) -> None:
    """Raise if an objective cannot be read from a recording."""
    lacking = [name for name in objectives if name in (ENERGY, ERROR)]
    if lacking:
        raise RecordingError(
            f"the recording of {recording.header.problem} holds no {' and no '.join(lacking)} of its configurations, "
            "only times, and the compiler says registers; leave that objective out, or tune on a GPU"
        )


def _recorded_device(recording: Recording) -> DeviceProperties:
    if recording.header.device is None:
        raise RecordingError(
            f"the recording names the GPU {recording.header.key.gpu_name!r}, of which nothing is known; "
            "replay needs the device's properties"
        )
    return recording.header.device


def _replay_notice(recording: Recording, options: TuneOptions) -> str:
    reason = "replay was asked for" if options.replay is not None else "there is no CUDA device here"
    name = _recorded_device(recording).name
    notice = f"{reason}: launches are replayed from measurements recorded on {name}"
    if not recording.header.key.template_hash:
        notice += ", imported: of which version of the kernel is not known"
    if options.verify_sizes:
        notice += "; nothing runs at the problems of --verify-problem"
    return notice
