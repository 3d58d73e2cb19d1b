"""Count the calls of kernels that were served as a fallback, and add the counts to the tuning database.

The calling thread writes the counts: after the first call of each kernel, and then whenever its number of calls has
doubled. To limit the overhead to 1 % of the time, a write is followed by a pause of 100 times its duration (some
milliseconds), in which doublings are ignored. The rest is written when the process ends. A process that is killed loses
no kernel that was called, and of the calls of a kernel less than half, or those made during a pause.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.forks import FORK_LOCK
from autotile.database.fast_access import SERVER_TIMEOUT_S, Miss, add_misses_fast
from autotile.database.paths import looks_like_url
from autotile.settings import expand_path

if TYPE_CHECKING:
    from autotile.database.engine import ServerLocation
    from autotile.serving.bound import BoundKernel

_MAX_SHARE = 0.01
"""Maximum share of the time spent writing, apart from first calls, which take long anyway as they load the kernel."""
_CALL_TIMEOUT_S = 0.05
"""Maximum wait for a locked database, within a call."""
_MAX_WATCHED = 10_000
"""Maximum number of kernels whose counts are kept; their number would otherwise grow with that of the problems."""
_EXIT_TIMEOUT_S = 5.0
"""Maximum wait for a locked database, and for another thread that is writing, when the process ends."""


class _Watched:
    """A kernel whose calls are counted.

    Attributes
    ----------
    location
        Path or URL of the database.
    written
        Number of calls that the database has.
    is_listed
        Whether it is among those whose counts are written.
    """

    __slots__ = ("is_listed", "kernel", "location", "written")

    def __init__(self, location: str, kernel: BoundKernel, written: int = 0) -> None:
        self.location = location
        self.kernel = kernel
        self.written = written
        self.is_listed = False

    @property
    def calls(self) -> int:
        """Number of calls so far; a kernel that was requested and never called counts as one."""
        return max(1, self.kernel.calls)


class _ProcessCounts:
    """Counts of one process."""

    def __init__(self) -> None:
        self.watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._resume_s = 0.0
        """End of the pause."""
        self._failed = False

    def add(self, watched: _Watched) -> None:
        """List a kernel; of too many, the older half is written and leaves the list until it is called again."""
        if len(self.watched) >= _MAX_WATCHED:
            self.write(self.watched, _CALL_TIMEOUT_S, wait_s=0.0)
            for one in self.watched[: _MAX_WATCHED // 2]:
                one.is_listed = False
            del self.watched[: _MAX_WATCHED // 2]  # in place, as the list is written at exit
        watched.is_listed = True
        self.watched.append(watched)

    def report(self, watched: _Watched, *, is_first: bool) -> None:
        """Write the counts after a call, unless this is a pause or another thread is writing."""
        if not watched.is_listed:
            self.add(watched)
        if time.monotonic() >= self._resume_s:
            self.write(self.watched, _CALL_TIMEOUT_S, wait_s=0.0)
        elif is_first and not self._failed:
            self.write([watched], _CALL_TIMEOUT_S, wait_s=0.0)

    def write(self, watched: Iterable[_Watched], timeout_s: float, wait_s: float) -> None:
        """Write the counts that the database does not have; those that cannot be written are kept for the next time.

        Parameters
        ----------
        watched
            Kernels to write.
        timeout_s
            Maximum wait for a locked database.
        wait_s
            Maximum wait for another thread that is writing.
        """
        if not self._lock.acquire(timeout=wait_s):
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
            self._lock.release()


class MissCounter:
    """Counts calls of kernels that were served as a fallback, in this process and in its children.

    A forked child counts the kernels that it was served itself, and leaves those of its parent to the parent. It could
    not call them: serving for a device initializes CUDA, which then cannot be used in children that are forked later
    ("The CUDA runtime does not support the fork start method": PyTorch, "Multiprocessing best practices").
    """

    def __init__(self) -> None:
        self._by_process: dict[int, _ProcessCounts] = {}

    def watch(self, location: str, kernel: BoundKernel) -> None:
        """Count the calls of a kernel from now on, for the database at ``location``; none is created."""
        watched = _Watched(location, kernel, kernel.calls)
        self._counts().add(watched)
        kernel.report_calls(partial(self._report, watched))

    def release(self, kernel: BoundKernel) -> None:
        """Write the counts of a kernel, if it is counted, and count its calls no longer."""
        kernel.report_calls(None)
        counts = self._counts()
        found = [watched for watched in list(counts.watched) if watched.kernel is kernel]
        counts.write(found, _CALL_TIMEOUT_S, wait_s=_CALL_TIMEOUT_S)
        for watched in found:
            with suppress(ValueError):  # another thread has shortened the list
                counts.watched.remove(watched)

    def flush(self) -> None:
        """Write all counts now."""
        counts = self._counts()
        counts.write(counts.watched, _EXIT_TIMEOUT_S, wait_s=_EXIT_TIMEOUT_S)

    def clear(self) -> None:
        """Forget all kernels and their unwritten counts."""
        self._counts().watched.clear()

    @property
    def kernels(self) -> tuple[BoundKernel, ...]:
        """Kernels whose calls are counted."""
        return tuple(watched.kernel for watched in self._counts().watched)

    def _report(self, watched: _Watched, calls: int) -> int:
        """Write the counts if it is time to, and return the number of calls at which to check again."""
        self._counts().report(watched, is_first=calls == 1)
        return 2 * calls

    def _counts(self) -> _ProcessCounts:
        process = os.getpid()
        counts = self._by_process.get(process)
        if counts is None:
            new = _ProcessCounts()
            counts = self._by_process.setdefault(process, new)
            if counts is new:  # rather than that of another thread
                _write_at_exit(new)
        return counts


def _write_at_exit(counts: _ProcessCounts) -> None:
    """Write the rest when this process ends.

    Unlike functions of `atexit`, finalizers of `multiprocessing` also run in the children that it forks, and never in a
    child of the process that made them.
    """
    from multiprocessing.util import Finalize

    Finalize(None, counts.write, (counts.watched, _EXIT_TIMEOUT_S, _EXIT_TIMEOUT_S), exitpriority=0)


def _write(location: str, watched: list[_Watched], timeout_s: float) -> bool:
    """Add counts to a database; return whether they were written."""
    totals = [one.calls for one in watched]
    misses = [
        Miss(one.kernel.problem, one.kernel.device.name, one.kernel.tier, total - one.written)
        for one, total in zip(watched, totals, strict=True)
    ]
    try:
        written = _add_misses(location, misses, timeout_s)
    except Exception:  # a database must not disturb the program, which has launched its kernel
        return False
    if written:
        for one, total in zip(watched, totals, strict=True):
            one.written = total
    return written


def _add_misses(location: str, misses: list[Miss], timeout_s: float) -> bool:
    if not looks_like_url(location):
        path = expand_path(location, "a database")
    else:
        from autotile.database.engine import parse_location

        place = parse_location(location)
        if not isinstance(place, Path):
            with FORK_LOCK:
                return _add_to_server(place, misses)
        path = place
    return path.exists() and add_misses_fast(path, misses, timeout_s=timeout_s)


def _add_to_server(server: ServerLocation, misses: list[Miss]) -> bool:
    from autotile.database.database import Database
    from autotile.database.misses import count_miss

    url = server.reveal()
    location = url.render_as_string(hide_password=False)
    present = Database.open_readonly(location, server_timeout_s=SERVER_TIMEOUT_S)
    if present is None:  # no tables are created for it
        return False
    present.close()
    with (
        Database.open(location, server_timeout_s=SERVER_TIMEOUT_S) as database,
        database.writing() as connection,
    ):
        for miss in misses:
            count_miss(connection, *miss)
    return True
