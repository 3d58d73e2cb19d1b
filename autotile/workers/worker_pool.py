"""A pool of idle child processes, which outlive the session that started them."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from autotile.workers.child import Child


class WorkerPool:
    """Idle children by module, for reuse by later sessions; closing the pool ends them.

    A worker must not depend on its earlier requests: a GPU worker sets up each new problem from scratch, and the same
    problem too if its data were corrupted; a compile worker keeps its cubin cache only. Both keep the memory limit of
    their first request.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[Child]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, module: str) -> Child:
        """Return a child that runs a module: an idle one, or a new one if there is none.

        Raises
        ------
        WorkerError, InputError
            As for `autotile.workers.child.Child`.
        """
        return self.acquire_idle(module) or Child(module)

    def acquire_idle(self, module: str) -> Child | None:
        """Return an idle child that runs a module; None if there is none."""
        found, dead = None, []
        with self._lock:
            idle = self._idle.get(module, [])
            while idle and found is None:
                child = idle.pop()
                if child.is_running():
                    found = child
                else:
                    dead.append(child)
        for child in dead:  # outside of the lock: reaping a child that the GPU driver holds takes long
            child.kill()
        return found

    def release(self, child: Child) -> None:
        """Keep a child without a pending request for reuse; a closed pool ends it."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._idle.setdefault(child.module, []).append(child)
        if closed:
            child.close()

    def close(self) -> None:
        """End the idle children, and those that are released from now on."""
        with self._lock:
            self._closed = True
            children = [child for idle in self._idle.values() for child in idle]
            self._idle.clear()
        for child in children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
