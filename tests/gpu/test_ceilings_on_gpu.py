"""The ceilings of this GPU: results are checked, rates are plausible, and both are stored."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import autotile
from autotile.core.ceilings import DeviceCeilings
from autotile.cuda.ceiling_kernels import CeilingKernels
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import device_uuid, live_device
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.settings import read_settings
from autotile.workers.device_ceilings import CeilingRequest, request_ceilings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> CeilingKernels:
    settings = read_settings()
    return CeilingKernels(live_device(), CubinCache(settings.cache, settings.cache_limit_bytes))


def test_every_kernel_computes_what_it_should_and_a_wrong_result_is_found(kernels: CeilingKernels) -> None:
    seen = set()
    for loops in kernels.groups():
        for loop in loops:
            rounds = min(3, loop.max_rounds)
            loop.queue(rounds)
            assert loop.fault(rounds) == "", (loop.ceiling, loop.method)
            seen.add(loop.ceiling)
    assert {"dram_read", "dram_copy", "l2_read", "l2_copy", "fma_float32", "fma_float64", "fma_float16"} <= seen


def test_work_that_was_not_done_is_a_fault(kernels: CeilingKernels) -> None:
    for loops in kernels.groups():
        loop = loops[0]
        if loop.ceiling in ("l2_read", "fma_float32", "fma_float64"):
            loop.queue(1)
            assert loop.fault(3), loop.ceiling
        if loop.ceiling.startswith("tensor"):
            loop.queue(0)
            assert loop.fault(3), loop.ceiling


def test_the_time_of_a_round_is_constant(kernels: CeilingKernels) -> None:
    """Twice the rounds take twice the time, so that none is skipped."""
    cupy = load_cupy()
    for loops in kernels.groups():
        loop = loops[0]
        if loop.max_rounds == 1:
            continue
        times = []
        for rounds in (33, 67):
            run = partial(loop.queue, rounds)
            run()
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for _ in range(3):
                run()
            stop.record()
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop))
        assert times[1] > 1.4 * times[0], (loop.ceiling, loop.method, times)


def test_a_gpu_is_measured_and_listed(tmp_path: Path) -> None:
    path, begin = tmp_path / "tuning.db", time.monotonic()
    measured = autotile.measure_device(0, database=path)
    assert time.monotonic() - begin < 60
    assert autotile.devices(database=path).ceilings == (measured,)
    assert (measured.gpu_uuid, measured.gpu_name) == (device_uuid(0), live_device(0).name)
    _check_order(measured)


def _check_order(measured: DeviceCeilings) -> None:
    """Rates are positive and in the order that the hardware has."""
    value = {one.name: one.value for one in measured.ceilings}
    assert value["l2_read"] > value["dram_read"]
    assert value["fma_float32"] >= 0.99 * value["fma_float64"]
    assert value["launch_graph"] < 100
    if "tensor_tf32" in value:
        assert value["tensor_float16"] > value["tensor_tf32"] > value["fma_float32"]


def test_an_unusable_device_is_one_line() -> None:
    settings = read_settings()
    with pytest.raises(ToolchainError) as caught:
        request_ceilings(CeilingRequest(str(settings.cache), settings.cache_limit_bytes, 63))
    assert "\n" not in str(caught.value)
