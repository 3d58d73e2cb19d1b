"""Compilation aside: a program is served what needs no compiler until what was chosen for it is compiled and loaded.

One thread of the process compiles and loads, one kernel after the other, without the interpreter's lock for most of the
time. It starts with the first kernel, and ends with the process, which waits for the compilation that it has begun.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_JOIN_S = 10.0
"""Maximum wait at exit for a compilation, which cannot be interrupted."""


class _Thread:
    """The thread of this process."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start without a thread, as a forked child has none."""
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._is_busy = False

    def add(self, job: Callable[[], object]) -> None:
        """Run a job, which reports its errors itself, after those before it."""
        with self._changed:
            if self._is_stopped:
                return
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="autotile-compile", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, timeout_s)

    def stop(self) -> None:
        """Drop the jobs that have not begun, and wait for the one that has."""
        with self._changed:
            self._is_stopped = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._is_stopped)
                if self._is_stopped:
                    return
                job, self._is_busy = self._jobs.popleft(), True
            with suppress(Exception):  # the program goes on with what it has
                job()


_thread = _Thread()
os.register_at_fork(after_in_child=_thread.begin_anew)
atexit.register(_thread.stop)

run_aside = _thread.add
wait_for_compilations = _thread.wait
