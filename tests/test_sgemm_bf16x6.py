"""The template of bf16 limbs: its space holds what it should, configurations spread over it compile; needs no GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from autotile.device.compiler import compile_cubin, compile_job
from autotile.files.library import load_kernel
from autotile.files.profiles import device_profile
from autotile.ground.space import check_config, feasible_space

KERNEL = load_kernel(str(Path(__file__).parents[1] / "search_spaces" / "sgemm_bf16x6.toml"))
SPEC = KERNEL.spec
H200 = device_profile("h200")
LAYOUTS = [{"TRANS_A": a, "TRANS_B": b} for a, b in product((0, 1), repeat=2)]
SHAPES = [(4096, 4096, 4096), (256, 256, 256), (128, 2112, 7168), (16, 6144, 4096), (512, 16, 500_000), (1, 1, 1)]


def sizes(shape: tuple[int, int, int], **others: int) -> dict[str, int]:
    return {**SPEC.sizes, **dict(zip("MNK", shape, strict=True)), **others}


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_the_space_is_searchable_in_a_minute(shape: tuple[int, int, int]) -> None:
    assert 1_000 <= len(feasible_space(SPEC, sizes(shape), H200)) <= 100_000


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default_is_right_for_every_size_and_device(shape: tuple[int, int, int]) -> None:
    for layout, device in product(LAYOUTS, [H200, device_profile("a100")]):
        assert check_config(SPEC, dict(SPEC.default), sizes(shape, **layout), device) == ""


def test_older_devices_get_no_clusters() -> None:
    space = feasible_space(SPEC, sizes((128, 2112, 7168)), device_profile("a100"))
    assert set(space.column("CLUSTER_SPLIT")) == {0}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_default_spills_nothing(layout: dict[str, int], architecture: str) -> None:
    job = compile_job(KERNEL, dict(SPEC.default), "float32", architecture, {**layout, "NONDETERMINISTIC": 0})
    assert compile_cubin(job).resources.spill_bytes == 0


def test_few_configurations_spread_over_the_space_break_its_limit_on_spills() -> None:
    """Where 64 threads copy tiles of 128 rows, some layouts need more addresses than there are registers."""
    spilling = []
    for index, (shape, part) in enumerate(product(SHAPES[:4], range(3))):
        problem = sizes(shape, NONDETERMINISTIC=part % 2, **LAYOUTS[(index + part) % 4])
        space = feasible_space(SPEC, problem, H200)
        config = dict(space.config((2 * part + 1) * len(space) // 6))
        architecture = "sm_90" if config["CLUSTER_SPLIT"] or part else "sm_80"
        resources = compile_cubin(compile_job(KERNEL, config, "float32", architecture, problem)).resources
        spilling += [config] if resources.spill_bytes > (SPEC.limits.max_spill_bytes or 0) else []
    assert len(spilling) <= 2, spilling
