"""Count the calls of kernels that are served for want of an exact result.

A kernel counts its own calls, at the cost of one addition. What was counted is added to the database from a thread of
its own every half minute and at the end of the process, so that serving waits for no disk. A child that is forked
counts what it calls itself. What a process counted since the last writing is lost where it is killed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.ground.errors import DatabaseError

if TYPE_CHECKING:
    from autotile.dispatch.bound import BoundKernel

_PERIOD_S = 30.0
_PATIENCE_S = 5.0
"""How long the end of a process waits for a writing that is under way."""


@dataclass(slots=True)
class _Watched:
    """A kernel, where its calls are counted, and how many of them are written."""

    location: str
    kernel: BoundKernel
    written: int = 0

    @property
    def total(self) -> int:
        """Calls so far; a program that only asked counts as one."""
        return max(1, self.kernel.calls)


class MissCounter:
    """The kernels whose calls are counted in this process."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._process = 0
        self._children_write = False
        self._begin()

    def watch(self, location: str, kernel: BoundKernel) -> None:
        """Count a kernel's calls from now on, in the database at ``location`` where there is one."""
        self._watched.append(_Watched(location, kernel))
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self.flush, wait_s=_PATIENCE_S)
            os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)
            self._flush_at_end_of_child()
            self._start_thread()

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what was counted since the last time; what cannot be written stays for the next."""
        if not self._writing.acquire(timeout=wait_s) if wait_s else not self._writing.acquire(blocking=False):
            return
        try:
            for location in dict.fromkeys(watched.location for watched in self._watched):
                _write(location, [watched for watched in self._watched if watched.location == location])
        finally:
            self._writing.release()

    def forget(self) -> None:
        """Drop what was counted and not written."""
        self._watched.clear()

    def _begin(self) -> None:
        self._writing = threading.Lock()

    def _start_thread(self) -> None:
        threading.Thread(target=self._keep_writing, name="autotile misses", daemon=True).start()

    def _keep_writing(self) -> None:
        pause = threading.Event()
        while not pause.wait(_PERIOD_S):
            self.flush()

    def _before_fork(self) -> None:
        """See that a child of `multiprocessing`, which ends without running what is registered at exit, writes too."""
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None and not self._children_write:
            self._children_write = True
            multiprocessing.register_after_fork(self, MissCounter._flush_at_end_of_child)

    def _in_child(self) -> None:
        """What the parent counted is the parent's to write."""
        self._begin()
        self._process = os.getpid()
        for watched in self._watched:
            watched.written = watched.total
        self._start_thread()

    def _flush_at_end_of_child(self) -> None:
        """What `multiprocessing` runs at the end of this process, if it is one of its own."""
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:
            multiprocessing.Finalize(None, self.flush, kwargs={"wait_s": _PATIENCE_S}, exitpriority=0)


def _write(location: str, counted: list[_Watched]) -> None:
    totals = [(watched, watched.total) for watched in counted]
    new = [(watched, total) for watched, total in totals if total > watched.written]
    if not new or ("://" not in location and not Path(location).expanduser().exists()):
        return
    try:
        from autotile.store.database import Database

        present = Database.open_readonly(location)
        if present is None:
            return
        present.close()
        with Database.open(location, set_damage_aside=False) as database:
            for watched, total in new:
                kernel = watched.kernel
                database.record_miss(kernel.problem, kernel.device.name, kernel.tier, total - watched.written)
                watched.written = total
    except (DatabaseError, ImportError):
        return  # serving depends neither on being allowed to write nor on an SQL engine


misses = MissCounter()
