import importlib.util
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.device import DeviceProperties, device_profile, limits_for, profile_names
from autotile.space.limits import UNLIMITED, block_limits, max_blocks_per_sm, occupancy

G80 = device_profile("g80")
RTX_3060 = device_profile("rtx-3060")
H200 = device_profile("h200")
TILE_16 = 2 * 16 * 16 * 4
"""Bytes of two 16x16 fp32 tiles, one of each factor."""
TILE_32 = 2 * 32 * 32 * 4

# threads, registers, bytes of shared memory -> blocks by threads, registers, shared memory and block slots, from
# NVIDIA's cuda_occupancy.h (CUDA 13)
NVIDIA_ANSWERS = [
    ("7.0", (256, 40, 0), (8, 6, UNLIMITED, 32)),
    ("7.0", (1024, 64, 49152), (2, 1, 2, 32)),
    ("7.0", (96, 168, 32000), (21, 4, 3, 32)),
    ("7.0", (160, 200, 1), (12, 1, 384, 32)),
    ("7.5", (256, 64, 16384), (4, 4, 4, 16)),
    ("7.5", (1024, 64, 65536), (1, 1, 1, 16)),
    ("7.5", (128, 128, 33000), (8, 4, 1, 16)),
    ("7.5", (33, 24, 0), (16, 42, UNLIMITED, 16)),
    ("8.0", (128, 96, 40000), (16, 5, 4, 32)),
    ("8.0", (256, 255, 0), (8, 1, 164, 32)),
    ("8.0", (192, 80, 166912), (10, 4, 1, 32)),
    ("8.0", (1024, 32, 20000), (2, 2, 7, 32)),
    ("8.6", (1024, 32, 8192), (1, 2, 11, 16)),
    ("8.6", (256, 40, 7168), (6, 6, 12, 16)),
    ("8.6", (96, 170, 9000), (16, 2, 10, 16)),
    ("8.6", (64, 255, 101376), (24, 4, 1, 16)),
    ("8.7", (256, 64, 82000), (6, 4, 2, 16)),
    ("8.7", (512, 48, 40960), (3, 2, 4, 16)),
    ("8.9", (64, 32, 0), (24, 32, 100, 24)),
    ("8.9", (256, 128, 50000), (6, 2, 2, 24)),
    ("8.9", (288, 72, 12345), (5, 3, 7, 24)),
    ("8.9", (1024, 64, 1024), (1, 1, 50, 24)),
    ("9.0", (256, 128, 65536), (8, 2, 3, 32)),
    ("9.0", (384, 168, 232448), (5, 1, 1, 32)),
    ("9.0", (128, 255, 1000), (16, 2, 114, 32)),
    ("9.0", (96, 176, 75000), (21, 2, 3, 32)),
    ("9.0", (1024, 65, 0), (2, 0, 228, 32)),
    ("9.0", (64, 32, 6000), (32, 32, 33, 32)),
    ("10.0", (192, 255, 113000), (10, 1, 2, 32)),
    ("10.0", (256, 96, 57344), (8, 2, 4, 32)),
    ("10.0", (32, 16, 0), (64, 128, 228, 32)),
    ("11.0", (256, 64, 113664), (6, 4, 2, 24)),
    ("11.0", (64, 40, 8000), (24, 24, 25, 24)),
    ("12.0", (256, 104, 33000), (6, 2, 3, 24)),
    ("12.0", (128, 80, 24000), (12, 6, 4, 24)),
    ("12.0", (32, 32, 3000), (48, 64, 25, 24)),
]

CAPABILITIES = ["5.2", "6.1", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]


def device_of(capability: str) -> DeviceProperties:
    limits = limits_for(capability)
    return replace(
        H200, compute_capability=capability, **{name: getattr(limits, name) for name in limits.__dataclass_fields__}
    )


