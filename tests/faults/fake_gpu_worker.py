"""A fake GPU worker: it fails as the kernel of the fault kit would, and returns synthetic times otherwise."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.core.model import Measurement, Outcome
from autotile.workers.child import Stage, serve
from autotile.workers.jobs import Reading

sys.path.append(str(Path(__file__).parents[1]))  # of a child process

from gpu_calls import worker


def race_us(config: Mapping[str, Any], done: int) -> float:
    if config["FAULT"] == "hangs_later":
        time.sleep(600)
    return 5.0 + done / 1000


def check(config: Mapping[str, Any], stage: Stage) -> Reading:
    if config["FAULT"] == "hangs_later":
        stage("verify")
        time.sleep(600)
    return run(config, None, stage)


def run(config: Mapping[str, Any], limit_us: float | None, stage: Stage) -> Reading:
    stage("load")
    stage("verify")
    match config["FAULT"]:
        case "write_outside":
            return Reading(Outcome.OUT_OF_BOUNDS, "wrote 1 word outside y at n=1001", "verify")
        case "assertion":
            os.write(2, b"first\nfaults.cu:1: Assertion `i < n / 2` failed.\n" + 99 * b"Exception ignored in: CuPy\n")
            return Reading(Outcome.CRASHED, "CUDA_ERROR_ASSERT: device-side assert triggered", "verify")
        case "infinite_loop":
            time.sleep(600)
        case "recursion":
            os.abort()
    stage("measure")
    time_us = 2000.0 / int(config["THREADS"])
    return Reading(Outcome.OK, "", "measure", Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us,)))


if __name__ == "__main__":
    serve(worker(run, race_us, check=check))
