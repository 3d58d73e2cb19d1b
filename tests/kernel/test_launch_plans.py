"""Launches of one kernel and of several steps: plans, limits, hashes, and arrays that depend on parameters."""

import ctypes
import struct
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from feature_kernels import copy_kernel, space_text
from spec_samples import SGEMM, copy_spec, make_spec, refused

from autotile.core.device import EXPRESSION_NAMES, device_profile
from autotile.core.model import CompiledFunction, LaunchGeometry, Problem, Resources, Value
from autotile.cuda import driver
from autotile.cuda.instance import Instances
from autotile.database.keys import space_hash
from autotile.errors import ConfigError, InputError, ProblemError, SpecError
from autotile.exchange.cpp_header import write_header
from autotile.kernel.launch import MAX_LAUNCHES, LaunchPlan, fixed_names, launch_geometry
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import Workrate, check_memory, resolve_problem
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config, compiled_steps
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
SCAN = space_text("scan")
TILED_SPACE, PARTIAL_SPACE = space_text("several_steps"), space_text("block_sums")
TILED, PARTIAL = parse_spec(TILED_SPACE, "several_steps.toml"), parse_spec(PARTIAL_SPACE, "block_sums.toml")


def spec_of(*changes: tuple[str, str]) -> KernelSpec:
    """The scan of three steps, with changes of its text."""
    text = SCAN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_spec(text, "scan.toml")


def plan(spec: KernelSpec, **config: Value) -> LaunchPlan:
    return LaunchPlan.of(spec, {**spec.default, **config}, spec.at(), H200)


def test_launches_come_in_order_with_their_own_arguments_and_swapped_memory_stays_swapped():
    launches = plan(spec_of()).launches
    assert [launch.step for launch in launches] == [0, 1, 1, 1, 2]
    assert [launch.geometry.grid[0] for launch in launches] == [16, 16, 8, 4, 1]
    assert [launch.scalars for launch in launches[1:4]] == [(("stride", s),) for s in (1, 2, 4)]
    assert (launches[0].arguments, launches[4].scalars) == (("x", "a", "N"), (("block", 64),))
    assert launches[4].geometry.dynamic_smem_bytes == 256
    assert [launch.arguments[:2] for launch in launches[1:4]] == [("a", "b"), ("b", "a"), ("a", "b")]
    assert launches[4].arguments == ("b", "y", "block")  # what the third sweep wrote
    assert plan(spec_of(), ROUNDS=1).launches[-1].arguments[0] == "b"
    assert [launch.step for launch in plan(spec_of(), ROUNDS=0).launches] == [0]  # conditions leave launches out
    assert plan(spec_of()).main.step == 0  # the one with the most threads
    assert sorted(plan(spec_of()).steps) == [0, 1, 2]
    assert plan(spec_of()) == plan(spec_of())
    assert plan(spec_of()) != plan(spec_of(), BLOCK=128)


def test_a_step_is_declared_to_be_the_main_one():
    """Then it stands for all, though others have more threads; what is computed, and so the hash, is the same."""
    spec = spec_of(('entry = "finish"\n', 'entry = "finish"\nmain = true\n'))
    assert plan(spec).main.step == 2
    assert plan(spec, ROUNDS=0).main.step == 0  # it is not launched
    assert [step.entry for step in spec.main_steps] == ["finish"]
    assert len(spec_of().main_steps) == 3
    assert space_hash(spec) == space_hash(spec_of())
    with pytest.raises(SpecError, match="several steps have main = true"):
        spec_of(("block = [", "main = true\nblock = ["))


def test_nothing_and_too_many_launches():
    never = spec_of(('when = "ROUNDS > 0"', 'when = "N < 0"'), ("[32]", '["BLOCK"]'))
    assert [launch.step for launch in plan(never).launches] == [0, 1, 1, 1]
    many = spec_of(('times = "ROUNDS"', f'times = "{MAX_LAUNCHES} * ROUNDS"'))
    with pytest.raises(ConfigError, match=r"would launch 12,290 kernels, expected 1 to 4,096"):
        plan(many)
    space = feasible_space(many, many.at(), H200)
    assert {space.config(row)["ROUNDS"] for row in range(len(space))} == {0}


def test_the_limits_apply_to_every_launch():
    grid = 'grid = ["ceil_div(N, BLOCK * 2'
    wide = spec_of((f'block = ["BLOCK"]\n{grid}', f'block = ["16 * BLOCK"]\n{grid}'))
    space = feasible_space(wide, wide.at(), H200)
    found = {(space.config(row)["BLOCK"], space.config(row)["ROUNDS"]) for row in range(len(space))}
    assert found == {(64, 0), (64, 1), (64, 3), (128, 0)}  # 2048 threads where the step runs
    said = check_config(wide, {"BLOCK": 128, "ROUNDS": 3}, wide.at(), H200)
    assert said.startswith("threads_per_block: sweep: 2,048 threads in a block")


