"""Misses that a running program counts in the database, and new results that it finds there.

Calls of kernels that were served as a fallback are counted. The calling thread writes the counts: after the first call
of each kernel, and then whenever its number of calls has doubled. To limit the overhead to 1 % of the time, a write is
followed by a pause of 100 times its duration (some milliseconds), in which doublings are ignored. The rest is written
when the process ends. A process that is killed loses no kernel that was called, and of the calls of a kernel less than
half, or those made during a pause.

New results are looked for by a thread every few seconds (the setting ``refresh``). While nothing was written, it reads
the state of two files. When something was decided, what is served of the kernels concerned is chosen again. Where the
choice differs, its code is compiled and loaded before callers use it, so that no call waits for it. Look-ups and calls
do nothing for this: a kernel that changes stays the same object. The thread starts with the first kernel that is served
for a CUDA device, and ends with the process. A forked child has none until it is served a kernel itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec
from msgspec.structs import replace

from autotile.core.forks import FORK_LOCK
from autotile.database.paths import looks_like_url
from autotile.database.winners import (
    ADD_MISSES,
    CHANGES,
    SERVER_TIMEOUT_S,
    Changes,
    file_signature,
    miss_row,
    read_file,
    write_file,
)
from autotile.errors import AutotileError
from autotile.serving.aside import AsideThreads, at_exit
from autotile.serving.selection import read_server
from autotile.settings import expand_path, read_settings

if TYPE_CHECKING:
    from autotile.serving.bound import BoundKernel

_MAX_SHARE = 0.01
"""Maximum share of the time spent writing, apart from first calls, which take long anyway as they load the kernel."""
_CALL_TIMEOUT_S = 0.05
"""Maximum wait for a locked database, within a call."""
_MAX_WATCHED = 10_000
"""Maximum number of kernels whose counts are kept; their number would otherwise grow with that of the problems."""
_EXIT_TIMEOUT_S = 5.0
"""Maximum wait for a locked database, and for another thread that is writing, when the process ends."""


class _Watched(msgspec.Struct, eq=False):
    """A kernel whose calls are counted for a database, which has ``written`` of them; what these calls report to."""

    counter: MissCounter
    location: str
    kernel: BoundKernel
    written: int
    is_listed: bool = False

    @property
    def calls(self) -> int:
        """Number of calls so far; a kernel that was requested and never called counts as one."""
        return max(1, self.kernel.calls)

    def __call__(self, calls: int) -> int:
        """Write the counts after a call of the kernel, unless this is a pause or another thread is writing.

        Return the number of calls at which to do so again.
        """
        counter = self.counter
        if not self.is_listed:
            counter._list(self)
        if time.monotonic() >= counter._resume_s:
            counter._write(counter._watched.values())
        elif calls == 1 and not counter._failed:
            counter._write([self])
        return 2 * calls


class MissCounter:
    """Counts calls of kernels that were served as a fallback, in this process and in its children.

    A forked child counts the kernels that it was served itself, and leaves those of its parent to the parent. It could
    not call them: serving for a device initializes CUDA, which then cannot be used in children that are forked later
    ("The CUDA runtime does not support the fork start method": PyTorch, "Multiprocessing best practices").
    """

    def __init__(self) -> None:
        self._process = 0
        """The process at whose end the counts are written."""
        self.clear()

    def clear(self) -> None:
        """Forget all kernels with their unwritten counts, and the pause; a forked child does so first."""
        self._watched: dict[BoundKernel, _Watched] = {}
        self._lock = threading.Lock()
        self._resume_s = 0.0
        """End of the pause."""
        self._failed = False
        """Whether the last counts could not be written."""

    def watch(self, location: str, kernel: BoundKernel) -> None:
        """Count the calls of a kernel from now on, for the database at ``location``; none is created."""
        watched = _Watched(self, location, kernel, kernel.calls)
        self._list(watched)
        kernel.report_calls(watched)

    def release(self, kernel: BoundKernel) -> None:
        """Write the counts of a kernel, if it is counted, and count its calls no longer."""
        kernel.report_calls(None)
        if (found := self._watched.pop(kernel, None)) is not None:
            self._write([found], wait_s=_CALL_TIMEOUT_S)

    def flush(self) -> None:
        """Write all counts now."""
        self._write(self._watched.values(), _EXIT_TIMEOUT_S, wait_s=_EXIT_TIMEOUT_S)

    @property
    def kernels(self) -> tuple[BoundKernel, ...]:
        """Kernels whose calls are counted."""
        return tuple(self._watched)

    def _list(self, watched: _Watched) -> None:
        """List a kernel; of too many, the older half is written and leaves the list until it is called again."""
        if self._process != os.getpid():
            self._process = os.getpid()
            at_exit(self.flush)
        if len(self._watched) >= _MAX_WATCHED:
            self._write(self._watched.values())
            for kernel in list(self._watched)[: _MAX_WATCHED // 2]:
                self._watched.pop(kernel, watched).is_listed = False  # another thread may have done so
        watched.is_listed = True
        self._watched[watched.kernel] = watched

    def _write(self, watched: Iterable[_Watched], timeout_s: float = _CALL_TIMEOUT_S, wait_s: float = 0.0) -> None:
        """Write the counts that the database does not have; those that cannot be written are kept for the next time.

        Wait ``timeout_s`` for a locked database at most, and ``wait_s`` for another thread that is writing.
        """
        lock = self._lock
        if not lock.acquire(timeout=wait_s):
            return
        start_s = time.monotonic()
        try:
            new: dict[str, list[_Watched]] = {}
            for one in list(watched):
                if one.calls > one.written:
                    new.setdefault(one.location, []).append(one)
            written = [_write(location, group, timeout_s) for location, group in new.items()]
            self._failed = not all(written)
        finally:
            end_s = time.monotonic()
            self._resume_s = end_s + (end_s - start_s) / _MAX_SHARE
            lock.release()


def _write(location: str, watched: list[_Watched], timeout_s: float) -> bool:
    """Add counts to a database that exists; return whether they were written."""
    totals = [one.calls for one in watched]
    misses = [
        miss_row(one.kernel.problem, one.kernel.device.name, one.kernel.tier, total - one.written)
        for one, total in zip(watched, totals, strict=True)
    ]
    try:
        if looks_like_url(location):
            from autotile.database.engine import parse_location

            place = parse_location(location)
        else:
            place = expand_path(location, "a database")
        if isinstance(place, Path):
            if not (place.exists() and write_file(place, ADD_MISSES, misses, timeout_s=timeout_s)):
                return False
        else:
            from autotile.database.database import Database

            if not read_server(location, lambda _: True):  # no tables are created for it
                return False
            with FORK_LOCK, Database.open(location, server_timeout_s=SERVER_TIMEOUT_S) as database:
                database.add_misses(misses)
    except Exception:  # a database must not disturb the program, which has launched its kernel
        return False
    for one, total in zip(watched, totals, strict=True):
        one.written = total
    return True


Pause = Callable[[float], object]

_location = attrgetter("lookup.location")
"""Returns the path or URL of the database that a dispatcher serves a kernel from."""
_SERVER_INTERVAL_S = 60.0
"""Minimum time between two queries of a database server, which thousands of processes may share."""
_SHARE = 0.1
"""Maximum share of the time in which the thread chooses, since it holds the interpreter's lock meanwhile."""


