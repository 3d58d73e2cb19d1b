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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from autotile.core.device import DeviceProperties
from autotile.core.documents import decode_json, encode_json
from autotile.core.model import Outcome
from autotile.core.text import plural
from autotile.cuda.driver import device_uuid, live_device
from autotile.errors import AutotileError, InputError, ToolchainError, WorkerError
from autotile.exchange.recording import Recording, read_recording, read_recording_header
from autotile.settings import read_settings, user_path
from autotile.tuning.backend import Backend, LiveBackend
from autotile.tuning.cluster.compilers import COMPILERS, CompilerPlugin, toolchain
from autotile.tuning.cluster.connection import SIMULATED, Reply, Request
from autotile.tuning.cluster.scheduler import (
    WorkerPlugin,
    check_scheduler,
    distributed,
    ignore_interrupts,
    local_host,
)
from autotile.tuning.replay import SimulatedGpu
from autotile.version import __version__
from autotile.workers.child import WorkerPool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Check, Job, Race, Time, Workload, read_job, with_files

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
        self._used_at = 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._bare: Gpu | None = None
        """GPU of a session whose entries have problems of their own."""
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
        try:
            if request.workload is None:
                return self._run_bare(request, cubins)
            return self._run(self._opened(request, request.workload), request, cubins)
        except AutotileError:
            self._end()
            raise
        finally:
            self._used_at = time.monotonic()

    def _run(self, backend: Backend, request: Request, cubins: Mapping[str, bytes]) -> Reply:
        """Run a job on the session's problem."""
        if request.op == "open":
            return Reply()
        job = self._moved(request, cubins)
        if isinstance(job, Race):
            return Reply(readings=backend.race(job, request.expected_s))
        (entry,) = job.entries
        if isinstance(job, Check):
            reading = backend.check(job)
        else:
            assert entry.candidate is not None
            backend.submit(entry.candidate, entry.limit_us)
            reading = backend.result().reading
        died = backend.is_dead and reading.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT)
        return Reply(readings=[replace(reading, began_at=0.0)], is_dead=died)

    def _run_bare(self, request: Request, cubins: Mapping[str, bytes]) -> Reply:
        """Run a job whose entries have problems of their own."""
        if self._session != request.session:
            self._end()
            self._end_idle()
            self._session = request.session
            self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        if request.op == "open":
            return Reply()
        self._bare = self._bare or Gpu(None, request.deadline_s, device_index=self._gpu.index)
        job = self._moved(request, cubins)
        if isinstance(job, Race):
            return Reply(readings=self._bare.race(job, expected_s=request.expected_s))
        return Reply(readings=self._bare.time(job) if isinstance(job, Time) else self._bare.check(job))

    def _moved(self, request: Request, cubins: Mapping[str, bytes]) -> Job:
        """Return the job of a request with the folders of this machine, and its cubins as files."""
        return with_files(read_job(request.job), lambda name: self._file(name, cubins), self._on_this_machine)

    def _on_this_machine(self, workload: Workload) -> Workload:
        settings = read_settings()
        return replace(
            workload,
            device_index=self._gpu.index,
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
        )

    def _opened(self, request: Request, workload: Workload) -> Backend:
        """Return the GPU, set up for the session's problem."""
        if self._backend is not None and self._session == request.session:
            return self._backend
        self._end()
        self._folder = tempfile.TemporaryDirectory(prefix="autotile-cluster-")
        backend = self._start(request, workload)
        self._backend, self._session = backend, request.session
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
        bare, self._bare = self._bare, None
        if bare is not None:
            bare.close()
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
    except Exception as error:  # Dask cannot send each one, and the session would wait for it
        reply = Reply(error=f"{type(error).__name__}: {error}")
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

    Each GPU has a process of Dask with a nanny, which replaces it when it dies, and all compilers have one. They listen
    on the interface by which this machine reaches the scheduler. One that has lost the scheduler tries to join again.

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
        As for `check_scheduler`; or no scheduler answers.
    """
    security = check_scheduler(scheduler, insecure=insecure)
    offers = [*map(_Offer.of_gpu, gpus), *([_Offer.of_compilers(compilers)] if compilers else [])]
    asyncio.run(_offer(scheduler, offers, observe, security))


async def _offer(
    scheduler: str, offers: Sequence[_Offer], observe: Callable[[str], None], security: distributed.Security
) -> None:
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(_await_scheduler(scheduler, observe, security))]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: [task.cancel() for task in tasks])
    with suppress(asyncio.CancelledError):
        await tasks[0]
        tasks += [asyncio.create_task(_keep_offering(scheduler, one, observe, security)) for one in offers]
        await asyncio.gather(*tasks, return_exceptions=True)


async def _await_scheduler(scheduler: str, observe: Callable[[str], None], security: distributed.Security) -> None:
    """Wait for a scheduler that is started at the same time as this program."""
    try:
        await local_host(scheduler, security, _FIRST_ANSWER_S)
    except InputError:
        left_s = _START_S - _FIRST_ANSWER_S
        observe(f"no scheduler answers at {scheduler} yet; it is tried for another {left_s:.0f} s")
        await local_host(scheduler, security, left_s)


async def _keep_offering(
    scheduler: str, one: _Offer, observe: Callable[[str], None], security: distributed.Security
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
            nthreads=one.threads,
            memory_limit=0,
            resources=dict(one.resources),
            plugins=(one.plugin,),
            security=security,
            dashboard=False,
            dashboard_address=_HTTP_ADDRESS,
            death_timeout=_START_S,
            local_directory=tempfile.gettempdir(),
        )
        try:
            await nanny
            observe(f"{one.name}: offered to {scheduler}")
            said = ""
            await nanny.finished()
            observe(f"{one.name}: the scheduler is lost; it joins again when it is back")
        except Exception as error:  # whatever Dask raises, the GPU is offered again
            text = f"{one.name}: {type(error).__name__}: {error}; it is tried again"
            if text != said:
                observe(text)
            said = text
        finally:
            with suppress(Exception):
                await nanny.close()
        await asyncio.sleep(_RETRY_S)
