"""Where launches are answered: by a GPU of this machine, or by a recording of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import L2Mode, Outcome, Problem
from autotile.core.objectives import ENERGY, ERROR
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.cuda.driver import device_count, has_driver, live_device
from autotile.cuda.timing import DISCARD_RATIO, discard_reason
from autotile.database.keys import space_hash
from autotile.errors import CompileError, InputError, RecordingError, ToolchainError, WorkerError
from autotile.exchange.recording import Recording, find_recording, list_recordings, read_recording
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.options import TuneOptions
from autotile.workers.child import Shelf
from autotile.workers.gpu import Gpu
from autotile.workers.protocol import Candidate, Evaluation, Workload
from autotile.workers.sanitizer import Finding, Sanitizer, find_sanitizer

_STAND_IN = "h200"
"""The GPU that the built-in recordings are of."""


def check_unmeasured(kernel: Kernel, problem: Problem) -> None:
    """Tell a fault of the kernel or the problem before the lack of a GPU is told: that would hide it.

    Raises
    ------
    InputError
        The problem does not fit in a large GPU's memory, no configuration is valid for it, or the default
        configuration does not compile.
    """
    device = device_profile(_STAND_IN)
    check_memory(kernel.spec, problem, device)
    feasible_space(kernel.spec, problem.sizes, device, problem.dtype)
    try:
        compile_cubin(compile_job(kernel, kernel.spec.default, problem.dtype, device.architecture, problem.sizes))
    except CompileError as error:
        raise InputError(f"{kernel.spec.source}: the default configuration does not compile: {error}") from None
    except ToolchainError:
        return


class Evaluator(Protocol):
    """Runs candidates, one at a time."""

    source: Literal["cuda", "replayed"]

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Load, verify and measure one candidate."""

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Interleaved times in microseconds, one row a candidate; None where nothing can be run again."""

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Verify one candidate again and again; ok where nothing can be run again."""

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """What compute-sanitizer's tools say, one row a candidate; empty rows where it was not asked for."""

    def close(self) -> None:
        """Release what is held."""


class GpuEvaluator:
    """A live GPU behind a worker process.

    Parameters
    ----------
    gpu
        Where candidates run.
    sanitizer
        What finalists are run under; None for nothing.
    """

    source: Literal["cuda", "replayed"] = "cuda"

    def __init__(self, gpu: Gpu, sanitizer: Sanitizer | None = None) -> None:
        self._gpu = gpu
        self._sanitizer = sanitizer

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Run the candidate; a crash or hang is an outcome."""
        return self._gpu.evaluate(candidate, best_us)

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Time the candidates in turn; None where the worker died of it."""
        try:
            return self._gpu.race(candidates, rounds, seed)
        except WorkerError:
            return None  # the search's own measurements stand

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Run the candidate ``repeats`` times; a crash or hang is an outcome."""
        return self._gpu.verify(candidate, repeats)

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run the candidates in processes of their own."""
        return [[] for _ in candidates] if self._sanitizer is None else self._sanitizer.check_all(candidates)

    def close(self) -> None:
        """End the worker."""
        self._gpu.close()


class ReplayEvaluator:
    """A recording of a GPU: launches are looked up, never invented."""

    source: Literal["cuda", "replayed"] = "replayed"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Look the candidate up."""
        result = self._recording.lookup(candidate.config)
        if result is None:
            return Evaluation(Outcome.NOT_AVAILABLE, "the recording does not hold this configuration", "replay")
        measured = result.measurement
        if best_us is not None and measured is not None and measured.time_us > DISCARD_RATIO * best_us:
            return Evaluation(Outcome.PRUNED, discard_reason(best_us), result.stage, measured)
        return Evaluation(result.outcome, result.reason, result.stage, measured)

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Nothing can be timed again."""
        return None

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Nothing can be run again."""
        return Evaluation(Outcome.OK, stage="replay")

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Nothing can be run again."""
        return [[] for _ in candidates]

    def close(self) -> None:
        """Nothing is held."""


_SANITIZER_S = 120.0
"""A check takes seconds at a few thousand a side; a slower one is given up and told."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device's properties and how to run candidates on it.

    Attributes
    ----------
    open
        Gives what runs candidates, as soon as it is ready; errors as for `Gpu.wait`.
    available
        Rows of a space that can be run; None for all.
    notice
        One line for the user, where the choice is not the obvious one.
    close
        Ends what was started, whether it was opened or not.
    """

    device: DeviceProperties
    open: Callable[[], Evaluator]
    available: Callable[[SearchSpace], NDArray[np.bool_] | None]
    notice: str = ""
    close: Callable[[], None] = lambda: None


