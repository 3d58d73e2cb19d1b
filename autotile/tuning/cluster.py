"""GPUs of several machines in one session, through a scheduler of Dask; see `autotile.tuning.cluster_worker`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Problem
from autotile.errors import AutotileError, InputError, ToolchainError, WorkerError
from autotile.kernel.library import Kernel
from autotile.settings import Settings
from autotile.space.search_space import SearchSpace
from autotile.tuning.backend import Backend, Finished, workload_of
from autotile.tuning.cluster_compilers import ClusterCompilers
from autotile.tuning.cluster_worker import SIMULATED, Operation, Reply, answer
from autotile.tuning.connection import Connection
from autotile.tuning.gpu_comparison import GpuUse
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend, open_recording, replay_notice
from autotile.tuning.scheduler import distributed
from autotile.workers.compile_pool import CompileFarm
from autotile.workers.protocol import Candidate, Evaluation, RaceTimes, Workload
from autotile.workers.sanitizer import Finding

_FIRST_GPU_S = 60.0
"""Time that a session waits for a first GPU."""
_POLL_S = 1.0
"""Interval at which a session looks for GPUs that join or are gone."""
_ABSENT_S = 30.0
"""Time after which a GPU that is gone is given up; its nanny replaces a worker that died within seconds."""
_DESCRIBE_S = 10.0
"""Time in which a GPU describes itself; one that works for another session may take longer, and is asked again."""
_MAX_FAILURES = 10
"""Replies to one request that may be lost on their way."""
_MAX_JOINS = 4
"""Times that a GPU joins a session, the first one included, and those after an absence left out."""
_RETURN_S = 300.0
"""Time that a session without a GPU waits for one to come back."""
_GPU_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class RemoteWork:
    """What all requests of a session have in common.

    Attributes
    ----------
    kernel
        Name of the kernel.
    workload
        The session's problem.
    deadline_s
        Time after which the worker of a candidate is killed, in seconds.
    session
        Identity of the session, for which a GPU works until it is closed.
    """

    kernel: str
    workload: Workload
    deadline_s: float
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class Cluster:
    """The GPUs and compilers of a scheduler, which sessions may share.

    A request waits for its GPU and for the scheduler: if the connection was lost, it is sent again.

    Parameters
    ----------
    address, insecure
        As for `autotile.tuning.connection.Connection`, whose errors are raised.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        self._connection = Connection(address, insecure=insecure)
        self.compilers = ClusterCompilers(self._connection)

    @property
    def is_lost(self) -> bool:
        """Whether the scheduler does not answer."""
        return self._connection.lost_s > 0

    def look(self) -> list[str]:
        """Return the UUIDs of the GPUs that are present."""
        return sorted({name for resources in self._connection.offers() for name in resources if _is_gpu(name)})

    def send(self, gpu: str, op: Operation, candidates: Sequence[Candidate], work: RemoteWork, **fields: Any) -> Sent:
        """Send a request with its cubins to a GPU; other fields are those of `Request`.

        A GPU answers one at a time, in the order in which they were sent.
        """
        cubins: dict[str, bytes] = {}
        packed = [_packed(one, cubins) for one in candidates]
        common = {"version": __version__, **asdict(work)}
        sent = Sent(gpu, encode_json({"op": op, **common, "candidates": packed, **fields}), cubins)
        self._submit(sent)
        return sent

    def result(self, sent: Sent, limit_s: float = math.inf) -> Reply:
        """Wait for the reply to a request.

        Parameters
        ----------
        sent
            The request.
        limit_s
            Time to wait at most, in seconds.

        Raises
        ------
        WorkerError
            The GPU or the scheduler is lost, the time is over, or the request was withdrawn.
        InputError, ToolchainError
            The GPU cannot be set up for the session.
        """
        end = time.monotonic() + limit_s
        while (reply := self._poll(sent)) is None:
            if time.monotonic() > end:
                sent.withdraw()
                raise WorkerError(f"{sent.gpu} has not answered for {limit_s:.0f} s")
        if reply.error:
            raise {"input": InputError, "toolchain": ToolchainError}.get(reply.kind, WorkerError)(reply.error)
        return reply

    def _poll(self, sent: Sent) -> Reply | None:
        """Wait a moment for the reply, and send the request again if it was lost; None if there is no reply yet."""
        if sent.is_withdrawn:
            raise WorkerError(f"a request to {sent.gpu} was withdrawn")
        if sent.future is None or self._connection.is_lost(sent.future):
            self._connection.await_look()
            self._submit(sent)
            return None
        try:
            return decode_json(sent.future.result(timeout=_POLL_S), Reply)
        except TimeoutError:
            absent_s = self._connection.absent_s(sent.gpu)
            if absent_s > _ABSENT_S:
                sent.withdraw()
                raise AbsentGpuError(f"the cluster has lost {sent.gpu}: it is absent for {absent_s:.0f} s") from None
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            sent.future = None
        except AutotileError:
            raise
        except Exception as error:  # whatever Dask raises where processes die
            sent.failures += 1
            if sent.future.status == "error" or sent.failures > _MAX_FAILURES:
                raise WorkerError(f"{sent.gpu}: {type(error).__name__}: {error}") from None
            sent.future = None  # there was a reply, but its process died before it arrived
        return None

    def _submit(self, sent: Sent) -> None:
        try:
            sent.future = self._connection.submit(answer, sent.request, sent.cubins, resource=sent.gpu)
        except WorkerError:  # it is sent again when the scheduler is back
            sent.future = None

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self.compilers.close()
        self._connection.close()


