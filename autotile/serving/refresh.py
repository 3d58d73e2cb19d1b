"""New results reach a running program: a thread looks for them, and replaces what is served.

The thread looks at the database every few seconds (the setting ``refresh``). While nothing was written there, it reads
the state of two files. When something was decided, what is served of the kernels concerned is chosen again. Where the
choice differs, its code is compiled and loaded before callers use it, so that no call waits for it. Look-ups and calls
do nothing for this: a kernel that changes stays the same object.

The thread starts with the first kernel that is served for a CUDA device, and ends with the process. A forked child has
none until it is served a kernel itself.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from autotile.core.forks import FORK_LOCK
from autotile.database.fast_access import (
    SERVER_TIMEOUT_S,
    Changes,
    file_signature,
    read_changes_fast,
)
from autotile.errors import AutotileError
from autotile.settings import read_settings

if TYPE_CHECKING:
    from autotile.serving.bound import BoundKernel
    from autotile.serving.miss_counter import MissCounter
    from autotile.serving.recent_cache import RecentCache

Pause = Callable[[float], object]

_SERVER_INTERVAL_S = 60.0
"""Minimum time between two queries of a database server, which thousands of processes may share."""
_SHARE = 0.1
"""Maximum share of the time in which the thread chooses, since it holds the interpreter's lock meanwhile."""
_JOIN_S = 10.0
"""Maximum wait at exit for a compilation that the thread has begun, which cannot be interrupted."""


class _Place:
    """What is known of a database.

    Attributes
    ----------
    changes
        What was decided when it was last read; None before.
    """

    __slots__ = ("_asked_s", "_location", "_signature", "changes")

    def __init__(self, location: str) -> None:
        self._location = location
        self._signature: object = ()
        self._asked_s = 0.0
        self.changes: Changes | None = None

    def read(self) -> Changes | None:
        """Return what is decided; None if nothing can have changed, or the database cannot be read now."""
        signature = file_signature(self._location)
        if signature is None:  # a server
            if self._asked_s and time.monotonic() - self._asked_s < _SERVER_INTERVAL_S:
                return None
            self._asked_s = time.monotonic()
        elif signature == self._signature:
            return None
        changes = read_changes_fast(self._location)
        if changes is None:
            changes = self._read_server()
        if changes is not None:
            self._signature = signature  # from before the query, so that no later change is missed
        return changes

    def _read_server(self) -> Changes | None:
        from autotile.database.database import Database

        try:
            with FORK_LOCK:
                database = Database.open_readonly(self._location, server_timeout_s=SERVER_TIMEOUT_S)
                if database is None:
                    return frozenset()
                with database:
                    return database.changes()
        except AutotileError:
            return None


ChooseAgain = Callable[["BoundKernel"], "BoundKernel"]
"""Function that returns what would be served now in place of a kernel, or the kernel itself."""


