"""Children that outlive a session: a family is tuned in a hundred short ones, and each would wait for its own."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from autotile.process.child import Child


class Shelf:
    """Keeps children that are idle and well until somebody asks for one of their module; ends them when it is closed.

    What a child was asked before must not matter to it: a GPU worker lays another problem out anew, and the same one
    too where that was harmed; a compile worker remembers its cubin cache only. Both keep the memory limit that they
    were given first.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Child]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, module: str) -> Child:
        """A child that runs a module, an old one where there is one.

        Raises
        ------
        WorkerError, InputError
            As for `Child`.
        """
        return self.take_kept(module) or Child(module)

    def take_kept(self, module: str) -> Child | None:
        """An old child that runs a module; None where there is none."""
        found, dead = None, []
        with self._lock:
            kept = self._kept.get(module, [])
            while kept and found is None:
                child = kept.pop()
                if child.is_running():
                    found = child
                else:
                    dead.append(child)
        for child in dead:  # outside of the lock, as a child that the driver holds takes long to bury
            child.kill()
        return found

    def put(self, child: Child) -> None:
        """Keep a child that has answered whatever it was asked; end it where the shelf is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept.setdefault(child.module, []).append(child)
        if closed:
            child.close()

    def close(self) -> None:
        """End all that are kept, and what is put here from now on."""
        with self._lock:
            self._closed = True
            children = [child for kept in self._kept.values() for child in kept]
            self._kept.clear()
        for child in children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
