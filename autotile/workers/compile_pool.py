"""Compile in parallel, ahead of the GPU; a compile that hangs or dies costs one candidate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotile.core.model import Outcome, Resources
from autotile.cuda.compiler import CachedCubin, CompileJob, CubinCache
from autotile.errors import InputError, ToolchainError, WorkerError, WorkerTimeoutError
from autotile.workers.child import Child, Shelf
from autotile.workers.protocol import memory_share_bytes

_WORKER_MODULE = "autotile.workers.compile_worker"


@dataclass(frozen=True, slots=True)
class Compiled:
    """How a compilation ended: a cubin, or an outcome with its reason."""

    cubin: CachedCubin | None
    seconds: float = 0.0
    outcome: Outcome = Outcome.OK
    reason: str = ""


class CompilePool:
    """Compile workers, one a core; each thread of the pool owns one child process.

    A job whose cubin is in the cache is answered without a worker, so a pool over a warm cache starts none.

    Parameters
    ----------
    cache
        Folder of the cubin cache.
    limit_bytes
        Size bound of the cache.
    workers
        Compilations at a time.
    deadline_s
        Seconds until a compilation is given up and its worker killed.
    memory_bytes
        Memory that a compilation may take; None: its share of the machine's.
    module
        What a worker runs.
    shelf
        Where workers come from, and go back to when they are idle; None: they are started and ended here.
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
        shelf: Shelf | None = None,
    ) -> None:
        self._folder = cache
        self._limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes or memory_share_bytes(workers)
        self._module = module
        self._shelf = shelf
        self._cache = CubinCache(cache, limit_bytes)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._own = threading.local()
        self._children: set[Child] = set()
        self._asked: set[Child] = set()
        """Those that compile now."""
        self._lock = threading.Lock()
        self._closing = False
        self._busy = 0
        self._busy_s = 0.0
        self._counted_at = time.perf_counter()
        self.begun_at = self._counted_at
        """When the newest compilation began, by `time.perf_counter`."""

    @property
    def busy_s(self) -> float:
        """Seconds that all workers together have compiled so far."""
        self._count(0)
        return self._busy_s

    def submit(self, make_job: Callable[[], CompileJob]) -> Future[Compiled]:
        """Compile in the background; the future never raises for a failed candidate.

        The future raises `ToolchainError` when nothing can be compiled at all, `InputError` when the cubin cache or
        temporary files cannot be written, and `WorkerError` when no process can be started.
        """
        return self._threads.submit(self._compile, make_job)

    def close(self) -> None:
        """Give up what waits, kill what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closing = True
            asked = list(self._asked)
        for child in asked:
            child.kill()
        self._threads.shutdown(wait=True)
        for child in self._children:
            if self._shelf is not None:
                self._shelf.put(child)
            else:
                child.kill()
        self._children.clear()

    def _compile(self, make_job: Callable[[], CompileJob]) -> Compiled:
        start = self.begun_at = time.perf_counter()
        self._count(+1)
        try:
            job = make_job()
            cubin = self._cache.get(job.key)
            compiled = Compiled(cubin) if cubin is not None else self._ask(job)
            return replace(compiled, seconds=time.perf_counter() - start)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Note that a worker begins or ends."""
        with self._lock:
            now = time.perf_counter()
            self._busy_s += self._busy * (now - self._counted_at)
            self._counted_at = now
            self._busy += change

    def _ask(self, job: CompileJob) -> Compiled:
        """What a worker makes of a job; its death, too, is an answer."""
        message = {
            "job": job.to_json(),
            "cache": str(self._folder),
            "limit_bytes": self._limit_bytes,
            "memory_bytes": self._memory_bytes,
        }
        child = self._child()  # should none start, that is no fault of the candidate
        try:
            with self._asking(child):
                return _compiled(child.request(message, self._deadline_s))
        except WorkerTimeoutError:
            self._drop_child()
            reason = f"the compiler was stopped after {self._deadline_s:g} s"
            return Compiled(None, outcome=Outcome.TIMED_OUT, reason=reason)
        except WorkerError as error:
            self._drop_child()
            return Compiled(None, outcome=Outcome.COMPILE_FAILED, reason=f"the compiler failed: {error}")

    def _child(self) -> Child:
        child: Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._shelf.take(self._module) if self._shelf is not None else Child(self._module)
            self._own.child = child
            with self._lock:
                self._children.add(child)
        return child

    @contextmanager
    def _asking(self, child: Child) -> Iterator[None]:
        """While a child compiles, closing the pool kills it; of a closed pool, it is killed before it can begin."""
        with self._lock:
            closing = self._closing
            self._asked.add(child)
        try:
            if closing:
                child.kill()
            yield
        finally:
            with self._lock:
                self._asked.discard(child)

    def _drop_child(self) -> None:
        child: Child | None = getattr(self._own, "child", None)
        if child is not None:
            child.kill()
            self._own.child = None
            with self._lock:
                self._children.discard(child)


def _compiled(reply: Mapping[str, Any]) -> Compiled:
    try:
        if reply.get("kind") == "setup":
            raise ToolchainError(reply["error"])
        if reply.get("kind") == "input":
            raise InputError(reply["error"])
        if "error" in reply:
            return Compiled(None, outcome=Outcome.COMPILE_FAILED, reason=str(reply["error"]))
        return Compiled(CachedCubin(Path(reply["path"]), reply["cubin_hash"], Resources(**reply["resources"])))
    except (KeyError, TypeError) as error:
        raise WorkerError(f"the worker's answer makes no sense: {type(error).__name__}: {error}") from None
