"""Interface of a session to a GPU, and that of this machine: a worker process, replaced when a candidate breaks it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome
from autotile.errors import InputError, ToolchainError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.workers.child import GPU_WORKER, Child, WorkerPool, parsed_reply, start_child
from autotile.workers.jobs import (
    CHECK_STAGE,
    RACE_STAGE,
    Candidate,
    Check,
    Entry,
    Job,
    Race,
    Reading,
    Readings,
    Time,
    Workload,
    job_message,
)

if TYPE_CHECKING:
    from autotile.workers.compile_pool import CompileFarm
    from autotile.workers.python_reference import ExpectedFolder
    from autotile.workers.sanitizer import Sanitizer


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Work of a GPU in a session."""

    uuid: str
    """Empty if it is not known."""
    trials: int
    busy_s: float
    """Time for which it loaded, verified and measured."""
    scale: float | None = None
    """Factor of its times to those of the GPU that holds the finals; None if it was not measured."""
    lost: str = ""
    """Reason why it was given up; empty if it was not."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with None for no reason."""
        return {**asdict(self), "busy_s": round(self.busy_s, 3), "lost": self.lost or None}


class Backend(ABC):
    """A GPU, several of them, or a recording of one, for the candidates of a session.

    The methods block, and are called by one thread at a time; only `close` may be called by another one meanwhile,
    which ends them. One GPU returns the results in the order of the entries, several as they end.
    """

    device: DeviceProperties
    notice: str = ""
    """One line for the user about the choice of the GPU; empty where it is the expected one."""
    recorded: Sequence[Config] | None = None
    """Configurations that can be run; None for all."""
    sanitizer: Sanitizer | None = None
    """Runs candidates under compute-sanitizer, if that is enabled."""
    farm: CompileFarm | None = None
    """Compilers of other machines that come with the GPU."""
    uuid: str = ""
    """UUID of the GPU that holds races; empty if it is not known."""
    gpu_count: int = 1
    """Number of GPUs that evaluate candidates at the same time."""
    has_result: bool = False
    """Whether `result` is certain not to wait; False where that is not known."""
    uses: tuple[GpuUse, ...] = ()
    """Work of each of several GPUs so far; empty for one."""
    observe_wait: Callable[[str], None] = staticmethod(lambda _: None)
    """Called with what is waited for beside results, and with an empty text when that is over."""

    @property
    def source(self) -> Literal["cuda", "replayed"]:
        """Whether results are measured, or read from a recording."""
        return "replayed" if self.device.source == "replayed" else "cuda"

    def await_reference(self) -> None:  # noqa: B027 - most have none
        """Wait for the results of a reference in Python; an `InputError` is raised if it fails."""

    def wait(self) -> None:  # noqa: B027 - a recording is there
        """Wait until candidates can be run.

        Raise `InputError` if the problem does not fit in memory or its reference cannot be computed, `ToolchainError`
        if the device or the toolchain does not work.
        """

    @abstractmethod
    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        """Submit a candidate, to be loaded, verified and measured after those before; the limit is that of `Entry`."""

    @abstractmethod
    def result(self) -> tuple[Candidate, Reading]:
        """Wait for a candidate that was submitted, and return its reading; a crash or hang is an outcome.

        Raise `WorkerError` if five consecutive workers died, and a candidate that ran before fails, too.
        """

    def withdraw(self) -> None:
        """Forget the candidates that one GPU was given and that have no result; their readings are never returned."""
        raise NotImplementedError

    @abstractmethod
    def run(self, job: Job) -> list[Reading]:
        """Run a job on one GPU, and return the readings of its entries; a crash or hang is an outcome.

        There are none of a race that is not possible, or that broke the worker. Raise `InputError` if a problem or a
        second set of inputs does not fit in memory, or its reference cannot be computed; else as for `result`.
        """

    def spare(self) -> Backend | None:
        """Return a second GPU, to confirm what the first has found; None if there is none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the device; closing twice is harmless."""