@pytest.mark.parametrize(
    ("device", "kernel", "limits", "limited_by", "share"),
    [
        (G80, (16 * 16, 10, TILE_16), (3, 3, 8, 8), ("threads", "registers"), 1.0),
        (G80, (16 * 16, 11, TILE_16), (3, 2, 8, 8), ("registers",), 2 / 3),
        (G80, (32 * 32, 8, TILE_32), (0, 1, 2, 8), ("threads",), 0.0),
        (RTX_3060, (32 * 32, 32, TILE_32), (1, 2, 11, 16), ("threads",), 32 / 48),
        # a resource that is not used does not limit
        (device_profile("v100"), (256, 0, 0), (8, UNLIMITED, UNLIMITED, 32), ("threads",), 1.0),
    ],
)
def test_textbook_tiles(device, kernel, limits, limited_by, share):
    found = occupancy(*kernel, device)
    assert found.limits == dict(zip(("threads", "registers", "shared_memory", "blocks"), limits, strict=True))
    assert (found.blocks_per_sm, found.limited_by) == (min(limits), limited_by)
    assert found.warps_per_sm == min(limits) * kernel[0] // 32
    assert found.occupancy == pytest.approx(share)


def test_the_systems_reserve_costs_the_rtx_3060_a_block():
    assert 16 * TILE_32 == 128 * 1024 > RTX_3060.smem_per_sm_bytes
    without_reserve = replace(RTX_3060, smem_reserved_per_block_bytes=0)
    assert occupancy(32 * 32, 32, TILE_32, without_reserve).limits["shared_memory"] == 12


@pytest.mark.parametrize(("capability", "kernel", "answer"), NVIDIA_ANSWERS)
def test_agrees_with_nvidias_own_calculator(capability, kernel, answer):
    found = occupancy(*kernel, device_of(capability))
    assert tuple(found.limits.values()) == answer
    assert found.blocks_per_sm == min(answer)


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "limit"),
    [
        (0, 32, 0, "threads"),
        (1025, 32, 0, "threads"),
        (128, 256, 0, "registers"),
        (128, -1, 0, "registers"),
        (1024, 72, 0, "registers"),
        (128, 32, 232449, "shared_memory"),
        (128, 32, -1, "shared_memory"),
    ],
)
def test_a_block_beyond_a_hard_limit_gets_none(threads, registers, smem, limit):
    found = occupancy(threads, registers, smem, H200)
    assert found.blocks_per_sm == 0
    assert found.limited_by == (limit,)


def test_a_block_may_use_all_that_the_device_lets_it_opt_in_to():
    assert occupancy(128, 32, H200.smem_per_block_optin_bytes, H200).blocks_per_sm == 1


def test_columns_broadcast():
    blocks = max_blocks_per_sm(np.array([[64], [256], [1024]]), np.array([32, 255]), 0, H200)
    assert blocks.dtype == np.int64
    assert blocks.tolist() == [[32, 4], [8, 1], [2, 0]]


def test_small_dtypes_do_not_overflow():
    smem = np.array([60000], dtype=np.uint16)
    threads = np.array([255], dtype=np.uint8)
    assert max_blocks_per_sm(threads, np.array([200], dtype=np.uint8), smem, H200).tolist() == [1]


devices = st.sampled_from([device_profile(name) for name in profile_names()])
threads_of = st.integers(0, 1100)
registers_of = st.integers(0, 260)
smem_of = st.integers(0, 240_000)


@settings(deadline=None, max_examples=200)
@given(devices, st.tuples(st.integers(1, 1100), registers_of, smem_of), st.integers(0, 2), st.integers(0, 300))
def test_more_of_anything_never_gives_more_blocks(device, kernel, grown, more):
    larger = [value + more * (index == grown) for index, value in enumerate(kernel)]
    assert occupancy(*larger, device).blocks_per_sm <= occupancy(*kernel, device).blocks_per_sm


@settings(deadline=None, max_examples=200)
@given(devices, threads_of, registers_of, smem_of)
def test_result_hangs_together_and_fits_the_sm(device, threads, registers, smem):
    found = occupancy(threads, registers, smem, device)
    assert found.limited_by
    assert found.blocks_per_sm == min(found.limits.values())
    assert all((found.limits[name] == found.blocks_per_sm) == (name in found.limited_by) for name in found.limits)
    assert 0.0 <= found.occupancy <= 1.0
    assert found.warps_per_sm <= device.max_warps_per_sm
    assert found.warps_per_sm * device.warp_size * registers <= device.registers_per_sm
    assert found.blocks_per_sm * (smem + device.smem_reserved_per_block_bytes) <= device.smem_per_sm_bytes


