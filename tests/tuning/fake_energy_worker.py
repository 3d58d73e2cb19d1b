"""A fake GPU worker for the tiny kernel: more threads are faster and use more energy, more work has larger errors."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.core.model import Measurement, Outcome
from autotile.workers.child import Stage, serve
from autotile.workers.jobs import Reading

sys.path.append(str(Path(__file__).parents[1]))  # of a child process

from gpu_calls import worker

_open: dict[str, Any] = {}


def run(config: Mapping[str, Any], limit_us: float | None, stage: Stage) -> Reading:
    """Report energies if the workload requests them, as the real worker does."""
    time = time_us(config)
    if config == {"THREADS": 64, "WORK": 4}:
        return Reading(Outcome.WRONG_RESULT, "y[3] is 0", "verify")
    dropped = limit_us is not None and time > 1.25 * limit_us
    telemetry: dict[str, float] = {"max_error": 1e-7 * int(config["WORK"])}
    if _open["energy"] and not dropped:
        telemetry["energy_mj"] = int(config["THREADS"]) / 64 + int(config["WORK"])
    measurement = Measurement(time, 0.99 * time, 1.01 * time, (time,))
    outcome = Outcome.PRUNED if dropped else Outcome.OK
    return Reading(outcome, "", "measure", measurement, telemetry=telemetry)


def time_us(config: Mapping[str, Any]) -> float:
    """Return a time; THREADS=256 WORK=4 is the fastest."""
    return 1000 / int(config["THREADS"]) + 2 / int(config["WORK"])


if __name__ == "__main__":
    serve(
        worker(
            run,
            lambda config, _: time_us(config),
            opened=_open.update,
            check=lambda *_: Reading(Outcome.OK, stage="verify"),
        )
    )
