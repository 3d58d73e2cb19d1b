"""Parallel compilation ahead of the GPU, on all machines; a compiler that hangs or dies costs one candidate."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from autotile.core.documents import Text, convert
from autotile.core.model import Outcome
from autotile.core.timeline import NO_TIMELINE, Timeline
from autotile.cuda.compiler import CachedCubin, Compilation, CompileJob, CubinCache
from autotile.cuda.toolchain import load_nvrtc
from autotile.errors import CompileError, InputError, ToolchainError, WorkerError, WorkerTimeoutError
from autotile.settings import Settings, available_cores
from autotile.workers.child import (
    COMPILE_WORKER,
    Child,
    Fields,
    Stage,
    WorkerPool,
    limit_memory,
    memory_share_bytes,
    parsed_reply,
    serve,
    start_child,
)

MAX_WORKERS_PER_CORE = 2
"""More only take memory from each other, and a machine that is busy starting them does not end them either."""
_CACHE_TRACK = "cubin cache"
"""Row of the timeline for cubins that were compiled before."""
_FARM_TRACK = "compile farm"
"""Row of those that were compiled on other machines."""
_MIN_TIMES, _MAX_TIMES = 8, 256
"""Compile times from which those of others are expected: at least, and the newest."""
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
    reason: Text = ""


_ENDED = Compiled(None, outcome=Outcome.NOT_COMPILED, reason="the session ended before it was compiled")
Remote = Future[Compilation | Compiled | None]
"""A compilation on another machine: its cubin, or an outcome; None if no machine has compiled it, which says nothing
about the job."""


class CompileFarm(Protocol):
    """Compilers of other machines, which may come and go."""

    slots: int
    """Number of compilations at the same time."""

    @property
    def room(self) -> int:
        """Number of compilations that can begin now."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks for the user about machines that are not used."""

    def accepts(self, job: CompileJob) -> bool:
        """Return True if other machines can compile a job."""

    def submit(self, job: CompileJob, deadline_s: float) -> Remote:
        """Compile a job elsewhere."""


_Waiting = tuple[CompileJob, Future[Compiled], float]
"""A compilation that has not begun, and its deadline in seconds; one that runs was given back by the farm."""


def _longest_first(waiting: Iterable[_Waiting], known: Sequence[tuple[frozenset[str], float]]) -> list[_Waiting]:
    """Return compilations, that which is expected to take longest first; as they are while little is known.

    ``known`` are the options and the logarithm of the time of others. The fit is log-linear in the options, such as
    macros, with a ridge of one, so that an option that was met once counts half of what it seems to.
    """
    jobs = list(waiting)
    if len(known) < _MIN_TIMES or not jobs:
        return jobs
    import numpy as np  # which a compile worker does without

    met, times = zip(*known, strict=True)
    options = sorted(frozenset().union(*met))
    every = [*met, *(frozenset(job.options) for job, _, _ in jobs)]
    rows = np.array([[option in one for option in options] for one in every], float)
    rows -= rows[: len(met)].mean(axis=0)
    own, wanted = rows[: len(met)], rows[len(met) :]
    weights = np.linalg.solve(own.T @ own + np.eye(len(options)), own.T @ (np.array(times) - np.mean(times)))
    return [jobs[place] for place in np.argsort(-(wanted @ weights), kind="stable")]