@dataclass(eq=False, slots=True)
class Sent:
    """A request that was sent to a GPU."""

    gpu: str
    request: str
    """A `Request` as JSON."""
    cubins: Mapping[str, bytes]
    future: Any = None
    """Future of Dask; None while the scheduler is lost."""
    failures: int = 0
    """Number of replies that did not arrive."""
    is_withdrawn: bool = False

    def withdraw(self) -> None:
        """Let nobody wait for the reply any more."""
        self.is_withdrawn = True
        if self.future is not None and not self.future.done():
            with suppress(Exception):  # of a connection that is closed, and the future with it
                self.future.cancel()

    def forget(self) -> None:
        """Have the request answered although nobody waits for the reply."""
        if self.future is not None:
            with suppress(Exception):
                distributed.fire_and_forget(self.future)


class AbsentGpuError(WorkerError):
    """A GPU is gone: its machine is off or cannot be reached. It may come back."""


def _is_gpu(resource: str) -> bool:
    return resource.startswith((*_GPU_PREFIXES, SIMULATED))


class RemoteGpu:
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
    """

    source: Literal["cuda", "replayed"]
    farm: CompileFarm | None = None
    gpu_count = 1
    has_result = False
    uses: tuple[GpuUse, ...] = ()

    def __init__(
        self,
        cluster: Cluster,
        gpu: str,
        device: DeviceProperties,
        work: RemoteWork,
        *,
        recorded: ReplayBackend | None = None,
    ) -> None:
        self.device = device
        self.uuid = gpu
        self.source = "replayed" if recorded is not None else "cuda"
        self.notice = recorded.notice if recorded is not None else ""
        self.is_dead = False
        self.is_closed = False
        self._cluster = cluster
        self._work = work
        self._recorded = recorded
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
        self._request("evaluate", ())

    def submit(self, candidate: Candidate, best_us: float | None) -> None:
        """Send a candidate with its cubin; it waits in the process of the GPU while an earlier one runs."""
        self._submitted.append((candidate, self._send("evaluate", [candidate], best_us=best_us)))

    def result(self) -> Finished:
        """Wait for the oldest candidate; a crash or a hang of the GPU's worker process is an outcome."""
        candidate, sent = self._submitted[0]
        reply = self._reply(sent)
        self._submitted.popleft()
        return Finished(candidate, self._evaluation(reply), self.uuid)

    def withdraw(self) -> None:
        """Forget the candidates without a result."""
        submitted, self._submitted = self._submitted, deque()
        for _, sent in submitted:
            sent.withdraw()

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int, expected_s: float
    ) -> list[RaceTimes] | None:
        """Time the candidates interleaved; None if the worker process of the GPU died."""
        return self._request("race", candidates, rounds=rounds, seed=seed, expected_s=expected_s).raced

    def draw_second_inputs(self, seed: int) -> None:
        """Draw a second set of inputs in the worker, and in its successors."""
        former = self._work
        self._work = replace(former, workload=replace(former.workload, verify_seed=seed))
        try:
            self._request("evaluate", ())
        except (InputError, ToolchainError):
            self._work = former
            raise

    def verify(self, candidate: Candidate, repeats: int, limit_s: float | None) -> Evaluation:
        """Run the candidate up to ``repeats`` times; a crash or a hang is an outcome."""
        return self._evaluation(self._request("verify", [candidate], repeats=repeats, limit_s=limit_s))

    def spare(self) -> None:
        """Return None: there is no other GPU."""

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Return no findings: the sanitizer runs on this machine's GPUs only."""
        return [[] for _ in candidates]

    def close(self) -> None:
        """Release the GPU to other sessions, and end what another thread waits for."""
        if self.is_closed:
            return
        self.is_closed = True
        self.withdraw()
        if self._running is not None:
            self._running.withdraw()
        self._send("close", ()).forget()

    def _evaluation(self, reply: Reply) -> Evaluation:
        if reply.evaluation is None:
            raise WorkerError(f"the reply of {self.uuid} holds no result")
        self.is_dead = reply.is_dead
        return reply.evaluation

    def _request(self, op: Operation, candidates: Sequence[Candidate], **fields: Any) -> Reply:
        self._running = self._send(op, candidates, **fields)
        return self._reply(self._running)

    def _reply(self, sent: Sent) -> Reply:
        try:
            return self._cluster.result(sent)
        except AbsentGpuError:
            self.was_absent = True
            raise

    def _send(self, op: Operation, candidates: Sequence[Candidate], **fields: Any) -> Sent:
        return self._cluster.send(self.uuid, op, candidates, self._work, **fields)