_OPEN_DEADLINE_S = 300.0
"""Covers the context, the inputs and the float64 reference of a large problem."""
_ENTRY_DEADLINE_S = 1.0
"""Time for each entry of a grid, besides that for its problem."""
_GRID_DEADLINE_S = 60.0
_RACE_MARGIN = 3.0
"""Time of a race over that of its kernels alone; the flush of the L2 cache before each launch takes the rest."""
_RACE_START_S = 10.0
"""Time of a race besides its launches, at most: modules, graphs, the checks of the outputs. The races of verified
candidates hang if at all, and all of them wait."""
_REPEAT_MARGIN, _MIN_REPEAT_S, _REPEAT_SHARE = 10.0, 2.0, 1 / 3
"""Limit of one repeat of a verification: ten times the longest verification of the session, two seconds at least; where
none is known, a third of a candidate's deadline, in which it was verified and measured."""
_MAX_OPEN_ATTEMPTS = 3
_OPEN_RETRY_S = 1.0
"""A device may refuse a new context for a moment after a kernel was killed."""
_MAX_CONSECUTIVE_DEATHS = 5
_MAX_KILLED_RUNS, _MAX_KILLED_OPENS = 3, 10
"""Attempts at a candidate, and at setting up the problem, where another process kills the worker: neither the candidate
nor the GPU is at fault. Setting up takes most of a worker's first seconds."""
_MAX_UNCERTAIN = 2
"""Requests of an entry that has no reading, as the worker's data were overwritten: alone in a worker, it has one."""


