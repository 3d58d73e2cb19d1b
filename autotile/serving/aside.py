"""Compilation aside: a program is served what needs no compiler until what was chosen for it is compiled and loaded.

One thread of the process compiles and loads, one kernel after the other, without the interpreter's lock for most of the
time. It starts with the first kernel, and ends with the process, which waits for the compilation that it has begun.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Queue

_JOIN_S = 10.0
"""Maximum wait at exit for a compilation, which cannot be interrupted."""


class AsideThread:
    """A thread of this process that runs jobs, which report their errors themselves, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.begin_anew()
        os.register_at_fork(after_in_child=self.begin_anew)
        atexit.register(self.stop)

    def begin_anew(self) -> None:
        """Start without a thread, as a forked child has none, and locks that it held would be held forever."""
        self._jobs: Queue[Callable[[], object]] = Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, job: Callable[[], object]) -> None:
        """Run a job after those before it; the first one starts the thread."""
        with self._lock:
            if self._stop.is_set():
                return
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended; return whether they have."""
        with self._jobs.all_tasks_done:
            return self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, timeout_s)

    def stop(self) -> None:
        """Drop the jobs that have not begun, and wait for the one that has."""
        self._stop.set()
        self._jobs.put(lambda: None)  # wakes the thread
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(Exception):  # the program goes on with what it has
                self._jobs.get()()
            self._jobs.task_done()


_thread = AsideThread("autotile-compile")

run_aside = _thread.add
wait_for_compilations = _thread.wait
