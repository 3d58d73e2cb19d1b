"""Parallel compilation ahead of the GPU; a compiler that hangs or dies costs one candidate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotile.core.documents import convert
from autotile.core.model import Outcome
from autotile.core.timeline import NO_TIMELINE, Timeline
from autotile.cuda.compiler import CompileJob
from autotile.cuda.cubin_cache import CachedCubin, CubinCache
from autotile.errors import DataError, InputError, ToolchainError, WorkerCrashError, WorkerError, WorkerTimeoutError
from autotile.settings import Settings, available_cores
from autotile.workers.child import Child, WorkerPool
from autotile.workers.protocol import CompiledCubin, ErrorReply, memory_share_bytes

_WORKER_MODULE = "autotile.workers.compile_worker"

MAX_WORKERS_PER_CORE = 2
"""More only take memory from each other, and a machine that is busy starting them does not end them either."""
_CACHE_TRACK = "cubin cache"
"""Row of the timeline for cubins that were compiled before."""
_MAX_ATTEMPTS = 2
"""Attempts at a compilation whose worker the system killed, the second one alone."""


def worker_count(requested: int | None) -> int:
    """Return the number of compile workers: that requested, at most two a core; one a core if None."""
    cores = available_cores()
    return cores if requested is None else min(requested, MAX_WORKERS_PER_CORE * cores)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of a compilation: a cubin, or an outcome with its reason."""

    cubin: CachedCubin | None
    seconds: float = 0.0
    outcome: Outcome = Outcome.OK
    reason: str = ""