class Gpu(Backend):
    """A GPU of this machine, behind a worker process; each death of the worker costs one entry.

    The constructor starts the worker, which sets up the problem in the background; the first method that needs the
    worker waits for it. The properties of the device may be given; else the worker states them. Raise `ToolchainError`
    if the process cannot be started.

    ``workload`` is the problem of the entries without one; None if every entry has one, at ``device_index``. A worker
    is acquired from ``worker_pool``, and an intact one released to it; None to start and end it here. ``expected`` are
    results of a reference in Python, deleted in `close`.
    """

    def __init__(
        self,
        workload: Workload | None,
        deadline_s: float,
        module: str = GPU_WORKER,
        *,
        worker_pool: WorkerPool | None = None,
        device_index: int = 0,
        uuid: str = "",
        device: DeviceProperties | None = None,
        sanitizer: Sanitizer | None = None,
        expected: ExpectedFolder | None = None,
    ) -> None:
        if device is not None:
            self.device = device
        self.uuid = uuid
        self.sanitizer = sanitizer
        self._workload = workload
        self._device_index = device_index if workload is None else workload.device_index
        self._deadline_s = deadline_s
        self._module = module
        self._worker_pool = worker_pool or WorkerPool()
        self._owns_worker = worker_pool is None
        self._expected = expected
        self._is_open = self._is_closed = self._is_opening = False
        self._opening = threading.Lock()
        self._consecutive_deaths = 0
        self._last_reason = ""
        self._queue: deque[Time] = deque()
        """Jobs of one entry that were submitted and have no result, oldest first."""
        self._known_good: Time | None = None
        """Job of the newest candidate that ran to its end, with a limit of 0: it is dropped after three samples, enough
        to show that it runs."""
        self._verification_s: float | None = None
        """Longest time of a verification that ended."""
        self._child: Child | None = self._start()

    def await_reference(self) -> None:
        """Wait for the results of a reference in Python, and send the worker the problem."""
        with self._opening:  # the thread of one GPU among several may be there first
            if self._expected is not None and self._child is not None and not self._is_opening:
                self._expected.wait(0)
                self._send_problem(self._child)

    def wait(self) -> None:
        """Wait until the worker has set up the problem, from when on the properties of its device are known."""
        if not self._is_open:
            opened = self._wait_until_open()
            self._is_open = True
            self.device = getattr(self, "device", opened)

    @property
    def has_result(self) -> bool:  # type: ignore[override]
        """Whether the worker has replied to the oldest candidate."""
        child = self._child
        return self._is_open and child is not None and bool(child.outstanding) and child.has_reply()

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        """Send one candidate to the worker, to be verified and measured after those submitted before."""
        self._queue.append(Time((Entry(candidate, limit_us=limit_us),)))
        if self._is_open and self._child is not None:
            self._send_queue(self._child)

    def result(self) -> tuple[Candidate, Reading]:
        """Wait for the oldest entry that was submitted, and return its reading."""
        job = self._queue[0]
        candidate = job.entries[0].candidate
        assert candidate is not None
        try:
            return candidate, self._read(job)
        except KeyboardInterrupt:  # a session of the caller's own may go on
            if not self._queue or self._queue[0] is not job:
                self._queue.appendleft(job)
            raise

    def withdraw(self) -> None:
        """Forget the entries without a result; a worker that runs one is ended."""
        self._queue.clear()
        self._drop_child()

    def run(self, job: Job) -> list[Reading]:
        """Run a job; checks and jobs of one entry that are no grid have a single one.

        A check that hangs is given up after a few verifications, long before its deadline.
        """
        if isinstance(job, Race):
            try:
                return self.raced(job)
            except WorkerError:
                return []
        if isinstance(job, Check):
            limit_s = min(self._deadline_s / 2, job.limit_s if job.limit_s is not None else self._deadline_s)
            if job.seed and self._expected is not None:
                self._expected.wait()
            return [self._read(replace(job, limit_s=limit_s))]
        if not job.grid:
            return [self._read(job)]
        readings: list[Reading] = []
        while len(readings) < len(job.entries):
            left = job.entries[len(readings) :]
            times_us = [one.measurement.time_us for one in readings if one.outcome is Outcome.OK and one.measurement]
            if times_us:  # those before limit it, though this worker has not seen them
                left = (replace(left[0], limit_us=min(times_us)), *left[1:])
            readings += self._part(replace(job, entries=left))
        return readings

    def raced(self, job: Race) -> list[Reading]:
        """Race entries of any problems.

        Where one ends the worker or hangs in its verification before the race, the others are raced without it. Raise
        `WorkerError` if the worker died, reported a CUDA error, or its data were overwritten; `InputError` or
        `ToolchainError` if a problem does not fit in memory beside the others, or a reference cannot be computed.
        """
        race_s = min(2 * self._deadline_s, _RACE_START_S) + _RACE_MARGIN * job.expected_s
        checks_s = {f"{CHECK_STAGE}{number}": self._deadline_s for number in range(len(job.entries))}
        deadline_s = _OPEN_DEADLINE_S + race_s if job.workloads else race_s
        try:
            return self._request(job, deadline_s, {**checks_s, RACE_STAGE: race_s}).readings
        except WorkerError as error:
            number = int(error.stage.removeprefix(CHECK_STAGE)) if error.stage in checks_s else -1
            others = (*job.entries[:number], *job.entries[number + 1 :])
            if number < 0 or error.killed or not any(one.candidate is not None for one in others):
                raise
            outcome = Outcome.TIMED_OUT if isinstance(error, WorkerTimeoutError) else Outcome.CRASHED
            fault = Reading(outcome, f"{error} in the last race", RACE_STAGE)
        raced = self.raced(replace(job, entries=others))
        return [*raced[:number], fault, *raced[number:]]

    def close(self) -> None:
        """Release the worker to the pool, or end it; a call that waits for it in another thread raises an error."""
        self._is_closed = True
        child, self._child = self._child, None
        if child is not None and child.outstanding:
            child.kill()
        elif child is not None:
            self._worker_pool.release(child)
        if self._owns_worker:
            self._worker_pool.close()
        if self._expected is not None:
            self._expected.close()

    def _part(self, job: Time) -> list[Reading]:
        """Return the readings of the first entries of a grid, one at least."""
        self._raise_if_dying()
        for _ in range(_MAX_UNCERTAIN):
            try:
                reply = self._request(job, _GRID_DEADLINE_S + _ENTRY_DEADLINE_S * len(job.entries))
            except WorkerError as error:
                if not error.stage:  # no entry was begun
                    raise
                number = int(error.stage.partition(" ")[2] or 0)
                before = self._part(replace(job, entries=job.entries[:number])) if number else []
                return [*before, _death(error)] if len(before) == number else before
            found = reply.readings
            if not found:
                continue
            if not reply.last or len(found) == 1:
                return found
            # the fastest of those before the one that broke the worker was not verified repeatedly
            before = self._part(replace(job, entries=job.entries[: len(found) - 1]))
            return [*before, found[-1]] if len(before) == len(found) - 1 else before
        raise WorkerError("the worker's data were overwritten again and again")

    def _read(self, job: Time | Check) -> Reading:
        """Return the reading of a job of one entry, and count the consecutive deaths of workers."""
        self._raise_if_dying()
        reading = self._run(job)
        died = self._child is None and reading.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        self._consecutive_deaths = self._consecutive_deaths + 1 if died else 0
        self._last_reason = reading.reason
        if reading.outcome.has_time:
            (entry,) = job.entries
            self._known_good = Time((replace(entry, limit_us=0.0),), workloads=job.workloads)
        if isinstance(job, Time) and (seconds := reading.seconds.get("verify")) is not None:
            self._verification_s = max(seconds, self._verification_s or 0.0)
        return replace(reading, gpu=self.uuid, died=died)

    def _run(self, job: Time | Check) -> Reading:
        """Run one entry; the worker's death is an outcome, unless another process has killed it."""
        try:
            for left in reversed(range(_MAX_KILLED_RUNS)):
                repeat_s = self._deadline_s * _REPEAT_SHARE
                if self._verification_s is not None:
                    repeat_s = min(self._deadline_s, max(_MIN_REPEAT_S, _REPEAT_MARGIN * self._verification_s))
                limits_s = {"verify": repeat_s} if isinstance(job, Check) else None
                try:
                    for _ in range(_MAX_UNCERTAIN):
                        if found := self._request(job, self._deadline_s, limits_s).readings:
                            return found[0]
                    # the worker's data were overwritten, by this candidate or an earlier one
                    raise WorkerError("the worker has no result of a candidate that ran alone")
                except WorkerCrashError as error:
                    if not (error.killed and left) or self._is_closed:
                        raise
            raise AssertionError
        except WorkerError as error:
            return _death(error)

    def _request(self, job: Job, deadline_s: float, stage_limits_s: dict[str, float] | None = None) -> Readings:
        """Return the worker's reply; a worker that ends with the job is replaced at the next one."""
        self.wait()
        for left in reversed(range(_MAX_OPEN_ATTEMPTS)):
            if self._child is not None:
                break
            try:
                self._wait_until_open()
            except (InputError, ToolchainError):  # the problem was set up before: it is tried again
                if not left or self._is_closed:
                    raise
                time.sleep(_OPEN_RETRY_S)
        child = self._child
        assert child is not None
        try:
            if self._queue and self._queue[0] is job:
                self._send_queue(child)
                self._queue.popleft()
                reply = child.receive(deadline_s)
            else:
                reply = child.request(job_message(job), deadline_s, stage_limits_s)
            parsed = parsed_reply(reply, Readings)
            if parsed.last and parsed.readings and (broken := parsed.readings[-1]).outcome is Outcome.CRASHED:
                # an assertion in a kernel is printed, not returned; after it come complaints of what CuPy destroys
                reason = ": ".join(filter(None, [broken.reason, child.last_line("Assertion")]))
                parsed.readings[-1] = replace(broken, reason=reason)
        except BaseException:
            self._drop_child()
            raise
        if parsed.last:
            self._drop_child()
        return parsed

    def _send_queue(self, child: Child) -> None:
        """Send the jobs that the worker was not sent; those that it does not handle are sent to the next one."""
        for job in islice(self._queue, len(child.outstanding), None):
            child.send(job_message(job), self._deadline_s)

    def _start(self, *, reuse: bool = True) -> Child:
        """Start a worker, or reuse an idle one of the device, and send it the problem once the reference is known."""
        if self._is_closed:
            raise ToolchainError("the GPU worker was closed")
        place = str(self._device_index)
        idle = self._worker_pool.acquire_idle(self._module, place) if reuse else None
        self._is_reused = idle is not None
        try:
            child = idle or start_child(self._module, place)
        except WorkerError as error:
            raise _cannot_start(error) from None
        self._is_opening = False
        if self._expected is None or self._expected.is_complete:
            self._send_problem(child)
        return child

    def _send_problem(self, child: Child) -> None:
        child.send({"op": "open", "workload": self._workload, "device_index": self._device_index}, _OPEN_DEADLINE_S)
        self._is_opening = True

    def _wait_until_open(self) -> DeviceProperties:
        """Wait for the worker, started anew if there is none, to set up the problem; drop it if it fails."""
        for left in reversed(range(_MAX_KILLED_OPENS)):
            if self._child is None:
                self._child = self._start()
            try:
                self.await_reference()
                return parsed_reply(self._child.receive(_OPEN_DEADLINE_S), DeviceProperties)
            except BaseException as error:  # Ctrl-C, too, must not leave the worker behind
                self._drop_child()
                is_again = left and not self._is_closed
                if isinstance(error, WorkerCrashError) and error.killed and is_again:
                    continue
                if isinstance(error, InputError | ToolchainError | WorkerError) and self._is_reused and is_again:
                    self._child = self._start(reuse=False)  # the state left by an earlier session may be the cause
                    continue
                if isinstance(error, WorkerError):
                    raise _cannot_start(error) from None
                raise
        raise AssertionError

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _raise_if_dying(self) -> None:
        """Raise after too many consecutive deaths, unless a known good candidate shows that the device works."""
        if self._consecutive_deaths < _MAX_CONSECUTIVE_DEATHS:
            return
        if self._known_good is not None and self._run(self._known_good).outcome.has_time:
            self._consecutive_deaths = 0  # the device works: the candidates are at fault
            return
        raise WorkerError(
            f"{self._consecutive_deaths} GPU workers died one after another, the last with: {self._last_reason}. "
            "All measurements are saved. Run `autotile doctor`, and the kernel under compute-sanitizer"
        )


def _cannot_start(error: WorkerError) -> ToolchainError:
    return ToolchainError(f"the GPU worker cannot start: {error}; see `autotile doctor`")


def _death(error: WorkerError) -> Reading:
    stage, is_late = error.stage.partition(" ")[0], isinstance(error, WorkerTimeoutError)
    reason = f"{error} {'while in' if is_late else 'in'} stage {stage or 'start'}"
    return Reading(Outcome.TIMED_OUT if is_late else Outcome.CRASHED, reason, stage)
