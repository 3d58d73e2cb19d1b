"""Ceilings of this GPU: checked, plausible and stored; energy and error of real kernels."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from candidates import compiled
from gpu_calls import compare, evaluate

import autotile
from autotile.core.ceilings import DeviceCeilings
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import OBJECTIVES, Outcome
from autotile.cuda.ceiling_kernels import CeilingKernels
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import device_uuid, live_device
from autotile.cuda.timing import Nvml, Timer, energy_meter
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.kernel.library import load_kernel
from autotile.kernel.spec import Tolerance
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.workers.device_ceilings import request_ceilings
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Workload

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels():
    settings = read_settings()
    return CeilingKernels(live_device(), CubinCache(settings.cache, settings.cache_limit_bytes))


def test_every_kernel_computes_what_it_should_and_work_that_was_not_done_is_a_fault(kernels):
    seen = set()
    for loops in kernels.groups():
        for loop in loops:
            rounds = min(3, loop.max_rounds)
            loop.queue(rounds)
            assert loop.fault(rounds) == "", (loop.ceiling, loop.method)
            seen.add(loop.ceiling)
        loop = loops[0]
        if loop.ceiling in ("l2_read", "fma_float32", "fma_float64"):
            loop.queue(1)
            assert loop.fault(3), loop.ceiling
        if loop.ceiling.startswith("tensor"):
            loop.queue(0)
            assert loop.fault(3), loop.ceiling
    assert {"dram_read", "dram_copy", "l2_read", "l2_copy", "fma_float32", "fma_float64", "fma_float16"} <= seen


def test_the_time_of_a_round_is_constant(kernels):
    """Twice the rounds take twice the time, so that none is skipped."""
    cp = load_cupy()
    for loops in kernels.groups():
        loop = loops[0]
        if loop.max_rounds == 1:
            continue
        times = []
        for rounds in (33, 67):
            run = partial(loop.queue, rounds)
            run()
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record()
            for _ in range(3):
                run()
            stop.record()
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop))
        assert times[1] > 1.4 * times[0], (loop.ceiling, loop.method, times)


def test_a_gpu_is_measured_and_listed(tmp_path):
    path = tmp_path / "tuning.db"
    measured = autotile.measure_device(0, database=path)
    assert autotile.devices(database=path).ceilings == (measured,)
    assert (measured.gpu_uuid, measured.gpu_name) == (device_uuid(0), live_device(0).name)
    _check_order(measured)


def _check_order(measured: DeviceCeilings) -> None:
    value = {one.name: one.value for one in measured.ceilings}
    assert value["l2_read"] > value["dram_read"]
    assert value["fma_float32"] >= 0.99 * value["fma_float64"]
    assert value["launch_graph"] < 100
    if "tensor_tf32" in value:
        assert value["tensor_float16"] > value["tensor_tf32"] > value["fma_float32"]


def test_an_unusable_device_is_one_line():
    settings = read_settings()
    with pytest.raises(ToolchainError) as caught:
        request_ceilings(settings.cache, settings.cache_limit_bytes, 63)
    assert "\n" not in str(caught.value)


SIDE = 1024
SIZES = {"M": SIDE, "N": SIDE, "K": SIDE}
FLOAT = DTYPES["float32"]
MIN_W, MAX_W = 20.0, 1500.0
"""Range of the power of any GPU under load, in watts."""


@pytest.fixture(scope="module", params=["hot", "cold"])
def energy_mj(request, support):
    """Return a function that measures the energy (mJ) and the time (us) of a kernel of ``turns`` turns."""
    device = live_device()
    timer = Timer(device.l2_bytes, request.param, 0.1)
    read = energy_meter(timer, Nvml())

    def measured(turns: int) -> tuple[float, float]:
        def launch() -> None:
            support.spin(device.sm_count, turns)

        time_us = float(np.median(timer.samples(launch, 9)))
        found = read(launch, time_us)
        assert found["energy_source"] in ("counter", "power")
        return float(found["energy_mj"]), time_us

    timer.warm_up(lambda: support.spin(device.sm_count, 100_000))
    return measured


class TestEnergy:
    """Energy of a kernel that takes a given number of clock cycles, to which it is proportional."""

    def test_a_longer_kernel_uses_more(self, energy_mj):
        (short_mj, short_us), (long_mj, long_us) = energy_mj(20_000), energy_mj(200_000)
        assert long_mj / short_mj == pytest.approx(long_us / short_us, rel=0.3)

    @pytest.mark.parametrize("turns", [4_000, 40_000, 4_000_000])
    def test_it_repeats_and_is_that_of_a_gpu(self, energy_mj, turns):
        (first, time_us), (second, _) = energy_mj(turns), energy_mj(turns)
        assert second == pytest.approx(first, rel=0.2)
        if turns == 40_000:
            assert MIN_W < 1e3 * first / time_us < MAX_W


def test_an_error_is_the_greatest_and_what_is_not_a_number_is_wrong_and_has_none(support, cp):
    want = np.linspace(-3.0, 3.0, 100_003)
    got = want.astype(np.float32)
    got[[7, 100_002]] += np.float32([1e-3, 3e-3])
    expected = np.max(np.abs(got.astype(np.float64) - want) / np.maximum(np.abs(want), 0.5))
    device_got, device_want = cp.asarray(got), cp.asarray(want)
    found = compare(support, device_got.data.ptr, device_want, want.size, FLOAT, tolerance=Tolerance(1.0), scale=0.5)
    assert (found[:2], found[2]) == ((0, 2**64 - 1), pytest.approx(expected, rel=1e-12))
    got, want = cp.zeros(70, np.float32), cp.zeros(70)
    got[69] = np.nan
    for scale in (0.0, 1.0):
        found = compare(support, got.data.ptr, want, 70, FLOAT, tolerance=Tolerance(0.0), scale=scale)
        assert found == (1, 69, 0.0)


def test_a_candidate_has_the_error_of_fp32_and_its_energy_where_it_is_asked_for(tmp_path):
    kernel = load_kernel("matmul_tiled")
    candidate = compiled(kernel, kernel.spec.default, CubinCache(tmp_path, 10**8))
    own = (kernel.spec.text, kernel.spec.source, SIZES, "float32", "cold", str(tmp_path), 10**8, 0.1)
    found = []
    for energy in (False, True):
        with closing(Gpu(Workload(*own, energy=energy), deadline_s=30.0)) as gpu:
            found.append(evaluate(gpu, candidate, None))
    errors = [float(one.telemetry["max_error"]) for one in found]
    assert 0 < errors[0] < output_tolerance(FLOAT, [FLOAT], SIDE)
    assert errors[0] == errors[1]
    without, asked = found
    assert "energy_mj" not in without.telemetry
    assert asked.outcome is Outcome.OK
    assert MIN_W < 1e3 * float(asked.telemetry["energy_mj"]) / asked.measurement.time_us < MAX_W


def test_a_session_finds_what_can_be_had_for_what(tmp_path):
    options = TuneOptions(objectives=("registers", "energy", "error"), trials=8, database=str(tmp_path / "tuning.db"))
    result = autotile.tune("matmul_tiled", **SIZES, options=options)
    document = result.to_json()
    assert document["objectives"] == list(OBJECTIVES)
    assert set(result.outcomes) <= {Outcome.OK, Outcome.RESOURCE_EXCEEDED}
    assert document["front"]
    for entry in document["front"]:
        assert entry.keys() == {"config", *OBJECTIVES.values()}
        assert entry["energy_mj"] > 0
        assert 0 < entry["max_error"] < output_tolerance(FLOAT, [FLOAT], SIDE)
    assert autotile.tune("matmul_tiled", **SIZES, options=options).resumed == 8
