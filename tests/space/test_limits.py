import importlib.util
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace as change
from spec_samples import make_spec

import autotile
from autotile.core.device import DeviceProperties, device_profile, limits_for, profile_names
from autotile.core.model import LaunchGeometry, Outcome, Resources, Trial
from autotile.errors import InputError
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import (
    LIMITS,
    UNLIMITED,
    block_limits,
    check_config,
    compiled_occupancy,
    max_blocks_per_sm,
    occupancy,
    passes_otherwise,
    resource_violation,
)
from autotile.space.search_space import feasible_space

G80, RTX_3060, H200 = map(device_profile, ("g80", "rtx-3060", "h200"))
TILE_16, TILE_32 = (2 * width * width * 4 for width in (16, 32))  # bytes of two fp32 tiles, one of each factor
CAPABILITIES = ["5.2", "6.1", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]


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


def test_the_systems_reserve_costs_the_rtx_3060_a_block_and_a_block_may_use_all_that_it_may_opt_in_to():
    assert occupancy(128, 32, H200.smem_per_block_optin_bytes, H200).blocks_per_sm == 1
    assert 16 * TILE_32 == 128 * 1024 > RTX_3060.smem_per_sm_bytes
    without_reserve = structs.replace(RTX_3060, smem_reserved_per_block_bytes=0)
    assert occupancy(32 * 32, 32, TILE_32, without_reserve).limits["shared_memory"] == 12


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
        (2**71, 0, 0, "threads"),  # a file may declare what no 64 bits hold
        (128, 2**62, 0, "registers"),
        (128, 32, 2**64, "shared_memory"),
    ],
)
def test_a_block_beyond_a_hard_limit_gets_none(threads, registers, smem, limit):
    found = occupancy(threads, registers, smem, H200)
    assert found.blocks_per_sm == 0
    assert found.limited_by == (limit,)


def test_columns_broadcast_and_small_dtypes_do_not_overflow():
    blocks = max_blocks_per_sm(np.array([[64], [256], [1024]]), np.array([32, 255]), 0, H200)
    assert blocks.dtype == np.int64
    assert blocks.tolist() == [[32, 4], [8, 1], [2, 0]]
    smem = np.array([60000], dtype=np.uint16)
    threads = np.array([255], dtype=np.uint8)
    assert max_blocks_per_sm(threads, np.array([200], dtype=np.uint8), smem, H200).tolist() == [1]


devices = st.sampled_from([device_profile(name) for name in profile_names()])
threads_of = st.integers(0, 1100)
registers_of = st.integers(0, 260)
smem_of = st.integers(0, 240_000)


@settings(max_examples=200)
@given(devices, st.tuples(threads_of, registers_of, smem_of), st.integers(0, 2), st.integers(0, 300))
def test_result_hangs_together_and_fits_the_sm_and_more_of_anything_gives_no_more_blocks(device, kernel, grown, more):
    found, (threads, registers, smem) = occupancy(*kernel, device), kernel
    assert found.limited_by
    assert found.blocks_per_sm == min(found.limits.values())
    assert all((found.limits[name] == found.blocks_per_sm) == (name in found.limited_by) for name in found.limits)
    assert 0.0 <= found.occupancy <= 1.0
    assert found.warps_per_sm <= device.max_warps_per_sm
    assert found.warps_per_sm * device.warp_size * registers <= device.registers_per_sm
    assert found.blocks_per_sm * (smem + device.smem_reserved_per_block_bytes) <= device.smem_per_sm_bytes
    larger = [value + more * (index == grown) for index, value in enumerate(kernel)]
    assert threads == 0 or occupancy(*larger, device).blocks_per_sm <= found.blocks_per_sm


def test_agrees_with_nvidias_header_on_many_kernels(tmp_path):
    wheel = importlib.util.find_spec("nvidia")
    folders = wheel.submodule_search_locations if wheel is not None else ()
    headers = [header for folder in folders for header in Path(folder).glob("cu13/include/cuda_occupancy.h")]
    compiler = shutil.which("gcc")
    if not headers or compiler is None:
        pytest.skip("needs NVIDIA's cuda_occupancy.h (wheel nvidia-cuda-runtime) and gcc")
    source, program = Path(__file__).with_name("occupancy_by_header.c"), tmp_path / "main"
    subprocess.run([compiler, "-O1", "-w", "-I", headers[0].parent, source, "-o", program], check=True)
    for capability in CAPABILITIES:
        device = structs.replace(H200, compute_capability=capability, **limits_for(capability))
        rng = np.random.default_rng(0)
        kernels = 5000
        threads = rng.integers(1, 1030, kernels)
        threads[::2] = 32 * rng.integers(1, 33, threads[::2].size)
        registers = rng.integers(0, 256, kernels)
        smem = rng.integers(0, device.smem_per_block_optin_bytes + 300, kernels)
        smem[::3] = 128 * rng.integers(0, 80, smem[::3].size)
        figures = (
            device.max_threads_per_block, device.max_threads_per_sm, device.registers_per_block,
            device.registers_per_sm, device.smem_per_block_bytes, device.smem_per_sm_bytes,
            device.smem_per_block_optin_bytes, device.smem_reserved_per_block_bytes,
        )  # fmt: skip
        line = " ".join(map(str, (*capability.split("."), *figures)))
        rows = "\n".join(f"{line} {t} {r} {s}" for t, r, s in zip(threads, registers, smem, strict=True))
        answer = subprocess.run([program], input=rows, capture_output=True, text=True, check=True).stdout
        limits = np.array(answer.split(), int).reshape(kernels, 5).T
        assert max_blocks_per_sm(threads, registers, smem, device).tolist() == limits[4].tolist(), capability
        for found, expected in zip(block_limits(threads, registers, smem, device).values(), limits, strict=False):
            assert np.broadcast_to(found, kernels)[limits[4] > 0].tolist() == expected[limits[4] > 0].tolist()


