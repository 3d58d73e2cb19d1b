"""GPU worker that replays a recording in place of a GPU: a process that can be killed and stopped like a real one.

``BENCHMARK_RECORDING`` names the recording and ``BENCHMARK_SECONDS`` the time of a candidate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from autotile.core.model import Outcome
from autotile.exchange.recording import read_recording
from autotile.tuning.replay import ReplayBackend
from autotile.workers.child import Stage, serve
from autotile.workers.jobs import Race, Reading, Time, read_job

_NOISE = 1e-3


class ReplayingWorker:
    """Handler of the requests of `autotile.workers.gpu.Gpu`."""

    def __init__(self) -> None:
        self._backend = ReplayBackend(read_recording(Path(os.environ["BENCHMARK_RECORDING"])))
        self._seconds = float(os.environ["BENCHMARK_SECONDS"])

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Handle one request."""
        if message["op"] == "open":
            return self._backend.device.to_json()
        job = read_job(message)
        if isinstance(job, Race):
            return {"readings": self._race(job)}
        if isinstance(job, Time):
            stage("measure")
            time.sleep(self._seconds)
        return {"readings": self._backend.run(job)}

    def _race(self, job: Race) -> list[Reading]:
        rng = Random(job.seed)
        readings = []
        for entry in job.entries:
            (found,) = self._backend.run(Time((entry,)))
            measured = found.measurement
            assert measured is not None
            noises = (1.0 + _NOISE * rng.random() for _ in range(job.rounds))
            readings.append(Reading(Outcome.OK, rounds_us=tuple(measured.time_us * noise for noise in noises)))
        return readings


if __name__ == "__main__":
    serve(ReplayingWorker())