def test_a_scalar_that_does_not_fit_in_any_launch_excludes_the_configuration():
    """Of the strides 1, 2, 4, ... of the sweeps, int8 holds seven; the last launch takes the block."""
    rounds = ("[0, 1, 3]", "[0, 3, 7, 8]")
    spec = spec_of(rounds, ('"int32", value = "2 ** step"', '"int8", value = "2 ** step"'))
    assert {config["ROUNDS"] for config in feasible_space(spec, spec.at(), H200).configs} == {0, 3, 7}
    said = "scalars: scalar stride is 128, which does not fit in int8"
    reasons = [check_config(spec, {"BLOCK": 64, "ROUNDS": rounds}, spec.at(), H200) for rounds in (0, 3, 7, 8)]
    assert reasons == ["", "", "", said]
    spec = spec_of(rounds, ('"int32", value = "BLOCK"', '"int8", value = "BLOCK"'))
    found = {(config["BLOCK"], config["ROUNDS"]) for config in feasible_space(spec, spec.at(), H200).configs}
    assert found == {(64, 0), (64, 3), (64, 7), (64, 8), (128, 0)}  # what takes it is not launched without rounds


def test_expressions_have_a_value_only_where_the_step_runs_and_a_grid_that_vanishes_later_is_dropped():
    divided = spec_of(("grid = [1]", 'grid = ["ceil_div(N, ROUNDS)"]'))
    assert len(feasible_space(divided, divided.at(), H200)) == 6
    assert plan(divided).launches[-1].geometry.grid[0] == 334
    shrinking = spec_of(("ceil_div(N, BLOCK * 2 ** step)", "2 - step"))
    space = feasible_space(shrinking, shrinking.at(), H200)
    assert {space.config(row)["ROUNDS"] for row in range(len(space))} == {0, 1}


# --- the hash


def test_one_plain_step_is_the_launch_section():
    launched = copy_spec()
    text = launched.text.replace(', entry = "k"', "").replace("[launch]", '[[steps]]\nentry = "k"')
    stepped = parse_spec(text, "k.toml")
    assert (launched.steps, space_hash(launched)) == (stepped.steps, space_hash(stepped))


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
def test_the_hash_covers_a_step(old, new):
    assert SCAN.count(old) == 1
    assert space_hash(spec_of()) != space_hash(spec_of((old, new)))


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
def test_errors_name_the_step_and_its_line(old, new, key, said):
    number = refused(SCAN, old, new, key, said).line
    near = "\n".join(SCAN.replace(old, new).splitlines()[number - 1 : number + 2])
    assert near.startswith("block =" if key == "arguments.block" else new.partition(" ")[0] or "[[steps]]")


def test_a_file_has_steps_or_a_launch_and_step_is_no_name_of_one_with_steps():
    launch = ("ROUNDS = 3 }", "ROUNDS = 3 }\nlaunch = { block = [1], grid = [1] }")
    for change in (launch, ('"scan.cu"', '"scan.cu", entry = "f"')):
        with pytest.raises(SpecError, match=r"the file has \[\[steps\]\], of which each has its own"):
            spec_of(change)
    with pytest.raises(SpecError, match=r"'step' is the number of a launch"):
        spec_of(("{ BLOCK", "{ step = [1], BLOCK"), ("[1], BLOCK = 64", "1, BLOCK = 64"))
    named = parse_spec(copy_spec().text.replace("BLOCK", "step"), "k.toml")
    assert plan(named, step=128).main.geometry.threads == 128


def test_a_header_refuses_steps_and_references_what_depends_on_the_launch():
    with pytest.raises(SpecError, match=r"unknown name 'block'"):
        spec_of(('y = "x"', 'y = "x * block"'))
    with pytest.raises(InputError, match=r"scan has several steps, and a header launches one kernel only"):
        write_header(spec_of(), "float32", [], [], stem="scan")
    with pytest.raises(InputError, match=r"depend on the parameters BLOCK, which a header cannot tell its caller"):
        write_header(PARTIAL, "float32", [], [], stem="k")


def test_block_grid_and_dynamic_shared_memory_which_the_device_may_shape():
    spec = parse_spec(SGEMM, "sgemm.toml")
    geometry = launch_geometry(spec, spec.default, spec.at({"M": 100, "N": 4096, "K": 7}), H200)
    assert (geometry.block, geometry.grid, geometry.dynamic_smem_bytes) == ((8, 8, 1), (64, 2, 1), 4096)
    unstaged = launch_geometry(spec, {**spec.default, "STAGED": False}, spec.at(), H200)
    assert (unstaged.dynamic_smem_bytes, unstaged.threads, unstaged.blocks) == (0, 64, 4096)
    spec = make_spec({"P": [2]}, launch={"grid": ["P * device.sm_count"], "block": ["device.warp_size"]})
    geometry = launch_geometry(spec, {"P": 2}, spec.at({"N": 5}), H200)
    assert (geometry.grid, geometry.block, geometry.dynamic_smem_bytes) == ((264, 1, 1), (32, 1, 1), 0)


