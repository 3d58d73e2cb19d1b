"""GPUs of several machines: as backends of a session, and as the lane of a command."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from autotile.core.device import DeviceProperties, is_name_of
from autotile.errors import AutotileError, InputError, WorkerError
from autotile.tuning.cluster.requests import AbsentGpuError, Cluster, SentRequest
from autotile.tuning.cluster.worker import SIMULATED, GpuReply, GpuRequest
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.lanes import GpuName, Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend
from autotile.workers.gpu import Backend
from autotile.workers.jobs import Candidate, Entry, Job, Race, Reading, Time

_POLL_S = 1.0
"""Interval at which a session looks for GPUs that join or leave."""
_FIRST_GPU_S = 60.0
"""Time that a session or a command waits for a first GPU."""
_RENEW_S = 40.0
"""Interval at which a session renews the leases of its GPUs, a third of what they last."""
_DESCRIBE_S = 10.0
"""Time in which a GPU describes itself; one that works for another session may take longer, and is asked again."""
_MAX_JOINS = 4
"""Times that a GPU joins a session, the first one included, and those after an absence left out."""
_RETURN_S = 300.0
"""Time that a session without a GPU waits for one to come back."""
_SETTLE_S = 5.0
"""Time that a command waits for the properties of further GPUs."""
_FRESH_S = 3.0
"""Time after which a GPU is asked again whether another command uses it."""
_LANE_POLL_S = 0.05


class RemoteGpu(Backend):
    """A GPU of another machine.

    ``work`` is the common part of its requests, with the session's problem; ``recorded`` what simulated GPUs replay,
    None for real ones. ``meanwhile`` is called about every second in a thread that waits for a reply.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpu: str,
        device: DeviceProperties,
        work: GpuRequest,
        *,
        recorded: ReplayBackend | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.uuid = gpu
        if recorded is not None:
            self.notice, self.recorded = recorded.notice, recorded.recorded
        self.is_closed = self.was_absent = False
        self._cluster = cluster
        self._work = work
        self._meanwhile = meanwhile
        self._submitted: deque[tuple[Candidate, SentRequest]] = deque()
        """Candidates without a result and their requests, oldest first."""
        self._running: SentRequest | None = None
        """Request of another method."""

    def wait(self) -> None:
        """Wait until the worker has set up the problem."""
        self._running = self._cluster.send(self.uuid, "open", self._work)
        self._readings(self._running, may_be_none=True)

    def submit(self, candidate: Candidate, limit_us: float | None = None) -> None:
        """Send a candidate with its cubin; it waits in the process of the GPU while an earlier one runs."""
        job = Time((Entry(candidate, limit_us=limit_us),))
        self._submitted.append((candidate, self._cluster.send(self.uuid, "run", self._work, job)))

    def result(self) -> tuple[Candidate, Reading]:
        """Wait for the oldest candidate; a crash or a hang of the GPU's worker process is an outcome."""
        candidate, sent = self._submitted[0]
        readings = self._readings(sent)
        self._submitted.popleft()
        return candidate, readings[0]

    def withdraw(self) -> None:
        """Forget the candidates without a result."""
        submitted, self._submitted = self._submitted, deque()
        for _, sent in submitted:
            sent.withdraw()

    def run(self, job: Job) -> list[Reading]:
        """Run a job in the process of the GPU."""
        self._running = self._cluster.send(self.uuid, "run", self._work, job)
        return self._readings(self._running, may_be_none=isinstance(job, Race))

    def close(self) -> None:
        """Release the GPU to other sessions, and end what another thread waits for."""
        if self.is_closed:
            return
        self.is_closed = True
        self.withdraw()
        if self._running is not None:
            self._running.withdraw()
        self._cluster.send(self.uuid, "close", self._work).forget()

    def _readings(self, sent: SentRequest, *, may_be_none: bool = False) -> list[Reading]:
        try:
            reply = self._cluster.result(sent, meanwhile=self._meanwhile)
            if reply.is_busy:  # both found it free, and the other one was first
                raise AbsentGpuError(f"{self.uuid} works for another session")
        except AbsentGpuError:
            self.was_absent = True
            raise
        if not (reply.readings or may_be_none):
            raise WorkerError(f"the reply of {self.uuid} holds no result")
        return reply.readings


