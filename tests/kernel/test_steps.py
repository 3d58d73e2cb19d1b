"""Several kernels that make up one computation: parsing, what a call launches, the limits, and the hash."""

import pytest
from spec_samples import copy_spec, refused

from autotile.core.device import device_profile
from autotile.core.model import Value
from autotile.database.keys import space_hash
from autotile.errors import ConfigError, InputError, SpecError
from autotile.exchange.cpp_header import write_header
from autotile.kernel.launch import MAX_LAUNCHES, LaunchPlan
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")

HEAD = """
kernel = { name = "scan", template = "scan.cu" }
problem = { sizes = { N = 1000 } }
parameters = { BLOCK = [64, 128], ROUNDS = [0, 1, 3] }
default = { BLOCK = 64, ROUNDS = 3 }
"""
STEPS = """
[[steps]]
entry = "prepare"
arguments = ["x", "a", "N"]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]

[[steps]]
entry = "sweep"
arguments = ["a", "b", "stride"]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK * 2 ** step)"]
times = "ROUNDS"
swap = ["a", "b"]

[[steps]]
entry = "finish"
arguments = ["a", "y", "block"]
block = [32]
grid = [1]
dynamic_smem_bytes = "4 * BLOCK"
when = "ROUNDS > 0"
"""
TAIL = """
[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
a = { workspace = "float32", shape = ["N"] }
b = { workspace = "float32", shape = ["N"] }
N = { scalar = "int32", value = "N" }
stride = { scalar = "int32", value = "2 ** step" }
block = { scalar = "int32", value = "BLOCK" }
[reference]
outputs = { y = "x" }
"""


def spec_of(steps: str = STEPS, head: str = HEAD, tail: str = TAIL) -> KernelSpec:
    return parse_spec(head + steps + tail, "scan.toml")


def plan(spec: KernelSpec, **config: Value) -> LaunchPlan:
    return LaunchPlan.of(spec, {**spec.default, **config}, spec.sizes, H200)


def test_launches_come_in_order_with_their_own_arguments_and_swapped_memory_stays_swapped() -> None:
    launches = plan(spec_of()).launches
    assert [launch.step for launch in launches] == [0, 1, 1, 1, 2]
    assert [launch.geometry.grid[0] for launch in launches] == [16, 16, 8, 4, 1]
    assert [launch.scalars for launch in launches[1:4]] == [(("stride", s),) for s in (1, 2, 4)]
    assert launches[0].arguments == ("x", "a", "N")
    assert launches[4].scalars == (("block", 64),)
    assert launches[4].geometry.dynamic_smem_bytes == 256
    assert [launch.arguments[:2] for launch in launches[1:4]] == [("a", "b"), ("b", "a"), ("a", "b")]
    assert launches[4].arguments == ("b", "y", "block")  # what the third sweep wrote
    assert plan(spec_of(), ROUNDS=1).launches[-1].arguments[0] == "b"


def test_a_step_is_declared_to_be_the_main_one() -> None:
    """Then it stands for all, though others have more threads; what is computed, and so the hash, is the same."""
    spec = spec_of(STEPS.replace('entry = "finish"\n', 'entry = "finish"\nmain = true\n'))
    assert plan(spec).main.step == 2
    assert plan(spec, ROUNDS=0).main.step == 0  # it is not launched
    assert [step.entry for step in spec.main_steps] == ["finish"]
    assert len(spec_of().main_steps) == 3
    assert space_hash(spec) == space_hash(spec_of())
    with pytest.raises(SpecError, match="several steps have main = true"):
        spec_of(STEPS.replace("block =", "main = true\nblock ="))


def test_conditions_leave_launches_out_and_the_main_one_has_the_most_threads() -> None:
    assert [launch.step for launch in plan(spec_of(), ROUNDS=0).launches] == [0]
    assert plan(spec_of()).main.step == 0
    assert sorted(plan(spec_of()).steps) == [0, 1, 2]
    assert plan(spec_of()) == plan(spec_of())
    assert plan(spec_of()) != plan(spec_of(), BLOCK=128)


def test_nothing_and_too_many_launches() -> None:
    never = spec_of(STEPS.replace('when = "ROUNDS > 0"', 'when = "N < 0"').replace("[32]", '["BLOCK"]'))
    assert [launch.step for launch in plan(never).launches] == [0, 1, 1, 1]
    many = spec_of(STEPS.replace('times = "ROUNDS"', f'times = "{MAX_LAUNCHES} * ROUNDS"'))
    with pytest.raises(ConfigError, match=r"would launch 12,290 kernels, expected 1 to 4,096"):
        plan(many)
    space = feasible_space(many, many.sizes, H200)
    assert {space.config(row)["ROUNDS"] for row in range(len(space))} == {0}