class CompilePool:
    """Compile workers, one per core; each thread of the pool owns one child process while it compiles.

    A job whose cubin is in the cache needs no worker, so a pool over a warm cache starts none.

    Parameters
    ----------
    cache
        Folder of the cubin cache.
    limit_bytes
        Size limit of the cache.
    workers
        Number of concurrent compilations.
    deadline_s
        Time after which a compilation's worker is killed, in seconds.
    memory_bytes
        Memory limit of a compilation; None for an equal share of the machine's memory.
    module
        Module that a worker runs.
    worker_pool
        Pool from which a worker is acquired for each compilation, when it has a slot for it; None to start workers
        here, and to end them in `close`.
    timeline
        Records each compilation.
    """

    def __init__(
        self,
        cache: Path,
        limit_bytes: int,
        workers: int,
        deadline_s: float,
        *,
        memory_bytes: int | None = None,
        module: str = _WORKER_MODULE,
        worker_pool: WorkerPool | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._folder = cache
        self._limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes or memory_share_bytes(workers)
        self._module = module
        self._worker_pool = worker_pool
        self._timeline = timeline
        self._cache = CubinCache(cache, limit_bytes)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._thread_data = threading.local()
        self._children: set[Child] = set()
        self._compiling: set[Child] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._turns = threading.Condition()
        self._turns_taken = 0
        self._is_reserved = False
        self._busy = 0
        self._busy_s = 0.0
        self._updated_at = time.perf_counter()
        self.begun_at = self._updated_at
        """Start of the newest compilation, by `time.perf_counter`."""

    @property
    def busy_s(self) -> float:
        """Total compilation time of all workers so far, in seconds."""
        self._update_busy(0)
        return self._busy_s

    def submit(self, make_job: Callable[[], CompileJob]) -> Future[Compiled]:
        """Compile in the background; a candidate that fails is a result, not an error of the future.

        A cubin in the cache is returned at once, since another thread takes longer to begin than to read it.

        The future raises `ToolchainError` if nothing can be compiled at all, `InputError` if the cubin cache or
        temporary files cannot be written, and `WorkerError` if no process can be started.
        """
        done: Future[Compiled] = Future()
        start = self.begun_at = time.perf_counter()
        try:
            job = make_job()
            cubin = self._cache.get(job.key)
        except Exception as error:
            done.set_exception(error)
            return done
        if cubin is None:
            return self._threads.submit(self._compile, job)
        seconds = self._record(_CACHE_TRACK, "cached", start, job)
        done.set_result(Compiled(cubin, seconds))
        return done

    def close(self) -> None:
        """Cancel the pending compilations and kill the running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closing = True
            compiling = list(self._compiling)
        for child in compiling:
            child.kill()
        self._threads.shutdown(wait=True)
        for child in self._children:
            child.kill()
        self._children.clear()

    def _compile(self, job: CompileJob) -> Compiled:
        with self._worker_pool.compile_slots if self._worker_pool is not None else nullcontext():
            start = self.begun_at = time.perf_counter()
            self._update_busy(+1)
            try:
                compiled = self._request(job)
                return replace(compiled, seconds=self._record(_track(), "compile", start, job))
            finally:
                self._update_busy(-1)

    def _record(self, track: str, name: str, start: float, job: CompileJob) -> float:
        """Add a span that ends now to the timeline; return its duration in seconds."""
        end = time.perf_counter()
        if self._timeline.is_recording:
            self._timeline.add(track, name, start, end, options=" ".join(job.options))
        return end - start

    def _update_busy(self, change: int) -> None:
        """Accumulate the busy time, and change the number of busy workers."""
        with self._lock:
            now = time.perf_counter()
            self._busy_s += self._busy * (now - self._updated_at)
            self._updated_at = now
            self._busy += change

    def _request(self, job: CompileJob) -> Compiled:
        """Compile a job in a worker; the worker's death is a result, and if the system killed it, a second attempt."""
        message = {
            "job": job.to_json(),
            "cache": str(self._folder),
            "limit_bytes": self._limit_bytes,
            "memory_bytes": self._memory_bytes,
        }
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            with self._turn(alone=attempt > 1):
                compiled = self._attempt(message)
            if compiled.outcome is not Outcome.NOT_COMPILED or self._closing:
                break
        return compiled

    def _attempt(self, message: Mapping[str, Any]) -> Compiled:
        child = self._child()  # outside the try block: a worker that does not start is not the candidate's failure
        try:
            with self._registered(child):
                compiled = _compiled(child.request(message, self._deadline_s))
            self._release(child)
            return compiled
        except WorkerTimeoutError:
            self._drop_child()
            reason = f"the compiler was stopped after {self._deadline_s:g} s"
            return Compiled(None, outcome=Outcome.TIMED_OUT, reason=reason)
        except WorkerCrashError as error:
            self._drop_child()
            outcome = Outcome.NOT_COMPILED if error.killed else Outcome.COMPILE_FAILED
            hint = ", as the system does when memory runs out" if error.killed else ""
            return Compiled(None, outcome=outcome, reason=f"the compiler failed: {error}{hint}")
        except WorkerError as error:
            self._drop_child()
            return Compiled(None, outcome=Outcome.COMPILE_FAILED, reason=f"the compiler failed: {error}")

    @contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        """Wait until a worker may compile: with ``alone`` while no other does, else while none has to be alone."""
        with self._turns:
            self._turns.wait_for(lambda: not self._is_reserved)
            self._is_reserved = alone
            if alone:
                self._turns.wait_for(lambda: self._turns_taken == 0)
            self._turns_taken += 1
        try:
            yield
        finally:
            with self._turns:
                self._turns_taken -= 1
                self._is_reserved = self._is_reserved and not alone
                self._turns.notify_all()

    def _child(self) -> Child:
        child: Child | None = getattr(self._thread_data, "child", None)
        if child is None:
            pool = self._worker_pool
            child = pool.acquire(self._module) if pool is not None else Child(self._module)
            self._thread_data.child = child
            with self._lock:
                self._children.add(child)
        return child

    def _release(self, child: Child) -> None:
        """Return an idle child to the shared pool; without one, it waits for the next compilation of this thread."""
        if self._worker_pool is not None:
            self._thread_data.child = None
            with self._lock:
                self._children.discard(child)
            self._worker_pool.release(child)

    @contextmanager
    def _registered(self, child: Child) -> Iterator[None]:
        """Register a child that compiles, which `close` then kills; kill it now if the pool is closing."""
        with self._lock:
            closing = self._closing
            self._compiling.add(child)
        try:
            if closing:
                child.kill()
            yield
        finally:
            with self._lock:
                self._compiling.discard(child)

    def _drop_child(self) -> None:
        child: Child | None = getattr(self._thread_data, "child", None)
        if child is not None:
            child.kill()
            self._thread_data.child = None
            with self._lock:
                self._children.discard(child)


def _track() -> str:
    """Return the row of the timeline for the calling thread of the pool."""
    number = threading.current_thread().name.rpartition("_")[2]
    return f"compiler {int(number) + 1}"


def compile_in_worker(job: CompileJob, settings: Settings, deadline_s: float) -> Compiled:
    """Compile one job as a tuning session does: in a process of its own, with its timeout and its memory limit.

    No process is started if the cubin is in the cache.

    Parameters
    ----------
    job
        Compilation.
    settings
        Settings of the installation: the cubin cache.
    deadline_s
        Time after which the compilation is killed, in seconds.

    Raises
    ------
    ToolchainError, InputError, WorkerError
        As for the future of `CompilePool.submit`.
    """
    memory_bytes = memory_share_bytes(available_cores())
    pool = CompilePool(settings.cache, settings.cache_limit_bytes, 1, deadline_s, memory_bytes=memory_bytes)
    with closing(pool):
        return pool.submit(lambda: job).result()


def _compiled(reply: Mapping[str, Any]) -> Compiled:
    try:
        if "error" not in reply:
            cubin = convert(reply, CompiledCubin)
            return Compiled(CachedCubin(Path(cubin.path), cubin.cubin_hash, cubin.functions))
        failed = convert(reply, ErrorReply)
    except DataError as error:
        raise WorkerError(f"the worker's reply is malformed: {error}") from None
    if failed.kind == "setup":
        raise ToolchainError(failed.error)
    if failed.kind == "input":
        raise InputError(failed.error)
    return Compiled(None, outcome=Outcome.COMPILE_FAILED, reason=failed.error)
