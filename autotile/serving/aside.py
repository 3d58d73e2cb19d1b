"""Work aside: a program is served what is at hand until something better was chosen, compiled and loaded for it.

Threads of the process choose, and compile and load, without the interpreter's lock for most of the time. They start
with the first job, and end with the process, which waits for the compilations that have begun.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import Queue

_JOIN_S = 10.0
"""Maximum wait at exit for a compilation, which cannot be interrupted."""


def at_exit(run: Callable[[], object]) -> None:
    """Have a function run when this process ends, also one of `multiprocessing`, which runs none of `atexit`."""
    if "multiprocessing.process" in sys.modules:
        from multiprocessing.util import Finalize

        Finalize(None, run, exitpriority=0)
    else:  # its import takes 5 ms
        process = os.getpid()
        atexit.register(lambda: run() if os.getpid() == process else None)


class _ShortTurns:
    """A context in which threads take turns at the interpreter after 0.5 ms, in place of CPython's 5 ms.

    A program gives up the interpreter's lock several times in a call of PyTorch's, and may wait for a turn each time.
    Contexts of several threads may overlap. An interval that the program sets meanwhile stays.
    """

    turn_s = 0.0005

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._before_s = self._set_s = 0.0
        os.register_at_fork(after_in_child=self._leave_all)

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, self.turn_s))
                self._set_s = sys.getswitchinterval()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and sys.getswitchinterval() == self._set_s:
                sys.setswitchinterval(self._before_s)

    def _leave_all(self) -> None:
        """Leave the contexts of threads that a forked child does not have."""
        self._lock = threading.Lock()
        if self._entered:
            self._entered = 1
            self.__exit__()


_short_turns = _ShortTurns()


class AsideThreads:
    """Threads of this process, up to ``limit``, that run jobs in order, which report their errors themselves.

    Each job begins after a pause of ``pause_s``. With ``gives_way``, other threads wait for it only briefly.
    """

    def __init__(self, name: str, limit: int = 1, *, pause_s: float = 0.0, gives_way: bool = False) -> None:
        self._name, self._limit, self._pause_s, self._gives_way = name, limit, pause_s, gives_way
        self.begin_anew()
        os.register_at_fork(after_in_child=self.begin_anew)
        atexit.register(self.stop)

    def begin_anew(self) -> None:
        """Start without threads, as a forked child has none, and locks that they held would be held forever."""
        self._jobs: Queue[Callable[[], object]] = Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, job: Callable[[], object]) -> None:
        """Run a job after those before it; a thread is started for it if all may be busy."""
        with self._lock:
            if self._stop.is_set():
                return
            busy = self._jobs.unfinished_tasks
            self._jobs.put(job)
            if len(self._threads) < min(busy + 1, self._limit):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended; return whether they have."""
        with self._jobs.all_tasks_done:
            return self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, timeout_s)

    def stop(self) -> None:
        """Drop the jobs that have not begun, and wait for those that have."""
        self._stop.set()
        for _ in self._threads:
            self._jobs.put(lambda: None)  # wakes a thread
        end_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))

    def _run(self) -> None:
        while not self._stop.is_set():
            job = self._jobs.get()
            if self._pause_s:
                time.sleep(self._pause_s)
            # The program goes on with what it has where a job fails.
            with _short_turns if self._gives_way else nullcontext(), suppress(Exception):
                job()
            del job  # it may hold what the program has dropped
            self._jobs.task_done()


choices = AsideThreads("autotile-choose", pause_s=0.001, gives_way=True)
"""A program that has asked for something is about to queue more work, which goes first."""
compilations = AsideThreads("autotile-compile", limit=max(1, min(4, (os.cpu_count() or 1) // 2)), gives_way=True)
"""NVRTC compiles as many programs at once as there are threads: measured with 8, on 16 cores."""


def wait_for_compilations(timeout_s: float | None = None) -> bool:
    """Wait until what was asked for was chosen, compiled and loaded; return whether it was."""
    return choices.wait(timeout_s) and compilations.wait(timeout_s)
