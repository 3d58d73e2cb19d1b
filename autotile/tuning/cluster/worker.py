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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

from autotile.core.device import DeviceProperties
from autotile.core.documents import decode_json, encode_json, to_fields
from autotile.core.text import plural
from autotile.cuda.driver import device_uuid, live_device
from autotile.errors import AutotileError, InputError, WorkerError
from autotile.exchange.recording import read_recording, read_recording_header
from autotile.settings import read_settings, user_path
from autotile.tuning.cluster.compilers import COMPILERS, CompilerPlugin, toolchain
from autotile.tuning.cluster.connection import WorkerPlugin, check_scheduler, distributed, ignore_interrupts, local_host
from autotile.tuning.replay import ReplayBackend
from autotile.version import __version__
from autotile.workers.child import WorkerPool, fault_reply
from autotile.workers.gpu import Backend, Gpu
from autotile.workers.jobs import Reading, Workload, read_job, with_files

_PLUGIN = "autotile-gpu"
_LEASE_S = 120.0
"""Time without a request after which another session may take a GPU; one that has nothing for it asks what it is."""
_MAX_CUBINS = 256
"""Cubins of a session that are kept: a GPU runs an earlier candidate again to find out whether it is at fault."""
_RETRY_S = 2.0
"""Time until a worker that the scheduler has lost joins again."""
_FIRST_ANSWER_S = 5.0
"""Time after which the user is told that the scheduler does not answer yet."""
_START_S = 30.0
"""Time in which a scheduler answers that is started at the same time, and in which a process of Dask joins it."""
_HTTP_ADDRESS = "127.0.0.1:0"
"""Address of the HTTP server that each worker of Dask starts, without TLS; nothing uses it."""
_IDLE_S = 30.0
"""Time for which the GPU worker waits for the next session; it takes seconds to start."""
SIMULATED = "simulated-"
"""Prefix of the names of GPUs that replay a recording."""
Operation = Literal["describe", "open", "run", "close"]


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """A request of a session to a GPU. It is complete: a worker that was replaced answers it like the first one.

    The path of each cubin of its job is the SHA-256 hash of the content, which is sent along.
    """

    kernel: str = ""
    workload: Workload | None = None
    """The session's problem; None if each entry of its jobs has one of its own."""
    deadline_s: float = 0.0
    """Time after which the worker of a candidate is killed."""
    session: str = field(default_factory=lambda: uuid4().hex)
    """The session, for which a GPU works until it is closed."""
    op: Operation = "describe"
    job: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True, slots=True)
class GpuReply:
    """Reply to a request that has not failed.

    ``is_busy`` is whether another session has the GPU. There are no readings of a race that broke.
    """

    is_busy: bool = False
    device: DeviceProperties | None = None
    readings: list[Reading] = field(default_factory=list)


@dataclass(eq=False)
class GpuPlugin(WorkerPlugin):  # type: ignore[misc]
    """A GPU that a machine offers, one of its own or one that replays a recording, held by a process of Dask.

    ``recordings`` are the files that a simulated GPU replays, one a problem, and ``seconds`` is the time that it takes
    for a candidate.
    """

    name = _PLUGIN
    setup = staticmethod(ignore_interrupts)
    """Leave Ctrl-C, which reaches all processes of a terminal, to the nanny, which ends this one."""

    uuid: str
    device: DeviceProperties
    index: int = 0
    recordings: Sequence[str] = ()
    seconds: float = 0.0
    _backend: Backend | None = None
    _session: str = ""
    _used_at: float = 0.0
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _workers: WorkerPool | None = None
    """The GPU worker between two sessions."""
    _idle: threading.Timer | None = None

    def teardown(self, worker: Any) -> None:
        """End the GPU's worker process."""
        self._end()
        self._end_idle()

    def handle(self, request: GpuRequest, cubins: Mapping[str, bytes]) -> GpuReply:
        """Answer a request; requests come one at a time, as each takes the one resource of this process."""
        if request.version != __version__:
            raise InputError(f"{self.uuid} runs autotile {__version__}, the session {request.version}")
        is_own = self._session == request.session
        is_busy = bool(self._session) and not is_own and time.monotonic() - self._used_at < _LEASE_S
        if request.op == "describe":
            if is_own:
                self._used_at = time.monotonic()
            return GpuReply(device=self.device, is_busy=is_busy)
        if request.op == "close":
            if is_own:
                self._end()
            return GpuReply()
        if is_busy:
            return GpuReply(is_busy=True)
        self._used_at = time.monotonic()
        try:
            if not is_own:
                self._open(request)
            return self._run(request, cubins) if request.op == "run" else GpuReply()
        except BaseException:
            self._end()
            raise
        finally:
            self._used_at = time.monotonic()

    def _open(self, request: GpuRequest) -> None:
        self._end()
        self._session = request.session
        self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        asked, uuid = request.workload, self.uuid
        if self.recordings and asked is not None:
            found = {file: read_recording_header(Path(file)).problem for file in self.recordings}
            wanted = request.kernel, {**asked.sizes}, asked.dtype
            same = [file for file, of in found.items() if (of.kernel, {**of.sizes}, of.dtype) == wanted]
            if not same:
                known = "; ".join(map(str, found.values()))
                raise InputError(f"{uuid} replays recordings of {known}, not of the session's problem")
            self._backend = ReplayBackend(read_recording(Path(same[0])), uuid=uuid, seconds=self.seconds)
        else:
            if self._idle is not None:
                self._idle.cancel()
            self._workers = self._workers or WorkerPool()
            self._backend = Gpu(
                self._on_this_machine(asked) if asked is not None else None,
                request.deadline_s,
                worker_pool=self._workers,
                device_index=self.index,
                uuid=uuid,
            )
        self._backend.wait()

    def _run(self, request: GpuRequest, cubins: Mapping[str, bytes]) -> GpuReply:
        job = with_files(read_job(request.job), lambda name: self._file(name, cubins), self._on_this_machine)
        assert self._backend is not None
        readings = self._backend.run(job)
        return GpuReply(readings=[replace(one, began_at=0.0) for one in readings])  # by the clock of this machine

    def _on_this_machine(self, workload: Workload) -> Workload:
        settings, index = read_settings(), self.index
        limit_bytes = settings.cache_limit_bytes
        return replace(workload, device_index=index, cache=str(settings.cache), cache_limit_bytes=limit_bytes)

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
        backend, self._backend, self._session = self._backend, None, ""
        if backend is not None:
            backend.close()
            if self._workers is not None:
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