def choose_backend(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, shelf: Shelf | None = None
) -> Backend:
    """A GPU where there is one and no replay is asked for, else a recording; ``shelf`` as for `Gpu`.

    Raises
    ------
    InputError
        There is neither; the recording that was asked for is of something else, or holds nothing of an objective; or a
        sanitizer is asked for in replay.
    ToolchainError
        The sanitizer that is asked for is not installed.
    """
    if options.replay is None and has_driver():
        live = _live_backend(kernel, problem, settings, options, shelf)
        if live is not None:
            return live
    if options.sanitize:
        raise InputError("--sanitize runs the finalists on a GPU, and launches are replayed here; leave it out")
    try:
        recording = _recording(problem, options, settings.recording_folders)
        _check_recording(recording, kernel, problem, options.l2)
        _check_recorded(recording, options.objectives)
    except InputError:
        check_unmeasured(kernel, problem)
        raise
    device = replace(_recorded_device(recording), source="replayed")
    reason = "replay was asked for" if options.replay is not None else "there is no CUDA device here"
    notice = f"{reason}: launches are replayed from measurements recorded on {device.name}"
    if not recording.header.key.template_hash:
        notice += ", imported: of which version of the kernel is not known"
    if options.verify_sizes:
        notice += "; nothing runs at the problems of --verify-problem"
    return Backend(device, lambda: ReplayEvaluator(recording), lambda space: _recorded_rows(recording, space), notice)


def _live_backend(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, shelf: Shelf | None
) -> Backend | None:
    """The GPU, its worker getting ready from now on; None where there is no device.

    The worker is started before anything is known of the device: what it imports takes as long as what is done here.
    """
    workload = _workload(kernel, problem, settings, options)
    sanitizer = Sanitizer(workload, find_sanitizer(settings.sanitizer), _SANITIZER_S) if options.sanitize else None
    gpu = Gpu(workload, options.run_deadline_s, shelf=shelf)

    def open_gpu() -> Evaluator:
        gpu.wait()
        return GpuEvaluator(gpu, sanitizer)

    try:
        device = live_device(options.device_index) if device_count() else None
    except BaseException:
        gpu.close()
        raise
    if device is None:
        gpu.close()
        return None
    return Backend(device, open_gpu, lambda _: None, close=gpu.close)


def _workload(kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions) -> Workload:
    return Workload(
        spec_text=kernel.spec.text,
        spec_source=kernel.spec.source,
        sizes=problem.sizes,
        dtype=problem.dtype,
        l2=options.l2,
        cache=str(settings.cache),
        cache_limit_bytes=settings.cache_limit_bytes,
        sample_limit_s=options.sample_limit_s,
        device_index=options.device_index,
        verify_sizes=options.verify_sizes,
        energy=ENERGY in options.objectives,
    )


def _recorded_rows(recording: Recording, space: SearchSpace) -> NDArray[np.bool_]:
    rows = (space.row_of(recording.config(number)) for number in range(len(recording)))
    mask = np.zeros(len(space), dtype=np.bool_)
    mask[[row for row in rows if row is not None]] = True
    return mask


def _recording(problem: Problem, options: TuneOptions, folders: Sequence[Path]) -> Recording:
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


def _recorded_device(recording: Recording) -> DeviceProperties:
    if recording.header.device is None:
        raise RecordingError(
            f"the recording names the GPU {recording.header.key.gpu_name!r}, of which nothing is known; "
            "replay needs the device's properties"
        )
    return recording.header.device


def _check_recorded(recording: Recording, objectives: Sequence[str]) -> None:
    lacking = [name for name in objectives if name in (ENERGY, ERROR)]
    if lacking:
        raise RecordingError(
            f"the recording of {recording.header.problem} holds no {' and no '.join(lacking)} of its configurations, "
            "only times, and the compiler says registers; leave that objective out, or tune on a GPU"
        )


def _check_recording(recording: Recording, kernel: Kernel, problem: Problem, l2: L2Mode) -> None:
    key = recording.header.key
    if recording.header.problem != problem:
        raise RecordingError(
            f"the recording is of {recording.header.problem}, expected {problem}; name the sizes that it holds"
        )
    imported = not key.template_hash  # another tuner's files do not say which kernel they measured
    if not imported and (key.template_hash, key.space_hash) != (kernel.source_hash, space_hash(kernel.spec)):
        raise RecordingError(
            f"the recording of {problem} was made with another version of the kernel; "
            "its times say nothing of this one: measure it anew with `autotile record` on a GPU"
        )
    if key.l2_mode != l2:
        raise RecordingError(
            f"the recording of {problem} was measured with a {key.l2_mode} L2 cache, expected {l2}; "
            f"replay it with --l2 {key.l2_mode}, or record it with --l2 {l2}"
        )