def test_the_limits_apply_to_every_launch() -> None:
    grid = 'grid = ["ceil_div(N, BLOCK * 2'
    wide = spec_of(STEPS.replace(f'block = ["BLOCK"]\n{grid}', f'block = ["16 * BLOCK"]\n{grid}'))
    space = feasible_space(wide, wide.sizes, H200)
    found = {(space.config(row)["BLOCK"], space.config(row)["ROUNDS"]) for row in range(len(space))}
    assert found == {(64, 0), (64, 1), (64, 3), (128, 0)}  # 2048 threads where the step runs
    said = check_config(wide, {"BLOCK": 128, "ROUNDS": 3}, wide.sizes, H200)
    assert said.startswith("threads_per_block: sweep: 2,048 threads in a block")


def test_expressions_have_a_value_only_where_the_step_runs_and_a_grid_that_vanishes_later_is_dropped() -> None:
    divided = spec_of(STEPS.replace("grid = [1]", 'grid = ["ceil_div(N, ROUNDS)"]'))
    assert len(feasible_space(divided, divided.sizes, H200)) == 6
    assert plan(divided).launches[-1].geometry.grid[0] == 334
    shrinking = spec_of(STEPS.replace("ceil_div(N, BLOCK * 2 ** step)", "2 - step"))
    space = feasible_space(shrinking, shrinking.sizes, H200)
    assert {space.config(row)["ROUNDS"] for row in range(len(space))} == {0, 1}


# --- the hash


def test_one_plain_step_is_the_launch_section() -> None:
    launched = copy_spec()
    text = launched.text.replace(', entry = "k"', "").replace("[launch]", '[[steps]]\nentry = "k"')
    stepped = parse_spec(text, "k.toml")
    assert launched.steps == stepped.steps
    assert space_hash(launched) == space_hash(stepped)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('times = "ROUNDS"', 'times = "ROUNDS + 1"'),
        ('when = "ROUNDS > 0"', 'when = "ROUNDS > 1"'),
        ('arguments = ["a", "b", "stride"]', 'arguments = ["b", "a", "stride"]'),
        ('swap = ["a", "b"]', ""),
        ('entry = "finish"', 'entry = "prepare"'),
    ],
)
def test_the_hash_covers_a_step(old: str, new: str) -> None:
    assert STEPS.count(old) == 1
    assert space_hash(spec_of()) != space_hash(spec_of(STEPS.replace(old, new)))


# --- errors


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ('arguments = ["x", "a", "N"]', 'arguments = ["x", "a", "M"]', "steps[0].arguments", "'M' is not accepted"),
        ('arguments = ["a", "y", "block"]', 'arguments = ["a", "y"]', "arguments.block", "no step takes 'block'"),
        ('swap = ["a", "b"]', 'swap = ["a", "x"]', "steps[1].swap", "'x' is not a workspace or an array that"),
        ('swap = ["a", "b"]', 'swap = ["a"]', "steps[1].swap", "expected the names of two arrays, got 1"),
        ('times = "ROUNDS"', 'times = "step"', "steps[1].times", "unknown name 'step'"),
        ('times = "ROUNDS"', "tines = 3", "steps[1].tines", "did you mean 'times'?"),
        ('when = "ROUNDS > 0"', 'when = "ROUNDS"', "steps[2].when", "expected a condition"),
        ('entry = "sweep"\n', "", "steps[1]", "the key 'entry' is missing"),
    ],
)
def test_errors_name_the_step_and_its_line(old: str, new: str, key: str, said: str) -> None:
    number = refused(HEAD + STEPS + TAIL, old, new, key, said).line
    assert number is not None
    near = "\n".join((HEAD + STEPS.replace(old, new) + TAIL).splitlines()[number - 1 : number + 2])
    assert near.startswith("block =" if key == "arguments.block" else new.partition(" ")[0] or "[[steps]]")


def test_a_file_has_steps_or_a_launch() -> None:
    for head in (HEAD + "launch = { block = [1], grid = [1] }\n", HEAD.replace('"scan.cu"', '"scan.cu", entry = "f"')):
        with pytest.raises(SpecError, match=r"the file has \[\[steps\]\], of which each has its own"):
            spec_of(head=head)


def test_step_is_no_name_of_a_file_with_steps() -> None:
    with pytest.raises(SpecError, match=r"'step' is the number of a launch"):
        spec_of(head=HEAD.replace("{ BLOCK", "{ step = [1], BLOCK").replace("[1], BLOCK = 64", "1, BLOCK = 64"))
    named = parse_spec(copy_spec().text.replace("BLOCK", "step"), "k.toml")
    assert plan(named, step=128).main.geometry.threads == 128


def test_a_header_refuses_steps_and_references_what_depends_on_the_launch() -> None:
    with pytest.raises(SpecError, match=r"unknown name 'block'"):
        spec_of(tail=TAIL.replace('y = "x"', 'y = "x * block"'))
    with pytest.raises(InputError, match=r"scan has several steps, and a header launches one kernel only"):
        write_header(spec_of(), "float32", [], [], stem="scan")
