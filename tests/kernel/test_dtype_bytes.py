"""The name ``dtype_bytes`` has the value of the problem's type in every expression that may use sizes."""

import pytest
from spec_samples import make_spec

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.cuda.compiler import compile_job
from autotile.errors import ProblemError, SpecError
from autotile.families.features import Feature, SizeColumns, Tilings, Traits, meet_rules
from autotile.kernel.inputs import input_maker, missing_input
from autotile.kernel.launch import LaunchData, LaunchPlan, launch_geometry, problem_scalars
from autotile.kernel.library import make_kernel
from autotile.kernel.operation import parse_operation
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.space.limits import check_config, meets_heuristics
from autotile.space.search_space import enumerate_space, feasible_space
from autotile.space.time_estimate import estimate_times

H200 = device_profile("h200")
DTYPED = {"float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "complex128": 16}
SPEC = make_spec(
    {"VEC": [1, 2, 4, 8, 16], "WIDE": [False, True]},
    {"one_access": "VEC * dtype_bytes <= 16"},
    {"a_whole_one": "VEC * dtype_bytes >= 4"},
    default={"VEC": 1},
    launch={
        "block": ["32 * dtype_bytes"],
        "grid": ["ceil_div(N * dtype_bytes, 1024)"],
        "dynamic_smem_bytes": "VEC * dtype_bytes * 64",
        "static_smem_bytes": "dtype_bytes * 16",
        "min_registers": "16 + dtype_bytes",
    },
    more={
        "kernel": {"options": ["--maxrregcount={16 * dtype_bytes}"]},
        "kernel.defines": {"ACCESS": "VEC * dtype_bytes"},
        "problem": {"dtypes": ["float32", "float16", "float64", "float8_e4m3fn", "complex128"]},
        "arguments.X": {"buffer": "uint8", "shape": ["N * dtype_bytes"], "access": "inout", "init": "dtype_bytes"},
        "arguments.scratch": {"workspace": "uint8", "shape": ["VEC * dtype_bytes"]},
        "arguments.n": {"scalar": "int32", "value": "N * dtype_bytes"},
        "reference": {"reduction": "dtype_bytes"},
        "reference.outputs": {"X": "X * dtype_bytes"},
        "work": {"flops": "N", "bytes": "2 * dtype_bytes * N"},
        "objective": {"value": "time_us / dtype_bytes"},
        "metrics": {"per_byte": "N / dtype_bytes"},
    },
)

of_dtypes = pytest.mark.parametrize(("dtype", "size"), DTYPED.items())


@of_dtypes
def test_values_follow_the_type(dtype, size):
    problem = resolve_problem(SPEC, {"N": 1000}, dtype)
    config = {"VEC": 2, "WIDE": False}
    assert Workrate.of(SPEC, problem).bytes == 2 * size * 1000
    geometry = launch_geometry(SPEC, config, problem, H200)
    assert (geometry.block[0], geometry.grid[0]) == (32 * size, -(-1000 * size // 1024))
    assert geometry.dynamic_smem_bytes == 2 * size * 64
    data, plan = (made.of(SPEC, config, problem, H200) for made in (LaunchData, LaunchPlan))
    assert (data.workspaces[0].shape, plan.main.geometry) == ((2 * size,), geometry)
    assert problem_scalars(SPEC, problem, check=False) == {"n": 1000 * size}
    content = input_maker(SPEC, problem)("X")
    assert (content.shape, set(content.tolist())) == ((1000 * size,), {size})
    assert missing_input(SPEC, problem) == ""


@of_dtypes
def test_a_space_has_the_rules_heuristics_and_limits_of_the_type(dtype, size):
    problem = resolve_problem(SPEC, {"N": 1000}, dtype)
    for space in (enumerate_space(SPEC, problem, H200), feasible_space(SPEC, problem, H200)):
        found = sorted(set(space.column("VEC").tolist()))
        assert found == [vec for vec in (1, 2, 4, 8, 16) if 4 <= vec * size <= 16]
    for vec in (1, 2, 4, 8, 16):
        config = {"VEC": vec, "WIDE": True}
        assert ("one_access" in check_config(SPEC, config, problem, H200)) == (vec * size > 16)
        assert meets_heuristics(SPEC, config, problem, H200) == (vec * size >= 4)
    g80 = device_profile("g80")  # with 8,192 registers
    assert ("registers" in check_config(SPEC, {"VEC": 1, "WIDE": True}, problem, g80)) == (size == 16)
    estimate = estimate_times(SPEC, problem, H200, space)
    assert estimate is None or estimate.threads.tolist() == [32 * size] * len(space)


@of_dtypes
def test_what_families_learn_from_follows_the_type(dtype, size):
    problems = [SPEC.at({"N": n}, dtype) for n in (1000, 4096)]
    configs = [{"VEC": vec, "WIDE": False} for vec in (2, 16)]
    traits = Traits.of(SPEC, H200, configs, [1, 1], problems)
    assert traits.column(Feature("intensity")).tolist() == [1 / (2 * size)] * 2
    assert traits.blocks[:, 0].tolist() == [-(-n * size // 1024) for n in (1000, 4096)]
    assert meet_rules(SPEC, H200, configs, problems).tolist() == [[2 * size <= 16, 16 * size <= 16]] * 2
    assert SizeColumns(SPEC, H200, problems).outputs().tolist() == [1000 * size, 4096 * size]
    assert Tilings(SPEC, H200, configs, [None, None], problems[0]).tiles[:, 0].tolist() == [1024 / size] * 2


@of_dtypes
def test_options_and_macros_follow_the_type(dtype, size, tmp_path):
    template = tmp_path / "k.cu"
    template.write_text('extern "C" __global__ void k(unsigned char* X, unsigned char* scratch, int n) {}')
    job = compile_job(make_kernel(SPEC, template), {"VEC": 4, "WIDE": False}, SPEC.at(dtype=dtype), "sm_90")
    assert {f"--maxrregcount={16 * size}", f"-DACCESS={4 * size}"} <= {*job.options}
    assert not any("dtype_bytes" in option for option in job.options)  # no macro: sizeof(DTYPE) in the source


def test_an_operation_gives_its_kernels_sizes_and_conditions_by_the_type():
    text = """
[operation]
name = "copies"
sizes = { BYTES = 4096 }
dtypes = ["float32", "float64"]
[kernels.matmul_naive]
sizes = { M = "BYTES // dtype_bytes", N = "dtype_bytes", K = 1 }
when = "dtype_bytes < 8"
"""
    operation = parse_operation(text, "copies.toml")
    (member,) = operation.members
    assert member.sizes_for(operation.resolve({"BYTES": 64}, "float32")) == {"M": 16, "N": 4, "K": 1}
    assert member.sizes_for(Problem("copies", {"BYTES": 64}, "float64")) is None


@pytest.mark.parametrize(
    ("section", "entries"),
    [
        ("parameters", {"dtype_bytes": [1]}),
        ("problem.sizes", {"dtype_bytes": 1}),
        ("problem.flags", {"dtype_bytes": 0}),
        ("arguments.dtype_bytes", {"scalar": "int32", "value": 1}),
    ],
)
def test_it_cannot_be_defined(section, entries):
    with pytest.raises(SpecError, match="'dtype_bytes' already names the bytes of an element of the problem's type"):
        make_spec({"A": [1]}, more={section: entries})
    with pytest.raises(ProblemError, match="k has no size 'dtype_bytes'"):
        resolve_problem(make_spec({"A": [1]}), {"N": 1, "dtype_bytes": 4})


def test_what_a_file_states_is_checked_in_each_type():
    more = {"problem": {"dtypes": ["float32", "float16"]}, "work": {"bytes": "N * (dtype_bytes - 2)"}}
    with pytest.raises(SpecError, match=r"bytes\]: .* is 0, expected at least 1 where N = 4096, dtype_bytes = 2"):
        make_spec({"A": [1]}, more=more)


def test_a_stored_problem_of_a_type_that_is_not_known_here_has_no_such_name():
    assert Problem("k", {"N": 1}, "float4_e2m1").names == {"N": 1}
    assert {dtype: Problem("k", {}, dtype).names["dtype_bytes"] for dtype in DTYPED} == DTYPED