def answer(text: str, cubins: Mapping[str, bytes]) -> str:
    """Answer a request on the GPU of this process of Dask; the task that a session submits.

    ``text`` is a `GpuRequest` as JSON, ``cubins`` are the contents of its cubins by their SHA-256 hashes; the result is
    a `GpuReply` as JSON, or that of `fault_reply`.
    """
    plugin = cast("GpuPlugin", distributed.get_worker().plugins[_PLUGIN])
    try:
        reply = to_fields(plugin.handle(decode_json(text, GpuRequest), cubins))
    except AutotileError as error:
        reply = fault_reply(error)
    except Exception as error:  # Dask cannot send each one, and the session would wait for it
        reply = {"error": f"{type(error).__name__}: {error}"}
    return encode_json(reply)


def live_gpus(indices: Sequence[int]) -> list[GpuPlugin]:
    """Return GPUs of this machine."""
    return [GpuPlugin(device_uuid(index), live_device(index), index) for index in indices]


def replayed_gpus(recording: Path, numbers: Sequence[int], seconds: float) -> list[GpuPlugin]:
    """Return GPUs that replay a recording, or those of a folder; each takes so many seconds for a candidate.

    Raise `InputError` if there is no recording, one cannot be read, or they are of several GPUs.
    """
    recording = user_path(recording, "a recording")
    files = sorted(recording.glob("*.npz")) if recording.is_dir() else [recording]
    if not files:
        raise InputError(f"there is no recording (*.npz) in {recording}")
    device, *others = [ReplayBackend(read_recording(file)).device for file in files]
    if any(one.name != device.name for one in others):
        raise InputError(f"the recordings in {recording} are of several GPUs; give each model a worker of its own")
    host, paths = socket.gethostname(), tuple(str(file.absolute()) for file in files)
    return [GpuPlugin(f"{SIMULATED}{host}-{n}", device, n, paths, seconds) for n in numbers]


def offer(
    scheduler: str, gpus: Sequence[GpuPlugin], observe: Callable[[str], None], *, compilers: int = 0, insecure: bool
) -> None:
    """Offer GPUs and compilers to the sessions of a scheduler until Ctrl-C or SIGTERM.

    Each GPU has a process of Dask with a nanny, which replaces it when it dies, and all compilers have one. They listen
    on the interface by which this machine reaches the scheduler. One that has lost the scheduler tries to join again.

    ``observe`` is called with lines for the user, and ``compilers`` is the number of compilations at the same time.
    Raise `InputError` as `check_scheduler` does, or if no scheduler answers.
    """
    security = check_scheduler(scheduler, insecure=insecure)
    offers: dict[str, Mapping[str, Any]] = {}
    """Arguments of the nanny of each process of Dask, by the name that the user is told."""
    for gpu in gpus:
        resources, plugins = {gpu.uuid: 1, gpu.device.name: 1}, (gpu,)
        offers[f"{gpu.uuid} ({gpu.device.name})"] = {"resources": resources, "plugins": plugins, "nthreads": 1}
    if compilers:
        resource = COMPILERS + toolchain()
        given = {"resources": {resource: compilers}, "plugins": (CompilerPlugin(compilers),), "nthreads": compilers}
        offers[f"{plural(compilers, 'core')} to {resource}"] = given

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(local_host(scheduler, security, _FIRST_ANSWER_S))]
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
        with suppress(asyncio.CancelledError):
            try:
                await tasks[0]
            except InputError:  # one that is started at the same time as this program is waited for
                left_s = _START_S - _FIRST_ANSWER_S
                observe(f"no scheduler answers at {scheduler} yet; it is tried for another {left_s:.0f} s")
                tasks.append(asyncio.create_task(local_host(scheduler, security, left_s)))
                await tasks[-1]
            for name, given in offers.items():
                tasks.append(asyncio.create_task(_keep_offering(scheduler, name, given, observe, security)))
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


async def _keep_offering(
    scheduler: str, name: str, given: Mapping[str, Any], observe: Callable[[str], None], security: distributed.Security
) -> None:
    said = ""
    while True:
        try:
            host = await local_host(scheduler, security, _START_S)
        except InputError:  # it was there before: its loss was reported
            await asyncio.sleep(_RETRY_S)
            continue
        nanny = distributed.Nanny(
            scheduler,
            host=host,
            memory_limit=0,
            security=security,
            dashboard=False,
            dashboard_address=_HTTP_ADDRESS,
            death_timeout=_START_S,
            local_directory=tempfile.gettempdir(),
            **given,
        )
        try:
            await nanny
            observe(f"{name}: offered to {scheduler}")
            said = ""
            await nanny.finished()
            observe(f"{name}: the scheduler is lost; it joins again when it is back")
        except Exception as error:  # whatever Dask raises, the GPU is offered again
            text = f"{name}: {type(error).__name__}: {error}; it is tried again"
            if text != said:
                observe(text)
            said = text
        finally:
            with suppress(Exception):
                await nanny.close()
        await asyncio.sleep(_RETRY_S)