@pytest.mark.parametrize("launch", [{"block": ["P - 2"]}, {"grid": [1, "2 - P"]}, {"dynamic_smem_bytes": "-P"}])
def test_what_cannot_be_launched(launch):
    problem = Problem("k", {"N": 5}, "float32")
    with pytest.raises(ConfigError, match=r"k: the configuration gives the grid .* add a rule that excludes it"):
        launch_geometry(make_spec({"P": [2]}, launch=launch), {"P": 2}, problem, H200)
    with pytest.raises(SpecError, match="division by zero where N = 5, P = 0") as caught:
        launch_geometry(make_spec({"P": [0]}, launch={"block": ["N // P"]}), {"P": 0}, problem, H200)
    assert caught.value.key == "launch.block"


def test_names_that_no_parameter_decides():
    spec = parse_spec(SGEMM, "sgemm.toml")
    names = fixed_names(spec, spec.at(), H200)
    assert (names["M"], names["dtype_bytes"], names["device.sm_count"]) == (4096, 4, 132)
    assert len(names) == 4 + len(EXPRESSION_NAMES)
    with pytest.raises(ProblemError, match=r"sgemm: the size K is missing; give K=\.\.\., a whole number of at least"):
        fixed_names(spec, spec.at({"M": 1, "N": 1}), H200)


def launched(launch: str, blocks: str = "64") -> KernelSpec:
    text = copy_spec().text
    return parse_spec(text.replace('grid = ["ceil_div(N, BLOCK)"]', f"grid = [{blocks}]\n{launch}"), "k.toml")


def test_cooperation_and_clusters_are_part_of_the_plan():
    (launch,) = plan(launched('cooperative = true\ncluster = ["BLOCK // 32", 2]', blocks="64, 2")).launches
    assert (launch.is_cooperative, launch.cluster) == (True, (2, 2, 1))
    plain = launched("")
    (launch,) = plan(plain).launches
    assert (launch.is_cooperative, launch.cluster) == (False, None)
    assert space_hash(plain) == space_hash(launched("cooperative = false"))
    assert space_hash(plain) != space_hash(launched("cooperative = true"))


def test_more_cooperative_blocks_than_are_resident_are_refused():
    resident = H200.sm_count * 32  # blocks of 64 threads
    for blocks, is_cooperative, fits in ((resident, True, True), (resident + 1, True, False), (10**6, False, True)):
        spec = launched("cooperative = true" if is_cooperative else "", blocks=str(blocks))
        reason = check_config(spec, spec.default, spec.at(), H200)
        assert (reason == "") == fits
        if not fits:
            assert f"a cooperative launch of {blocks:,} blocks, of which {H200.name} holds {resident:,}" in reason
    spec = launched("cooperative = true", blocks=str(resident))
    for registers, fault in ((32, False), (128, True)):  # those of the compiled kernel count
        (step,) = compiled_steps(spec, plan(spec), {"k": CompiledFunction("k", Resources(registers, 0, 0, 0, 0))}, H200)
        assert ("a cooperative launch" in step.fault) == bool(step.fault) == fault
    spec, function = launched("cluster = [2]"), CompiledFunction("k", Resources(32, 0, 0, 0, 0), cluster=(4, 1, 1))
    (step,) = compiled_steps(spec, plan(spec), {"k": function}, H200)
    assert step.fault == "clusters of (2, 1, 1) blocks are declared, but its __cluster_dims__ are (4, 1, 1)"