class ClusterGpus(GpuGroup):
    """The GPUs of one model that the workers of a cluster offer; they may join and leave at any time.

    ``lane`` is the GPUs that the session may use, of one model; ``ending`` is called when it is closed. Raise
    `InputError` if no GPU is offered, or all work for other sessions.
    """

    _passing = (AbsentGpuError,)

    def __init__(
        self,
        lane: Lane,
        work: GpuRequest,
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
        self._ending = threading.Event()
        self._alone_at = math.inf
        """Time since which no GPU is left, by `time.monotonic`."""
        self._session_thread = threading.get_ident()
        self._reported = ""
        """Remark that was reported last; empty while nothing is waited for."""
        end = time.monotonic() + _FIRST_GPU_S
        while not (found := list(self._arriving())):
            if time.monotonic() + _POLL_S > end:
                raise no_gpu_error([str(gpu) for gpu in self._lane.devices])
            time.sleep(_POLL_S)
        cluster.compilers.look()
        super().__init__(found, work.deadline_s)
        self._watch = threading.Thread(target=self._let_join, name="cluster", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Wait until one GPU can run candidates."""
        super().wait()
        self._report_waiting()

    def result(self) -> tuple[Candidate, Reading]:
        """Wait for any candidate that was submitted, and return its reading."""
        finished = super().result()
        self._report_waiting()
        return finished

    def close(self) -> None:
        """Release the GPUs."""
        self._ending.set()
        self._watch.join()
        super().close()
        self._end()

    def _let_join(self) -> None:
        renewed_at = time.monotonic()
        while not self._ending.wait(_POLL_S):
            if time.monotonic() - renewed_at > _RENEW_S:  # others may not have them, though there is nothing for them
                for gpu, known in self._joined.items():
                    if known and not known[-1].is_closed:
                        with suppress(WorkerError):
                            self._cluster.send(gpu, "describe", self._work).forget()
                renewed_at = time.monotonic()
            with suppress(AutotileError):  # of one that is not of this version
                for one in self._arriving():
                    self.add(one)

    def _arriving(self) -> Iterator[RemoteGpu]:
        """Yield the GPUs of the lane that are present and not part of the session."""
        present = self._cluster.look()
        for gpu in map(str, self._lane.devices):
            known = self._joined.setdefault(gpu, [])
            if self._ending.is_set():
                return
            if gpu not in present:
                continue
            if sum(not one.was_absent for one in known) >= _MAX_JOINS or (known and not known[-1].is_closed):
                continue
            try:
                reply = self._cluster.result(self._cluster.send(gpu, "describe", self._work), _DESCRIBE_S)
            except WorkerError:  # it does not answer
                continue
            if reply.is_busy or reply.device is None:
                continue
            meanwhile = self._report_waiting
            one = RemoteGpu(self._cluster, gpu, reply.device, self._work, recorded=self._recorded, meanwhile=meanwhile)
            known.append(one)
            yield one

    def _abandon_silent(self) -> None:
        """Give up silent GPUs; while the scheduler is lost, all are silent."""
        if self._cluster.connection.lost_s > 0:
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
        text = self._cluster.connection.waiting
        if not text and self._alone_at < math.inf and not self._left():
            text = f"no GPU of the scheduler is left; one is waited for, {_RETURN_S / 60:.0f} min at most"
        if text != self._reported:
            self._reported = text
            self.observe_wait(text)


def free_gpu(lane: Lane, work: GpuRequest) -> RemoteGpu:
    """Return a GPU of a cluster that holds no problem; `WorkerError` if none becomes free within a minute."""
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


@contextmanager
def jobs_on_cluster(lane: Lane, deadline_s: float) -> Iterator[Callable[[Job], list[Reading]]]:
    """Yield a function that runs jobs whose entries have problems of their own.

    They run on one GPU of the lane, which other sessions cannot use meanwhile; if it is gone, on another one.
    """
    work, gpu = GpuRequest(deadline_s=deadline_s), None

    def run(job: Job) -> list[Reading]:
        nonlocal gpu
        while True:
            gpu = gpu or free_gpu(lane, work)
            try:
                readings = gpu.run(job)
            except AbsentGpuError:
                gpu = None
                continue
            if len(readings) != len(job.entries):
                raise WorkerError(f"the reply of {gpu.uuid} holds no times")
            return readings

    try:
        yield run
    finally:
        if gpu is not None:
            gpu.close()


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


class ClusterLane(Lane):
    """All GPUs of a cluster that are of use to a command; they may join and leave at any time.

    If they must be of one model, others that join later are not used. Raise `InputError` if the scheduler cannot be
    reached, has no GPU, or GPUs of several models.
    """

    cluster: Cluster

    def __init__(self, options: TuneOptions, *, is_of_one_model: bool = True) -> None:
        super().__init__()
        self._is_replay = options.replay is not None
        self._asked_model = options.gpu_model
        self._model: DeviceProperties | None = None
        self._replies: dict[str, tuple[GpuReply, float]] = {}
        """The last known state of each GPU, and its time."""
        self._requests: dict[str, SentRequest] = {}
        """Those whose replies are awaited."""
        self._error = ""
        self._lock = threading.Lock()
        """Held while GPUs are asked: a session looks for late ones in a thread of its own."""
        self.cluster = Cluster(options.scheduler, insecure=options.insecure)
        try:
            begun = time.monotonic()
            while True:  # for a first GPU of use, and a little for the others
                present, now = self._present(), time.monotonic()
                if self.free(()) and (all(gpu in self._replies for gpu in present) or now - begun > _SETTLE_S):
                    break
                if now - begun > _FIRST_GPU_S:
                    if not present and (others := self.cluster.look()):
                        fault = (
                            "measure, and the session replays; leave --replay out"
                            if self._is_replay
                            else "replay recordings; to try the cluster with them, add --replay"
                        )
                        raise InputError(f"the GPUs of the scheduler ({', '.join(others)}) {fault}")
                    raise no_gpu_error(present, self._asked_model, self._error)
                time.sleep(_LANE_POLL_S)
            if is_of_one_model:
                models = {device.name: device for device in map(self._device_of, self.devices) if device is not None}
                if len(models) > 1:
                    raise InputError(
                        f"the scheduler has GPUs of {len(models)} models, whose times are studies of their own: "
                        f"{', '.join(models)}; choose one, as in --device {next(iter(models))!r}, or use a plan, which "
                        "tunes for each"
                    )
                self._model = next(iter(models.values()))
                self.device = None if self._is_replay else self._model
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> tuple[GpuName, ...]:
        """UUIDs of the GPUs that are present, those that other commands use included."""
        present = self._present()
        self._ask([gpu for gpu in present if gpu not in self._replies])  # one that joins late
        return tuple(gpu for gpu in present if self._is_of_use(gpu))

    def device_of(self, gpu: GpuName) -> DeviceProperties | None:
        """Return the properties of a GPU; None in replay."""
        return None if self._is_replay else self._device_of(gpu)

    def free(self, held: Collection[GpuName]) -> list[GpuName]:
        """Return the GPUs that neither hold a problem nor work for another command."""
        present = [gpu for gpu in self._present() if gpu not in held]
        self._ask(present)
        return [gpu for gpu in present if self._is_of_use(gpu) and not self._replies[gpu][0].is_busy]

    def close(self) -> None:
        """Disconnect."""
        self.cluster.close()

    def _present(self) -> list[str]:
        return [gpu for gpu in self.cluster.look() if gpu.startswith(SIMULATED) == self._is_replay]

    def _device_of(self, gpu: GpuName) -> DeviceProperties | None:
        reply, _ = self._replies.get(str(gpu), (None, 0.0))
        return reply.device if reply is not None else None

    def _is_of_use(self, gpu: GpuName) -> bool:
        device = self._device_of(gpu)
        if device is None or (self._asked_model and not is_name_of(self._asked_model, device)):
            return False
        model = self._model
        return model is None or (device.name, device.compute_capability) == (model.name, model.compute_capability)

    def _ask(self, gpus: Collection[str]) -> None:
        """Ask GPUs for their properties and whether they work for another session, and take replies that are there."""
        now = time.monotonic()
        with self._lock:
            for gpu in gpus:
                if gpu not in self._requests and now - self._replies.get(gpu, (None, -_FRESH_S))[1] >= _FRESH_S:
                    self._requests[gpu] = self.cluster.send(gpu, "describe", GpuRequest(session=""))
            for gpu, request in list(self._requests.items()):
                try:
                    reply = self.cluster.answered(request)
                except AutotileError as error:  # it is gone, or runs another version
                    del self._requests[gpu]
                    self._error = str(error)
                    continue
                if reply is not None:
                    del self._requests[gpu]
                    self._replies[gpu] = reply, now
