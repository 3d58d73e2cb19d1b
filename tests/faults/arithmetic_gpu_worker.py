"""A fake GPU worker that runs no kernel: times depend on the configuration, and saved outputs are those of a sum.

The output ``arg0_c`` is the sum of ``arg1_a`` and ``arg2_b``; it is wrong where the parameter ``wrong`` is 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome
from autotile.kernel.contents import InputFile
from autotile.kernel.parser import parse_spec
from autotile.workers.protocol import Evaluation, RaceTimes, Stage, serve

_open: dict[str, Any] = {}


def handle(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    match message["op"]:
        case "open":
            _open.update(message["workload"])
            return {"device": device_profile("h200").to_json()}
        case "race":
            rounds = range(message["rounds"])
            raced = [
                RaceTimes(tuple(_time_us(each["config"]) + 0.001 * n for n in rounds)) for each in message["candidates"]
            ]
            return {"raced": [row.to_json() for row in raced]}
        case _:
            return _run(message["config"], stage).to_json()


def _time_us(config: Mapping[str, Any]) -> float:
    return 1e6 / int(config["block_size_x"])


def _run(config: Mapping[str, Any], stage: Stage) -> Evaluation:
    for name in ("load", "verify"):
        stage(name)
    captured = _saved(config) if _open["captured"] else ""
    stage("measure")
    time_us = _time_us(config)
    measured = Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us, time_us))
    return Evaluation(Outcome.OK, "", "measure", measured, {"verify": 0.5, "measure": 0.25}, captured=captured)


def _saved(config: Mapping[str, Any]) -> str:
    spec = parse_spec(_open["spec_text"], _open["spec_source"])
    contents = {buffer.name: buffer.content for buffer in spec.buffers}
    a, b = (
        np.load(content.path)
        for name, content in contents.items()
        if name in ("arg1_a", "arg2_b") and isinstance(content, InputFile)
    )
    folder = Path(tempfile.mkdtemp(dir=_open["capture_folder"]))
    for name in _open["captured"]:
        np.save(
            folder / f"{name}.npy", a + b + config.get("wrong", 0) if name == "arg0_c" else np.load(contents[name].path)
        )
    return str(folder)


if __name__ == "__main__":
    serve(handle)
