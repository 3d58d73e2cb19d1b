"""GPU worker without a GPU: answers ``sweep`` with times from a formula, and breaks at some configurations."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.workers.protocol import FinalReply, Stage, serve

WRONG, CRASHES, HANGS, BREAKS = ({"THREADS": t, "WORK": 4} for t in (32, 64, 128, 256))
"""Configurations that are wrong, end the process, never return, and leave a context that cannot be used."""
RAGGED_WRONG = {"THREADS": 64, "WORK": 1}
"""Configuration that is right, and fast, at every size but the ragged ones."""


def time_us(kernel: int, config: Mapping[str, Any], n: int) -> float:
    """Few threads are best for few elements, many for many; the second kernel is slower."""
    ideal = 64 if n < 20_000 else 256
    return (1.0 + n / 50_000) * (1.0 + 0.2 * abs(math.log2(config["THREADS"] / ideal)) + 0.1 * config["WORK"]) + kernel


def answer(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    """Answer a request."""
    assert message["op"] == "sweep"
    assert not message["libraries"]
    faulty = os.environ.get("AUTOTILE_FAULTY_SWEEP")
    swept = []
    for number, entry in enumerate(message["entries"]):
        stage(f"sweep {number}")
        config, n = entry["config"], message["sizes"][entry["kernel"]]["n"]
        if log := os.environ.get("AUTOTILE_SWEEP_LOG"):
            with Path(log).open("a") as file:
                file.write(json.dumps({**entry, "n": n}) + "\n")
        if os.environ.get("AUTOTILE_RAGGED_WRONG") and config == RAGGED_WRONG and entry["ragged"]:
            swept.append({"outcome": "wrong_result", "reason": f"y[0] is 1, expected 2 at n={entry['ragged']['n']}"})
            continue
        if faulty and config == CRASHES:
            os._exit(3)
        if faulty and config == HANGS:
            time.sleep(60)
        if faulty and config == BREAKS:
            raise FinalReply({"swept": swept, "failed": "an illegal address", "outcome": "crashed", "last": True})
        if faulty and config == WRONG:
            swept.append({"outcome": "wrong_result", "reason": "y[0] is 1, expected 2"})
            continue
        found = time_us(entry["kernel"], config, n)
        measurement = {"time_us": found, "low_us": found, "high_us": found, "samples_us": [found], "l2": "cold"}
        swept.append({"outcome": "ok", "measurement": measurement})
    return {"swept": swept}


if __name__ == "__main__":
    serve(answer)
