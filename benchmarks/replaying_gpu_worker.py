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

from autotile.exchange.recording import read_recording
from autotile.tuning.replay import ReplayBackend
from autotile.workers.protocol import Candidate, Evaluation, RaceTimes, Stage, serve

_NOISE = 1e-3


class ReplayingWorker:
    """Handler of the requests of `autotile.workers.gpu.Gpu`."""

    def __init__(self) -> None:
        self._backend = ReplayBackend(read_recording(Path(os.environ["BENCHMARK_RECORDING"])))
        self._seconds = float(os.environ["BENCHMARK_SECONDS"])

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Handle one request."""
        match message["op"]:
            case "open":
                return {"device": self._backend.device.to_json()}
            case "race":
                return self._race(message)
            case "verify":
                return self._backend.verify(self._candidate(message), 1, None).to_json()
            case _:
                stage("measure")
                time.sleep(self._seconds)
                return self._evaluation(message, message["best_us"]).to_json()

    def _race(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        rng = Random(message["seed"])
        rows = []
        for one in message["candidates"]:
            measured = self._evaluation(one, None).measurement
            assert measured is not None
            noises = (1.0 + _NOISE * rng.random() for _ in range(message["rounds"]))
            rows.append(RaceTimes(tuple(measured.time_us * noise for noise in noises)))
        return {"raced": [row.to_json() for row in rows]}

    def _evaluation(self, message: Mapping[str, Any], best_us: float | None) -> Evaluation:
        self._backend.submit(self._candidate(message), best_us)
        return self._backend.result().evaluation

    def _candidate(self, message: Mapping[str, Any]) -> Candidate:
        return Candidate(message["config"], message["cubin_path"], message["symbols"])


if __name__ == "__main__":
    serve(ReplayingWorker())