class CompilePool:
    """Compile workers, one per core; each thread of the pool holds one child process while it compiles.

    A job whose cubin is in the cache needs no worker. What finds no free core here goes to the farm.

    ``workers`` is the number of concurrent compilations, None for one a core; as many as are to be ``ready`` start at
    once, beside what the caller does before its first job. ``memory_bytes`` is the limit of each, None for an equal
    share of the machine's memory. A worker is acquired from ``worker_pool`` for each compilation, when it has a slot
    for it; None for workers of its own, which end in `close`.
    """

    def __init__(
        self,
        settings: Settings,
        workers: int | None = None,
        deadline_s: float = 60.0,
        *,
        ready: int = 0,
        memory_bytes: int | None = None,
        module: str = COMPILE_WORKER,
        worker_pool: WorkerPool | None = None,
        timeline: Timeline = NO_TIMELINE,
        farm: CompileFarm | None = None,
    ) -> None:
        self._settings = settings
        self._workers = workers = workers or available_cores()
        self._farm = farm
        self._waiting: deque[_Waiting] = deque()
        """Compilations that have no core yet, the next first."""
        self._here = 0
        """Number of compilations that run on this machine."""
        self._elsewhere: set[Remote] = set()
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes or memory_share_bytes(workers)
        self._module = module
        self._worker_pool = worker_pool or WorkerPool()
        self._owns_workers = worker_pool is None
        self._timeline = timeline
        self.longest_first = False
        """Whether those that are expected to take longest begin first, as the caller wants all results in any order."""
        self._times: deque[tuple[frozenset[str], float]] = deque(maxlen=_MAX_TIMES)
        self._cache = CubinCache(settings.cache, settings.cache_limit_bytes)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._thread_data = threading.local()
        self._compiling: set[Child] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._turns = threading.Semaphore(workers)
        self._next_turn = threading.Lock()
        """Held while turns are waited for, so that who wants all of them gets each that ends."""
        self._busy = 0
        self._busy_s = 0.0
        self._updated_at = time.perf_counter()
        self.begun_at = self._updated_at
        """Start of the newest compilation, by `time.perf_counter`."""
        for _ in range(min(ready, workers)):
            self._threads.submit(self._start_worker)

    @property
    def busy_s(self) -> float:
        """Total compilation time of all workers so far."""
        self._update_busy(0)
        return self._busy_s

    def submit(self, job: CompileJob, deadline_s: float | None = None) -> Future[Compiled]:
        """Compile in the background; a candidate that fails is a result, not an error of the future.

        A cubin in the cache is returned at once, since another thread takes longer to begin than to read it.

        Raise `ToolchainError` if nothing can be compiled at all; so does the future, `InputError` if the cubin cache or
        temporary files cannot be written, and `WorkerError` if no process can be started.
        """
        done: Future[Compiled] = Future()
        start = self.begun_at = time.perf_counter()
        cubin = self._cache.get(job.key)
        if cubin is None:
            with self._lock:
                if self._closing:
                    raise RuntimeError("the compile pool is closed")
                self._waiting.append((job, done, self._deadline_s if deadline_s is None else deadline_s))
            self._begin_waiting()
            return done
        seconds = self._record(_CACHE_TRACK, "cached", start, job)
        done.set_result(Compiled(cubin, seconds))
        return done

    def close(self) -> None:
        """Cancel the pending compilations and kill the running ones."""
        with self._lock:
            self._closing = True
            compiling, waiting, elsewhere = list(self._compiling), list(self._waiting), list(self._elsewhere)
            self._waiting.clear()
        for _, done, _ in waiting:
            if done.cancel():
                done.set_running_or_notify_cancel()  # `concurrent.futures.wait` returns only then
            else:  # the farm has given it back
                done.set_result(_ENDED)
        for remote in elsewhere:
            remote.cancel()
        self._threads.shutdown(wait=False)
        for child in compiling:
            child.kill()
        self._threads.shutdown(wait=True)
        if self._owns_workers:
            self._worker_pool.kill_idle()

    def _begin_waiting(self) -> None:
        """Begin the compilations for which there is a core, on this machine before the others."""
        if getattr(self._thread_data, "is_beginning", False):
            return  # the farm has given one back at once: the loop that gave it goes on
        self._thread_data.is_beginning = True
        try:
            while True:
                has_farm = self._farm is not None and self._farm.room > 0
                with self._lock:
                    if self._closing:
                        return
                    is_full = has_farm and (not self._worker_pool.has_compile_slot() or self._here == self._workers)
                    going = self._next(elsewhere=True) if is_full else None
                    if going is None:
                        one = self._next(elsewhere=False) if self._here < self._workers else None
                        if one is None:
                            return
                        self._here += 1
                        self._threads.submit(self._compile_here, *one)
                if going is not None:
                    self._compile_elsewhere(*going)
        finally:
            self._thread_data.is_beginning = False

    def _next(self, *, elsewhere: bool) -> _Waiting | None:
        """Take the next compilation that may begin here or elsewhere and was not cancelled."""
        for one in _longest_first(self._waiting, list(self._times)) if self.longest_first else list(self._waiting):
            job, done, _ = one
            is_returned = done.running()
            if elsewhere and (is_returned or self._farm is None or not self._farm.accepts(job)):
                continue
            self._waiting.remove(one)
            if is_returned or done.set_running_or_notify_cancel():
                return one
        return None

    def _compile_elsewhere(self, job: CompileJob, done: Future[Compiled], deadline_s: float) -> None:
        assert self._farm is not None
        start = self.begun_at = time.perf_counter()
        self._update_busy(+1)
        remote = self._farm.submit(job, deadline_s)
        with self._lock:
            self._elsewhere.add(remote)
            closing = self._closing
        remote.add_done_callback(partial(self._take_result, (job, done, deadline_s), start))
        if closing:
            remote.cancel()

    def _take_result(self, one: _Waiting, start: float, remote: Remote) -> None:
        """Store what the farm has compiled; what it has not is compiled here, before all that waits."""
        self._update_busy(-1)
        job, done, _ = one
        found = None if remote.cancelled() else remote.result()
        with self._lock:
            self._elsewhere.discard(remote)
            is_returned = found is None and not self._closing
            if is_returned:
                self._waiting.appendleft(one)
        if not is_returned:
            try:
                if found is None:
                    compiled = _ENDED
                else:
                    stored = self._cache.put(job.key, found) if isinstance(found, Compilation) else None
                    compiled = found if isinstance(found, Compiled) else Compiled(stored)
                    compiled = replace(compiled, seconds=self._record(_FARM_TRACK, "compile", start, job))
                done.set_result(compiled)
            except Exception as error:  # such as a cubin cache that cannot be written: whoever waits raises it
                done.set_exception(error)
        self._begin_waiting()

    def _compile_here(self, job: CompileJob, done: Future[Compiled], deadline_s: float) -> None:
        """Compile in a worker; the worker's death is a result, and if the system killed it, a second attempt."""
        try:
            with self._worker_pool.compile_slots:
                if self._closing:  # meanwhile
                    done.set_result(_ENDED)
                    return
                start = self.begun_at = time.perf_counter()
                self._update_busy(+1)
                try:
                    for attempt in range(1, _MAX_ATTEMPTS + 1):
                        with self._turn(alone=attempt > 1):
                            compiled = self._attempt(job, deadline_s)
                        if compiled.outcome is not Outcome.NOT_COMPILED or self._closing:
                            break
                    number = threading.current_thread().name.rpartition("_")[2]
                    seconds = self._record(f"compiler {int(number) + 1}", "compile", start, job)
                    self._times.append((frozenset(job.options), math.log(max(seconds, 1e-6))))
                finally:
                    self._update_busy(-1)
        except BaseException as error:  # whoever waits raises it
            done.set_exception(error)
        else:
            done.set_result(replace(compiled, seconds=seconds))
        finally:
            with self._lock:
                self._here -= 1
            self._begin_waiting()

    def _start_worker(self) -> None:
        if not self._closing:
            with suppress(InputError, WorkerError):  # the first compilation says it
                self._worker_pool.release(start_child(self._module))

    def _attempt(self, job: CompileJob, deadline_s: float) -> Compiled:
        message = {
            "job": job,
            "cache": str(self._settings.cache),
            "limit_bytes": self._settings.cache_limit_bytes,
            "memory_bytes": self._memory_bytes,
        }
        # that it does not start is not the candidate's failure
        child = self._worker_pool.acquire_idle(self._module) or start_child(self._module)
        with self._lock:
            closing = self._closing
            self._compiling.add(child)  # `close` kills it
        try:
            if closing:
                child.kill()
            compiled = parsed_reply(child.request(message, deadline_s), Compiled)
        except WorkerTimeoutError:
            child.kill()
            reason = f"the compiler was stopped after {deadline_s:g} s"
            return Compiled(None, outcome=Outcome.TIMED_OUT, reason=reason)
        except WorkerError as error:
            child.kill()
            hint = ", as the system does when memory runs out" if error.killed else ""
            outcome = Outcome.NOT_COMPILED if error.killed else Outcome.COMPILE_FAILED
            return Compiled(None, outcome=outcome, reason=f"the compiler failed: {error}{hint}")
        except (InputError, ToolchainError):
            self._worker_pool.release(child)
            raise
        finally:
            with self._lock:
                self._compiling.discard(child)
        self._worker_pool.release(child)
        return compiled

    @contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        """Wait until a worker may compile: with ``alone`` while no other does, else while none has to be alone."""
        turns = self._workers if alone else 1
        with self._next_turn:
            for _ in range(turns):
                self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release(turns)

    def _record(self, track: str, name: str, start: float, job: CompileJob) -> float:
        end = time.perf_counter()
        if self._timeline.is_recording:
            self._timeline.add(track, name, start, end, options=" ".join(job.options))
        return end - start

    def _update_busy(self, change: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._busy_s += self._busy * (now - self._updated_at)
            self._updated_at = now
            self._busy += change


def compile_in_worker(job: CompileJob, settings: Settings, deadline_s: float) -> Compiled:
    """Compile one job as a tuning session does: in a process of its own, with its timeout and its memory limit.

    No process is started if the cubin is in the cache. Errors are those of the future of `CompilePool.submit`.
    """
    memory_bytes = memory_share_bytes(available_cores())
    with closing(CompilePool(settings, 1, deadline_s, memory_bytes=memory_bytes)) as pool:
        return pool.submit(job).result()


_caches: dict[tuple[str, int], CubinCache] = {}
"""Caches of a compile worker, by folder and limit."""


def compile_one(message: Fields, _: Stage) -> Fields:
    """Handle one request of a compile worker; that the cache cannot be written, or nothing compiled, is an error."""
    if not _caches:  # the first request
        limit_memory(message["memory_bytes"])
    key = message["cache"], message["limit_bytes"]
    found = _caches.get(key) or _caches.setdefault(key, CubinCache(Path(key[0]), key[1]))
    try:
        return {"cubin": found.get_or_compile(convert(message["job"], CompileJob))}
    except CompileError as error:
        outcome = Outcome.RESOURCE_EXCEEDED if error.exceeds_limit else Outcome.COMPILE_FAILED
        return {"cubin": None, "outcome": outcome, "reason": str(error)}


def _prepare() -> None:
    from autotile.cuda.headers import toolkit_headers

    load_nvrtc()
    toolkit_headers()


if __name__ == "__main__":
    serve(compile_one, _prepare)
