"""The tuner's handle of the GPU: a worker process, replaced after each candidate that breaks it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.documents import convert
from autotile.core.model import Outcome
from autotile.errors import DataError, InputError, ToolchainError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.workers.child import Child, WorkerPool
from autotile.workers.jobs import (
    CHECK_STAGE,
    RACE_STAGE,
    Candidate,
    Check,
    Entry,
    Race,
    Reading,
    Readings,
    Time,
    Workload,
    job_message,
)
from autotile.workers.protocol import DriverOccupancy, ErrorReply

GPU_WORKER = "autotile.workers.gpu_worker"
"""Module of the worker process."""
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
_T = TypeVar("_T")


class Gpu:
    """Runs jobs on one GPU; each death of the worker costs one entry.

    The constructor starts the worker, which sets up the problem in the background; the first method that needs the
    worker waits for it.

    Parameters
    ----------
    workload
        The problem to set up, of which entries without a workload are; None if every entry has one.
    deadline_s
        Time after which a candidate's worker is killed, in seconds.
    module
        Module that the worker runs.
    worker_pool
        Pool from which a worker is acquired and to which an intact one is released; None to start and end it here.
    device_index
        Index of the device where there is no workload.

    Raises
    ------
    ToolchainError
        The worker process cannot be started.
    """

    def __init__(
        self,
        workload: Workload | None,
        deadline_s: float,
        module: str = GPU_WORKER,
        *,
        worker_pool: WorkerPool | None = None,
        device_index: int = 0,
    ) -> None:
        self._workload = workload
        self._device_index = device_index if workload is None else workload.device_index
        self._deadline_s = deadline_s
        self._module = module
        self._worker_pool = worker_pool
        self._is_closed = False
        self._consecutive_deaths = 0
        self._last_reason = ""
        self._queue: deque[Mapping[str, Any]] = deque()
        """Requests that were submitted and have no result, oldest first."""
        self._sent = 0
        """Number of these that the present worker was sent."""
        self._known_good: dict[str, Any] | None = None
        """Request of the newest candidate that ran to its end."""
        self._verification_s: float | None = None
        """Longest time of a verification that ended, in seconds."""
        self._device: DeviceProperties | None = None
        self._child: Child | None = self._start()

    def wait(self) -> DeviceProperties:
        """Wait until the worker has set up the problem, and return the properties of its device.

        Raises
        ------
        InputError
            The problem cannot be set up: it does not fit in memory, or its reference cannot be computed.
        ToolchainError
            The device or the toolchain does not work.
        """
        if self._device is None:
            try:
                self._device = self._wait_until_open()
            except (InputError, ToolchainError):
                if not self._is_reused:
                    raise
                self._child = self._start(reuse=False)  # the state left by an earlier session may be the cause
                self._device = self._wait_until_open()
        return self._device

    def submit(self, entry: Entry) -> None:
        """Send one entry to the worker, to be verified and measured after those submitted before."""
        self._queue.append(job_message(Time((entry,))))
        if self._device is not None and self._child is not None:
            self._send_queue(self._child)

    def result(self) -> Reading:
        """Wait for the oldest entry that was submitted, and return its reading; a crash or hang is an outcome.

        Raises
        ------
        WorkerError
            Five consecutive workers died, and a candidate that ran before fails, too: the device is at fault.
        """
        request = self._queue[0]
        reading = self._read(request)
        if reading.outcome.has_time:
            # dropped after three samples, enough to show that it runs
            self._known_good = {**request, "entries": [{**request["entries"][0], "limit_us": 0.0}]}
        if (seconds := reading.seconds.get("verify")) is not None:
            self._verification_s = max(seconds, self._verification_s or 0.0)
        return reading

    @property
    def is_dead(self) -> bool:
        """Whether the worker died with the last candidate, and was not replaced yet."""
        return self._child is None

    def withdraw(self) -> None:
        """Forget the entries that were submitted and have no result, after the death of the worker."""
        self._queue.clear()
        self._drop_child()

    def time(self, job: Time) -> list[Reading]:
        """Verify and measure entries; a crash or hang is the outcome of the entry that caused it.

        Raises
        ------
        InputError, ToolchainError
            A problem cannot be laid out.
        WorkerError
            As for `result`.
        """
        readings: list[Reading] = []
        while len(readings) < len(job.entries):
            readings += self._part(replace(job, entries=_limited(job, readings)))
        return readings

    def check(self, job: Check) -> list[Reading]:
        """Verify entries repeatedly; a crash or hang is the outcome of the entry that caused it.

        One that hangs is given up after the time of a few verifications, long before its deadline.

        Raises
        ------
        InputError
            A second set of inputs does not fit in memory, or its reference cannot be computed.
        WorkerError
            As for `result`.
        """
        limit_s = min(self._deadline_s / 2, job.limit_s if job.limit_s is not None else self._deadline_s)
        readings = []
        for one in job.entries:
            readings.append(self._read(job_message(replace(job, entries=(one,), limit_s=limit_s))))
            if readings[-1].outcome is Outcome.OK:
                self._known_good = job_message(Time((replace(one, limit_us=0.0),)))
        return readings

    @property
    def _repeat_limit_s(self) -> float:
        """Time of one repeat of a verification, in seconds, after which the candidate hangs."""
        if self._verification_s is None:
            return self._deadline_s * _REPEAT_SHARE
        return min(self._deadline_s, max(_MIN_REPEAT_S, _REPEAT_MARGIN * self._verification_s))

    def race(self, job: Race, *, expected_s: float = 0.0) -> list[Reading]:
        """Race entries of any problems.

        Where one ends the worker or hangs in its verification before the race, the others are raced without it.

        Parameters
        ----------
        expected_s
            Expected time of all launches, in seconds, by which the deadline is extended.

        Raises
        ------
        WorkerError
            The worker died, reported a CUDA error, or its data were overwritten.
        InputError, ToolchainError
            A problem does not fit in memory beside the others, or a reference cannot be computed.
        """
        race_s = min(2 * self._deadline_s, _RACE_START_S) + _RACE_MARGIN * expected_s
        lays_out = any(one.workload is not None for one in job.entries)
        checks_s = {f"{CHECK_STAGE}{number}": self._deadline_s for number in range(len(job.entries))}
        limits_s = {**checks_s, RACE_STAGE: race_s}
        deadline_s = _OPEN_DEADLINE_S + race_s if lays_out else race_s
        try:
            return self._request(job_message(job), deadline_s, _readings, limits_s)
        except WorkerError as error:
            number = int(error.stage.removeprefix(CHECK_STAGE)) if error.stage in checks_s else -1
            others = (*job.entries[:number], *job.entries[number + 1 :])
            if number < 0 or getattr(error, "killed", False) or not any(one.candidate is not None for one in others):
                raise
            outcome = Outcome.TIMED_OUT if isinstance(error, WorkerTimeoutError) else Outcome.CRASHED
            fault = Reading(outcome, f"{error} in the last race", RACE_STAGE)
        raced = self.race(replace(job, entries=others), expected_s=expected_s)
        return [*raced[:number], fault, *raced[number:]]

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """Return the occupancy that the driver computes for a candidate, in blocks per SM."""
        request = {"op": "occupancy", "candidate": candidate.to_json()}
        return self._request(request, self._deadline_s, lambda reply: convert(reply, DriverOccupancy).blocks_per_sm)

    def close(self) -> None:
        """Release the worker to the pool, or end it; a call that waits for it in another thread raises an error."""
        self._is_closed = True
        child, self._child = self._child, None
        if child is None:
            return
        if child.is_busy:
            child.kill()
        elif self._worker_pool is not None:
            self._worker_pool.release(child)
        else:
            child.close()

    def _part(self, job: Time) -> list[Reading]:
        """Return the readings of the first entries, one at least."""
        if len(job.entries) == 1 and not job.grid:
            return [self._read(job_message(job))]
        self._raise_if_dying()
        deadline_s = _GRID_DEADLINE_S + _ENTRY_DEADLINE_S * len(job.entries) if job.grid else self._deadline_s
        for _ in range(_MAX_UNCERTAIN):
            try:
                reply = self._request(job_message(job), deadline_s, lambda reply: convert(reply, Readings))
            except WorkerError as error:
                if not error.stage:  # no entry was begun
                    raise
                number = int(error.stage.partition(" ")[2] or 0)
                before = self._part(replace(job, entries=job.entries[:number])) if number else []
                return [*before, _death(error)] if len(before) == number else before
            found = reply.readings
            if not found:
                continue
            if reply.is_complete or not job.grid or len(found) == 1:
                return found
            # the fastest of those before the one that broke the worker was not verified repeatedly
            before = self._part(replace(job, entries=job.entries[: len(found) - 1]))
            return [*before, found[-1]] if len(before) == len(found) - 1 else before
        raise WorkerError("the worker's data were overwritten again and again")

    def _read(self, request: Mapping[str, Any]) -> Reading:
        """Return the reading of a request of one entry, and count the consecutive deaths of workers."""
        self._raise_if_dying()
        reading = self._run(request)
        died = self._child is None and reading.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        self._consecutive_deaths = self._consecutive_deaths + 1 if died else 0
        self._last_reason = reading.reason
        return reading

    def _run(self, request: Mapping[str, Any]) -> Reading:
        """Run one entry; the worker's death is an outcome, unless another process has killed it."""
        try:
            for left in reversed(range(_MAX_KILLED_RUNS)):
                limits_s = {"verify": self._repeat_limit_s} if request["op"] == "check" else None
                try:
                    for _ in range(_MAX_UNCERTAIN):
                        if found := self._request(request, self._deadline_s, _readings, limits_s):
                            return found[0]
                    # the worker's data were overwritten, by this candidate or an earlier one
                    raise WorkerError("the worker has no result of a candidate that ran alone")
                except WorkerCrashError as error:
                    if not (error.killed and left) or self._is_closed:
                        raise
            raise AssertionError
        except WorkerError as error:
            return _death(error)

    def _request(
        self,
        message: Mapping[str, Any],
        deadline_s: float,
        read: Callable[[Mapping[str, Any]], _T],
        stage_limits_s: Mapping[str, float] | None = None,
    ) -> _T:
        """Return the worker's parsed reply; a worker that ends with the request is replaced at the next one."""
        self.wait()
        if self._child is None:
            self._reopen()
        child = self._child
        assert child is not None
        try:
            reply = self._reply(child, message, deadline_s, stage_limits_s)
            last = reply.pop("last", False)
            broken = reply["readings"][-1:] if last and isinstance(reply.get("readings"), list) else []
            if broken and isinstance(broken[0], dict) and broken[0].get("outcome") == Outcome.CRASHED:
                # an assertion in a kernel is printed, not returned
                broken[0]["reason"] = ": ".join(filter(None, [broken[0].get("reason"), child.last_line()]))
            parsed = parsed_reply(reply, read)
        except BaseException:
            self._drop_child()
            raise
        if last:
            self._drop_child()
        return parsed

    def _reply(
        self, child: Child, message: Mapping[str, Any], deadline_s: float, stage_limits_s: Mapping[str, float] | None
    ) -> dict[str, Any]:
        """Return the reply to a request: the oldest one that was submitted, or another one while none is sent."""
        if not (self._queue and self._queue[0] is message):
            return child.request(message, deadline_s, stage_limits_s)
        self._send_queue(child)
        self._queue.popleft()
        self._sent -= 1
        return child.receive(deadline_s)

    def _send_queue(self, child: Child) -> None:
        """Send the requests that the worker was not sent; those that it does not handle are sent to the next one."""
        for request in islice(self._queue, self._sent, None):
            child.send(request, self._deadline_s)
            self._sent += 1

    def _start(self, *, reuse: bool = True) -> Child:
        """Start a worker, or reuse an idle one of the same device, and send it the problem."""
        if self._is_closed:
            raise ToolchainError("the GPU worker was closed")
        place = str(self._device_index)
        idle = self._worker_pool.acquire_idle(self._module, place) if reuse and self._worker_pool is not None else None
        self._is_reused = idle is not None
        try:
            child = idle or Child(self._module, place)
        except WorkerError as error:
            raise _cannot_start(error) from None
        workload = self._workload.to_json() if self._workload is not None else None
        child.send({"op": "open", "workload": workload, "device_index": self._device_index}, _OPEN_DEADLINE_S)
        return child

    def _wait_until_open(self) -> DeviceProperties:
        """Wait for the worker to set up the problem; drop it if it fails."""
        for left in reversed(range(_MAX_KILLED_OPENS)):
            if self._child is None:
                self._child = self._start()
            try:
                reply = self._child.receive(_OPEN_DEADLINE_S)
                return parsed_reply(reply, lambda reply: convert(reply.get("device"), DeviceProperties))
            except BaseException as error:  # Ctrl-C, too, must not leave the worker behind
                self._drop_child()
                if isinstance(error, WorkerCrashError) and error.killed and left and not self._is_closed:
                    continue
                if isinstance(error, WorkerError):
                    raise _cannot_start(error) from None
                raise
        raise AssertionError

    def _reopen(self) -> None:
        """Replace a worker that died; as the problem was set up before, a failure is tried again."""
        for left in reversed(range(_MAX_OPEN_ATTEMPTS)):
            try:
                self._wait_until_open()
            except (InputError, ToolchainError):
                if not left or self._is_closed:
                    raise
                time.sleep(_OPEN_RETRY_S)
            else:
                return

    def _drop_child(self) -> None:
        self._sent = 0
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


