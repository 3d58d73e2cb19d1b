from dataclasses import replace

import pytest

from autotile.core.device import device_profile
from autotile.core.model import LaunchGeometry, Resources
from autotile.kernel.spec import Limits
from autotile.space.limits import compiled_occupancy, resource_violation

H200 = device_profile("h200")
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


def test_what_fits_passes() -> None:
    assert fault() == ""


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
    assert fault(geometry=replace(GEOMETRY, dynamic_smem_bytes=232_448 - 4096)) == ""
    assert fault(geometry=replace(GEOMETRY, block=(1024, 1, 1))) == ""


@pytest.mark.parametrize(("most", "refused"), [(None, False), (24, False), (23, True), (0, True)])
def test_spills(most: int | None, refused: bool) -> None:
    said = fault(Limits(0.0, most))
    assert bool(said) is refused
    if refused:
        assert said == f"spills 24 bytes, over max_spill_bytes = {most}"


@pytest.mark.parametrize(("least", "refused"), [(0.5, False), (0.51, True), (1.0, True)])
def test_occupancy(least: float, refused: bool) -> None:
    said = fault(Limits(least, None))
    assert bool(said) is refused
    if refused:
        assert said == f"occupancy 0.500 is under min_occupancy = {least:g}; limited by registers"


def test_the_same_candidate_on_a_smaller_gpu() -> None:
    large = replace(GEOMETRY, dynamic_smem_bytes=100_000)
    assert fault(geometry=large) == ""
    assert "T4" in fault(geometry=large, gpu="t4")
