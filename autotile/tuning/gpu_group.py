"""Several GPUs that evaluate the candidates of one session: a backend made of backends, each with a thread of its own.

The parent puts candidates into one queue, from which each GPU takes two while there are as many: it runs one and has
the next at hand. A slow GPU takes fewer, and one that fails gives back what it holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from autotile.core.model import Outcome
from autotile.errors import AutotileError, WorkerError
from autotile.workers.gpu import Backend, GpuUse
from autotile.workers.jobs import Candidate, Job, Reading

if TYPE_CHECKING:
    from autotile.workers.sanitizer import Sanitizer

_DEPTH = 2
"""Candidates that a GPU holds: one runs, the other waits in the pipe of its worker."""
_CALIBRATIONS = 3
"""Measurements of the reference configuration on each GPU, of which the median counts."""
_CHECKS = 3
"""Attempts at the reference after a worker died: another process may have killed it."""
_MIN_STALL_S = 60.0
"""Time beyond a candidate's deadline after which a silent GPU is abandoned: a driver that hangs keeps its process."""
_OPENS_PER_STALL = 3.0
"""Times that the worker of a GPU took to start, added to that: a worker that died is replaced."""
_CHECK_S = 0.5
"""Interval at which the parent looks for such GPUs."""
_CLOSE_S = 10.0
"""Time that the threads have to end."""


@dataclass(eq=False, slots=True)
class _Submitted:
    candidate: Candidate
    limit_us: float | None
    suspects: list[_GroupGpu] = field(default_factory=list)
    """GPUs whose worker died with it, while it is not known which of the two is at fault."""


@dataclass(eq=False, slots=True)
class _GroupGpu:
    backend: Backend
    number: int
    state: Literal["starting", "working", "lost"] = "starting"
    tasks: deque[_Submitted] = field(default_factory=deque)
    """Candidates that its backend was given and that have no result, oldest first."""
    times_us: list[float] = field(default_factory=list)
    """Times of the reference configuration."""
    scale: float | None = None
    sign_at: float = field(default_factory=time.monotonic)
    """Time of its last sign of life."""
    open_s: float = 0.0
    trials: int = 0
    busy_s: float = 0.0
    lost: str = ""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def evaluated(self, candidate: Candidate, limit_us: float | None) -> Reading:
        """Evaluate a candidate while the backend has no other."""
        self.backend.submit(candidate, limit_us)
        _, reading = self.backend.result()
        self.sign_at = time.monotonic()
        return reading


