from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.device import device_profile
from autotile.families.features import UNTILED, Tilings, array_extents, blocks_at
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec

DEVICE = device_profile("h200")
MANY_SMS = replace(DEVICE, sm_count=2**40)
KERNELS = (
    "gemm_wgmma",
    "gemm_wgmma_padded",
    "gemm_mma",
    "gemm_small",
    "sgemm",
    "sgemm_ws",
    "sgemm_bf16x6",
    "sgemm_bf16x6_ws",
    "sgemm_2d",
)
SIZE = st.integers(1, 20_000)


@lru_cache
def _tilings(name: str, transposed: int) -> tuple[KernelSpec, dict[str, int], Tilings]:
    spec = load_kernel(name).spec
    flags = {flag: transposed if flag == "TRANS_B" else 0 for flag in spec.flags}
    return spec, flags, Tilings.of(spec, DEVICE, [spec.default], [None], flags)


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=30)
@given(m=SIZE, n=SIZE, k=SIZE, transposed=st.integers(0, 1))
def test_a_tiling_gives_the_blocks_of_the_grid(name: str, m: int, n: int, k: int, transposed: int) -> None:
    spec, flags, found = _tilings(name, transposed)
    sizes = {**spec.sizes, **flags, "M": m, "N": n, "K": k}
    counts = [math.ceil(sizes[size] / tile) for size, tile in zip(found.names, found.tiles[0], strict=True)]
    geometry = launch_geometry(spec, spec.default, sizes, MANY_SMS)
    assert not found.irregular
    assert math.prod(counts) * found.units[0] == geometry.blocks


def test_a_tiling_has_no_tile_along_a_size_that_the_grid_does_not_depend_on() -> None:
    spec = load_kernel("sgemm_2d").spec
    found = Tilings.of(spec, DEVICE, [spec.default], [None], {})
    tiles = dict(zip(found.names, found.tiles[0], strict=True))
    assert tiles == {"M": spec.default["BM"], "N": spec.default["BN"], "K": UNTILED}


TEXT = """
[kernel]
name = "rows"
template = "rows.cu"
entry = "rows"
summary = "Sums of rows"
[problem]
sizes = { N = 1000, D = 8 }
dtypes = ["float32"]
[parameters]
T = [32, 64]
[default]
T = 32
[launch]
block = ["T"]
grid = ["GRID"]
[arguments]
x = { buffer = "dtype", shape = ["N", "D"], access = "in" }
y = { buffer = "dtype", shape = ["N"], access = "out" }
[reference]
outputs = { y = "sum(x, axis=1)" }
"""


def test_a_grid_of_another_form_is_evaluated() -> None:
    spec = parse_spec(TEXT.replace("GRID", "ceil_div(N, T) + D"), "rows.toml")
    found = Tilings.of(spec, DEVICE, [spec.default], [None], {})
    assert found.irregular == (0,)
    assert blocks_at(spec, DEVICE, spec.default, {"N": 100, "D": 8}) == 4 + 8


def test_a_tiling_of_two_sizes_is_no_irregular_grid() -> None:
    spec = parse_spec(TEXT.replace("GRID", "ceil_div(N, T) * ceil_div(D, 4) * 3"), "rows.toml")
    found = Tilings.of(spec, DEVICE, [{"T": 64}], [None], {})
    assert found.tiles.tolist() == [[64.0, 4.0]]
    assert found.units.tolist() == [3.0]
    assert not found.irregular


def test_array_extents_follow_the_flags() -> None:
    spec = load_kernel("sgemm").spec
    assert array_extents(spec, {"TRANS_A": 1, "TRANS_B": 0, "NONDETERMINISTIC": 0}) == {
        "A": (3, 2, 0),
        "B": (3, 2, 1),
        "C": (3, 0, 1),
    }
