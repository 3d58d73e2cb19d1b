"""Forks of a process whose threads use databases.

A child must inherit nothing of SQLite: it has locks of its own, which a thread of the parent may hold for ever, and it
keeps per process which locks of a file are held, so that a child that opened the same file would work without any
(https://sqlite.org/howtocorrupt.html, section 2.6). So a fork waits until no thread uses a database, and closes all
connections to files first. The next use of a database opens new ones, in the parent as in the child.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")

FORK_LOCK = threading.RLock()
"""Held while serving uses a database, and during a fork."""
_WAIT_S = 60.0
"""Time that a fork waits for threads that use databases; a transaction waits 30 s for another process at most."""


class ForkGuard:
    """Keeps forks and uses of databases apart; several threads may use databases at the same time."""

    def __init__(self) -> None:
        self.generation = 0
        """Number of forks so far, of this process and those that it stems from: a connection is of one generation."""
        self._changed = threading.Condition(threading.Lock())
        self._active = 0
        """Number of threads that use a database."""
        self._is_forking = False
        self._uses = threading.local()
        self._closers: list[Callable[[], None]] = []
        self._leavers: list[Callable[[], None]] = []
        os.register_at_fork(
            before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
        )

    def on_fork(self, close: Callable[[], None], leave: Callable[[], None]) -> None:
        """Register what happens at each fork.

        ``close`` is called before it, while no thread uses a database, and closes connections; ``leave`` is called in
        the child, and leaves what could not be closed to the parent.
        """
        self._closers.append(close)
        self._leavers.append(leave)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use databases, or import modules, for the length of the block; a fork waits for its end."""
        depth = self._depth
        if not depth:
            with self._changed:
                while self._is_forking:
                    self._changed.wait()
                self._active += 1
        self._uses.depth = depth + 1
        try:
            yield
        finally:
            self._uses.depth = depth
            if not depth:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

    @property
    def _depth(self) -> int:
        """Number of blocks of `use` that the calling thread is in."""
        return getattr(self._uses, "depth", 0)

    def _before(self) -> None:
        FORK_LOCK.acquire()
        self._changed.acquire()
        while self._is_forking:  # by another thread
            self._changed.wait()
        self._is_forking = True
        own, end = int(self._depth > 0), time.monotonic() + _WAIT_S
        while self._active > own and (left_s := end - time.monotonic()) > 0:
            self._changed.wait(left_s)
        for close in self._closers:
            close()

    def _after_in_parent(self) -> None:
        self.generation += 1
        self._is_forking = False
        self._changed.notify_all()
        self._changed.release()
        FORK_LOCK.release()

    def _after_in_child(self) -> None:
        self.generation += 1
        self._changed.release()
        self._changed = threading.Condition(threading.Lock())
        self._active, self._is_forking = int(self._depth > 0), False
        for leave in self._leavers:
            leave()
        FORK_LOCK.release()


fork_guard = ForkGuard()
"""The guard of this process."""


class cached_property(Generic[Value]):  # noqa: N801 - as in functools
    """Attribute that is computed at its first use, as `functools.cached_property` but without a lock.

    Before Python 3.12, that one has a lock per class. A child that is forked while another thread holds it would wait
    for it forever. Here two threads may both compute the value, and the last one's is kept.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
