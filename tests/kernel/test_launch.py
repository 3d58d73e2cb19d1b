from __future__ import annotations

import pytest
from spec_samples import SGEMM, make_spec

from autotile.core.device import EXPRESSION_NAMES, device_profile
from autotile.errors import ConfigError, ProblemError, SpecError
from autotile.kernel.launch import fixed_names, launch_geometry
from autotile.kernel.parser import parse_spec

H200 = device_profile("h200")


def test_block_grid_and_dynamic_shared_memory() -> None:
    spec = parse_spec(SGEMM, "sgemm.toml")
    geometry = launch_geometry(spec, spec.default, {"M": 100, "N": 4096, "K": 7}, H200)
    assert (geometry.block, geometry.grid, geometry.dynamic_smem_bytes) == ((8, 8, 1), (64, 2, 1), 4096)
    unstaged = launch_geometry(spec, {**spec.default, "STAGED": False}, spec.sizes, H200)
    assert (unstaged.dynamic_smem_bytes, unstaged.threads, unstaged.blocks) == (0, 64, 4096)


def test_the_device_may_shape_the_launch() -> None:
    spec = make_spec({"P": [2]}, launch={"grid": ["P * device.sm_count"], "block": ["device.warp_size"]})
    geometry = launch_geometry(spec, {"P": 2}, {"N": 5}, H200)
    assert (geometry.grid, geometry.block, geometry.dynamic_smem_bytes) == ((264, 1, 1), (32, 1, 1), 0)


@pytest.mark.parametrize("launch", [{"block": ["P - 2"]}, {"grid": [1, "2 - P"]}, {"dynamic_smem_bytes": "-P"}])
def test_what_cannot_be_launched(launch: dict[str, object]) -> None:
    spec = make_spec({"P": [2]}, launch=launch)
    with pytest.raises(ConfigError, match=r"k: the configuration gives the grid .* add a rule that excludes it"):
        launch_geometry(spec, {"P": 2}, {"N": 5}, H200)


def test_a_dimension_without_a_value() -> None:
    spec = make_spec({"P": [0]}, launch={"block": ["N // P"]})
    with pytest.raises(SpecError, match="division by zero where N = 5, P = 0") as caught:
        launch_geometry(spec, {"P": 0}, {"N": 5}, H200)
    assert caught.value.key == "launch.block"


def test_names_that_no_parameter_decides() -> None:
    spec = parse_spec(SGEMM, "sgemm.toml")
    names = fixed_names(spec, spec.sizes, H200)
    assert names["M"] == 4096
    assert names["device.sm_count"] == 132
    assert len(names) == 3 + len(EXPRESSION_NAMES)
    with pytest.raises(
        ProblemError, match=r"sgemm: the size K is missing; give K=\.\.\., a whole number of at least 1"
    ):
        fixed_names(spec, {"M": 1, "N": 1}, H200)