class GpuGroup(Backend):
    """Backend of several GPUs of one model.

    Their times differ by up to some percent. The first configuration that runs on any of them is the *reference*: each
    GPU measures it before its first result is passed on, and its times are multiplied by the ratio of the reference's
    time on the first of them, the *home*, to that on itself. So they are all on the scale of the home, which holds the
    finals.

    If a worker dies with a candidate, the reference is run on the same GPU. If it still runs, the candidate is at
    fault. If not, or if no worker can be started, the GPU is given up, and its candidates go to the others. Before
    anything has run, the candidate is tried on another GPU first.

    The backends, one at least, are of one GPU each, and were not waited for; they are closed with the group. The worker
    of a candidate is killed after ``deadline_s``.
    """

    _passing: tuple[type[WorkerError], ...] = ()
    """Errors of the last GPU after which another one may join in its place."""

    def __init__(self, backends: Sequence[Backend], deadline_s: float) -> None:
        first = backends[0]
        self.device, self.notice, self.recorded = first.device, first.notice, first.recorded
        self._deadline_s = deadline_s
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Notified of results, and of what happens to a GPU."""
        self._queued = threading.Condition(lock)
        """Notified of candidates for GPUs that wait; of a new one, a single GPU: all would contend for it."""
        self._members: list[_GroupGpu] = []
        self._queue: deque[_Submitted] = deque()
        """Candidates that no GPU holds, the next first."""
        self._finished: deque[tuple[Candidate, Reading]] = deque()
        self._waiting = 0
        """Number of GPUs without a candidate."""
        self._reference: Candidate | None = None
        self._home: _GroupGpu | None = None
        self._home_us: float | None = None
        self._closing = False
        self._error: AutotileError | None = None
        """Error of the GPU that was lost last."""
        for backend in backends:
            self.add(backend)

    @property
    def gpu_count(self) -> int:  # type: ignore[override]
        """Number of GPUs that are not lost."""
        return max(1, len(self._left()))

    @property
    def uuid(self) -> str:  # type: ignore[override]
        """UUID of the GPU that holds races."""
        with self._changed:
            return self._racing_member().backend.uuid

    @property
    def sanitizer(self) -> Sanitizer | None:  # type: ignore[override]
        """That of the GPU that holds races."""
        return self._racing_member().backend.sanitizer

    @property
    def has_result(self) -> bool:  # type: ignore[override]
        """Whether a result waits."""
        return bool(self._finished)

    @property
    def uses(self) -> tuple[GpuUse, ...]:  # type: ignore[override]
        """Work of each GPU so far."""
        with self._changed:
            return tuple(GpuUse(m.backend.uuid, m.trials, m.busy_s, m.scale, m.lost) for m in self._members)

    def add(self, backend: Backend) -> None:
        """Let another GPU of the same model take part; it may join at any time."""
        member = _GroupGpu(backend, len(self._members))
        member.thread = threading.Thread(target=self._serve, args=(member,), name=f"GPU {member.number}", daemon=True)
        with self._changed:
            self._members.append(member)
        member.thread.start()

    def await_reference(self) -> None:
        """Wait for the results of a reference in Python for each GPU."""
        for member in self._members:
            member.backend.await_reference()

    def wait(self) -> None:
        """Wait until one GPU can run candidates; the others join when they can."""
        with self._changed:
            while not any(member.state == "working" for member in self._members):
                self._raise_if_lost()
                self._changed.wait(_CHECK_S)

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        """Put a candidate into the queue of the GPUs."""
        with self._changed:
            self._queue.append(_Submitted(candidate, limit_us))
            self._queued.notify()

    def result(self) -> tuple[Candidate, Reading]:
        """Wait for any candidate that was submitted, and return its reading, on the scale of the home.

        If the last GPU is lost, its own error is raised: a `WorkerError`, `ToolchainError` or `InputError`.
        """
        with self._changed:
            while not self._finished:
                self._abandon_silent()
                self._raise_if_lost()
                self._changed.wait(_CHECK_S)
            return self._finished.popleft()

    def run(self, job: Job) -> list[Reading]:
        """Run a job on one GPU; on another one if its worker fails, or dies and the reference fails there, too."""
        while True:
            with self._changed:
                member = self._racing_member()
                is_last = len(self._left()) <= 1
            fault: AutotileError
            try:
                readings = member.backend.run(job)
            except WorkerError as error:
                fault = error
            else:
                if self._reference is None or not any(one.died for one in readings):
                    return readings
                try:
                    self._check_sound(member, self._reference)
                    return readings
                except AutotileError as error:
                    fault = error
            if is_last and not isinstance(fault, self._passing):
                raise fault
            self._lose(member, fault)
            self.wait()

    def spare(self) -> Backend | None:
        """Return a second GPU that works."""
        with self._changed:
            racing = self._racing_member()
            idle = (m.backend for m in self._members if m.state == "working" and m is not racing and not m.tasks)
            return next(idle, None)

    def close(self) -> None:
        """Release all GPUs."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._queued.notify_all()
            busy = [one for one in self._members if one.tasks or one.state != "working"]
        # in threads, as a driver that hangs keeps its process, and what waits for that
        threads = [threading.Thread(target=one.backend.close, name="close GPU", daemon=True) for one in busy]
        for thread in threads:
            thread.start()  # ends what the thread of the GPU waits for
        end = time.monotonic() + _CLOSE_S
        for thread in (*threads, *(one.thread for one in self._members)):
            thread.join(max(0.0, end - time.monotonic()))
        for member in self._members:
            if not member.thread.is_alive():
                member.backend.close()

    def _serve(self, member: _GroupGpu) -> None:
        try:
            begun = time.monotonic()
            member.backend.wait()
            with self._changed:
                member.sign_at = time.monotonic()
                member.open_s = member.sign_at - begun
                member.state = "working" if member.state == "starting" else member.state
                self._changed.notify_all()
            while self._take_tasks(member):
                _, reading = member.backend.result()
                with self._changed:
                    member.sign_at = time.monotonic()
                    if self._is_stopped(member):
                        continue
                    task = member.tasks[0]
                if reading.died:
                    if not self._is_to_blame(member, task):
                        continue
                elif reading.measurement is not None and member.scale is None:
                    self._calibrate(member, task.candidate, reading)
                with self._changed:
                    if self._is_stopped(member):
                        continue
                    member.tasks.popleft()
                    member.trials += 1
                    member.busy_s += sum(reading.seconds.values())
                    self._finished.append((task.candidate, reading.scaled(member.scale)))
                    self._changed.notify_all()
        except AutotileError as error:
            self._lose(member, error)
        except BaseException as error:  # a thread must not end without a word
            self._lose(member, WorkerError(f"{type(error).__name__}: {error}"))
        if member.state == "lost" and not self._closing:
            member.backend.close()  # it was given up without a sign, and came back: it may join again

    def _take_tasks(self, member: _GroupGpu) -> bool:
        """Wait until the GPU has a candidate, and pass on to its backend what it takes; False if it is to stop."""
        taken: list[_Submitted] = []
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self._is_stopped(member):
                        return False
                    # A second one is taken only if no other GPU waits for it. One whose worker died with a candidate
                    # runs that only if no other GPU is left. Until it is calibrated, a GPU holds a single candidate.
                    depth = _DEPTH if member.scale is not None else 1
                    while len(member.tasks) < depth and not (member.tasks and len(self._queue) < self._waiting):
                        left = self._left()
                        able = (t for t in self._queue if member not in t.suspects or {*left} <= {*t.suspects})
                        task = next(able, None)
                        if task is None:
                            break
                        self._queue.remove(task)
                        member.tasks.append(task)
                        taken.append(task)
                    if member.tasks:
                        break
                    self._queued.wait()
            finally:
                self._waiting -= 1
            member.sign_at = time.monotonic()
        for task in taken:
            limit_us = task.limit_us
            if limit_us is not None and member.scale:
                limit_us /= member.scale
            member.backend.submit(task.candidate, limit_us)
        return True

    def _is_to_blame(self, member: _GroupGpu, task: _Submitted) -> bool:
        """Return True if a candidate is at fault for the worker's death, False if it is tried elsewhere."""
        with self._changed:
            if self._is_stopped(member):  # given up meanwhile, and the candidate given back
                return False
            task.suspects.append(member)
            held, member.tasks = list(member.tasks), deque()
            reference = self._reference
            if reference is None and len(task.suspects) == 1 and len(self._left()) > 1:
                self._give_back(held)
                return False
            member.tasks.append(task)
            self._give_back(held[1:])
        member.backend.withdraw()
        if reference is not None:
            self._check_sound(member, reference)
        return True

    def _check_sound(self, member: _GroupGpu, reference: Candidate) -> None:
        """Raise `WorkerError` unless the reference still runs on a GPU; one that crashes is tried again.

        A result that is merely wrong shows that the GPU runs kernels, also where its worker ends because of it.
        """
        for _ in range(_CHECKS):
            reading = member.evaluated(reference, 0.0)
            if not reading.died:
                return
            if reading.outcome is Outcome.TIMED_OUT:
                break
        raise WorkerError(f"the configuration that ran first fails now, too: {reading.outcome}, {reading.reason}")

    def _calibrate(self, member: _GroupGpu, candidate: Candidate, reading: Reading) -> None:
        """Measure the reference on a GPU; the first candidate that runs anywhere is the reference."""
        with self._changed:
            if self._reference is None:
                self._reference, self._home = candidate, member
            reference = self._reference
        if reference is candidate and reading.outcome is Outcome.OK and reading.measurement is not None:
            member.times_us.append(reading.measurement.time_us)
        while len(member.times_us) < _CALIBRATIONS:
            measured = member.evaluated(reference, None)
            if self._closing:
                return
            if measured.died:
                raise WorkerError(f"the reference configuration fails: {measured.outcome}, {measured.reason}")
            if measured.measurement is None:  # it is wrong now and then, which says nothing of the GPU
                break
            member.times_us.append(measured.measurement.time_us)
        own_us = float(np.median(member.times_us)) if member.times_us else self._home_us or 1.0
        with self._changed:
            if self._home is member:
                self._home_us = own_us
                self._changed.notify_all()
            while self._home_us is None and not self._closing:
                if self._home is None:  # it was lost before it had measured: this GPU takes its place
                    self._home, self._home_us = member, own_us
                    self._changed.notify_all()
                    break
                self._changed.wait(_CHECK_S)
                member.sign_at = time.monotonic()
            member.scale = round(self._home_us / own_us, 6) if self._home_us is not None else None
            member.sign_at = time.monotonic()

    def _is_stopped(self, member: _GroupGpu) -> bool:
        return self._closing or member.state == "lost"

    def _left(self) -> list[_GroupGpu]:
        return [member for member in self._members if member.state != "lost"]

    def _give_back(self, tasks: Iterable[_Submitted]) -> None:
        self._queue.extendleft(reversed([*tasks]))
        self._changed.notify_all()
        self._queued.notify_all()

    def _lose(self, member: _GroupGpu, error: AutotileError) -> None:
        with self._changed:
            if member.state == "lost" or self._closing:
                return
            self._give_up(member, error, str(error))
        member.backend.close()

    def _give_up(self, member: _GroupGpu, error: AutotileError, reason: str) -> None:
        """Mark a GPU as lost; its candidates go to the others, except one with which two GPUs were lost."""
        member.state, member.lost, self._error = "lost", reason, error
        tasks, member.tasks = member.tasks, deque()
        if self._home is member and self._home_us is None:
            self._home = None
        if tasks and member not in tasks[0].suspects:
            tasks[0].suspects.append(member)
        if tasks and len(tasks[0].suspects) > 1:
            crash = Reading(Outcome.CRASHED, f"the GPU was lost with it, twice: {error}", "verify")
            self._finished.append((tasks.popleft().candidate, crash))
        self._give_back(tasks)

    def _abandon_silent(self) -> None:
        """Give up the GPUs that hold candidates and have given no sign for too long."""
        for member in self._left():
            limit_s = self._deadline_s + _MIN_STALL_S + _OPENS_PER_STALL * member.open_s
            if member.tasks and member.state == "working" and time.monotonic() - member.sign_at > limit_s:
                reason = f"it gave no sign for {limit_s:.0f} s"
                name = member.backend.uuid or f"GPU {member.number}"
                self._give_up(member, WorkerError(f"{name}: {reason}"), reason)

    def _raise_if_lost(self) -> None:
        if not self._left() and not self._finished:
            raise self._error or WorkerError("no GPU is left")

    def _racing_member(self) -> _GroupGpu:
        working = [member for member in self._members if member.state == "working"]
        home = [member for member in working if member is self._home]
        known = [member for member in working if member.scale is not None]
        return [*home, *known, *working, *self._members][0]
