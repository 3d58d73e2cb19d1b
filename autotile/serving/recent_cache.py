"""A dictionary of the entries that were used last, whose hits cost no more than those of a plain one."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


MAX_SERVED = 10_000
"""Maximum number of served kernels that are kept, of 3 KiB each."""


class RecentCache(dict[Key, Value]):
    """The entries that were used last, read with `dict.get`.

    An order of use would cost time at each hit. Instead there are two generations: this dictionary, and the one that it
    was when it last became full. An entry of the older generation that is asked for moves into this one; the others
    are dropped when this one is full again.

    Parameters
    ----------
    limit
        Maximum number of entries of both generations together.
    """

    __slots__ = ("_full", "_lock", "_older")  # without a dictionary of attributes, `get` is found as fast as in a dict

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._full = limit // 2
        self._older: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def recall(self, key: Key) -> Value | None:
        """Return an entry of either generation, or None, after `get` has found nothing."""
        with self._lock:
            found = self.get(key)
            if found is None and (found := self._older.pop(key, None)) is not None:
                self._add(key, found)
            return found

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry unless the key has one, and return the entry: concurrent callers get the same object."""
        with self._lock:
            found = self.get(key, self._older.get(key))
            if found is None:
                self._add(key, found := value)
            return found

    def exchange(self, old: Value, new: Value) -> None:
        """Replace a value by another wherever it is kept."""
        with self._lock:
            for entries in (self, self._older):
                for key in [key for key, value in entries.items() if value is old]:
                    entries[key] = new

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            super().clear()
            self._older = {}

    def _add(self, key: Key, value: Value) -> None:
        if len(self) >= self._full:
            self._older = dict(self)
            super().clear()
        self[key] = value
