"""Choose what answers launches: a GPU of this machine, or a recording of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotile.device.properties import device_count, live_device
from autotile.files.library import Kernel
from autotile.ground.errors import InputError, RecordingError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem
from autotile.process.gpu import Gpu
from autotile.process.messages import Workload
from autotile.store.keys import space_hash
from autotile.store.recording import Recording, find_recording, list_recordings, read_recording
from autotile.tuning.evaluator import Evaluator, GpuEvaluator, ReplayEvaluator
from autotile.tuning.options import TuneOptions


@dataclass(frozen=True, slots=True)
class Backend:
    """A device's properties and how to run candidates on it.

    Attributes
    ----------
    open
        Starts what runs candidates; the device is not touched before.
    notice
        One line for the user, where the choice is not the obvious one.
    """

    device: DeviceProperties
    open: Callable[[], Evaluator]
    notice: str = ""


def choose_backend(
    kernel: Kernel, problem: Problem, options: TuneOptions, workload: Workload, folders: Sequence[Path]
) -> Backend:
    """A GPU where there is one and no replay is asked for, else a recording.

    Raises
    ------
    InputError
        There is neither; or the recording that was asked for is of something else.
    """
    if options.replay is None and device_count() > 0:
        device = live_device(options.device_index)
        return Backend(device, lambda: GpuEvaluator(Gpu(workload, options.run_deadline_s)))
    recording = _recording(problem, options, folders)
    _check_recording(recording, kernel, problem)
    device = replace(recording.device, source="replayed")
    reason = "replay was asked for" if options.replay is not None else "there is no CUDA device here"
    notice = f"{reason}: launches are replayed from measurements recorded on {device.name}"
    return Backend(device, lambda: ReplayEvaluator(recording), notice)


def _recording(problem: Problem, options: TuneOptions, folders: Sequence[Path]) -> Recording:
    if options.replay not in (None, "auto"):
        return read_recording(Path(str(options.replay)))
    path = find_recording(folders, problem.kernel, problem.sizes, problem.dtype)
    if path is not None:
        return read_recording(path)
    known = [entry for entry in list_recordings(folders) if entry.kernel == problem.kernel]
    sizes = "; ".join(" ".join(f"{name}={value}" for name, value in entry.sizes.items()) for entry in known)
    recorded = f"recorded are: {sizes}" if known else f"nothing is recorded of {problem.kernel}"
    raise InputError(f"there is no CUDA device here and no recording of {problem}; {recorded}. See `autotile doctor`")


def _check_recording(recording: Recording, kernel: Kernel, problem: Problem) -> None:
    header = recording.header
    if header.kernel != problem.kernel or dict(header.sizes) != dict(problem.sizes) or header.dtype != problem.dtype:
        recorded = Problem(header.kernel, header.sizes, header.dtype)
        raise RecordingError(f"the recording is of {recorded}, expected {problem}; name the sizes that it holds")
    if header.template_hash != kernel.source_hash or header.space_hash != space_hash(kernel.spec):
        raise RecordingError(
            f"the recording of {problem} was made with another version of the kernel; "
            "its times say nothing of this one: measure it anew with `autotile record` on a GPU"
        )
