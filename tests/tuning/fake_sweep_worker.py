"""GPU worker without a GPU: answers jobs of a grid with times from a formula, and breaks at some configurations."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.core.device import device_profile
from autotile.workers.child import Stage, serve

WRONG, CRASHES, HANGS, BREAKS = ({"THREADS": t, "WORK": 4} for t in (32, 64, 128, 256))
"""Configurations that are wrong, end the process, never return, and leave a context that cannot be used."""
RAGGED_WRONG = {"THREADS": 64, "WORK": 1}
"""Configuration that is right, and fast, at every size but the ragged ones."""


def time_us(kernel: int, config: Mapping[str, Any], n: int) -> float:
    """Few threads are best for few elements, many for many; the second kernel is slower."""
    ideal = 64 if n < 20_000 else 256
    return (1.0 + n / 50_000) * (1.0 + 0.2 * abs(math.log2(config["THREADS"] / ideal)) + 0.1 * config["WORK"]) + kernel


def answer(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    if message["op"] == "open":
        return device_profile("h200").to_json()
    assert message["op"] == "time"
    assert message["grid"]
    faulty = os.environ.get("AUTOTILE_FAULTY_SWEEP")
    wrong = [WRONG] * bool(faulty) + [RAGGED_WRONG] * bool(os.environ.get("AUTOTILE_RAGGED_WRONG"))
    readings: list[Any] = []
    for number, entry in enumerate(message["entries"]):
        stage(f"load {number}" if len(message["entries"]) > 1 else "load")
        candidate, workload = entry["candidate"], message["workloads"][entry["problem"]]
        config = candidate["config"]
        if log := os.environ.get("AUTOTILE_SWEEP_LOG"):
            with Path(log).open("a") as file:
                file.write(json.dumps(candidate) + "\n")
        if faulty and config == CRASHES:
            os._exit(3)
        if faulty and config == HANGS:
            time.sleep(60)
        if faulty and config == BREAKS:
            readings.append({"outcome": "crashed", "reason": "an illegal address in stage verify", "stage": "verify"})
            return {"readings": readings, "last": True}
        if config in wrong:
            readings.append({"outcome": "wrong_result", "reason": "y[0] is 1, expected 2"})
            continue
        kernel = 'name = "second"' in workload["spec_text"]
        found = time_us(int(kernel), config, workload["sizes"]["n"])
        measurement = {"time_us": found, "low_us": found, "high_us": found, "samples_us": [found], "l2": "cold"}
        readings.append({"outcome": "ok", "measurement": measurement})
    return {"readings": readings}


if __name__ == "__main__":
    serve(answer)