SIZES = {"N": 4096}


def reason(launch: dict[str, Any], device: DeviceProperties = H200, **limits: float) -> str:
    spec = make_spec({"P": [1]}, launch=launch, limits=limits)
    return check_config(spec, {"P": 1}, spec.at(SIZES), device)


def test_the_limits_and_their_order():
    first = ["memory", "tensor_maps", "launches", "scalars", "threads_per_block", "block_dims", "grid_dims", "cluster"]
    assert [limit.name for limit in LIMITS] == [*first, "registers", "shared_memory", "occupancy", "cooperative"]


def test_a_scalar_of_the_problem_that_does_not_fit_is_the_first_reason_in_the_words_of_tune(scale_toml):
    bound, other = 'n = { scalar = "int32", value = "n" }', 'bytes = { scalar = "int32", value = "4 * n" }'
    scale_toml.write_text(scale_toml.read_text().replace(bound, other))
    assert autotile.explain(scale_toml, n=2**29 - 1, device="h200").checks[0].kind == "rule"
    said = "scalar bytes is 2147483648, which does not fit in int32"
    found = autotile.explain(scale_toml, n=2**29, THREADS=96, device="h200")  # 96 is not among the values
    assert (found.fault, found.checks[0].detail, found.checks[0].holds) == (said, said, False)
    assert found.not_compiled == "it would not be compiled"
    for refusing in (partial(autotile.tune, trials=1, replay="auto"), partial(autotile.space, device="h200")):
        with pytest.raises(InputError, match=f"^{said}$"):
            refusing(scale_toml, n=2**29)


ALLOWS = "NVIDIA H200 allows"


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ({"block": [1024]}, ""),
        ({"block": [32, 32]}, ""),
        ({"block": [33, 32]}, f"threads_per_block: 33 x 32 threads in a block, {ALLOWS} 1,024"),
        ({"block": [2**40, 2**40, 2**40]}, "threads_per_block: "),
        ({"block": [1, 1, 64]}, ""),
        ({"block": [1, 1, 65]}, f"block_dims: a block of 1 x 1 x 65 threads, {ALLOWS} 1 to 1,024 x 1,024 x 64"),
        ({"block": ["P - 1", 32]}, "block_dims: a block of 0 x 32 threads"),
        ({"block": ["-P", -32]}, "block_dims: a block of -1 x -32 threads"),
        ({"grid": [2**31 - 1, 65535, 65535]}, ""),
        ({"grid": [2**31]}, f"grid_dims: a grid of 2,147,483,648 blocks, {ALLOWS} 1 to 2,147,483,647 x 65,535"),
        ({"grid": [1, 65536]}, "grid_dims: a grid of 1 x 65,536 blocks"),
        ({"grid": ["N - 4096"]}, "grid_dims: a grid of 0 blocks"),
        ({"min_registers": 255}, ""),
        ({"min_registers": 256}, f"registers: at least 256 registers per thread for 32 threads, {ALLOWS} 255 per"),
        ({"block": [512], "min_registers": 128}, ""),
        (
            {"block": [512], "min_registers": 129},
            f"registers: at least 129 registers per thread for 512 threads, {ALLOWS} 255 per thread and",
        ),
        ({"static_smem_bytes": 49_152, "dynamic_smem_bytes": 183_296}, ""),
        (
            {"static_smem_bytes": 49_152, "dynamic_smem_bytes": 183_297},
            f"shared_memory: 49,152 bytes static and 183,297 dynamic, {ALLOWS} 49,152 static, 232,448 toge",
        ),
        ({"dynamic_smem_bytes": 232_448}, ""),
        ({"dynamic_smem_bytes": 232_449}, "shared_memory: 0 bytes static and 232,449 dynamic"),
        ({"static_smem_bytes": 49_153}, "shared_memory: 49,153 bytes static"),
        ({"dynamic_smem_bytes": "-P"}, "shared_memory: 0 bytes static and -1 dynamic"),
        ({"static_smem_bytes": 2**62, "dynamic_smem_bytes": 2**62}, "shared_memory: "),
        ({"min_registers": 2**62}, "registers: "),
    ],
)
def test_one_line_with_figures(launch, line):
    found = reason(launch)
    assert found.startswith(line)
    assert bool(found) == bool(line)