class Refresher:
    """Chooses again what a dispatcher has served.

    Kernels are known as long as the program or the dispatcher keeps them.

    Parameters
    ----------
    misses
        Counter of the calls of fallbacks.
    caches
        Where the dispatcher keeps kernels.
    """

    def __init__(self, misses: MissCounter, caches: Sequence[RecentCache[Any, BoundKernel]]) -> None:
        self._misses = misses
        self._caches = caches
        self._kernels: WeakKeyDictionary[BoundKernel, tuple[str, ChooseAgain]] = WeakKeyDictionary()
        self._places: dict[str, _Place] = {}
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make new locks, in a forked child."""
        self._lock = threading.Lock()
        self._polling = threading.Lock()

    def add(self, location: str, kernel: BoundKernel, choose_again: ChooseAgain) -> None:
        """Refresh a kernel that is served from a database from now on.

        Parameters
        ----------
        location
            Path or URL of the database.
        choose_again
            Chooses again. It must not refer to the kernel.
        """
        with self._lock:
            self._kernels[kernel] = location, choose_again
        if kernel.can_launch:
            _thread.watch(self)

    def kernels(self) -> list[tuple[BoundKernel, str, ChooseAgain]]:
        """Return the kernels that the program or the dispatcher keeps, each with its database."""
        with FORK_LOCK, self._lock:
            return [(kernel, *known) for kernel, known in self._kernels.items()]

    def poll(self, pause: Pause = lambda _: None) -> int:
        """Choose again what new results concern; return the number of replacements.

        Parameters
        ----------
        pause
            Called with a time in seconds after each choice, for a thread to leave the interpreter to others.
        """
        with self._polling:
            locations = sorted({location for _, location, _ in self.kernels()})
            return sum(self._poll(location, pause) for location in locations)

    def _poll(self, location: str, pause: Pause) -> int:
        place = self._places.setdefault(location, _Place(location))
        found = place.read()
        if found is None:
            return 0
        known, place.changes = place.changes, found
        if known == found:
            return 0
        changed = None if known is None else {(kernel, dtype) for kernel, dtype, *_ in known ^ found}
        return self.refresh(location, changed, pause)

    def refresh(
        self, location: str | None = None, changed: set[tuple[Any, Any]] | None = None, pause: Pause = lambda _: None
    ) -> int:
        """Choose again; return the number of replacements. What cannot be chosen or loaded is not replaced.

        Parameters
        ----------
        location
            Database whose results are served; None for all.
        changed
            Kernels and dtypes that are concerned; None for all. Operations are chosen again in any case.
        pause
            As for `poll`.
        """
        replaced = 0
        for kernel, place, choose_again in sorted(self.kernels(), key=lambda one: -one[0].calls):
            is_concerned = changed is None or (kernel.kernel, kernel.problem.dtype) in changed
            if location in (None, place) and (is_concerned or kernel.operation is not None):
                start_s = time.monotonic()
                with suppress(Exception):  # the program goes on with what it has
                    replaced += self._refresh(place, kernel, choose_again)
                pause((time.monotonic() - start_s) * (1 / _SHARE - 1))
        return replaced

    def _refresh(self, location: str, kernel: BoundKernel, choose_again: ChooseAgain) -> bool:
        fresh = choose_again(kernel)
        if fresh is kernel or fresh.choice.unread or not kernel.has_shapes_of(fresh):
            return False
        return self.exchange(location, kernel, fresh, choose_again)

    def exchange(self, location: str, kernel: BoundKernel, fresh: BoundKernel, choose_again: ChooseAgain) -> bool:
        """Serve another choice in place of a kernel's, loaded first if the kernel is; return whether they differ.

        The kernel itself adopts it, unless one of the two is a library: then callers get the other object at their next
        look-up.

        Raises
        ------
        ToolchainError, CompileError, InputError
            As for a call.
        """
        choices = [replace(one.choice, contenders=()) for one in (fresh, kernel)]  # which are only found when asked for
        if fresh.kernel == kernel.kernel and choices[0] == choices[1]:
            return False
        if kernel.is_loaded:
            fresh.load()
        if kernel.can_launch:
            self._misses.release(kernel)
        adopted = kernel.adopt(fresh)
        if not (adopted or kernel.is_library or fresh.is_library):  # it was loaded meanwhile
            fresh.load()
            adopted = kernel.adopt(fresh)
        if not adopted:
            fresh.request, fresh.operation = kernel.request, kernel.operation
            fresh.library_allowed = kernel.library_allowed
            with FORK_LOCK:
                for cache in self._caches:
                    cache.exchange(kernel, fresh)
            self.add(location, fresh, choose_again)
            kernel = fresh
        self.count_misses(location, kernel)
        return True

    def count_misses(self, location: str, kernel: BoundKernel) -> None:
        """Count the calls of a kernel if it is a fallback."""
        if kernel.tier != "exact" and kernel.can_launch and not kernel.is_library:
            self._misses.watch(location, kernel)


class _Thread:
    """The thread of this process."""

    def __init__(self) -> None:
        self._refreshers: WeakSet[Refresher] = WeakSet()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start without a thread, as a forked child has none, and locks that it held would be held forever."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        for refresher in self._refreshers:
            refresher.renew_locks()

    def watch(self, refresher: Refresher) -> None:
        """Look for new results of what is served, unless the setting ``refresh`` is 0."""
        if self._thread is not None and refresher in self._refreshers:
            return
        interval_s = read_settings().refresh_s
        if interval_s <= 0:
            return
        with self._lock:
            self._refreshers.add(refresher)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(interval_s,), name="autotile-refresh", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            for refresher in self._known():
                with suppress(Exception):  # the program needs none of this
                    refresher.poll(self._pause)

    def _known(self) -> list[Refresher]:
        with self._lock:
            return list(self._refreshers)

    def _pause(self, time_s: float) -> None:
        if self._stop.wait(time_s):
            raise InterruptedError("the process ends")


_thread = _Thread()


os.register_at_fork(after_in_child=_thread.begin_anew)
atexit.register(_thread.stop)
