"""New results reach kernels that are loaded: in calls, with graphs that the program captured, and in other threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from stored_runs import add_trial, end_run, start_run

from autotile.core.model import Measurement, Outcome, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher, get_best_kernel
from autotile.settings import read_settings

pytestmark = pytest.mark.gpu
BEST, BETTER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 2}


def put(kernel: BoundKernel, config: dict[str, int], time_us: float) -> None:
    key = key_of(kernel.definition, kernel.problem, kernel.device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    measurement = Measurement(time_us, 0.99 * time_us, 1.01 * time_us)
    with Database.open(read_settings().database) as database:
        study = database.study(key, kernel.device)
        run = start_run(database, study, sampler="random")
        add_trial(database, study, run, Trial(config, Outcome.OK, "", "finals", measurement=measurement), phase="final")
        add_trial(
            database,
            study,
            run,
            Trial(config, Outcome.OK, "", "finals", measurement=measurement),
            phase="final",
            rank=1,
        )
        end_run(database, run)


def poll() -> int:
    """Refresh in a thread of its own, as the program does."""
    replaced: list[int] = []
    thread = threading.Thread(target=lambda: replaced.append(default_dispatcher.refresher.poll()))
    thread.start()
    thread.join()
    return replaced[0]


def test_calls_graphs_and_bound_launches_stay_right(scale_toml: Path, cupy: Any) -> None:
    kernel = get_best_kernel(scale_toml, n=4096)
    x = cupy.arange(4096, dtype=cupy.float32)
    y, captured, bound = (cupy.zeros_like(x) for _ in range(3))
    for _ in range(3):  # also as a graph of its own
        kernel(x, y)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kernel(x, captured)
        graph = stream.end_capture()
    launch = kernel.bind(x, bound)
    for config, time_us in ((BEST, 5.0), (BETTER, 4.0)):
        put(kernel, config, time_us)
        assert poll() == 1
        assert (kernel.tier, kernel.config) == ("exact", config)
        for out in (y, captured, bound):
            out[:] = 0
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            kernel(x, y)
        graph.launch(stream)
        stream.synchronize()
        launch()
        for out in (y, captured, bound):
            assert bool((out == 2 * x).all())


def test_a_refresh_during_a_capture(scale_toml: Path, cupy: Any) -> None:
    kernel = get_best_kernel(scale_toml, n=4096)
    x = cupy.arange(4096, dtype=cupy.float32)
    y, z = cupy.zeros_like(x), cupy.zeros_like(x)
    kernel(x, y)
    put(kernel, BEST, 5.0)
    y[:] = 0
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kernel(x, y)
        assert poll() == 1
        kernel(x, z)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert kernel.config == BEST
    assert bool((y == 2 * x).all())
    assert bool((z == 2 * x).all())
