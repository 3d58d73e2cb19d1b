"""How busy the compilers and the GPU are, and which of them the search waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from autotile.ground.model import Trial
from autotile.process.compile_pool import CompilePool

_ON_GPU = ("load", "verify", "measure")


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the search's wall time while candidates remain: from its first trial to its last compilation's start.

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
    pool
        The compile workers.
    workers
        How many they are.
    """

    def __init__(self, pool: CompilePool, workers: int) -> None:
        self._pool = pool
        self._workers = workers
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._gpu_s = 0.0

    def add(self, trial: Trial) -> None:
        """Note that a trial has ended now."""
        now = time.perf_counter()
        if self._first is not None:
            self._gpu_s += sum(trial.seconds.get(stage, 0.0) for stage in _ON_GPU)
        mark = _Mark(now, self._pool.busy_s, self._gpu_s)
        if self._first is None:
            self._first = mark
        if self._last is None or self._last.time_s < self._pool.begun_at:
            self._last = mark

    def read(self) -> Load | None:
        """The load while candidates remained; None before there are two trials."""
        if self._first is None or self._last is None or self._first is self._last:
            return None
        wall_s = self._last.time_s - self._first.time_s
        compiled_s = self._last.compiled_s - self._first.compiled_s
        return Load(self._last.gpu_s / wall_s, compiled_s / wall_s / self._workers)


class _Mark(NamedTuple):
    time_s: float
    compiled_s: float
    gpu_s: float
