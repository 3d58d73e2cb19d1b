"""A fake GPU worker: it fails as the kernel of the fault kit would, and returns synthetic times otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome
from autotile.workers.protocol import Evaluation, FinalReply, RaceTimes, Stage, serve


def handle(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    match message["op"]:
        case "open":
            return {"device": device_profile("h200").to_json()}
        case "race":
            if any(one["config"]["FAULT"] == "hangs_later" for one in message["candidates"]):
                time.sleep(600)
            numbers, rounds = range(len(message["candidates"])), range(message["rounds"])
            raced = [RaceTimes(tuple(5.0 + number + done / 1000 for done in rounds)) for number in numbers]
            return {"raced": [row.to_json() for row in raced]}
        case _:
            if message["op"] == "verify" and message["config"]["FAULT"] == "hangs_later":
                stage("verify")
                time.sleep(600)
            return run(message["config"], stage).to_json()


def run(config: Mapping[str, Any], stage: Stage) -> Evaluation:
    stage("load")
    stage("verify")
    match config["FAULT"]:
        case "write_outside":
            return Evaluation(Outcome.OUT_OF_BOUNDS, "wrote 1 words outside y at n=1001", "verify")
        case "assertion":
            os.write(2, b"first\nfaults.cu:1: Assertion `i < n / 2` failed.\n")
            reply = Evaluation(Outcome.CRASHED, "CUDA_ERROR_ASSERT: device-side assert triggered", "verify").to_json()
            raise FinalReply({**reply, "last": True})
        case "infinite_loop":
            time.sleep(600)
        case "recursion":
            os.abort()
    stage("measure")
    time_us = 2000.0 / int(config["THREADS"])
    return Evaluation(Outcome.OK, "", "measure", Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us,)))


if __name__ == "__main__":
    serve(handle)
