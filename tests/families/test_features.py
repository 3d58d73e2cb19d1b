"""Features of a problem, and the tilings of grids."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_gpu import DEVICE, SPEC

from autotile.families.features import (
    UNTILED,
    Feature,
    Tilings,
    Traits,
    array_extents,
    blocks_at,
    list_features,
    meet_rules,
)
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.search_space import enumerate_space

SIZES = [{"M": 4096, "N": 4096, "K": 1024}, {"M": 129, "N": 1999, "K": 7}]
WIDE, NARROW = SPEC.default | {"BM": 256, "BN": 128}, SPEC.default | {"BM": 64, "BN": 64, "TM": 4, "TN": 4}
TRAITS = Traits.of(SPEC, DEVICE, [WIDE, NARROW], [1, 4], SIZES)


def value(feature: Feature) -> list[float]:
    return TRAITS.column(feature).tolist()


def test_sizes_and_work() -> None:
    assert value(Feature("size", "M")) == [4096, 129]
    assert value(Feature("alignment", "N")) == [256, 1]
    assert value(Feature("outputs")) == [4096 * 4096, 129 * 1999]
    flops, moved = 2 * 4096 * 4096 * 1024, 4 * (4096 * 1024 + 1024 * 4096 + 4096 * 4096)
    assert value(Feature("intensity"))[0] == pytest.approx(flops / moved)


def test_blocks_agree_with_the_launch() -> None:
    for number, config in enumerate((WIDE, NARROW)):
        blocks = [launch_geometry(SPEC, config, sizes, DEVICE).blocks for sizes in SIZES]
        assert value(Feature("blocks", config=number)) == blocks
    assert value(Feature("waves", config=1)) == [64 * 64 / (4 * 132), 3 * 32 / (4 * 132)]


def test_of_persistent_kernels_the_tiles_are_counted_and_not_the_blocks_that_take_them() -> None:
    text = SPEC.text.replace(
        'grid = ["ceil_div(M, BM)", "ceil_div(N, BN)"]',
        'grid = ["min(device.sm_count, ceil_div(M, BM) * ceil_div(N, BN))"]',
    )
    persistent = Traits.of(parse_spec(text, "persistent.toml"), DEVICE, [WIDE, NARROW], [1, 4], SIZES)
    assert persistent.blocks.tolist() == TRAITS.blocks.tolist()
    assert persistent.tile.tolist() == TRAITS.tile.tolist() == [256 * 128, 64 * 64]


def test_the_work_ratio_counts_whole_rounds_of_whole_tiles() -> None:
    wide = [np.ceil(16 * 32 / 132), np.ceil(1 * 16 / 132)]
    narrow = [np.ceil(64 * 64 / 132), np.ceil(3 * 32 / 132)]
    expected = [w * 256 * 128 / (n * 64 * 64) for w, n in zip(wide, narrow, strict=True)]
    assert value(Feature("work_ratio", config=0, over=1)) == pytest.approx(expected)


def test_rules_are_evaluated_for_many_problems_as_for_one() -> None:
    kept = enumerate_space(SPEC, SIZES[0], DEVICE)
    broken = SPEC.default | {"BM": 256, "BN": 32}
    assert kept.row_of(broken) is None
    assert meet_rules(SPEC, DEVICE, [SPEC.default, broken], SIZES).tolist() == [[True, False]] * 2


def test_features_read_back() -> None:
    names = tuple(SPEC.sizes)
    for feature in list_features(SPEC, 3):
        assert Feature.from_json(feature.to_json(), names, 3) == feature
        assert str(feature)
    for damaged in (
        {"feature": "size", "of": "Q"},
        {"feature": "blocks", "config": 3},
        {"feature": "exec"},
        {},
        {"feature": []},
        7,
    ):
        with pytest.raises(ValueError, match=r"is not a feature|expected"):
            Feature.from_json(damaged, names, 3)


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
