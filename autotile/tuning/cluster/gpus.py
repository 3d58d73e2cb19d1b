"""GPUs of several machines in one session: a backend of GPUs that the workers of a cluster offer."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.errors import AutotileError, InputError, WorkerError
from autotile.kernel.library import Kernel
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace
from autotile.tuning.backend import Backend, Finished, workload_of
from autotile.tuning.cluster.client import AbsentGpuError, Cluster, RemoteWork, Sent
from autotile.tuning.cluster.connection import Operation, Reply
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend, open_recording, replay_notice
from autotile.tuning.schedule import Lane, open_lane
from autotile.workers.jobs import Candidate, Check, Entry, Job, Race, Reading, Time

_FIRST_GPU_S = 60.0
"""Time that a session waits for a first GPU."""
_POLL_S = 1.0
"""Interval at which a session looks for GPUs that join or are gone."""
_RENEW_S = 40.0
"""Interval at which a session renews the leases of its GPUs, a third of what they last."""
_DESCRIBE_S = 10.0
"""Time in which a GPU describes itself; one that works for another session may take longer, and is asked again."""
_MAX_JOINS = 4
"""Times that a GPU joins a session, the first one included, and those after an absence left out."""
_RETURN_S = 300.0
"""Time that a session without a GPU waits for one to come back."""


class RemoteGpu(Backend):
    """A GPU of another machine.

    Parameters
    ----------
    cluster
        Connection to its scheduler.
    gpu
        Its UUID.
    device
        Its properties.
    work
        The session's problem.
    recorded
        What simulated GPUs replay; None for real ones.
    meanwhile
        Called about every second while a request is waited for, in the thread that waits.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpu: str,
        device: DeviceProperties,
        work: RemoteWork,
        *,
        recorded: ReplayBackend | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.uuid = gpu
        self.source = "replayed" if recorded is not None else "cuda"
        self.notice = recorded.notice if recorded is not None else ""
        self.is_closed = False
        self._cluster = cluster
        self._work = work
        self._recorded = recorded
        self._meanwhile = meanwhile
        self.was_absent = False
        self._submitted: deque[tuple[Candidate, Sent]] = deque()
        """Candidates without a result and their requests, oldest first."""
        self._running: Sent | None = None
        """Request of another method."""

    def available_rows(self, space: SearchSpace) -> NDArray[np.bool_] | None:
        """Return a mask over the recorded rows; None for a real GPU."""
        return self._recorded.available_rows(space) if self._recorded is not None else None

    def wait(self) -> None:
        """Wait until the worker has set up the problem."""
        self._request("open", None)

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Send a candidate with its cubin; it waits in the process of the GPU while an earlier one runs."""
        self._submitted.append((candidate, self._send("run", Time((Entry(candidate, limit_us=best_us),)))))

    def result(self) -> Finished:
        """Wait for the oldest candidate; a crash or a hang of the GPU's worker process is an outcome."""
        candidate, sent = self._submitted[0]
        reply = self._reply(sent)
        self._submitted.popleft()
        return Finished(candidate, self._reading(reply), self.uuid)

    def withdraw(self) -> None:
        """Forget the candidates without a result."""
        submitted, self._submitted = self._submitted, deque()
        for _, sent in submitted:
            sent.withdraw()

    def race(self, job: Race, expected_s: float) -> list[Reading] | None:
        """Race entries; None if the worker process of the GPU died."""
        return self._request("run", job, expected_s=expected_s).readings

    def check(self, job: Check) -> Reading:
        """Verify the candidate repeatedly; a crash or a hang is an outcome."""
        return self._reading(self._request("run", job))

    def time(self, job: Time) -> list[Reading]:
        """Verify and measure entries; as for `autotile.workers.gpu.Gpu.time`."""
        return self._request("run", job).readings or []

    def close(self) -> None:
        """Release the GPU to other sessions, and end what another thread waits for."""
        if self.is_closed:
            return
        self.is_closed = True
        self.withdraw()
        if self._running is not None:
            self._running.withdraw()
        self._send("close", None).forget()

    def _reading(self, reply: Reply) -> Reading:
        if not reply.readings:
            raise WorkerError(f"the reply of {self.uuid} holds no result")
        self.is_dead = reply.is_dead
        return reply.readings[0]

    def _request(self, op: Operation, job: Job | None, *, expected_s: float = 0.0) -> Reply:
        self._running = self._send(op, job, expected_s=expected_s)
        return self._reply(self._running)

    def _reply(self, sent: Sent) -> Reply:
        try:
            return self._cluster.result(sent, meanwhile=self._meanwhile)
        except AbsentGpuError:
            self.was_absent = True
            raise

    def _send(self, op: Operation, job: Job | None, *, expected_s: float = 0.0) -> Sent:
        return self._cluster.send(self.uuid, op, self._work, job, expected_s=expected_s)