class WatchedDatabase(msgspec.Struct, eq=False):
    """Decisions in a database when it was last read (``changes``); None before."""

    _location: str
    changes: Changes | None = None
    _signature: object = ()
    _asked_s: float = 0.0

    def read(self) -> Changes | None:
        """Return the decisions; None if nothing can have changed, or the database cannot be read now."""
        signature = file_signature(self._location)
        if signature is None:  # a server
            if self._asked_s and time.monotonic() - self._asked_s < _SERVER_INTERVAL_S:
                return None
            self._asked_s = time.monotonic()
        elif signature == self._signature:
            return None
        rows = read_file(self._location, CHANGES)
        if rows is None:
            with suppress(AutotileError):
                rows = read_server(self._location, lambda database: database.read(CHANGES)) or []
        if rows is None:
            return None
        self._signature = signature  # from before the query, so that no later change is missed
        return frozenset(rows)


class Refresher:
    """Chooses again what a dispatcher has served, as long as the program or the dispatcher keeps it.

    ``choose_again`` returns what would be served now in place of a kernel, or the kernel itself.
    """

    def __init__(self, misses: MissCounter, choose_again: Callable[[BoundKernel], BoundKernel]) -> None:
        self._misses = misses
        self.choose_again = choose_again
        self._kernels: WeakSet[BoundKernel] = WeakSet()
        self._databases: dict[str, WatchedDatabase] = {}
        self._renew_locks()

    def begin_anew(self) -> None:
        """Leave the counts to the parent, and make new locks, in a forked child."""
        self._misses.clear()
        self._renew_locks()

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._polling = threading.Lock()

    def add(self, kernel: BoundKernel) -> None:
        """Refresh a kernel that was looked up in a database from now on."""
        with self._lock:
            self._kernels.add(kernel)
        if kernel.can_launch:
            _thread.watch(self)

    def kernels(self) -> list[BoundKernel]:
        """Return the kernels that the program or the dispatcher keeps."""
        with FORK_LOCK, self._lock:
            return list(self._kernels)

    def poll(self, pause: Pause = lambda _: None) -> int:
        """Choose again what new results concern; return the number of replacements.

        ``pause`` is called with a time in seconds after each choice, for a thread to leave the interpreter to others.
        """
        replaced = 0
        with self._polling:
            for location in sorted(set(map(_location, self.kernels()))):
                database = self._databases.setdefault(location, WatchedDatabase(location))
                found = database.read()
                if found is not None:
                    known, database.changes = database.changes, found
                    if known != found:
                        changed = None if known is None else {(kernel, dtype) for kernel, dtype, *_ in known ^ found}
                        replaced += self.refresh(location, changed, pause)
        return replaced

    def refresh(
        self, location: str | None = None, changed: set[tuple[Any, Any]] | None = None, pause: Pause = lambda _: None
    ) -> int:
        """Choose again; return the number of replacements. What cannot be chosen or loaded is not replaced.

        Kernels are concerned if they are served from the database at ``location``, and are among the names and dtypes
        ``changed``; None for all. Operations are chosen again in any case.
        """
        replaced = 0
        for kernel in sorted(self.kernels(), key=lambda one: -one.calls):
            is_concerned = changed is None or (kernel.kernel, kernel.problem.dtype) in changed
            if location in (None, _location(kernel)) and (is_concerned or kernel.operation is not None):
                start_s = time.monotonic()
                with suppress(Exception):  # the program goes on with what it has
                    fresh = self.choose_again(kernel)
                    if fresh is not kernel and not fresh.choice.unread and kernel.has_shapes_of(fresh):
                        replaced += self.exchange(kernel, fresh)
                pause((time.monotonic() - start_s) * (1 / _SHARE - 1))
        return replaced

    def exchange(self, kernel: BoundKernel, fresh: BoundKernel) -> bool:
        """Serve another choice in place of a kernel's, loaded first if the kernel is; return whether they differ."""
        choices = [replace(one.choice, contenders=()) for one in (fresh, kernel)]  # which are only found when asked for
        if fresh.kernel == kernel.kernel and choices[0] == choices[1]:
            return False
        if kernel.is_loaded:
            fresh.load()
        if kernel.can_launch:
            self._misses.release(kernel)
        if not kernel.adopt(fresh):  # it was loaded meanwhile
            fresh.load()
            kernel.adopt(fresh)
        self.count_misses(kernel)
        return True

    def count_misses(self, kernel: BoundKernel) -> None:
        """Count the calls of a kernel if it is a fallback."""
        if kernel.tier != "exact" and kernel.can_launch and not kernel.is_library:
            self._misses.watch(_location(kernel), kernel)


class _RefreshThread(AsideThreads):
    """The thread that looks for new results of what is served."""

    def __init__(self) -> None:
        self._refreshers: WeakSet[Refresher] = WeakSet()
        super().__init__("autotile-refresh")

    def watch(self, refresher: Refresher) -> None:
        """Look for new results of what is served, unless the setting ``refresh`` is 0."""
        if self._threads and refresher in self._refreshers:
            return
        interval_s = read_settings().refresh_s
        if interval_s > 0:
            with self._lock:
                self._refreshers.add(refresher)
            if not self._threads:
                self.add(partial(self._poll, interval_s))

    def _poll(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            with self._lock:
                refreshers = list(self._refreshers)
            for refresher in refreshers:
                with suppress(Exception):  # the program needs none of this
                    refresher.poll(self._pause)

    def _pause(self, time_s: float) -> None:
        if self._stop.wait(time_s):
            raise InterruptedError("the process ends")


_thread = _RefreshThread()