def replace_driver(monkeypatch: pytest.MonkeyPatch, launch_kernel: Any) -> None:
    """Launch by a function of C, whose arguments are converted as those of the driver."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launch_kernel)
    monkeypatch.setattr(driver, "load_driver", lambda: SimpleNamespace(cuLaunchKernelEx=function))
    error = SimpleNamespace(CUDADriverError=RuntimeError)
    monkeypatch.setattr(driver, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=error)))


@pytest.mark.parametrize(
    ("is_cooperative", "cluster", "expected"),
    [(True, None, [(2, (1,))]), (False, (2, 4, 1), [(4, (2, 4, 1))]), (True, (8, 1, 1), [(2, (1,)), (4, (8, 1, 1))])],
)
def test_the_driver_gets_the_attributes_and_its_error_is_raised(monkeypatch, is_cooperative, cluster, expected):
    calls: list[Any] = []

    def launch_kernel(address: int, function: int, parameters: int | None, extra: int | None) -> int:
        config = ctypes.string_at(
            address, 56
        )  # CUlaunchConfig of cuda.h: 28 bytes, 4 of padding, two addresses, a number
        *extents, smem_bytes = struct.unpack_from("7I", config)
        stream, attributes, count = struct.unpack_from("QQI", config, 32)
        found = [struct.unpack_from("i4x3I", ctypes.string_at(attributes + 72 * n, 72)) for n in range(count)]
        words = [(kind, tuple(values[: len(w)])) for (kind, *values), (_, w) in zip(found, expected, strict=True)]
        calls.append((tuple(extents[:3]), tuple(extents[3:]), smem_bytes, stream, words))
        calls.append((function, parameters, extra))
        return 0

    replace_driver(monkeypatch, launch_kernel)
    geometry = LaunchGeometry(grid=(8, 4, 1), block=(64, 2, 1), dynamic_smem_bytes=1024)
    launch = partial(driver.attribute_launch, 5, geometry, is_cooperative=is_cooperative, cluster=cluster)
    made = launch()
    for stream, parameters, extra in ((7, 99, 0), (8, 0, 66), (8, 0, 66)):
        made(stream, parameters, extra)
        assert calls[-2:] == [((8, 4, 1), (64, 2, 1), 1024, stream, expected), (5, parameters or None, extra or None)]
    replace_driver(monkeypatch, lambda *_: 720)
    with pytest.raises(RuntimeError, match="720"):
        launch()(7, 99, 0)


def test_the_parameters_that_shape_a_problem(tmp_path):
    assert load_kernel(str(copy_kernel(tmp_path, "two_step_sum"))).spec.shaping == ()
    assert (TILED.shaping, PARTIAL.shaping) == (("STEPS",), ("BLOCK",))
    assert TILED.shaped(TILED.at({"N": 7}), {"BLOCK": 128, "STEPS": 3}) == TILED.at({"N": 7, "STEPS": 3})
    shaped = PARTIAL.shaped(PARTIAL.at({"N": 1000}), {"BLOCK": 64})
    assert PARTIAL.buffer("sums").extents(shaped.names) == (16,)


def test_limits_count_the_arrays_of_each_configuration():
    large = parse_spec(TILED_SPACE.replace("STEPS = [1, 2, 3]", "STEPS = [1, 2, 30]"), "k.toml")
    problem = large.at({"N": 2**31 - 1})
    assert check_config(large, {"BLOCK": 128, "STEPS": 2}, problem, H200) == ""
    said = check_config(large, {"BLOCK": 128, "STEPS": 30}, problem, H200)
    assert said.startswith("memory: its arrays take 256.0 GiB")
    check_memory(large, problem, H200)
    space = feasible_space(large, problem, H200)
    assert {space.config(row)["STEPS"] for row in range(len(space))} == {1, 2}
    text = TILED_SPACE.replace('["STEPS", "N"]', '["3 - STEPS", "N"]')
    text = text.replace('rows = ["s', 'rows = ["s = arange(STEPS); zeros(3 - STEPS, N)"] }\n#')
    said = check_config(parse_spec(text, "k.toml"), {"BLOCK": 128, "STEPS": 3}, TILED.at({"N": 100}), H200)
    assert said == "memory: the array rows would have the shape 0 x 100"


def test_work_needs_the_configuration_and_the_hash_covers_the_shapes():
    problem = resolve_problem(TILED, {"N": 1000})
    assert Workrate.of(TILED, problem).flops is None
    assert Workrate.of(TILED, problem, {"BLOCK": 128, "STEPS": 3}).flops == 6000
    changed = parse_spec(PARTIAL_SPACE.replace('ceil_div(N, BLOCK)"], access', '-(-N // BLOCK)"], access'), "k.toml")
    assert space_hash(changed) != space_hash(PARTIAL)


def test_instances_are_made_once_for_each_shape_and_give_way():
    made: list[dict[str, int]] = []

    def make(problem: Problem) -> Any:
        made.append(dict(problem.sizes))
        return SimpleNamespace(size_bytes=problem.sizes["STEPS"] * 100)

    instances = Instances(TILED, TILED.at({"N": 5}), make, 300)
    first = instances.of({"BLOCK": 128, "STEPS": 1})
    assert instances.of({"BLOCK": 256, "STEPS": 1}) is first
    second = instances.of({"BLOCK": 128, "STEPS": 2})
    assert (list(instances), made) == ([first, second], [{"N": 5, "STEPS": 1}, {"N": 5, "STEPS": 2}])
    assert instances.of({"BLOCK": 128, "STEPS": 1}) is first
    third = instances.of({"BLOCK": 128, "STEPS": 3})
    assert list(instances) == [third]
    instances.of({"BLOCK": 128, "STEPS": 1})
    assert made[-1] == {"N": 5, "STEPS": 1}
