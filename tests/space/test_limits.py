from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from spec_samples import make_spec

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import LaunchGeometry, Resources
from autotile.kernel.spec import Limits
from autotile.space.limits import LIMITS, check_config, compiled_occupancy, occupancy, resource_violation
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
G80 = device_profile("g80")
SIZES = {"N": 4096}


def reason(launch: dict[str, Any], device: DeviceProperties = H200, **limits: float) -> str:
    spec = make_spec({"P": [1]}, launch=launch, limits=limits)
    return check_config(spec, {"P": 1}, SIZES, device)


def test_the_limits_and_their_order() -> None:
    order = (
        "memory tensor_maps launches threads_per_block block_dims grid_dims cluster registers shared_memory occupancy"
    )
    assert [limit.name for limit in LIMITS] == [*order.split(), "cooperative"]


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ({"block": [1024]}, ""),
        ({"block": [32, 32]}, ""),
        ({"block": [33, 32]}, "threads_per_block: 33 x 32 threads in a block, NVIDIA H200 allows 1,024"),
        ({"block": [2**40, 2**40, 2**40]}, "threads_per_block: "),
        ({"block": [1, 1, 64]}, ""),
        (
            {"block": [1, 1, 65]},
            "block_dims: a block of 1 x 1 x 65 threads, NVIDIA H200 allows 1 to 1,024 x 1,024 x 64",
        ),
        ({"block": ["P - 1", 32]}, "block_dims: a block of 0 x 32 threads"),
        ({"block": ["-P", -32]}, "block_dims: a block of -1 x -32 threads"),
        ({"grid": [2**31 - 1, 65535, 65535]}, ""),
        (
            {"grid": [2**31]},
            "grid_dims: a grid of 2,147,483,648 blocks, NVIDIA H200 allows 1 to 2,147,483,647 x 65,535",
        ),
        ({"grid": [1, 65536]}, "grid_dims: a grid of 1 x 65,536 blocks"),
        ({"grid": ["N - 4096"]}, "grid_dims: a grid of 0 blocks"),
        ({"min_registers": 255}, ""),
        (
            {"min_registers": 256},
            "registers: at least 256 registers per thread for 32 threads, NVIDIA H200 allows 255 per",
        ),
        ({"block": [512], "min_registers": 128}, ""),
        (
            {"block": [512], "min_registers": 129},
            "registers: at least 129 registers per thread for 512 threads, NVIDIA H200 allows 255 per thread and",
        ),
        ({"static_smem_bytes": 49_152, "dynamic_smem_bytes": 183_296}, ""),
        (
            {"static_smem_bytes": 49_152, "dynamic_smem_bytes": 183_297},
            "shared_memory: 49,152 bytes static and 183,297 dynamic, NVIDIA H200 allows 49,152 static, 232,448 toge",
        ),
        ({"dynamic_smem_bytes": 232_448}, ""),
        ({"dynamic_smem_bytes": 232_449}, "shared_memory: 0 bytes static and 232,449 dynamic"),
        ({"static_smem_bytes": 49_153}, "shared_memory: 49,153 bytes static"),
        ({"dynamic_smem_bytes": "-P"}, "shared_memory: 0 bytes static and -1 dynamic"),
        ({"static_smem_bytes": 2**62, "dynamic_smem_bytes": 2**62}, "shared_memory: "),
        ({"min_registers": 2**62}, "registers: "),
    ],
)
def test_one_line_with_figures(launch: dict[str, Any], line: str) -> None:
    found = reason(launch)
    assert found.startswith(line)
    assert bool(found) == bool(line)


def test_occupancy_counts_what_the_file_declares() -> None:
    launch = {"block": [256], "dynamic_smem_bytes": 100_000}  # two blocks of 8 warps on an SM of 64
    assert occupancy(256, 0, 100_000, H200).occupancy == 0.25
    assert reason(launch, min_occupancy=0.25) == ""
    assert reason(launch, min_occupancy=0.26) == (
        "occupancy: 0.250 is under min_occupancy = 0.26; limited by shared_memory"
    )


def test_registers_are_handed_out_in_units() -> None:
    """Fits by the plain product, but not after rounding up the registers of each warp to the allocation unit."""
    launch = {"block": [32 * 9], "min_registers": 224}
    assert H200.registers_per_block >= 32 * 9 * 224
    assert reason(launch) == (
        "occupancy: no block fits on an SM of NVIDIA H200: 288 threads, at least 224 registers per thread, 0 bytes of "
        "shared memory; limited by registers"
    )


def test_textbook_tiles_on_a_g80() -> None:
    def tile(width: int) -> dict[str, Any]:
        return {"block": [width, width], "static_smem_bytes": 2 * 4 * width * width}

    assert reason(tile(16), G80, min_occupancy=1.0) == ""
    assert reason(tile(32), G80).startswith("threads_per_block: 32 x 32 threads in a block")


