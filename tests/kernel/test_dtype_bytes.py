"""The name ``dtype_bytes`` has the value of the problem's type in every expression that may use sizes."""

import pytest
from spec_samples import make_spec

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.cuda.compiler import compile_job
from autotile.errors import ProblemError, SpecError
from autotile.exchange.bundle import untuned_config
from autotile.families.features import Feature, SizeColumns, Traits, meet_rules, tilings
from autotile.kernel.inputs import input_maker, missing_input
from autotile.kernel.launch import LaunchData, launch_geometry, problem_scalars
from autotile.kernel.library import make_kernel
from autotile.kernel.operation import parse_operation
from autotile.kernel.problem import Workrate, resolve_problem
from autotile.space.limits import check_config, meets_heuristics
from autotile.space.search_space import enumerate_space, feasible_space
from autotile.space.time_estimate import estimate_times

H200, G80 = device_profile("h200"), device_profile("g80")
DTYPES = {"float32": 4, "float16": 2, "float64": 8, "float8_e4m3fn": 1, "complex128": 16}
SPEC = make_spec(
    {"VEC": [1, 2, 4, 8, 16]},
    {"one_access": "VEC * dtype_bytes <= 16"},
    {"no_sliver": "VEC * dtype_bytes >= 4"},
    launch={
        "block": ["32 * dtype_bytes"],
        "grid": ["ceil_div(N * dtype_bytes, 1024)"],
        "dynamic_smem_bytes": "VEC * dtype_bytes * 64",
        "min_registers": "16 + dtype_bytes",
    },
    more={
        "kernel": {"options": ["--maxrregcount={16 * dtype_bytes}"]},
        "kernel.defines": {"ACCESS": "VEC * dtype_bytes"},
        "problem": {"dtypes": [*DTYPES]},
        "arguments.X": {"buffer": "uint8", "shape": ["N * dtype_bytes"], "access": "inout", "init": "dtype_bytes"},
        "arguments.scratch": {"workspace": "uint8", "shape": ["VEC * dtype_bytes"]},
        "arguments.n": {"scalar": "int32", "value": "N * dtype_bytes"},
        "reference": {"reduction": "dtype_bytes"},
        "reference.outputs": {"X": "X * dtype_bytes"},
        "work": {"flops": "N", "bytes": "2 * dtype_bytes * N"},
    },
)


