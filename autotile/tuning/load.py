"""How busy the compilers and the GPU are, and which of them the search waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotile.ground.model import Trial

_ON_GPU = ("load", "verify", "measure")


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the search's wall time, from the end of its first trial on.

    Attributes
    ----------
    gpu_busy
        Loading, verifying and measuring in the GPU worker, 0 to 1.
    compilers_busy
        Mean share of the compile workers that compiled, 0 to 1.
    """

    gpu_busy: float
    compilers_busy: float

    @property
    def binds(self) -> str:
        """What a faster one of would have made the search faster: ``gpu`` or ``compilers``."""
        return "gpu" if self.gpu_busy >= self.compilers_busy else "compilers"

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        return {
            "gpu_busy": round(self.gpu_busy, 3),
            "compilers_busy": round(self.compilers_busy, 3),
            "binds": self.binds,
        }


class LoadMeter:
    """Adds up a search's load.

    Parameters
    ----------
    compiled_s
        Seconds that all compile workers together have compiled so far.
    workers
        How many they are.
    """

    def __init__(self, compiled_s: Callable[[], float], workers: int) -> None:
        self._compiled_s = compiled_s
        self._workers = workers
        self._start: tuple[float, float] | None = None
        self._end = (0.0, 0.0)
        self._gpu_s = 0.0

    def add(self, trial: Trial) -> None:
        """Note that a trial has ended now."""
        now = (time.perf_counter(), self._compiled_s())
        if self._start is None:
            self._start = now
        else:
            self._gpu_s += sum(trial.seconds.get(stage, 0.0) for stage in _ON_GPU)
        self._end = now

    def read(self) -> Load | None:
        """The load from the first trial to the last; None before there are two."""
        if self._start is None or self._end[0] <= self._start[0]:
            return None
        wall_s, compiled_s = self._end[0] - self._start[0], self._end[1] - self._start[1]
        return Load(self._gpu_s / wall_s, compiled_s / wall_s / self._workers)