def test_stages_count_what_each_limit_left() -> None:
    spec = make_spec(
        {"T": [32, 1024, 2048], "Z": [1, 65], "G": [1, 70_000], "R": [32, 255], "S": [0, 49_153]},
        launch={"block": ["T", 1, "Z"], "grid": [1, "G"], "min_registers": "R", "static_smem_bytes": "S"},
        limits={"min_occupancy": 0.5},
    )
    space = feasible_space(spec, SIZES, H200)
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


def test_every_row_agrees_with_the_occupancy_of_one() -> None:
    spec = make_spec(
        {"T": [32, 96, 256, 1024], "R": [24, 40, 64, 128, 255], "S": [0, 1000, 20_000, 48_000]},
        launch={"block": ["T"], "min_registers": "R", "static_smem_bytes": "S"},
        limits={"min_occupancy": 0.4},
    )
    for device in (H200, device_profile("rtx-3060")):
        space = feasible_space(spec, SIZES, device)
        whole = feasible_space(replace(spec, limits=spec.limits._replace(min_occupancy=0.0)), SIZES, device)
        expected = [
            occupancy(int(config["T"]), int(config["R"]), int(config["S"]), device).occupancy >= 0.4
            for config in (whole.config(row) for row in range(len(whole)))
        ]
        assert 0 < sum(expected) < len(expected)
        assert np.array_equal(space.codes, whole.codes[np.array(expected)])


# --- after compilation

LENIENT = Limits(min_occupancy=0.0, max_spill_bytes=None)
GEOMETRY = LaunchGeometry((64, 1, 1), (16, 16, 1), 16 * 1024)
RESOURCES = Resources(registers=64, spill_store_bytes=8, spill_load_bytes=16, stack_bytes=24, static_smem_bytes=4096)


def fault(
    limits: Limits = LENIENT, geometry: LaunchGeometry = GEOMETRY, resources: Resources = RESOURCES, gpu: str = "h200"
) -> str:
    device = device_profile(gpu)
    return resource_violation(limits, geometry, resources, compiled_occupancy(geometry, resources, device), device)


def test_static_and_dynamic_shared_memory_add_up() -> None:
    found = compiled_occupancy(GEOMETRY, RESOURCES, H200)
    assert found.limits["shared_memory"] == 233_472 // (4096 + 16 * 1024 + 1024)
    assert found.limits["registers"] == 4
    assert (found.blocks_per_sm, found.warps_per_sm, found.occupancy) == (4, 32, 0.5)
    assert found.limited_by == ("registers",)


@pytest.mark.parametrize(
    ("geometry", "resources", "by"),
    [
        (replace(GEOMETRY, block=(1024, 1, 1)), replace(RESOURCES, registers=65), "registers"),
        (replace(GEOMETRY, dynamic_smem_bytes=232_448), RESOURCES, "shared_memory"),
        (GEOMETRY, replace(RESOURCES, static_smem_bytes=300_000), "shared_memory"),
    ],
)
def test_what_fits_no_sm_says_what_it_needs(geometry: LaunchGeometry, resources: Resources, by: str) -> None:
    said = fault(geometry=geometry, resources=resources)
    assert said.startswith("no block fits on an SM of NVIDIA H200: ")
    assert f"{geometry.threads} threads, {resources.registers} registers per thread" in said
    assert said.endswith(f"limited by {by}")


def test_the_largest_block_just_fits() -> None:
    assert fault() == ""
    assert fault(geometry=replace(GEOMETRY, dynamic_smem_bytes=232_448 - 4096)) == ""
    assert fault(geometry=replace(GEOMETRY, block=(1024, 1, 1))) == ""


@pytest.mark.parametrize(("most", "refused"), [(None, False), (24, False), (23, True), (0, True)])
def test_compiled_spills(most: int | None, refused: bool) -> None:
    said = fault(Limits(0.0, most))
    assert bool(said) is refused
    if refused:
        assert said == f"spills 24 bytes, over max_spill_bytes = {most}"


@pytest.mark.parametrize(("least", "refused"), [(0.5, False), (0.51, True), (1.0, True)])
def test_compiled_occupancy(least: float, refused: bool) -> None:
    said = fault(Limits(least, None))
    assert bool(said) is refused
    if refused:
        assert said == f"occupancy 0.500 is under min_occupancy = {least:g}; limited by registers"


def test_the_same_candidate_on_a_smaller_gpu() -> None:
    large = replace(GEOMETRY, dynamic_smem_bytes=100_000)
    assert fault(geometry=large) == ""
    assert "T4" in fault(geometry=large, gpu="t4")
