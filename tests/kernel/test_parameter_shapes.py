"""Arrays, references and work that depend on parameters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from step_kernels import PARTIAL_SPACE, TILED_SPACE, write_steps

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.cuda.instance import Instances
from autotile.database.keys import space_hash
from autotile.errors import InputError
from autotile.exchange.cpp_header import write_header
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import Workrate, check_memory, resolve_problem
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
TILED = parse_spec(TILED_SPACE, "several_steps.toml")
PARTIAL = parse_spec(PARTIAL_SPACE, "block_sums.toml")


def test_the_parameters_that_shape_a_problem(tmp_path: Path) -> None:
    assert load_kernel(str(write_steps(tmp_path, "two_step_sum"))).spec.shaping == ()
    assert (TILED.shaping, PARTIAL.shaping) == (("STEPS",), ("BLOCK",))
    assert TILED.shaped_sizes({"N": 7}, {"BLOCK": 128, "STEPS": 3}) == {"N": 7, "STEPS": 3}
    assert PARTIAL.buffer("sums").extents(PARTIAL.shaped_sizes({"N": 1000}, {"BLOCK": 64})) == (16,)


def test_limits_count_the_arrays_of_each_configuration() -> None:
    large = parse_spec(TILED_SPACE.replace("STEPS = [1, 2, 3]", "STEPS = [1, 2, 30]"), "k.toml")
    sizes = {"N": 2**31 - 1}
    assert check_config(large, {"BLOCK": 128, "STEPS": 2}, sizes, H200) == ""
    assert check_config(large, {"BLOCK": 128, "STEPS": 30}, sizes, H200).startswith("memory: its arrays take 256.0 GiB")
    check_memory(large, Problem("several_steps", sizes, "float32"), H200)
    space = feasible_space(large, sizes, H200)
    assert {space.config(row)["STEPS"] for row in range(len(space))} == {1, 2}


def test_an_array_that_would_be_empty_is_a_limit() -> None:
    text = TILED_SPACE.replace('["STEPS", "N"]', '["3 - STEPS", "N"]')
    text = text.replace('rows = ["s', 'rows = ["s = arange(STEPS); zeros(3 - STEPS, N)"] }\n#')
    empty = parse_spec(text, "k.toml")
    said = check_config(empty, {"BLOCK": 128, "STEPS": 3}, {"N": 100}, H200)
    assert said == "memory: the array rows would have the shape 0 x 100"


def test_work_needs_the_configuration_and_the_hash_covers_the_shapes() -> None:
    problem = resolve_problem(TILED, {"N": 1000})
    assert Workrate.of(TILED, problem).flops is None
    assert Workrate.of(TILED, problem, {"BLOCK": 128, "STEPS": 3}).flops == 6000
    changed = parse_spec(PARTIAL_SPACE.replace('ceil_div(N, BLOCK)"], access', '-(-N // BLOCK)"], access'), "k.toml")
    assert space_hash(changed) != space_hash(PARTIAL)


def test_a_header_refuses_what_its_caller_cannot_know() -> None:
    with pytest.raises(InputError, match=r"depend on the parameters BLOCK, which a header cannot tell its caller"):
        write_header(PARTIAL, "float32", [], [], stem="k")


def test_instances_are_made_once_for_each_shape_and_give_way() -> None:
    made: list[dict[str, int]] = []

    def make(names: Any) -> Any:
        made.append(dict(names))
        return SimpleNamespace(size_bytes=names["STEPS"] * 100)

    instances = Instances(TILED, {"N": 5}, make, 300)
    first = instances.of({"BLOCK": 128, "STEPS": 1})
    assert instances.of({"BLOCK": 256, "STEPS": 1}) is first
    second = instances.of({"BLOCK": 128, "STEPS": 2})
    assert (list(instances), made) == ([first, second], [{"N": 5, "STEPS": 1}, {"N": 5, "STEPS": 2}])
    assert instances.of({"BLOCK": 128, "STEPS": 1}) is first
    third = instances.of({"BLOCK": 128, "STEPS": 3})
    assert list(instances) == [third]
    instances.of({"BLOCK": 128, "STEPS": 1})
    assert made[-1] == {"N": 5, "STEPS": 1}
