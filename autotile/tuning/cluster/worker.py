"""The worker's end of a cluster: a process of Dask for each GPU, which passes requests on to the GPU's worker."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Outcome
from autotile.core.text import plural
from autotile.cuda.cublas import cublas_version
from autotile.cuda.driver import device_uuid, live_device
from autotile.errors import AutotileError, InputError, ToolchainError, WorkerError
from autotile.exchange.recording import Recording, read_recording, read_recording_header
from autotile.settings import read_settings, user_path
from autotile.tuning.backend import Backend, LiveBackend
from autotile.tuning.cluster.compilers import COMPILERS, CompilerPlugin, toolchain
from autotile.tuning.cluster.scheduler import WorkerPlugin, check_scheduler, distributed, ignore_interrupts
from autotile.tuning.replay import SimulatedGpu
from autotile.workers.child import Child, WorkerPool
from autotile.workers.gpu import GPU_WORKER, Gpu
from autotile.workers.protocol import Candidate, Evaluation, LibraryCall, RaceTimes, Workload

SIMULATED = "simulated-"
"""Prefix of the names of GPUs that replay a recording."""
_PLUGIN = "autotile-gpu"
_LEASE_S = 120.0
"""Time without a request after which another session may take a GPU; one that has nothing for it asks what it is."""
_MAX_CUBINS = 256
"""Cubins of a session that are kept: a GPU runs an earlier candidate again to find out whether it is at fault."""
_RETRY_S = 2.0
"""Time until a worker that the scheduler has lost joins again."""
_START_S = 30.0
_IDLE_S = 30.0
"""Time for which the GPU worker waits for the next session; it takes seconds to start."""

Operation = Literal["describe", "evaluate", "verify", "race", "contest", "sweep", "close"]


class Request(msgspec.Struct):
    """A request of a session to a GPU. It is complete: a worker that was replaced answers it like the first one.

    The path of each cubin is its SHA-256 hash; its content is sent along. A contest has a workload for each candidate.
    """

    op: Operation
    version: str
    session: str
    kernel: str = ""
    workload: Workload | None = None
    deadline_s: float = 0.0
    candidates: list[Candidate] = []
    best_us: float | None = None
    rounds: int = 1
    repeats: int = 1
    seed: int = 0
    expected_s: float = 0.0
    limit_s: float | None = None
    workloads: list[Workload] = []
    libraries: list[LibraryCall] = []
    message: dict[str, Any] = {}
    """Request of a sweep, as the GPU worker takes it."""
    versions: dict[str, str] = {}
    """Versions of the libraries that it times."""


class Reply(msgspec.Struct):
    """Reply to a request; ``error`` and its kind are set if it failed.

    ``is_dead`` is whether the GPU's worker process died with the candidate, ``is_busy`` whether another session has the
    GPU.
    """

    error: str = ""
    kind: str = ""
    is_dead: bool = False
    is_busy: bool = False
    device: DeviceProperties | None = None
    evaluation: Evaluation | None = None
    raced: list[RaceTimes] | None = None
    versions: list[str] = []
    """Version of each library of a contest; empty if the machine lacks it."""
    swept: dict[str, Any] | None = None
    """Reply of the GPU worker to a sweep."""
    failure: str = ""
    """Why it died with it, in which stage."""
    stage: str = ""


@dataclass(frozen=True, slots=True)
class OfferedGpu:
    """A GPU that a machine offers: one of its own, or one that replays a recording."""

    uuid: str
    device: DeviceProperties
    index: int = 0
    recordings: tuple[str, ...] = ()
    """Files that a simulated GPU replays, one a problem."""
    seconds: float = 0.0
    """Time that a simulated GPU takes for a candidate."""


class GpuPlugin(WorkerPlugin):  # type: ignore[misc]
    """A GPU, held by a process of Dask.

    Parameters
    ----------
    gpu
        The GPU.
    """

    name = _PLUGIN

    def __init__(self, gpu: OfferedGpu) -> None:
        self._gpu = gpu
        self._backend: Backend | None = None
        self._session = ""
        self._workload: Workload | None = None
        self._used_at = 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: Child | None = None
        """GPU worker of a sweep."""
        self._workers: WorkerPool | None = None
        """The GPU worker between two sessions."""
        self._idle: threading.Timer | None = None

    def setup(self, worker: Any) -> None:
        """Leave Ctrl-C, which reaches all processes of a terminal, to the nanny, which ends this one."""
        ignore_interrupts(worker)

    def teardown(self, worker: Any) -> None:
        """End the GPU's worker process."""
        self._end()
        self._end_idle()

    def handle(self, request: Request, cubins: Mapping[str, bytes]) -> Reply:
        """Answer a request; requests come one at a time, as each takes the one resource of this process."""
        if request.version != __version__:
            raise InputError(f"{self._gpu.uuid} runs autotile {__version__}, the session {request.version}")
        is_busy = bool(self._session) and self._session != request.session
        is_busy &= time.monotonic() - self._used_at < _LEASE_S
        if request.op == "describe":
            if self._session == request.session:
                self._used_at = time.monotonic()
            return Reply(device=self._gpu.device, is_busy=is_busy)
        if request.op == "close":
            if self._session == request.session:
                self._end()
            return Reply()
        if is_busy:
            raise WorkerError(f"{self._gpu.uuid} works for another session")
        self._used_at = time.monotonic()
        if request.op == "contest":
            return self._contest(request, cubins)
        if request.op == "sweep":
            return self._sweep(request, cubins)
        backend = self._opened(request)
        try:
            return self._run(backend, request, [self._stored(one, cubins) for one in request.candidates])
        except AutotileError:
            self._end()
            raise
        finally:
            self._used_at = time.monotonic()

    def _run(self, backend: Backend, request: Request, candidates: Sequence[Candidate]) -> Reply:
        if request.op == "race":
            return Reply(raced=backend.race(candidates, request.rounds, request.seed, request.expected_s))
        if not candidates:  # the session only waits for the GPU
            return Reply()
        if request.op == "verify":
            evaluation = backend.verify(candidates[0], request.repeats, request.limit_s)
        else:
            backend.submit(candidates[0], request.best_us)
            evaluation = backend.result().evaluation
        died = backend.is_dead and evaluation.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        return Reply(evaluation=replace(evaluation, began_at=0.0), is_dead=died)

    def _contest(self, request: Request, cubins: Mapping[str, bytes]) -> Reply:
        """Race candidates of several kernels and the libraries that this machine has."""
        self._end()
        self._end_idle()
        self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        try:
            workloads = [self._on_this_machine(one) for one in request.workloads]
            entries = list(zip(workloads, [self._stored(one, cubins) for one in request.candidates], strict=True))
            versions = [_library_version(one.library) for one in request.libraries]
            calls = [one for one, version in zip(request.libraries, versions, strict=True) if version]
            with closing(Gpu(workloads[0], request.deadline_s)) as gpu:
                found = gpu.contest(entries, calls, request.rounds, request.seed, expected_s=request.expected_s)
        finally:
            self._end()
        timed = iter(found[len(entries) :])
        absent = RaceTimes((), Outcome.CRASHED, f"{socket.gethostname()} does not have it")
        raced = [*found[: len(entries)], *(next(timed) if version else absent for version in versions)]
        return Reply(raced=raced, versions=versions)

    def _sweep(self, request: Request, cubins: Mapping[str, bytes]) -> Reply:
        """Pass a request on to the GPU worker, with the cubins as files."""
        for name, version in request.versions.items():
            if (own := _library_version(name)) != version:
                host = socket.gethostname()
                raise ToolchainError(f"{host} has {name} {own or 'not installed'}, and the session {version}")
        if self._session != request.session:
            self._end()
            self._end_idle()
            self._session = request.session
            self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        settings, message = read_settings(), request.message
        here = {"cache": str(settings.cache), "cache_limit_bytes": settings.cache_limit_bytes}
        entries = [{**one, "cubin_path": self._file(one["cubin_path"], cubins)} for one in message["entries"]]
        setup = {**message["setup"], **here, "device_index": self._gpu.index}
        self._child = self._child or Child(GPU_WORKER)
        try:
            swept = self._child.request({**message, "setup": setup, "entries": entries}, request.deadline_s)
        except WorkerError as error:
            self._end_child()
            return Reply(failure=str(error), stage=error.stage)
        if swept.get("last"):
            self._end_child()
        return Reply(swept=swept)

    def _on_this_machine(self, workload: Workload) -> Workload:
        settings = read_settings()
        return replace(
            workload,
            device_index=self._gpu.index,
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
        )

    def _opened(self, request: Request) -> Backend:
        """Return the GPU, set up for the session's problem."""
        workload = request.workload
        if workload is None:
            raise WorkerError("the request states no problem")
        if self._backend is not None and self._session == request.session:
            if workload.verify_seed and workload != self._workload:
                self._backend.draw_second_inputs(workload.verify_seed)
                self._workload = workload
            return self._backend
        self._end()
        self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        backend = self._start(request, workload)
        self._backend, self._session, self._workload = backend, request.session, workload
        try:
            backend.wait()
        except BaseException:
            self._end()
            raise
        return backend

    def _start(self, request: Request, asked: Workload) -> Backend:
        if self._gpu.recordings:
            return SimulatedGpu(
                self._recording_of(request.kernel, asked), uuid=self._gpu.uuid, seconds=self._gpu.seconds
            )
        if self._idle is not None:
            self._idle.cancel()
        self._workers = self._workers or WorkerPool()
        gpu = Gpu(self._on_this_machine(asked), request.deadline_s, worker_pool=self._workers)
        return LiveBackend(gpu, self._gpu.device, uuid=self._gpu.uuid)

    def _recording_of(self, kernel: str, workload: Workload) -> Recording:
        found = {file: read_recording_header(Path(file)).problem for file in self._gpu.recordings}
        asked = (kernel, dict(workload.sizes), workload.dtype)
        for file, problem in found.items():
            if (problem.kernel, dict(problem.sizes), problem.dtype) == asked:
                return read_recording(Path(file))
        known = "; ".join(map(str, found.values()))
        raise InputError(f"{self._gpu.uuid} replays recordings of {known}, not of the session's problem")

    def _stored(self, candidate: Candidate, cubins: Mapping[str, bytes]) -> Candidate:
        """Return a candidate whose cubins are files of this machine."""
        others = tuple(replace(one, cubin_path=self._file(one.cubin_path, cubins)) for one in candidate.others)
        return replace(candidate, cubin_path=self._file(candidate.cubin_path, cubins), others=others)

    def _file(self, name: str, cubins: Mapping[str, bytes]) -> str:
        if not name:  # of a replay
            return ""
        content = cubins.get(name, b"")
        if hashlib.sha256(content).hexdigest() != name:
            raise WorkerError("a cubin arrived damaged")
        assert self._folder is not None
        folder = Path(self._folder.name)
        path = folder / f"{name}.cubin"
        if not path.exists():
            kept = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
            for file in kept[: max(0, len(kept) - _MAX_CUBINS)]:
                file.unlink()
            path.write_bytes(content)
        return str(path)

    def _end(self) -> None:
        self._end_child()
        backend, self._backend, self._session = self._backend, None, ""
        if backend is not None:
            backend.close()
            self._idle = threading.Timer(_IDLE_S, self._end_idle)
            self._idle.daemon = True
            self._idle.start()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def _end_idle(self) -> None:
        """End the GPU worker that waits for the next session, as it keeps memory of the GPU."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _library_version(name: str) -> str:
    """Return the version of a library of `autotile.kernel.operation.LIBRARIES`; empty if it is not installed."""
    try:
        return cublas_version() if name == "cublas" else ""
    except ToolchainError:
        return ""


def answer(text: str, cubins: Mapping[str, bytes]) -> str:
    """Answer a request on the GPU of this process of Dask; the task that a session submits.

    Parameters
    ----------
    text
        A `Request` as JSON.
    cubins
        Contents of its cubins by their SHA-256 hashes.

    Returns
    -------
    str
        A `Reply` as JSON.
    """
    plugin = cast("GpuPlugin", distributed.get_worker().plugins[_PLUGIN])
    try:
        reply = plugin.handle(decode_json(text, Request), cubins)
    except AutotileError as error:
        kinds = {InputError: "input", ToolchainError: "toolchain"}
        kind = next((name for one, name in kinds.items() if isinstance(error, one)), "")
        reply = Reply(error=str(error), kind=kind)
    return encode_json(msgspec.to_builtins(reply))


def live_gpus(indices: Sequence[int]) -> list[OfferedGpu]:
    """Return GPUs of this machine."""
    return [OfferedGpu(device_uuid(index), live_device(index), index) for index in indices]


def replayed_gpus(recording: Path, numbers: Sequence[int], seconds: float) -> list[OfferedGpu]:
    """Return GPUs that replay a recording, or those of a folder; each takes so many seconds for a candidate.

    Raises
    ------
    InputError
        There is no recording, one cannot be read, or they are of several GPUs.
    """
    recording = user_path(recording, "a recording")
    files = sorted(recording.glob("*.npz")) if recording.is_dir() else [recording]
    if not files:
        raise InputError(f"there is no recording (*.npz) in {recording}")
    devices = {file: SimulatedGpu(read_recording(file)).device for file in files}
    device = devices[files[0]]
    if any(one.name != device.name for one in devices.values()):
        raise InputError(f"the recordings in {recording} are of several GPUs; give each model a worker of its own")
    host, paths = socket.gethostname(), tuple(str(file.absolute()) for file in files)
    return [OfferedGpu(f"{SIMULATED}{host}-{n}", device, n, paths, seconds) for n in numbers]


@dataclass(frozen=True, slots=True)
class _Offer:
    """A process of Dask that a machine offers."""

    name: str
    resources: Mapping[str, float]
    plugin: WorkerPlugin
    threads: int = 1

    @classmethod
    def of_gpu(cls, gpu: OfferedGpu) -> _Offer:
        return cls(f"{gpu.uuid} ({gpu.device.name})", {gpu.uuid: 1, gpu.device.name: 1}, GpuPlugin(gpu))

    @classmethod
    def of_compilers(cls, count: int) -> _Offer:
        resource = COMPILERS + toolchain()
        return cls(f"{plural(count, 'core')} to {resource}", {resource: count}, CompilerPlugin(count), threads=count)


def offer(
    scheduler: str,
    gpus: Sequence[OfferedGpu],
    observe: Callable[[str], None],
    *,
    compilers: int = 0,
    insecure: bool,
) -> None:
    """Offer GPUs and compilers to the sessions of a scheduler until Ctrl-C or SIGTERM.

    Each GPU has a process of Dask with a nanny, which replaces it when it dies, and all compilers have one. One that
    has lost the scheduler tries to join again.

    Parameters
    ----------
    scheduler
        Address such as ``tls://host:8786``.
    gpus
        The GPUs.
    observe
        Called with one line for the user.
    compilers
        Number of compilations at the same time; 0 for none.
    insecure
        Whether the connection may leave the machine without TLS.

    Raises
    ------
    InputError
        As for `check_scheduler`.
    """
    security = check_scheduler(scheduler, insecure=insecure)
    offers = [*map(_Offer.of_gpu, gpus), *([_Offer.of_compilers(compilers)] if compilers else [])]
    asyncio.run(_offer(scheduler, offers, observe, security))


async def _offer(
    scheduler: str, offers: Sequence[_Offer], observe: Callable[[str], None], security: distributed.Security
) -> None:
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(_keep_offering(scheduler, one, observe, security)) for one in offers]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_offering(
    scheduler: str, one: _Offer, observe: Callable[[str], None], security: distributed.Security
) -> None:
    while True:
        nanny = distributed.Nanny(
            scheduler,
            nthreads=one.threads,
            memory_limit=0,
            resources=dict(one.resources),
            plugins=(one.plugin,),
            security=security,
            dashboard=False,
            death_timeout=_START_S,
            local_directory=tempfile.gettempdir(),
        )
        try:
            await nanny
            observe(f"{one.name}: offered to {scheduler}")
            await nanny.finished()
            observe(f"{one.name}: the scheduler is lost; it joins again when it is back")
        except Exception as error:  # whatever Dask raises, the GPU is offered again
            observe(f"{one.name}: {type(error).__name__}: {error}; the scheduler is tried again")
        finally:
            with suppress(Exception):
                await nanny.close()
        await asyncio.sleep(_RETRY_S)