def test_occupancy_counts_what_the_file_declares_and_registers_are_handed_out_in_units():
    launch = {"block": [256], "dynamic_smem_bytes": 100_000}  # two blocks of 8 warps on an SM of 64
    assert occupancy(256, 0, 100_000, H200).occupancy == 0.25
    assert reason(launch, min_occupancy=0.25) == ""
    assert reason(launch, min_occupancy=0.26) == (
        "occupancy: 0.250 is under min_occupancy = 0.26; limited by shared_memory"
    )
    assert H200.registers_per_block >= 32 * 9 * 224  # but not after rounding up those of each warp to the unit
    assert reason({"block": [32 * 9], "min_registers": 224}) == (
        "occupancy: no block fits on an SM of NVIDIA H200: 288 threads, at least 224 registers per thread, 0 bytes of "
        "shared memory; limited by registers"
    )


def test_stages_count_what_each_limit_left():
    spec = make_spec(
        {"T": [32, 1024, 2048], "Z": [1, 65], "G": [1, 70_000], "R": [32, 255], "S": [0, 49_153]},
        launch={"block": ["T", 1, "Z"], "grid": [1, "G"], "min_registers": "R", "static_smem_bytes": "S"},
        limits={"min_occupancy": 0.5},
    )
    space = feasible_space(spec, spec.at(SIZES), H200)
    remaining = {stage.name: stage.remaining for stage in space.limits}
    assert remaining == {
        "memory": 48,  # all
        "threads_per_block": 16,  # 32 or 1024 threads, Z = 1
        "block_dims": 16,
        "grid_dims": 8,
        "registers": 6,  # not 255 registers for 1024 threads
        "shared_memory": 3,
        "occupancy": 2,  # 32 blocks of one warp with 32 registers each is half; with 255, an eighth
    }
    assert [space.config(row)["T"] for row in range(len(space))] == [32, 1024]
    assert space.limits[-1].remaining == len(space)


LENIENT = make_spec({"P": [1]})
GEOMETRY = LaunchGeometry((64, 1, 1), (16, 16, 1), 16 * 1024)
RESOURCES = Resources(registers=64, spill_store_bytes=8, spill_load_bytes=16, stack_bytes=24, static_smem_bytes=4096)


def fault(
    spec: KernelSpec = LENIENT, geometry: LaunchGeometry = GEOMETRY, resources: Resources = RESOURCES, gpu: str = "h200"
) -> str:
    return resource_violation(spec, geometry, resources, device_profile(gpu))


@pytest.mark.parametrize(
    ("geometry", "resources", "by"),
    [
        (change(GEOMETRY, block=(1024, 1, 1)), change(RESOURCES, registers=65), "registers"),
        (change(GEOMETRY, dynamic_smem_bytes=232_448), RESOURCES, "shared_memory"),
        (GEOMETRY, change(RESOURCES, static_smem_bytes=300_000), "shared_memory"),
    ],
)
def test_what_fits_no_sm_says_what_it_needs(geometry, resources, by):
    said = fault(geometry=geometry, resources=resources)
    assert said.startswith("no block fits on an SM of NVIDIA H200: ")
    assert f"{geometry.threads} threads, {resources.registers} registers per thread" in said
    assert said.endswith(f"limited by {by}")


def test_the_largest_block_just_fits_and_not_on_a_smaller_gpu():
    assert fault() == ""
    assert fault(geometry=change(GEOMETRY, dynamic_smem_bytes=232_448 - 4096)) == ""
    assert fault(geometry=change(GEOMETRY, block=(1024, 1, 1))) == ""
    large = change(GEOMETRY, dynamic_smem_bytes=100_000)
    assert fault(geometry=large) == ""
    assert "T4" in fault(geometry=large, gpu="t4")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((0.0, None), ""),
        ((0.0, 24), ""),
        ((0.0, 23), "spills 24 bytes, over max_spill_bytes = 23"),
        ((0.0, 0), "spills 24 bytes, over max_spill_bytes = 0"),
        ((0.5, None), ""),
        ((0.51, None), "occupancy 0.500 is under min_occupancy = 0.51; limited by registers"),
        ((1.0, None), "occupancy 0.500 is under min_occupancy = 1; limited by registers"),
    ],
)
def test_compiled_spills_and_occupancy(limits, said):
    min_occupancy, max_spill_bytes = limits
    spec = replace(LENIENT, min_occupancy=min_occupancy, max_spill_bytes=max_spill_bytes)
    assert fault(spec) == said
    dropped = Trial({}, Outcome.RESOURCE_EXCEEDED, said)
    found = compiled_occupancy(GEOMETRY, RESOURCES, H200)
    ran = Trial({}, Outcome.OK, resources=RESOURCES, occupancy=found)
    assert [passes_otherwise(each, dropped) for each in (spec, LENIENT)] == [False, said != ""]
    assert [passes_otherwise(each, ran) for each in (spec, LENIENT)] == [said != "", False]
