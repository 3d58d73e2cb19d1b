"""The worker's own tools, on a real device."""

from pathlib import Path

import numpy as np
import pytest

from autotile.device.buffers import GuardedBuffer
from autotile.device.cubin_cache import CubinCache
from autotile.device.properties import live_device
from autotile.device.support import SupportKernels
from autotile.device.telemetry import Telemetry
from autotile.device.timing import Timer
from autotile.ground.dtypes import DTYPES

pytestmark = pytest.mark.gpu
FLOAT = DTYPES["float32"]


@pytest.fixture(scope="module")
def support(tmp_path_factory: pytest.TempPathFactory) -> SupportKernels:
    cache = CubinCache(tmp_path_factory.mktemp("support"), 10**8)
    return SupportKernels(cache, live_device().architecture)


def test_properties_are_whole() -> None:
    device = live_device()
    assert device.source == "cuda"
    assert device.sm_count > 0
    assert device.smem_per_block_optin_bytes >= device.smem_per_block_bytes == 48 * 1024
    assert device.peak_fp32_flops_per_s > 1e11
    assert device.memory_bandwidth_bytes_per_s > 1e10


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 33, 5), (128, 64, 300)])
def test_float64_product(support: SupportKernels, m: int, n: int, k: int) -> None:
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((m, k)), generator.standard_normal((k, n))
    np.testing.assert_allclose(support.matmul(a, b), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DTYPES)
def test_compare_finds_the_one_wrong_element(support: SupportKernels, name: str) -> None:
    import cupy

    dtype = DTYPES[name]
    stored = dtype.encode(np.arange(1000) % 100)
    got = GuardedBuffer((1000,), dtype, support)
    got.write(stored)
    want = cupy.asarray(dtype.decode(stored))
    assert support.compare(got.pointer, want.data.ptr, 1000, dtype, tolerance=0.0, scale=1.0)[0] == 0
    want[777] += 1.0
    assert support.compare(got.pointer, want.data.ptr, 1000, dtype, tolerance=0.0, scale=1.0) == (1, 777)


def test_nan_is_wrong(support: SupportKernels) -> None:
    import cupy

    got = GuardedBuffer((64,), FLOAT, support)
    got.poison()
    want = cupy.zeros(64)
    assert support.compare(got.pointer, want.data.ptr, 64, FLOAT, tolerance=1e9, scale=1e9)[0] == 64


@pytest.mark.parametrize("offset", [-1, 64 * 64])
def test_a_write_outside_is_seen_and_mended(support: SupportKernels, offset: int) -> None:
    buffer = GuardedBuffer((64, 64), FLOAT, support)
    assert buffer.broken_guard_words() == 0
    support.fill_words(buffer.pointer + 4 * offset, 1, 0)
    assert buffer.broken_guard_words() == 1
    assert buffer.broken_guard_words() == 0


def test_times_grow_with_the_work(support: SupportKernels) -> None:
    device = live_device()
    timer = Timer(device.l2_bytes, "cold", 0.1)
    small, large = (GuardedBuffer((n,), FLOAT, support) for n in (1 << 20, 1 << 26))
    timer.warm_up(large.poison)
    fast = timer.measure(small.poison, None).measurement
    slow = timer.measure(large.poison, None).measurement
    assert slow.time_us > 5 * fast.time_us
    assert slow.low_us <= slow.time_us <= slow.high_us
    assert 0 <= timer.event_floor_us() < 20
    assert timer.measure(large.poison, fast.time_us).discarded
    assert not timer.measure(large.poison, slow.time_us).discarded


def test_a_race_gives_every_candidate_every_round(support: SupportKernels) -> None:
    timer = Timer(live_device().l2_bytes, "hot", 0.1)
    buffer = GuardedBuffer((1 << 20,), FLOAT, support)
    times = timer.race([buffer.poison] * 3, rounds=7, seed=0)
    assert [len(row) for row in times] == [7, 7, 7]
    assert all(t > 0 for row in times for t in row)


def test_telemetry_reads_or_is_empty() -> None:
    readings = Telemetry().read()
    assert readings == {} or readings["sm_clock_mhz"] > 0


def test_reading_properties_makes_no_context(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "from autotile.device.properties import live_device; live_device();"
        "from cuda.bindings import driver; _, device = driver.cuDeviceGet(0);"
        "_, flags, active = driver.cuDevicePrimaryCtxGetState(device); raise SystemExit(active)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