@settings(deadline=None, max_examples=50)
@given(devices, st.lists(st.tuples(threads_of, registers_of, smem_of), min_size=1, max_size=8))
def test_columns_give_what_single_kernels_give(device, kernels):
    threads, registers, smem = (np.array(column) for column in zip(*kernels, strict=True))
    expected = [occupancy(*kernel, device) for kernel in kernels]
    assert max_blocks_per_sm(threads, registers, smem, device).tolist() == [found.blocks_per_sm for found in expected]
    for name, limit in block_limits(threads, registers, smem, device).items():
        assert np.broadcast_to(limit, len(kernels)).tolist() == [found.limits[name] for found in expected]


HEADER_PROGRAM = r"""
#include <stdio.h>
#include "cuda_occupancy.h"
int main(void) {
    struct cudaOccDeviceProp device;
    struct cudaOccFuncAttributes kernel;
    struct cudaOccDeviceState state;
    struct cudaOccResult result;
    int threads;
    memset(&device, 0, sizeof device);
    memset(&state, 0, sizeof state);
    device.warpSize = 32;
    device.numSms = 1;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
    while (scanf("%d %d %d %d %d %d %zu %zu %zu %zu", &device.computeMajor, &device.computeMinor,
                 &device.maxThreadsPerBlock, &device.maxThreadsPerMultiprocessor, &device.regsPerBlock,
                 &device.regsPerMultiprocessor, &device.sharedMemPerBlock, &device.sharedMemPerMultiprocessor,
                 &device.sharedMemPerBlockOptin, &device.reservedSharedMemPerBlock) == 10) {
        memset(&kernel, 0, sizeof kernel);
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.numBlockBarriers = 1;
        if (scanf("%d %d %zu", &threads, &kernel.numRegs, &kernel.maxDynamicSharedSizeBytes) != 3) return 1;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                    kernel.maxDynamicSharedSizeBytes) != CUDA_OCC_SUCCESS) return 2;
        printf("%d\n", result.activeBlocksPerMultiprocessor);
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def nvidia_calculator(tmp_path_factory):
    wheel = importlib.util.find_spec("nvidia")
    folders = wheel.submodule_search_locations if wheel is not None else ()
    headers = [header for folder in folders for header in Path(folder).glob("cu13/include/cuda_occupancy.h")]
    compiler = shutil.which("gcc")
    if not headers or compiler is None:
        pytest.skip("needs NVIDIA's cuda_occupancy.h (wheel nvidia-cuda-runtime) and gcc")
    folder = tmp_path_factory.mktemp("nvidia_calculator")
    source, program = folder / "main.c", folder / "main"
    source.write_text(HEADER_PROGRAM)
    subprocess.run([compiler, "-O1", "-w", "-I", headers[0].parent, source, "-o", program], check=True)
    return program


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_agrees_with_nvidias_header_on_many_kernels(capability, nvidia_calculator):
    device = device_of(capability)
    rng = np.random.default_rng(0)
    kernels = 5000
    threads = rng.integers(1, 1030, kernels)
    threads[::2] = 32 * rng.integers(1, 33, threads[::2].size)
    registers = rng.integers(0, 256, kernels)
    smem = rng.integers(0, device.smem_per_block_optin_bytes + 300, kernels)
    smem[::3] = 128 * rng.integers(0, 80, smem[::3].size)
    figures = (
        device.max_threads_per_block, device.max_threads_per_sm, device.registers_per_block, device.registers_per_sm,
        device.smem_per_block_bytes, device.smem_per_sm_bytes, device.smem_per_block_optin_bytes,
        device.smem_reserved_per_block_bytes,
    )  # fmt: skip
    line = " ".join(map(str, (*capability.split("."), *figures)))
    rows = "\n".join(f"{line} {t} {r} {s}" for t, r, s in zip(threads, registers, smem, strict=True))
    answer = subprocess.run([nvidia_calculator], input=rows, capture_output=True, text=True, check=True).stdout
    assert max_blocks_per_sm(threads, registers, smem, device).tolist() == [int(word) for word in answer.split()]
