"""Children that outlive a session: a family is tuned in a hundred short ones, and each would wait for its own."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from autotile.process.child import Child


class Shelf:
    """Keeps children that are idle and well until somebody asks for one of their module; ends them when it is closed.

    What a child was asked before must not matter to it: a GPU worker lays another problem out anew, and the same one
    too where that was harmed; a compile worker remembers nothing.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Child]] = {}
        self._lock = threading.Lock()

    def take(self, module: str) -> Child:
        """A child that runs a module, an old one where there is one.

        Raises
        ------
        WorkerError, InputError
            As for `Child`.
        """
        with self._lock:
            kept = self._kept.get(module, [])
            while kept:
                child = kept.pop()
                if child.is_running():
                    return child
                child.kill()  # it died meanwhile
        return Child(module)

    def put(self, child: Child) -> None:
        """Keep a child that has answered whatever it was asked."""
        with self._lock:
            self._kept.setdefault(child.module, []).append(child)

    def close(self) -> None:
        """End all that are kept."""
        with self._lock:
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