@pytest.mark.parametrize(("dtype", "size"), DTYPES.items())
class TestValues:
    def test_of_the_launch_the_arguments_the_compiler_and_the_work(self, dtype, size, tmp_path):
        problem, config = resolve_problem(SPEC, {"N": 1000}, dtype), {"VEC": 2}
        geometry = launch_geometry(SPEC, config, problem, H200)
        launched = geometry.block[0], geometry.grid[0], geometry.dynamic_smem_bytes
        assert launched == (32 * size, -(-1000 * size // 1024), 2 * size * 64)
        assert LaunchData.of(SPEC, config, problem, H200).workspaces[0].shape == (2 * size,)
        assert problem_scalars(SPEC, problem, check=False) == {"n": 1000 * size}
        content = input_maker(SPEC, problem)("X")
        assert (content.shape, set(content.tolist()), missing_input(SPEC, problem)) == ((1000 * size,), {size}, "")
        assert Workrate.of(SPEC, problem).bytes == 2 * size * 1000
        (tmp_path / "k.cu").write_text("__global__ void k(unsigned char* X, unsigned char* scratch, int n) {}")
        job = compile_job(make_kernel(SPEC, tmp_path / "k.cu"), config, problem, "sm_90")  # no macro of the name
        assert job.options[:2] == (f"--maxrregcount={16 * size}", "-DVEC=2")
        assert job.options[-1:] == (f"-DACCESS={2 * size}",)

    def test_of_rules_heuristics_limits_and_estimates(self, dtype, size):
        problem = SPEC.at({"N": 1000}, dtype)
        for space in (enumerate_space(SPEC, problem, H200), feasible_space(SPEC, problem, H200)):
            assert space.column("VEC").tolist() == [vec for vec in (1, 2, 4, 8, 16) if 4 <= vec * size <= 16]
        assert estimate_times(SPEC, problem, H200, space).threads.tolist() == [32 * size] * len(space)
        for config in SPEC.parameters[0].values:
            assert ("one_access" in check_config(SPEC, {"VEC": config}, problem, H200)) == (config * size > 16)
            assert meets_heuristics(SPEC, {"VEC": config}, problem, H200) == (config * size >= 4)
        assert ("registers" in check_config(SPEC, {"VEC": 1}, problem, G80)) == (size == 16)  # 512 threads of 32

    def test_of_the_configuration_that_ships_untuned(self, dtype, size):
        more = {"problem": {"dtypes": [*DTYPES]}}
        spec = make_spec({"VEC": [4, 1, 2]}, {"one_access": "VEC * dtype_bytes <= 16"}, more=more)
        assert untuned_config(spec, spec.at(dtype=dtype)) == {"VEC": 4 if size <= 4 else 1}

    def test_of_what_families_learn_from(self, dtype, size):
        problems, configs = [SPEC.at({"N": n}, dtype) for n in (1000, 4096)], [{"VEC": 2}, {"VEC": 16}]
        traits = Traits.of(SPEC, H200, configs, [1, 1], problems)
        assert traits.column(Feature("intensity")).tolist() == [1 / (2 * size)] * 2
        assert traits.blocks[:, 0].tolist() == [-(-n * size // 1024) for n in (1000, 4096)]
        assert meet_rules(SPEC, H200, configs, problems).tolist() == [[2 * size <= 16, 16 * size <= 16]] * 2
        assert SizeColumns(SPEC, H200, problems).outputs().tolist() == [1000 * size, 4096 * size]
        assert tilings(SPEC, H200, configs, [None, None], problems[0])[0][:, 0].tolist() == [1024 / size] * 2


def test_an_operation_gives_its_kernels_sizes_and_conditions_by_the_type():
    text = '[operation]\nname = "copies"\nsizes = { BYTES = 4096 }\ndtypes = ["float32", "float64"]\n'
    text += '[kernels.matmul_naive]\nsizes = { M = "BYTES // dtype_bytes", N = "dtype_bytes", K = 1 }\n'
    (member,) = parse_operation(f'{text}when = "dtype_bytes < 8"', "copies.toml").members
    assert member.sizes_for(Problem("copies", {"BYTES": 64}, "float32")) == {"M": 16, "N": 4, "K": 1}
    assert member.sizes_for(Problem("copies", {"BYTES": 64}, "float64")) is None


@pytest.mark.parametrize("section", ["parameters", "problem.sizes", "problem.flags", "arguments.dtype_bytes"])
def test_it_cannot_be_defined(section):
    value = [1] if section == "parameters" else 1
    table = {"scalar": "int32", "value": 1} if section.startswith("arguments") else {"dtype_bytes": value}
    with pytest.raises(SpecError, match="'dtype_bytes' already names the bytes of an element of the problem's type"):
        make_spec({"A": [1]}, more={section: table})


def test_what_a_file_states_is_checked_in_each_type_and_a_type_that_is_not_known_here_has_no_such_name():
    more = {"problem": {"dtypes": ["float32", "float16"]}, "work": {"bytes": "N * (dtype_bytes - 2)"}}
    with pytest.raises(SpecError, match=r"bytes\]: .* is 0, expected at least 1 where N = 4096, dtype_bytes = 2"):
        make_spec({"A": [1]}, more=more)
    with pytest.raises(ProblemError, match="k has no size 'dtype_bytes'"):
        resolve_problem(SPEC, {"N": 1, "dtype_bytes": 4})
    assert Problem("k", {"N": 1}, "float4_e2m1").names == {"N": 1}  # stored by another version


@pytest.mark.parametrize(
    ("section", "name", "text", "fault"),
    [
        ("reference.outputs", "X", "X if dtype_bytes == 4 else X[:5]", r"\(5,\), but the buffer X has \(4096,\)"),
        ("arguments.X", "init", "arange(N if dtype_bytes == 4 else 3)", r"\(3,\), but the buffer X has \(4096,\)"),
        ("arguments.X", "init", "arange(N)[:: 1 + 0 // (dtype_bytes - 2)]", r"init\]: division by zero"),
    ],
)
def test_shapes_are_checked_in_each_type_and_a_message_names_the_sizes(section, name, text, fault):
    table = {"buffer": "dtype", "shape": ["N"], "access": "inout"} if section == "arguments.X" else {}
    more = {"problem": {"dtypes": ["float32", "float16"]}, section: {**table, name: text}}
    with pytest.raises(SpecError, match=rf"{fault}.*, at N=4096 dtype_bytes=2"):
        make_spec({"A": [1]}, more=more)
    cure = "give ragged sizes for which it holds"
    said = rf"1009 elements has no shape \(2, -1\) .*, at the ragged sizes N=1009 A=1; {cure}\n"
    with pytest.raises(SpecError, match=said):
        make_spec({"A": [1]}, more={"reference.outputs": {"X": "ravel(reshape(X, 2, -1))"}})
