"""Values that Python functions compute from a configuration."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import device_profile
from autotile.errors import SpecError
from autotile.kernel.launch import known_names, launch_geometry
from autotile.kernel.parser import parse_spec
from autotile.kernel.python_kernel import map_rows, names_read
from autotile.kernel.spec import ConfigFunction
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
TEXT = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale"
[problem]
sizes = { N = 1000 }
[parameters]
BLOCK = [32, 64, 128]
WORK = [1, 2, 3]
LEFT = [0, 1]
[default]
BLOCK = 64
WORK = 1
LEFT = 0
[computed]
grid_x = "number"
[launch]
block = ["BLOCK"]
grid = ["computed.grid_x"]
[arguments]
Y = { buffer = "float32", shape = ["N"], access = "inout" }
[reference.outputs]
Y = "2 * Y"
"""
CONFIG = {"BLOCK": 64, "WORK": 3, "LEFT": 1}


def blocks(config: Mapping[str, Any]) -> float:
    return -(-1000 // (config["BLOCK"] * config["WORK"]))


def test_the_launch_follows_the_function_here_and_the_given_value_in_a_worker() -> None:
    here = parse_spec(TEXT, "scale.toml", functions={"grid_x": blocks})
    assert launch_geometry(here, CONFIG, here.sizes, H200).grid == (6, 1, 1)
    there = parse_spec(TEXT, "scale.toml")
    sent = {**CONFIG, "computed.grid_x": 6}
    assert launch_geometry(there, sent, there.sizes, H200).grid == (6, 1, 1)
    assert check_config(there, sent, there.sizes, H200) == ""
    with pytest.raises(SpecError, match="computed by a function, which is not known here"):
        known_names(there, CONFIG, there.sizes, H200)


def test_the_limits_see_the_value_of_every_row() -> None:
    spec = parse_spec(TEXT, "scale.toml", functions={"grid_x": lambda config: config["WORK"] - 2})
    space = feasible_space(spec, spec.sizes, H200)
    assert {space.config(row)["WORK"] for row in range(len(space))} == {3}


@pytest.mark.parametrize("function", [lambda config: config["BLOCK"] / 128, lambda config: config["NONE"]])
def test_a_function_without_a_whole_number_is_named_with_the_configuration(function: ConfigFunction) -> None:
    spec = parse_spec(TEXT, "scale.toml", functions={"grid_x": function})
    with pytest.raises(SpecError, match=r"computed.grid_x raises .* where BLOCK = 32"):
        feasible_space(spec, spec.sizes, H200)


def test_a_function_is_called_once_for_each_combination_that_it_reads() -> None:
    calls = []

    def counted(config: Mapping[str, Any]) -> int:
        calls.append(dict(config) if isinstance(config, dict) else None)
        return int(config["a"])

    columns = {"a": np.arange(1000) % 3, "b": np.arange(1000)}
    assert map_rows(counted, columns).tolist() == (np.arange(1000) % 3).tolist()
    assert len(calls) <= 4
    assert names_read(lambda config: config["a"] or config["b"], [{"a": 1, "b": 0, "c": 0}]) == {"a"}


def changing(config: Any) -> Any:
    config["sum"] = config["a"] + config["b"]
    return config["sum"]


FUNCTIONS: list[ConfigFunction] = [
    lambda p: p["a"] if p["b"] else p["c"],
    lambda p: sum(p.values()),
    lambda p: p.get("c", 0) * p["a"],
    lambda p: {**p}["b"],
    changing,
]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.sampled_from(FUNCTIONS))
def test_each_row_has_the_value_that_the_function_gives_it(rows: list[tuple[int, ...]], function: Any) -> None:
    columns = dict(zip("abc", np.array(rows).T, strict=True))
    assert map_rows(function, columns).tolist() == [function(dict(zip("abc", row, strict=True))) for row in rows]
