"""A fake GPU worker for the tiny kernel: more threads are faster and use more energy, more work has larger errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome
from autotile.workers.protocol import Evaluation, RaceTimes, Stage, serve


class Worker:
    """Reports energies if the workload requests them, as the real worker does."""

    def __init__(self) -> None:
        self._energy = False

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        match message["op"]:
            case "open":
                self._energy = message["workload"]["energy"]
                return {"device": device_profile("h200").to_json()}
            case "race":
                raced = [RaceTimes((time_us(c["config"]),) * message["rounds"]) for c in message["candidates"]]
                return {"raced": [row.to_json() for row in raced]}
            case "verify":
                return Evaluation(Outcome.OK, stage="verify").to_json()
            case _:
                return self._evaluation(message).to_json()

    def _evaluation(self, message: Mapping[str, Any]) -> Evaluation:
        config, time = message["config"], time_us(message["config"])
        if config == {"THREADS": 64, "WORK": 4}:
            return Evaluation(Outcome.WRONG_RESULT, "y[3] is 0", "verify")
        dropped = message["best_us"] is not None and time > 1.25 * message["best_us"]
        telemetry: dict[str, float] = {"max_error": 1e-7 * int(config["WORK"])}
        if self._energy and not dropped:
            telemetry["energy_mj"] = int(config["THREADS"]) / 64 + int(config["WORK"])
        measurement = Measurement(time, 0.99 * time, 1.01 * time, (time,))
        outcome = Outcome.PRUNED if dropped else Outcome.OK
        return Evaluation(outcome, "", "measure", measurement, telemetry=telemetry)


def time_us(config: Mapping[str, Any]) -> float:
    """Return a time; THREADS=256 WORK=4 is the fastest."""
    return 1000 / int(config["THREADS"]) + 2 / int(config["WORK"])


if __name__ == "__main__":
    serve(Worker())
