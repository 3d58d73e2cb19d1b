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
from autotile.workers.protocol import (
    CONTEST_STAGE,
    RACE_STAGE,
    Candidate,
    DriverOccupancy,
    ErrorReply,
    Evaluation,
    LibraryCall,
    Opened,
    Race,
    RaceTimes,
    Workload,
)

GPU_WORKER = "autotile.workers.gpu_worker"
"""Module of the worker process."""
_OPEN_DEADLINE_S = 300.0
"""Covers the context, the inputs and the float64 reference of a large problem."""
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
_T = TypeVar("_T")


class Gpu:
    """Evaluates candidates on one GPU; each death of the worker costs one candidate.

    The constructor starts the worker, which sets up the problem in the background; the first method that needs the
    worker waits for it.

    Parameters
    ----------
    workload
        The problem to set up.
    deadline_s
        Time after which a candidate's worker is killed, in seconds.
    module
        Module that the worker runs.
    worker_pool
        Pool from which a worker is acquired and to which an intact one is released; None to start and end it here.

    Raises
    ------
    ToolchainError
        The worker process cannot be started.
    """

    def __init__(
        self,
        workload: Workload,
        deadline_s: float,
        module: str = GPU_WORKER,
        *,
        worker_pool: WorkerPool | None = None,
    ) -> None:
        self._workload = workload
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

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Send one candidate to the worker, to be loaded, verified and measured after those submitted before.

        Parameters
        ----------
        candidate
            The compiled configuration.
        best_us
            Best time so far in microseconds, against which a clearly slower candidate is pruned; None for no pruning.
        """
        self._queue.append({"op": "evaluate", **candidate.to_json(), "best_us": best_us})
        if self._device is not None and self._child is not None:
            self._send_queue(self._child)

    def result(self) -> Evaluation:
        """Wait for the oldest candidate that was submitted, and return its evaluation; a crash or hang is an outcome.

        Raises
        ------
        WorkerError
            Five consecutive workers died, and a candidate that ran before fails, too: the device is at fault.
        """
        request = self._queue[0]
        evaluation = self._evaluate(request)
        if evaluation.outcome.has_time:
            self._known_good = {**request, "best_us": 0.0}  # dropped after three samples, enough to show that it runs
        if (seconds := evaluation.seconds.get("verify")) is not None:
            self._verification_s = max(seconds, self._verification_s or 0.0)
        return evaluation

    @property
    def is_dead(self) -> bool:
        """Whether the worker died with the last candidate, and was not replaced yet."""
        return self._child is None

    def withdraw(self) -> None:
        """Forget the candidates that were submitted and have no result, after the death of the worker."""
        self._queue.clear()
        self._drop_child()

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Submit one candidate while no other waits, and return its result; parameters and errors as for these."""
        self.submit(candidate, best_us)
        return self.result()

    def draw_second_inputs(self, seed: int) -> None:
        """Draw a second set of inputs and compute its reference, here and in later workers.

        `verify` then alternates between the two sets.

        Parameters
        ----------
        seed
            Seed of the random values, not 0.

        Raises
        ------
        InputError
            The set does not fit in memory, or its reference cannot be computed. There is no second set then.
        ToolchainError
            The worker died.
        """
        self.wait()
        former, self._workload = self._workload, replace(self._workload, verify_seed=seed)
        try:
            if self._child is None:
                self._reopen()
            else:
                self._child.send({"op": "open", "workload": self._workload.to_json()}, _OPEN_DEADLINE_S)
                self._wait_until_open()
        except (InputError, ToolchainError):
            self._workload = former
            raise

    def verify(self, candidate: Candidate, repeats: int, limit_s: float | None = None) -> Evaluation:
        """Load one candidate and verify it repeatedly, to find intermittent errors; nothing is measured.

        75 repeats, of two runs each, find a kernel that is wrong in one run of fifty with 95 % probability. The number
        of repeats that were made is in ``telemetry["repeats"]``. A candidate that hangs is given up after the time of a
        few verifications, long before its deadline.

        Parameters
        ----------
        candidate
            The candidate to verify.
        repeats
            Maximum number of repeats, one at least.
        limit_s
            Time after which they end, in seconds; half of the candidate's deadline at most, which is the default.

        Raises
        ------
        WorkerError
            As for `evaluate`.
        """
        limit_s = min(self._deadline_s / 2, limit_s if limit_s is not None else self._deadline_s)
        request = {"op": "verify", **candidate.to_json(), "repeats": repeats, "limit_s": limit_s}
        evaluation = self._evaluate(request)
        if evaluation.outcome is Outcome.OK:
            self._known_good = {"op": "evaluate", **candidate.to_json(), "best_us": 0.0}
        return evaluation

    @property
    def _repeat_limit_s(self) -> float:
        """Time of one repeat of a verification, in seconds, after which the candidate hangs."""
        if self._verification_s is None:
            return self._deadline_s * _REPEAT_SHARE
        return min(self._deadline_s, max(_MIN_REPEAT_S, _REPEAT_MARGIN * self._verification_s))

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int, *, expected_s: float = 0.0
    ) -> list[RaceTimes]:
        """Time verified candidates in interleaved rounds, and verify the outputs that timed launches wrote.

        Parameters
        ----------
        candidates, rounds, seed
            Candidates, number of rounds, and seed of the order within them.
        expected_s
            Expected time of all launches, in seconds, by which the deadline is extended.

        Raises
        ------
        WorkerError
            The worker died, reported a CUDA error, or its data were overwritten.
        """
        request = {"op": "race", "candidates": [c.to_json() for c in candidates], "rounds": rounds, "seed": seed}
        start_s = min(2 * self._deadline_s, _RACE_START_S)
        return self._request(request, start_s + _RACE_MARGIN * expected_s, _raced)

    def contest(
        self,
        entries: Sequence[tuple[Workload, Candidate]],
        libraries: Sequence[LibraryCall],
        rounds: int,
        seed: int,
        *,
        expected_s: float = 0.0,
    ) -> list[RaceTimes]:
        """Verify candidates of several kernels and libraries, and time those that are correct in interleaved rounds.

        Parameters
        ----------
        entries
            Candidates, each with the workload of its kernel.
        libraries
            Libraries, which run on the buffers of the first kernel.
        rounds, seed, expected_s
            As for `race`.

        Returns
        -------
        list of RaceTimes
            Of the candidates, then of the libraries; one that failed has no times. Where a candidate ends the worker
            or hangs, the others are raced without it.

        Raises
        ------
        WorkerError, InputError
            As for `race`; or a problem does not fit in memory beside the others.
        """
        request = {
            "op": "contest",
            "entries": [{"workload": w.to_json(), "candidate": c.to_json()} for w, c in entries],
            "libraries": [call.to_json() for call in libraries],
            "rounds": rounds,
            "seed": seed,
        }
        race_s = _RACE_START_S + _RACE_MARGIN * expected_s
        limits_s = {f"{CONTEST_STAGE}{number}": self._deadline_s for number in range(len(entries) + len(libraries))}
        try:
            return self._request(
                request, _OPEN_DEADLINE_S + _RACE_MARGIN * expected_s, _raced, {**limits_s, RACE_STAGE: race_s}
            )
        except WorkerError as error:
            number = int(error.stage.removeprefix(CONTEST_STAGE)) if error.stage in limits_s else len(entries)
            if number >= len(entries) or len(entries) == 1 or getattr(error, "killed", False):
                raise
            outcome = Outcome.TIMED_OUT if isinstance(error, WorkerTimeoutError) else Outcome.CRASHED
            reason = f"{error} in the last race"
        others = [*entries[:number], *entries[number + 1 :]]
        raced = self.contest(others, libraries, rounds, seed, expected_s=expected_s)
        return [*raced[:number], RaceTimes((), outcome, reason), *raced[number:]]

    def driver_blocks_per_sm(self, candidate: Candidate) -> int:
        """Return the occupancy that the driver computes for a candidate, in blocks per SM."""
        request = {"op": "occupancy", **candidate.to_json()}
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

    def _evaluate(self, request: Mapping[str, Any]) -> Evaluation:
        """Evaluate or verify one candidate, and count the consecutive deaths of workers."""
        self._raise_if_dying()
        evaluation = self._run(request)
        died = self._child is None and evaluation.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        self._consecutive_deaths = self._consecutive_deaths + 1 if died else 0
        self._last_reason = evaluation.reason
        return evaluation

    def _run(self, request: Mapping[str, Any]) -> Evaluation:
        """Run one candidate; the worker's death is an outcome, unless another process has killed it."""
        try:
            for left in reversed(range(_MAX_KILLED_RUNS)):
                limits_s = {"verify": self._repeat_limit_s} if request["op"] == "verify" else None
                try:
                    evaluation = self._request(request, self._deadline_s, _evaluation, limits_s)
                    if evaluation is None:  # the worker's data were overwritten, by this candidate or an earlier one
                        evaluation = self._request(request, self._deadline_s, _certain_evaluation, limits_s)
                    return evaluation
                except WorkerCrashError as error:
                    if not (error.killed and left) or self._is_closed:
                        raise
            raise AssertionError
        except WorkerTimeoutError as error:
            return Evaluation(Outcome.TIMED_OUT, f"{error} while in stage {error.stage or 'start'}", error.stage)
        except WorkerError as error:
            return Evaluation(Outcome.CRASHED, f"{error} in stage {error.stage or 'start'}", error.stage)

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
            if last and reply.get("outcome") == Outcome.CRASHED:  # an assertion in a kernel is printed, not returned
                reply["reason"] = ": ".join(filter(None, [reply.get("reason"), child.last_line()]))
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
        place = str(self._workload.device_index)
        idle = self._worker_pool.acquire_idle(self._module, place) if reuse and self._worker_pool is not None else None
        self._is_reused = idle is not None
        try:
            child = idle or Child(self._module, place)
        except WorkerError as error:
            raise _cannot_start(error) from None
        child.send({"op": "open", "workload": self._workload.to_json()}, _OPEN_DEADLINE_S)
        return child

    def _wait_until_open(self) -> DeviceProperties:
        """Wait for the worker to set up the problem; drop it if it fails."""
        for left in reversed(range(_MAX_KILLED_OPENS)):
            if self._child is None:
                self._child = self._start()
            try:
                reply = self._child.receive(_OPEN_DEADLINE_S)
                return parsed_reply(reply, lambda reply: convert(reply, Opened).device)
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


def _evaluation(reply: Mapping[str, Any]) -> Evaluation | None:
    """Parse an evaluation; None if the candidate is to be evaluated again in a new worker."""
    return None if reply.get("again") else _certain_evaluation(reply)


def _certain_evaluation(reply: Mapping[str, Any]) -> Evaluation:
    return convert(reply, Evaluation)


def _raced(reply: Mapping[str, Any]) -> list[RaceTimes]:
    return convert(reply, Race).raced
