"""Wall time of a session and of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._phases: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._start

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds of each phase that was reached, also where an exception ended it."""
        return dict(self._phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of what runs inside."""
        start = self.elapsed_s
        try:
            yield
        finally:
            self._phases[name] = round(self.elapsed_s - start, 3)