def _packed(candidate: Candidate, cubins: dict[str, bytes]) -> dict[str, Any]:
    """Return a candidate as plain data with hashes in place of its cubins, which are added to ``cubins``."""

    def packed(path: str) -> str:
        if not path:
            return ""
        content = Path(path).read_bytes()
        name = hashlib.sha256(content).hexdigest()
        cubins[name] = content
        return name

    others = [
        {"sizes": dict(one.sizes), "symbols": dict(one.symbols), "cubin_path": packed(one.cubin_path)}
        for one in candidate.others
    ]
    plain = {**candidate.to_json(), "config": dict(candidate.config), "computed": dict(candidate.computed)}
    return {**plain, "cubin_path": packed(candidate.cubin_path), "others": others}


class ClusterGpus(GpuGroup):
    """The GPUs of one model that the workers of a cluster offer; they may join and leave at any time.

    Parameters
    ----------
    cluster
        Connection to the scheduler, closed with this.
    work, recorded
        As for `RemoteGpu`.

    Raises
    ------
    InputError
        No GPU is offered, or all work for other sessions.
    """

    def __init__(self, cluster: Cluster, work: RemoteWork, recorded: ReplayBackend | None = None) -> None:
        self._cluster = cluster
        self.farm = cluster.compilers
        self._work = work
        self._recorded = recorded
        self._joined: dict[str, list[RemoteGpu]] = {}
        self._refused: set[str] = set()
        """GPUs of other models."""
        self._ending = threading.Event()
        self._alone_at = math.inf
        """Time since which no GPU is left, by `time.monotonic`."""
        super().__init__(self._first(), work.deadline_s)
        self._watch = threading.Thread(target=self._let_join, name="cluster", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Release the GPUs, and disconnect."""
        self._ending.set()
        self._watch.join()
        super().close()
        self._cluster.close()

    def _first(self) -> list[RemoteGpu]:
        """Wait for GPUs, and return those that are there."""
        end = time.monotonic() + _FIRST_GPU_S
        while time.monotonic() < end:
            if found := list(self._arriving(None)):
                self._cluster.compilers.look()
                return found
            time.sleep(_POLL_S)
        present = self._cluster.look()
        state = f"those there ({', '.join(present)}) work for other sessions" if present else "none joined"
        raise InputError(f"the scheduler has no GPU for this session: {state}; start `autotile worker` on a machine")

    def _let_join(self) -> None:
        while not self._ending.wait(_POLL_S):
            with suppress(AutotileError):  # of one that is not of this version
                for one in self._arriving(self.device):
                    self.add(one)

    def _arriving(self, model: DeviceProperties | None) -> Iterator[RemoteGpu]:
        """Yield the GPUs that are present, of the session's model, and not part of it."""
        for gpu in self._cluster.look():
            known = self._joined.setdefault(gpu, [])
            if gpu.startswith(SIMULATED) != (self._recorded is not None) or gpu in self._refused:
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
            one = RemoteGpu(self._cluster, gpu, reply.device, self._work, recorded=self._recorded)
            known.append(one)
            yield one

    def _description(self, gpu: str) -> Reply | None:
        """Return what a GPU says of itself; None if it says nothing."""
        try:
            return self._cluster.result(self._cluster.send(gpu, "describe", (), self._work), _DESCRIBE_S)
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
        if self._left():
            self._alone_at = math.inf
            return
        self._alone_at = min(self._alone_at, time.monotonic())
        if time.monotonic() - self._alone_at > _RETURN_S or not isinstance(self._error, AbsentGpuError):
            super()._raise_if_lost()


def cluster_backend(kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions) -> Backend:
    """Return the GPUs of the cluster that the options name.

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
    cluster = Cluster(options.scheduler, insecure=options.insecure)
    try:
        return ClusterGpus(cluster, work, recorded)
    except BaseException:
        cluster.close()
        raise
