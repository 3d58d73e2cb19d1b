"""GPUs that replay a recording: results are looked up, and nothing runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import structs

from autotile.core.forks import cached_property
from autotile.core.model import ENERGY, ERROR, Config, Outcome, Problem
from autotile.core.statistics import DISCARD_RATIO, discard_reason
from autotile.database.keys import version_of
from autotile.errors import InputError, RecordingError, WorkerError
from autotile.exchange.recording import Recording, find_recording, list_recordings, read_recording
from autotile.kernel.library import Kernel
from autotile.settings import user_path
from autotile.tuning.options import TuneOptions
from autotile.workers.gpu import Backend
from autotile.workers.jobs import Candidate, Check, Job, Race, Reading


class ReplayBackend(Backend):
    """A GPU that replays a recording: results are looked up, and nothing runs.

    With the options of a session, its notice says what is replayed, and why. One of several that are simulated has a
    ``uuid``, and takes part in races. It takes some ``seconds`` for each candidate; its ``slowness`` is the factor of
    its times to the recorded ones, 1.03 for a GPU that is 3 % slower. A recording that does not state the properties of
    its GPU is a `RecordingError`.
    """

    def __init__(
        self,
        recording: Recording,
        options: TuneOptions | None = None,
        *,
        uuid: str = "",
        slowness: float = 1.0,
        seconds: float = 0.0,
    ) -> None:
        key, device = recording.header.key, recording.header.device
        if device is None:
            raise RecordingError(
                f"the recording names the GPU {key.gpu_name!r}, of which nothing is known; "
                "replay needs the device's properties"
            )
        self.device = structs.replace(device, source="replayed")
        if options is not None:
            reason = "replay was asked for" if options.replay is not None else "there is no CUDA device here"
            # an imported result may name the device in other words
            self.notice = f"{reason}: launches are replayed from measurements recorded on {device.name}"
            if not key.template_hash:
                self.notice += ", imported: of which version of the kernel is not known"
            if options.verify_sizes:
                self.notice += "; nothing runs at the problems of --verify-problem"
        self.uuid = uuid
        self._recording = recording
        self._slowness = slowness
        self._seconds = seconds
        self._finished: deque[tuple[Candidate, Reading]] = deque()
        self._closed = threading.Event()

    @cached_property
    def recorded(self) -> list[Config]:
        """All configurations of the recording."""
        return [self._recording.config(number) for number in range(len(self._recording))]

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        """Look up the candidate, and prune it by its time as a live measurement would."""
        found = reading = self._reading(candidate, limit_us / self._slowness if limit_us is not None else None)
        if self._slowness != 1.0:  # its own times, which no factor of the telemetry explains
            found = replace(reading.scaled(self._slowness), telemetry=reading.telemetry)
        if self._seconds:
            found = replace(found, seconds={"measure": self._seconds})
        self._finished.append((candidate, found))

    def result(self) -> tuple[Candidate, Reading]:
        """Return the oldest result after the time that it takes; a `WorkerError` if it is closed meanwhile."""
        if self._seconds and self._closed.wait(self._seconds):
            raise WorkerError("the backend is closed")
        return self._finished.popleft()

    def withdraw(self) -> None:
        """Forget the results that were not returned."""
        self._finished.clear()

    def run(self, job: Job) -> list[Reading]:
        """Look up what is to be timed; a check succeeds, as the recorded outcome remains.

        Only one of several GPUs races: with the recorded median and interval of each candidate.
        """
        if isinstance(job, Check):
            return [Reading(Outcome.OK, stage="replay") for _ in job.entries]
        candidates = [one.candidate for one in job.entries if one.candidate is not None]
        if not isinstance(job, Race):
            for candidate, entry in zip(candidates, job.entries, strict=True):
                self.submit(candidate, entry.limit_us)
            return [self.result()[1] for _ in candidates]
        known = [one for one in (self._reading(each).measurement for each in candidates) if one is not None]
        if not self.uuid or len(known) < len(job.entries):
            return []
        rest, readings = (job.rounds - 1) // 2, []
        for number, one in enumerate(known):
            rounds = np.repeat([one.low_us, one.time_us, one.high_us], [rest, job.rounds - 2 * rest, rest])
            own = self._slowness * np.random.default_rng(number).permutation(rounds)  # those of a round are independent
            readings.append(Reading(Outcome.OK, stage="race", rounds_us=tuple(own.tolist())))
        return readings

    def close(self) -> None:
        """End what another thread waits for; no resource is held."""
        self._closed.set()
        self.withdraw()

    def _reading(self, candidate: Candidate, limit_us: float | None = None) -> Reading:
        result = self._recording.lookup(candidate.config)
        if result is None:
            reason = "the recording does not hold this configuration"
            return Reading(Outcome.NOT_AVAILABLE, reason, "replay", gpu=self.uuid)
        measured = result.measurement
        if limit_us is not None and measured is not None and measured.time_us > DISCARD_RATIO * limit_us:
            return Reading(Outcome.PRUNED, discard_reason(limit_us), result.stage, measured, gpu=self.uuid)
        return Reading(result.outcome, result.reason, result.stage, measured, gpu=self.uuid)


def open_recording(kernel: Kernel, problem: Problem, options: TuneOptions, folders: Sequence[Path]) -> Recording:
    """Read the recording that a session replays: the one that is asked for, or the newest of the problem.

    An `InputError` says that there is none, or that it is of another problem, kernel version or L2 mode, or lacks an
    objective.
    """
    if options.replay not in (None, "auto"):
        recording = read_recording(user_path(str(options.replay), "a recording"), kernel=problem.kernel)
    elif (path := find_recording(folders, problem.kernel, problem.sizes, problem.dtype)) is not None:
        recording = read_recording(path)
    else:
        headers = [header for _, header in list_recordings(folders) if not isinstance(header, str)]
        known = [str(header.problem) for header in headers if header.problem.kernel == problem.kernel]
        recorded = f"recorded are: {'; '.join(known)}" if known else f"nothing is recorded of {problem.kernel}"
        where = "no CUDA device here and no" if options.replay is None else "no"
        raise InputError(f"there is {where} recording of {problem}; {recorded}. See `autotile doctor`")
    key, l2 = recording.header.key, options.l2
    if recording.header.problem != problem:
        raise RecordingError(
            f"the recording is of {recording.header.problem}, expected {problem}; name its sizes and its dtype"
        )
    is_imported = not key.template_hash  # files of other tuners do not identify the kernel
    if not is_imported and key.version != version_of(kernel):
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