def parsed_reply(reply: Mapping[str, Any], read: Callable[[Mapping[str, Any]], _T]) -> _T:
    """Parse a reply.

    Raises
    ------
    InputError, ToolchainError
        The worker reports an error that concerns all candidates.
    WorkerError
        The worker reports another error, or the reply is malformed.
    """
    try:
        if "error" not in reply:
            return read(reply)
        failed = convert(reply, ErrorReply)
    except DataError as error:
        raise WorkerError(f"the worker's reply is malformed: {error}") from None
    if failed.kind in ("input", "toolchain"):
        raise {"input": InputError, "toolchain": ToolchainError}[failed.kind](failed.error)
    raise WorkerError(failed.error, failed.stage)


def _readings(reply: Mapping[str, Any]) -> list[Reading]:
    return convert(reply, Readings).readings


def _death(error: WorkerError) -> Reading:
    """Return the reading of an entry with which the worker died."""
    stage = error.stage.partition(" ")[0]
    outcome, what = (
        (Outcome.TIMED_OUT, "while in") if isinstance(error, WorkerTimeoutError) else (Outcome.CRASHED, "in")
    )
    return Reading(outcome, f"{error} {what} stage {stage or 'start'}", stage)


def _limited(job: Time, readings: Sequence[Reading]) -> tuple[Entry, ...]:
    """Return the entries without a reading; in a grid, the first of them is limited by the best so far."""
    left = job.entries[len(readings) :]
    times_us = [one.measurement.time_us for one in readings if one.outcome is Outcome.OK and one.measurement]
    if not job.grid or not times_us:
        return left
    return replace(left[0], limit_us=min(times_us)), *left[1:]
