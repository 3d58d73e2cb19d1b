"""The template for matrix-vector-like products: its space and its compilations; needs no GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from compiled_templates import compiled_as_declared

from autotile.core.device import device_profile
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.space.search_space import feasible_space

KERNEL = load_kernel(str(Path(__file__).parents[1] / "search_spaces" / "gemm_small.toml"))
SPEC = KERNEL.spec
H200 = device_profile("h200")
LAYOUTS = [{"TRANS_A": a, "TRANS_B": b} for a, b in product((0, 1), repeat=2)]
SHAPES = [(1, 4096, 7168), (16, 6144, 4096), (512, 16, 500_000), (5124, 7, 2560)]


def sizes(shape: tuple[int, int, int], **others: int) -> dict[str, int]:
    return {**SPEC.sizes, **dict(zip("MNK", shape, strict=True)), **others}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_smaller_side_is_the_small_operand(shape: tuple[int, int, int], layout: dict[str, int]) -> None:
    space = feasible_space(SPEC, sizes(shape, **layout), H200)
    assert 1_000 <= len(space) <= 100_000
    assert set(space.column("SMALL_A")) == {int(shape[0] < shape[1])}


def test_other_products_are_refused() -> None:
    with pytest.raises(InputError, match="vector_like"):
        feasible_space(SPEC, sizes((17, 17, 1000)), H200)


@pytest.mark.parametrize("part", range(4))
def test_configurations_spread_over_the_space_use_what_is_declared(part: int) -> None:
    for index, shape in enumerate(SHAPES):
        problem = sizes(shape, OUT_FP32=index % 2, **LAYOUTS[(index + part) % 4])
        space = feasible_space(SPEC, problem, H200)
        config = dict(space.config((2 * part + 1) * len(space) // 8))
        architecture = ("sm_80", "sm_90")[index % 2]
        compiled_as_declared(KERNEL, config, SPEC.dtypes[part % 3], architecture, problem)
