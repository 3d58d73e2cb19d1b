"""The wgmma template: its space holds what it should, and configurations spread over it compile; needs no GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from compiled_templates import compiled_as_declared

from autotile.core.device import device_profile
from autotile.core.model import Value
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

KERNEL = load_kernel(str(Path(__file__).parents[1] / "search_spaces" / "gemm_wgmma.toml"))
SPEC = KERNEL.spec
H200 = device_profile("h200")
LAYOUTS = [dict(zip(("TRANS_A", "TRANS_B"), values, strict=True)) for values in product((0, 1), repeat=2)]
SHAPES = [(256, 256, 256), (4096, 4096, 4096), (128, 2112, 7168), (64, 7168, 16384), (65536, 128, 128)]


def sizes(m: int, n: int, k: int, **others: int) -> dict[str, int]:
    return {**SPEC.sizes, "M": m, "N": n, "K": k, **others}


def compiled(config: dict[str, Value], dtype: str, problem: dict[str, int]) -> int:
    """Bytes spilled; a warning of the assembler, as of an ignored setmaxnreg, is an error."""
    return compiled_as_declared(KERNEL, config, dtype, "sm_90a", problem, "--ptxas-options=-Werror").spill_bytes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_space_is_searchable_in_a_minute(shape: tuple[int, int, int], layout: dict[str, int]) -> None:
    assert 1_000 <= len(feasible_space(SPEC, sizes(*shape, **layout), H200)) <= 100_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_is_valid_and_spills_nothing(layout: dict[str, int]) -> None:
    out_fp32 = layout["TRANS_A"] ^ layout["TRANS_B"]
    problem = sizes(4096, 4096, 4096, OUT_FP32=out_fp32, **layout)
    config = dict(SPEC.default)
    assert check_config(SPEC, config, problem, H200) == ""
    assert compiled(config, "bfloat16", problem) == 0


@pytest.mark.parametrize("part", range(3))
def test_configurations_spread_over_the_space_compile(part: int) -> None:
    """The limit that the space sets on spills holds, so that a search rejects none after compiling."""
    for index, (shape, layout) in enumerate(zip(SHAPES, [*LAYOUTS, LAYOUTS[0]], strict=True)):
        problem = sizes(*shape, OUT_FP32=index % 2, NONDETERMINISTIC=part % 2, **layout)
        space = feasible_space(SPEC, problem, H200)
        config = dict(space.config((2 * part + 1) * len(space) // 6))
        assert compiled(config, SPEC.dtypes[part % 2], problem) <= (SPEC.limits.max_spill_bytes or 0)


def test_rows_that_the_copy_engine_cannot_take_leave_nothing() -> None:
    for problem in (sizes(64, 64, 100), sizes(64, 100, 64), sizes(100, 64, 64, TRANS_A=1)):
        with pytest.raises(InputError, match="whole_rows"):
            feasible_space(SPEC, problem, H200)


def test_odd_rows_of_c_are_written_by_the_threads() -> None:
    space = feasible_space(SPEC, sizes(64, 101, 64, TRANS_B=1), H200)
    assert set(space.column("TMA_STORE")) == {0}


def test_clusters_along_k_are_for_few_tiles() -> None:
    assert set(feasible_space(SPEC, sizes(4096, 4096, 4096), H200).column("CLUSTER_SPLIT")) == {0}
    space = feasible_space(SPEC, sizes(2560, 64, 2560), H200)
    clusters = [config for config in map(space.config, range(len(space))) if config["CLUSTER_SPLIT"] == 1]
    assert {config["SPLIT_K"] for config in clusters} == set(range(2, 9))
    assert all(config["PINGPONG"] == 0 and config["CLUSTER_M"] == config["CLUSTER_N"] == 1 for config in clusters)
    for config in clusters[:: len(clusters) // 4]:
        assert compiled(dict(config), "float16", sizes(2560, 64, 2560)) == 0
