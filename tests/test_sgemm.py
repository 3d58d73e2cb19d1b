"""The fp32 templates compile over their whole spaces; needs no GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from compiled_templates import compiled_as_declared

from autotile.core.device import device_profile
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

SPACES = Path(__file__).parents[1] / "search_spaces"
H200 = device_profile("h200")
SPREAD = 2


@pytest.fixture(scope="module", params=["sgemm", "sgemm_ws"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(SPACES / f"{request.param}.toml"))


@pytest.mark.parametrize("layout", list(product((0, 1), repeat=2)))
def test_configurations_over_the_space_compile(kernel: Kernel, layout: tuple[int, int]) -> None:
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "NONDETERMINISTIC": layout[0]}
    sizes = {**kernel.spec.sizes, "M": 700, "N": 520, **flags}
    space = feasible_space(kernel.spec, sizes, H200)
    first = 1 + 2 * layout[0] + layout[1]  # each layout at other places of the space
    for i in range(SPREAD):
        config = space.config((len(space) - 1) * (5 * i + first) // (5 * SPREAD))
        resources = compiled_as_declared(kernel, config, "float32", "sm_90a", sizes)
        assert resources.spill_bytes <= 300, config


@pytest.mark.parametrize("layout", list(product((0, 1), repeat=2)))
@pytest.mark.parametrize("size", [68, 256, 1024, 4096])
def test_the_default_is_valid_in_all_layouts_and_sizes(kernel: Kernel, layout: tuple[int, int], size: int) -> None:
    sizes = {**kernel.spec.sizes, "M": size, "N": size, "K": size, "TRANS_A": layout[0], "TRANS_B": layout[1]}
    assert check_config(kernel.spec, kernel.spec.default, sizes, H200) == ""


@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_all_configurations_of_large_enough_squares_are_verified_at_the_ragged_shape(kernel: Kernel, size: int) -> None:
    sizes = {**kernel.spec.sizes, "M": size, "N": size, "K": size}
    space = feasible_space(kernel.spec, sizes, H200)
    assert space.rows_in(feasible_space(kernel.spec, kernel.spec.ragged_sizes(sizes), H200)).all()


def test_few_blocks_have_little_to_do(kernel: Kernel) -> None:
    space = feasible_space(kernel.spec, {**kernel.spec.sizes, "M": 1024, "N": 1024, "K": 1024}, H200)
    bm, bn, splits = (space.column(name) for name in ("BM", "BN", "SPLIT_K"))
    blocks = 1024 // bm * (1024 // bn) * splits
    defaults_tile = (bm == 128) & (bn == 128) & (splits == 1)
    assert (blocks[~defaults_tile] >= H200.sm_count / 2).all()
    assert np.mean(defaults_tile) < 0.05


def test_what_is_transposed_is_swizzled_or_padded(kernel: Kernel) -> None:
    padded, swizzled = ({**kernel.spec.default, "SWIZZLE": swizzle} for swizzle in (0, 1))
    sizes = {**kernel.spec.sizes, "TRANS_B": 1}
    geometries = [launch_geometry(kernel.spec, config, sizes, H200) for config in (padded, swizzled)]
    gaps = 4 * (4 + 4) * padded["BK"] * padded["STAGES"]
    assert geometries[0].dynamic_smem_bytes - geometries[1].dynamic_smem_bytes == gaps
    copied = {**kernel.spec.sizes, "TRANS_A": 1}
    assert "swizzle_is_felt" in check_config(kernel.spec, swizzled, copied, H200)


@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (64, 7168, 16384), (512, 16, 500000), (1023, 701, 511)])
def test_every_shape_has_configurations(kernel: Kernel, m: int, n: int, k: int) -> None:
    assert len(feasible_space(kernel.spec, {**kernel.spec.sizes, "M": m, "N": n, "K": k}, H200)) > 100


def test_wide_loads_are_for_rows_that_allow_them(kernel: Kernel) -> None:
    aligned, odd = ({**kernel.spec.sizes, "N": n, "K": n} for n in (512, 511))
    narrow = {**kernel.spec.default, "VEC": 1}
    assert check_config(kernel.spec, kernel.spec.default, aligned, H200) == ""
    assert "wide_where_it_fits" in check_config(kernel.spec, kernel.spec.default, odd, H200)
    assert check_config(kernel.spec, narrow, odd, H200) == check_config(kernel.spec, narrow, aligned, H200) == ""
    assert feasible_space(kernel.spec, odd, H200).row_of(narrow) is not None
    assert feasible_space(kernel.spec, aligned, H200).row_of(narrow) is None
