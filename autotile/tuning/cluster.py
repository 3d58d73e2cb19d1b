"""GPUs of several machines in one session, through a scheduler of Dask; see `autotile.tuning.cluster_worker`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from autotile.tuning.gpu_comparison import GpuUse
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.options import TuneOptions
from autotile.tuning.problem_queue import Lane, open_lane
from autotile.tuning.replay import ReplayBackend, open_recording, replay_notice
from autotile.tuning.scheduler import check_scheduler, distributed
from autotile.workers.compile_pool import CompileFarm
from autotile.workers.protocol import Candidate, Evaluation, RaceTimes, Workload
from autotile.workers.sanitizer import Finding

_CONNECT_S = 10.0
_LOOK_S = 0.3
"""Time after which the scheduler is asked again for what it has."""
_FIRST_GPU_S = 60.0
"""Time that a session waits for a first GPU."""
_POLL_S = 1.0
"""Interval at which a session looks for GPUs that join or are gone."""
_ABSENT_S = 30.0
"""Time after which a GPU that is gone is given up; its nanny replaces a worker that died within seconds."""
_MAX_JOINS = 4
"""Times that a GPU joins a session, the first one included."""
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
    """Connection to a scheduler, which sessions may share.

    Parameters
    ----------
    address
        Address of the scheduler.
    insecure
        Whether the connection may leave the machine without TLS.

    Raises
    ------
    InputError
        The address is not allowed, or nothing answers there.
    """

    def __init__(self, address: str, *, insecure: bool) -> None:
        security = check_scheduler(address, insecure=insecure)
        self._address = address
        try:
            self._client = distributed.Client(
                address, security=security, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=False
            )
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            raise InputError(f"no scheduler answers at {address}: {error}; see `dask scheduler --help`") from None
        self._seen_at: dict[str, float] = {}
        """Time at which each GPU was seen last, by `time.monotonic`."""
        self._looking = threading.Lock()
        self._offers: tuple[float, list[Mapping[str, float]]] = (0.0, [])
        self.compilers = ClusterCompilers(self)

    def offers(self) -> list[Mapping[str, float]]:
        """Return the resources of each process of Dask that is present, as of some tenths of a second ago."""
        with self._looking:
            looked_at, found = self._offers
            if time.monotonic() - looked_at > _LOOK_S:
                found = self._read_offers()
                self._offers = time.monotonic(), found
        return found

    def _read_offers(self) -> list[Mapping[str, float]]:
        try:
            workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        except Exception:  # the scheduler is gone; any error of the connection says so
            return []
        return [worker.get("resources", {}) for worker in workers] if self._client.status == "running" else []

    def look(self) -> list[str]:
        """Return the UUIDs of the GPUs that are present."""
        found = [name for resources in self.offers() for name in resources if _is_gpu(name)]
        self._seen_at.update(dict.fromkeys(found, time.monotonic()))
        return sorted(set(found))

    def describe(self, gpu: str) -> Any:
        """Ask a GPU for its properties and whether it works for a session; return the future for `result`."""
        return self.submit(
            answer, encode_json({"op": "describe", "version": __version__, "session": ""}), {}, resource=gpu
        )

    def request(self, gpu: str, op: Operation, work: RemoteWork) -> Reply:
        """Send a request without a candidate, and wait for the reply; errors are those of `submit` and `result`."""
        return self.result(gpu, self.send(gpu, op, (), work))

    def send(self, gpu: str, op: Operation, candidates: Sequence[Candidate], work: RemoteWork, **fields: Any) -> Any:
        """Send a request with its cubins to a GPU, and return its future; other fields are those of `Request`.

        Raises
        ------
        WorkerError
            The connection is lost.
        """
        cubins: dict[str, bytes] = {}
        sent = [_packed(one, cubins) for one in candidates]
        common = {"version": __version__, **asdict(work)}
        return self.submit(
            answer, encode_json({"op": op, **common, "candidates": sent, **fields}), cubins, resource=gpu
        )

    def submit(self, function: Callable[..., Any], *arguments: Any, resource: str) -> Any:
        """Submit a task for a process that has a resource, and return its future.

        A GPU runs one task at a time, in the order of submission. If the process dies, the scheduler has the task run
        by its successor, or by another one with the resource.

        Raises
        ------
        WorkerError
            The connection is lost.
        """
        try:
            key = f"autotile-{uuid.uuid4().hex}"
            return self._client.submit(function, *arguments, key=key, resources={resource: 1}, pure=False)
        except Exception as error:
            raise WorkerError(f"the scheduler {self._address} is lost: {error}") from None

    def result(self, gpu: str, future: Any) -> Reply:
        """Wait for the reply to a request.

        Raises
        ------
        WorkerError
            The GPU or the scheduler is lost, or the session ends.
        InputError, ToolchainError
            The GPU cannot be set up for the session.
        """
        while True:
            try:
                reply = decode_json(future.result(timeout=_POLL_S), Reply)
                break
            except TimeoutError:
                absent_s = time.monotonic() - self._seen_at.get(gpu, 0.0)
                if absent_s > _ABSENT_S + _POLL_S:
                    future.cancel()
                    raise WorkerError(f"the cluster has lost {gpu}: it is absent for {absent_s:.0f} s") from None
            except (asyncio.CancelledError, concurrent.futures.CancelledError):
                raise WorkerError(
                    f"a request to {gpu} was cancelled, as the session ends or the scheduler died"
                ) from None
            except AutotileError:
                raise
            except Exception as error:  # whatever Dask raises where a process died again and again
                raise WorkerError(f"{gpu}: {type(error).__name__}: {error}") from None
        if reply.error:
            raise {"input": InputError, "toolchain": ToolchainError}.get(reply.kind, WorkerError)(reply.error)
        return reply

    def forget(self, future: Any) -> None:
        """Have a request answered although nobody waits for the reply."""
        distributed.fire_and_forget(future)

    def close(self) -> None:
        """Disconnect; the scheduler drops what is not done."""
        self.compilers.close()
        self._client.close(timeout=_CONNECT_S)


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
        self._submitted: deque[tuple[Candidate, Any]] = deque()
        """Candidates without a result and their futures, oldest first."""
        self._running: Any = None
        """Future that another method waits for."""

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
        candidate, future = self._submitted[0]
        reply = self._cluster.result(self.uuid, future)
        self._submitted.popleft()
        return Finished(candidate, self._evaluation(reply), self.uuid)

    def withdraw(self) -> None:
        """Forget the candidates without a result."""
        submitted, self._submitted = self._submitted, deque()
        for _, future in submitted:
            _cancel(future)

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
        _cancel(self._running)
        try:
            self._cluster.forget(self._send("close", ()))
        except WorkerError:
            return

    def _evaluation(self, reply: Reply) -> Evaluation:
        if reply.evaluation is None:
            raise WorkerError(f"the reply of {self.uuid} holds no result")
        self.is_dead = reply.is_dead
        return reply.evaluation

    def _request(self, op: Operation, candidates: Sequence[Candidate], **fields: Any) -> Reply:
        self._running = self._send(op, candidates, **fields)
        return self._cluster.result(self.uuid, self._running)

    def _send(self, op: Operation, candidates: Sequence[Candidate], **fields: Any) -> Any:
        return self._cluster.send(self.uuid, op, candidates, self._work, **fields)


def _cancel(future: Any) -> None:
    if future is not None and not future.done():
        try:
            future.cancel()
        except Exception:  # the connection is closed, and the future with it
            return


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
        super().__init__(self._first(), work.deadline_s)
        self._watch = threading.Thread(target=self._let_join, name="cluster", daemon=True)
        self._watch.start()

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
                return found
            time.sleep(_POLL_S)
        raise no_gpu_error([str(gpu) for gpu in self._lane.devices])

    def _let_join(self) -> None:
        while not self._ending.wait(_POLL_S):
            try:
                for one in self._arriving(self.device):
                    self.add(one)
            except AutotileError:  # of one that is gone again
                continue

    def _arriving(self, model: DeviceProperties | None) -> Iterator[RemoteGpu]:
        """Yield the GPUs that are present, of the session's model, and not part of it."""
        present = self._cluster.look()
        for gpu in map(str, self._lane.devices):
            known = self._joined.setdefault(gpu, [])
            if gpu not in present or gpu in self._refused:
                continue
            if len(known) >= _MAX_JOINS or (known and not known[-1].is_closed):
                continue
            reply = self._cluster.request(gpu, "describe", self._work)
            if reply.is_busy or reply.device is None:
                continue
            model = model or reply.device
            if (reply.device.name, reply.device.compute_capability) != (model.name, model.compute_capability):
                self._refused.add(gpu)
                continue
            one = RemoteGpu(self._cluster, gpu, reply.device, self._work, recorded=self._recorded)
            known.append(one)
            yield one


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
