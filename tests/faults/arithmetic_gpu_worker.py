"""A fake GPU worker that runs no kernel: times depend on the configuration, and saved outputs are those of a sum.

The output ``arg0_c`` is the sum of ``arg1_a`` and ``arg2_b``; it is wrong where the parameter ``wrong`` is 1.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.model import Measurement, Outcome
from autotile.kernel.contents import InputFile
from autotile.kernel.parser import parse_spec
from autotile.workers.child import Stage, serve
from autotile.workers.jobs import Reading

sys.path.append(str(Path(__file__).parents[1]))  # of a child process

from gpu_calls import worker

_open: dict[str, Any] = {}


def _time_us(config: Mapping[str, Any]) -> float:
    return 1e6 / int(config["block_size_x"])


def _run(config: Mapping[str, Any], limit_us: float | None, stage: Stage) -> Reading:
    for name in ("load", "verify"):
        stage(name)
    captured = _saved(config) if _open["captured"] else ""
    stage("measure")
    time_us = _time_us(config)
    measured = Measurement(time_us, 0.99 * time_us, 1.01 * time_us, (time_us, time_us))
    return Reading(Outcome.OK, "", "measure", measured, {"verify": 0.5, "measure": 0.25}, captured=captured)


def _saved(config: Mapping[str, Any]) -> str:
    spec = parse_spec(_open["spec_text"], _open["spec_source"], folder=_open["spec_folder"])
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
    serve(worker(_run, lambda config, done: _time_us(config) + 0.001 * done, opened=_open.update))