class ClusterGpus(GpuGroup):
    """The GPUs of one model that the workers of a cluster offer; they may join and leave at any time.

    Parameters
    ----------
    lane
        GPUs of the cluster that the session may use.
    work, recorded
        As for `RemoteGpu`.
    ending
        Called when the session is closed.

    Raises
    ------
    InputError
        No GPU is offered, or all work for other sessions.
    """

    _passing = (AbsentGpuError,)

    def __init__(
        self,
        lane: Lane,
        work: RemoteWork,
        recorded: ReplayBackend | None = None,
        *,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        assert lane.cluster is not None
        self._lane = lane
        self._cluster = cluster = lane.cluster
        self._end = ending
        self.farm = cluster.compilers
        self._work = work
        self._recorded = recorded
        self._joined: dict[str, list[RemoteGpu]] = {}
        self._refused: set[str] = set()
        """GPUs of other models."""
        self._ending = threading.Event()
        self._alone_at = math.inf
        """Time since which no GPU is left, by `time.monotonic`."""
        self._session_thread = threading.get_ident()
        self._reported = ""
        """Remark that was reported last; empty while nothing is waited for."""
        super().__init__(self._first(), work.deadline_s)
        self._watch = threading.Thread(target=self._let_join, name="cluster", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Wait until one GPU can run candidates."""
        super().wait()
        self._report_waiting()

    def result(self) -> Finished:
        """Wait for any candidate that was submitted, and return its evaluation."""
        finished = super().result()
        self._report_waiting()
        return finished

    def close(self) -> None:
        """Release the GPUs."""
        self._ending.set()
        self._watch.join()
        super().close()
        self._end()

    def _first(self) -> list[RemoteGpu]:
        """Wait for GPUs, and return those that are there."""
        end = time.monotonic() + _FIRST_GPU_S
        while time.monotonic() < end:
            if found := list(self._arriving(None)):
                self._cluster.compilers.look()
                return found
            time.sleep(_POLL_S)
        raise no_gpu_error([str(gpu) for gpu in self._lane.devices])

    def _let_join(self) -> None:
        renewed_at = time.monotonic()
        while not self._ending.wait(_POLL_S):
            if time.monotonic() - renewed_at > _RENEW_S:
                self._renew()
                renewed_at = time.monotonic()
            with suppress(AutotileError):  # of one that is not of this version
                for one in self._arriving(self.device):
                    self.add(one)

    def _renew(self) -> None:
        """Keep the GPUs of this session from others while it has nothing for them."""
        for gpu, known in self._joined.items():
            if known and not known[-1].is_closed:
                with suppress(WorkerError):
                    self._cluster.send(gpu, "describe", self._work).forget()

    def _arriving(self, model: DeviceProperties | None) -> Iterator[RemoteGpu]:
        """Yield the GPUs that are present, of the session's model, and not part of it."""
        present = self._cluster.look()
        for gpu in map(str, self._lane.devices):
            known = self._joined.setdefault(gpu, [])
            if self._ending.is_set():
                return
            if gpu not in present or gpu in self._refused:
                continue
            if sum(not one.was_absent for one in known) >= _MAX_JOINS or (known and not known[-1].is_closed):
                continue
            reply = self._description(gpu)
            if reply is None or reply.is_busy or reply.device is None:
                continue
            model = model or reply.device
            if (reply.device.name, reply.device.compute_capability) != (model.name, model.compute_capability):
                self._refused.add(gpu)
                continue
            meanwhile = self._report_waiting
            one = RemoteGpu(self._cluster, gpu, reply.device, self._work, recorded=self._recorded, meanwhile=meanwhile)
            known.append(one)
            yield one

    def _description(self, gpu: str) -> Reply | None:
        """Return the state of a GPU; None if it does not answer."""
        try:
            return self._cluster.result(self._cluster.send(gpu, "describe", self._work), _DESCRIBE_S)
        except WorkerError:
            return None

    def _abandon_silent(self) -> None:
        """Give up silent GPUs; while the scheduler is lost, all are silent."""
        if self._cluster.is_lost:
            for member in self._left():
                member.sign_at = time.monotonic()
        super()._abandon_silent()

    def _raise_if_lost(self) -> None:
        """Wait for a GPU to come back if all of them are absent."""
        self._alone_at = math.inf if self._left() else min(self._alone_at, time.monotonic())
        self._report_waiting()
        if self._left():
            return
        if time.monotonic() - self._alone_at > _RETURN_S or not isinstance(self._error, AbsentGpuError):
            super()._raise_if_lost()

    def _report_waiting(self) -> None:
        """Report to the session that it begins to wait for a part of the cluster, or that this is over."""
        if threading.get_ident() != self._session_thread:
            return
        text = self._cluster.waiting
        if not text and self._alone_at < math.inf and not self._left():
            text = f"no GPU of the scheduler is left; one is waited for, {_RETURN_S / 60:.0f} min at most"
        if text != self._reported:
            self._reported = text
            self.observe_wait(text)


def free_gpu(lane: Lane, work: RemoteWork) -> RemoteGpu:
    """Return a GPU of a cluster that holds no problem.

    Raises
    ------
    WorkerError
        None becomes free within a minute.
    """
    assert lane.cluster is not None
    end = time.monotonic() + _FIRST_GPU_S
    while time.monotonic() < end:
        present = lane.cluster.look()
        for gpu in map(str, lane.free(())):
            device = lane.device_of(gpu)
            if gpu in present and device is not None:
                return RemoteGpu(lane.cluster, gpu, device, work)
        time.sleep(_POLL_S)
    raise WorkerError("no GPU of the cluster is free")


class FreeGpu:
    """A GPU of a cluster for jobs whose entries have problems of their own; if it is gone, another one.

    Parameters
    ----------
    lane
        GPUs of the cluster.
    deadline_s
        Time after which the worker of a candidate is killed, in seconds.
    """

    def __init__(self, lane: Lane, deadline_s: float) -> None:
        self._lane = lane
        self._work = RemoteWork("", None, deadline_s)
        self._gpu: RemoteGpu | None = None

    def time(self, job: Time) -> list[Reading]:
        """Verify and measure entries; as for `autotile.workers.gpu.Gpu.time`."""
        while True:
            self._gpu = self._gpu or free_gpu(self._lane, self._work)
            try:
                return self._gpu.time(job)
            except AbsentGpuError:
                self._gpu = None

    def close(self) -> None:
        """Release the GPU."""
        if self._gpu is not None:
            self._gpu.close()


def no_gpu_error(present: Sequence[str], model: str = "", reason: str = "") -> InputError:
    """Return the error of a session or command for which no GPU is left."""
    if not present:
        state = "none joined"
    elif reason:
        state = reason
    elif model:
        state = f"none of those there ({', '.join(present)}) is a {model} that is free"
    else:
        state = f"those there ({', '.join(present)}) work for other sessions"
    return InputError(f"the scheduler has no GPU for this session: {state}; start `autotile worker` on a machine")


def cluster_backend(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, lane: Lane | None
) -> Backend:
    """Return GPUs of the cluster that the options name.

    Parameters
    ----------
    kernel, problem, settings, options
        As for `autotile.tuning.session.tune`.
    lane
        GPUs that the session may use; None for all that there are, of one model.

    Raises
    ------
    InputError
        The scheduler cannot be reached, it has no GPU, or the session needs what only this machine has.
    """
    needs_python = kernel.reference_function is not None or kernel.inspection is not None
    for what, is_used in (
        ("a reference or a check in Python", needs_python or kernel.spec.reference.is_agreement),
        ("a captured call", options.captured is not None),
        ("compute-sanitizer", options.sanitize),
        ("a choice of this machine's GPUs", bool(options.devices or options.device_index)),
    ):
        if is_used:
            raise InputError(f"a session with a scheduler cannot use {what}, which other machines lack; leave one out")
    recorded = None
    if options.replay is not None:
        recording = open_recording(kernel, problem, options, settings.recording_folders)
        recorded = ReplayBackend(recording, replay_notice(recording, options))
    work = RemoteWork(kernel.name, workload_of(kernel, problem, settings, options), options.run_deadline_s)
    if lane is not None and lane.cluster is not None:
        return ClusterGpus(lane, work, recorded)
    with ExitStack() as opened:
        own = opened.enter_context(open_lane(options))
        return ClusterGpus(own, work, recorded, ending=opened.pop_all().close)
