"""Arguments of Kernel Tuner against Kernel Tuner itself, which is the oracle, and the headers of a script."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_tuner import accuracy as their_accuracy
from kernel_tuner import util
from kernel_tuner.searchspace import Searchspace

from autotile.cuda.compiler import CompileJob, compile_cubin, compile_job
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel_tuner import parameters
from autotile.kernel_tuner.accuracy import TunablePrecision, error_metric_from_name
from autotile.kernel_tuner.parameters import ParameterCodec, evaluate, holds_in_rows, restriction_rules
from autotile.kernel_tuner.translation import ScriptKernel, block_names, nvrtc_options
from autotile.kernel_tuner.util import get_best_config, get_config_string, process_metrics

PARAMS = {"block_size_x": 32, "block_size_y": 4, "tile_size_x": 3, "num_blocks": 7, "scale": 1.5}
NAMES = ["block_size_x", "block_size_y", "block_size_z"]


def script(problem_size: Any, source: Any = "", **options: Any) -> ScriptKernel:
    return ScriptKernel("k", source, problem_size, [], ParameterCodec({"a": [1]}), **options)


@pytest.mark.parametrize(
    "problem_size",
    [1000, (1000, 33), ("num_blocks*2", 5, 6), "num_blocks", np.int32(77), lambda p: (p["num_blocks"], 3)],
)
@pytest.mark.parametrize(
    "grid_div",
    [
        (None, None, None),
        ([], [], []),
        (["block_size_x", "tile_size_x"], ["block_size_y"], None),
        (["block_size_x/tile_size_x"], 2, lambda p: p["tile_size_x"] / 2),
        ("block_size_x*2", None, None),
        ([["block_size_x"], 3, lambda p: 2], None, None),
    ],
)
def test_the_grid_is_theirs(problem_size, grid_div):
    launch = script(problem_size, grid_div=grid_div)
    threads, grid = util.setup_block_and_grid(problem_size, grid_div, PARAMS, NAMES)
    assert (launch.grid(PARAMS), launch.block(PARAMS)) == (grid, threads)


def test_shared_memory_is_theirs_and_block_names_in_any_case_and_in_part():
    for size in (100, "block_size_x*4", lambda p: p["block_size_y"] * 8):
        given: dict[str, Any] = {"size": size}
        assert script(1, smem_args=given).dynamic_smem_bytes(PARAMS) == util.get_smem_args(given, PARAMS)["size"]
    assert block_names(None, ["BLOCK_SIZE_Y", "Block_Size_X"]) == ("Block_Size_X", "BLOCK_SIZE_Y", "block_size_z")
    assert block_names(["bx"], ["bx"]) == ("bx", "block_size_y", "block_size_z")
    with pytest.raises(InputError, match="at most three names"):
        block_names("bx", [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "defines", [None, {}, {"A": "block_size_x + 1", "B": lambda p: p["scale"], "C": 3, "D": "a\nb"}]
)
def test_macros_are_theirs(defines):
    code = "int main;\n"
    threads, grid = util.setup_block_and_grid(1000, (None, None, None), PARAMS, NAMES)
    _, theirs = util.prepare_kernel_string("k", code, PARAMS, grid, threads, NAMES, "CUDA", defines)
    ours, _ = script(1000, code, defines=defines).variant(PARAMS)
    before, ends, after = ours.rpartition(code)
    assert ends
    assert set((before + code).splitlines()) == set(theirs.splitlines())
    known = {line.split()[1] for line in ours.splitlines() if line.startswith("#define")}
    assert known >= PARAMS.keys()  # those that are no macros are defined behind the code
    assert (after == "") == (defines is None)


TUNE_PARAMS = {"a": [1, 2, 4, 8], "b": [1, 3, 5], "c": ["x", "y"], "d": [0.5, 1.5]}


@pytest.mark.parametrize(
    "restrictions",
    [None, "a * b <= 8", ["a <= 4", "b == 1 or a > 2", "c == 'x'"], ["d * a > 1", "a in [1, 2, 8]", "a % 3 != 0"]],
)
def test_restrictions_leave_their_space(restrictions):
    theirs = {tuple(config) for config in Searchspace(TUNE_PARAMS, restrictions, 1024).list}
    assert survivors(restrictions) == theirs


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (lambda p: p["a"] * p["b"] <= 8, "a * b <= 8"),
        (lambda a, b: a * b <= 8, "a * b <= 8"),
        (lambda **p: p["a"] * p["b"] <= 8, "a * b <= 8"),
        (lambda *values: values[0] * values[1] <= 8, "a * b <= 8"),
        ([util.FunctionConstraint(lambda a, b, c, d: a * b <= 8)], "a * b <= 8"),
        ([(util.MaxProdConstraint(8), ["a", "b"])], "a * b <= 8"),
        ([(util.MinSumConstraint(6), ["a", "b"])], "a + b >= 6"),
        ([(util.InSetConstraint({1, 3}), ["b"])], "b in [1, 3]"),
        ([(util.AllEqualConstraint(), ["a", "b"])], "a == b"),
        ([(util.AllDifferentConstraint(), ["a", "b"]), "a < 8"], "a != b and a < 8"),
        ([(lambda a, b: a > b, ["a", "b"])], "a > b"),
        (lambda p: 4 % (p["a"] - 1) == 0, "a != 1 and 4 % (a - 1) == 0"),
    ],
)
def test_every_form_means_the_same(given, same):
    assert survivors(given) == survivors(same)


def survivors(restrictions: Any) -> set[tuple[Any, ...]]:
    """Return what both the rules of a space and the check of one configuration leave."""
    codec = ParameterCodec(TUNE_PARAMS)
    listed = list(itertools.product(*codec.values.values()))
    columns = dict(
        zip(codec.values, map(np.array, zip(*itertools.product(*codec.declared.values()), strict=True)), strict=True)
    )
    kept = np.ones(len(listed), np.bool_)
    for rule in restriction_rules(restrictions, codec).values():
        names = list(rule.__signature__.parameters)  # type: ignore[attr-defined]
        kept &= rule(**{name: columns[name] for name in names})
    configs = [dict(zip(codec.values, values, strict=True)) for values in listed]
    single = [
        all(each.allows(one) for each in parameters.parse_restrictions(restrictions, codec.values)) for one in configs
    ]
    assert kept.tolist() == single
    return {values for values, is_kept in zip(listed, kept, strict=True) if is_kept}


CONDITIONS = st.recursive(
    st.one_of(st.sampled_from("ab"), st.integers(-3, 2**33).map(lambda n: f"({n})")),
    lambda inner: st.builds(
        "({} {} {})".format,
        inner,
        st.sampled_from(["+", "-", "*", "/", "//", "%", "and", "or", "<", ">=", "==", "!="]),
        inner,
    ),
    max_leaves=6,
)


@given(CONDITIONS, st.lists(st.tuples(st.integers(-4, 2**34), st.integers(-4, 70)), min_size=1, max_size=20))
def test_a_condition_holds_in_the_rows_where_it_holds_in_each(text, rows):
    columns = dict(zip("ab", np.array(rows, np.int64).T, strict=True))
    found = holds_in_rows(text, columns)
    if found is not None:
        assert found.tolist() == [bool(evaluate(text, dict(zip("ab", row, strict=True)))) for row in rows]


def test_conditions_of_suites_need_no_rows_and_numbers_are_no_restriction():
    columns = {"a": np.array([1, 2]), "b": np.array([0, 4])}
    assert holds_in_rows("a == 1 or (a * 2 + b) * 4 <= 64 and not a % 2 == 1", columns) is not None
    assert holds_in_rows("a in (1, 3) and b / a < 0.5", columns).tolist() == [True, False]
    assert holds_in_rows("1", columns).tolist() == [True, True]
    for text in ("a % b == 0", "a and b", "round(a) == b", f"a / {2**60} < b", "'x'"):
        assert holds_in_rows(text, columns) is None
    with pytest.raises(InputError, match="a restriction is 3, expected"):
        restriction_rules(3, ParameterCodec(TUNE_PARAMS))


def test_metrics_are_theirs():
    metrics = {"GFLOP/s": lambda p: 2 / p["time"], "x": "a * 2 / (time / 1000)", "y": "x * x + ceil(a / 3)"}
    result = {"a": 4, "time": 0.5}
    assert process_metrics(dict(result), metrics) == util.process_metrics(dict(result), metrics)
    with pytest.raises(ValueError, match="expected a dictionary"):
        process_metrics(dict(result), ["x"])  # type: ignore[arg-type]


EXPRESSIONS = [
    *("a + b * 2", "a / b", "a // b % 3", "-a ** 2", "a if a > b else b", "min(a, b, 3)", "a << b", "1 < a <= b"),
    *("not a or b", "[a, b][0]", "math.sqrt(b)", "np.ceil(a / b)", "sum([x * x for x in (a, b)])"),
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_have_pythons_values(text):
    for a, b in itertools.product(range(0 if "<<" in text else -9, 10, 3), range(1, 10, 2)):
        assert evaluate(text, {"a": a, "b": b}) == eval(text, {"math": math, "np": np, "a": a, "b": b})


@pytest.mark.parametrize(
    "text", ["__import__('os')", "(1).__class__", "open('x')", "a.b", "lambda: 1", "x :=", "[].append(1)", "f'{a}'"]
)
def test_nothing_else_is_carried_out(text):
    with pytest.raises(InputError):
        evaluate(text, {"a": 1})


def test_absurd_numbers_and_texts_are_refused():
    with pytest.raises(OverflowError):
        evaluate("9 ** 9 ** 9", {})
    with pytest.raises(InputError):
        evaluate("1+" * 9000 + "1", {})
    assert parameters.replace_param_occurrences("k<T, block>", {"T": "float", "block": 3}) == "k<float, 3>"


def test_values_of_any_type_are_parameters():
    codec = ParameterCodec(
        {"n": [np.int32(4), 8, 8], "f": [0.5, 1], "s": ["a b", "c"], "t": ["int", "float"], "b": [True], "p": [(2, 4)]}
    )
    assert codec.declared == {"n": [4, 8], "f": [0, 1], "s": [0, 1], "t": ["int", "float"], "b": [True], "p": [0]}
    config = {"n": 8, "f": 1, "s": "a b", "t": "int", "b": True, "p": (2, 4)}
    assert codec.decode(dict(codec.encode({**config, "p": [2, 4]}))) == config  # as in JSON
    with pytest.raises(InputError, match="not among its values"):
        codec.encode({**config, "f": 2})


@pytest.mark.parametrize("params", [{}, {"a": []}, {"a b": [1]}, {"time": [1]}, {"a": "text"}])
def test_parameters_that_cannot_be(params):
    with pytest.raises(InputError):
        ParameterCodec(params)


@pytest.mark.parametrize(
    ("lang", "source", "said"),
    [
        ("C", "float f();", "host"),
        (None, "float f() { return 1; }", "no __global__ function"),
        (None, "__kernel void f() {}", "CUDA C"),
        ("opencl", "__global__ void f() {}", "CUDA C"),
        ("basic", "__global__ void f() {}", "no language"),
    ],
)
def test_other_languages_are_refused(lang, source, said):
    with pytest.raises(InputError, match=said):
        script(1, source).check_language(lang)


def test_options_of_nvcc_that_nvrtc_lacks_are_left_out():
    given = ["-O3", "-std=c++14", "-arch=sm_52", "-Xcompiler", "-Wall", "-lineinfo", "-use_fast_math", "-Xptxas", "-v"]
    assert nvrtc_options(given) == ("-std=c++14", "-lineinfo", "-use_fast_math", "--ptxas-options=-v")
    assert nvrtc_options(["-I", "/a", "-I/b"]) == ("-I/a", "-I/b")


ERRORS = "MSE,rmse,NRMSE,MAE,absolute error,MRE,relative,rmsre,MALE,RMSLE,max,max rel,maximum_absolute"


@pytest.mark.parametrize("name", ERRORS.split(","))
def test_errors_are_theirs(name):
    rng = np.random.default_rng(0)
    a, b = rng.random(50) + 0.1, rng.random(50) + 0.1
    assert error_metric_from_name(name)(a, b) == pytest.approx(their_accuracy.error_metric_from_name(name)(a, b))


def test_precisions_and_texts_are_theirs():
    values = np.linspace(0, 1, 9)
    ours, theirs = TunablePrecision("T", values), their_accuracy.TunablePrecision("T", values)
    for name in ("half", "float", "double"):
        assert ours({"T": name}).dtype == theirs({"T": name}).dtype
    results = [{"a": 1, "time": 0.25}, {"a": 2, "time": 0.125}, {"a": 3, "__error__": util.InvalidConfig()}]
    assert get_best_config(results, "time") == util.get_best_config(results, "time")
    shown = results[0], None, {"time": "ms"}
    assert get_config_string(*shown) == util.get_config_string(*shown)


HEADER_PARAMS = {"block_size_x": [32, 64], "which": [1, 2]}
CODE = "%s\n__global__ void fill(float* x) { x[threadIdx.x] = VALUE; }\n"


def described(source: Any, options: Any) -> Kernel:
    arguments = [np.zeros(64, np.float32)]
    return ScriptKernel("fill", source, 64, arguments, ParameterCodec(HEADER_PARAMS), options=options).build()


def job(kernel: Kernel) -> CompileJob:
    return compile_job(kernel, {"block_size_x": 64, "which": 2}, kernel.spec.at(), "sm_90")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (CODE % '#include "x_2.h"', lambda folder: [f"-I{folder}"]),
        (CODE % '#define H "x_2.h"\n#include H', lambda folder: ["-I", str(folder)]),
        (
            CODE % "#define STR(x) #x\n#define N(a, b) STR(a##b.h)\n#define M(a) N(x_, a)\n#include M(which)",
            lambda folder: ["-I", str(folder)],
        ),
        (CODE % '#include "x_2.h"', lambda folder: lambda params: [f"-I{folder}"] if params["which"] == 2 else []),
        (CODE % '#include "x_2.h"', lambda folder: [f"-I{folder}", "-DFLAG", "-DVALUE=3"]),  # which theirs replaces
        (CODE % "", lambda folder: [f"-I{folder}", "--pre-include=x_2.h"]),
        (lambda params: CODE % f'#include "x_{params["which"]}.h"', lambda folder: [f"-I{folder}"]),
        (lambda params: CODE % f'#include "own/x_{params["which"]}.h"', lambda folder: []),
    ],
)
def test_a_changed_header(tmp_path, monkeypatch, source, options):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own"
    folder.mkdir()
    for which in (1, 2):
        (folder / f"x_{which}.h").write_text("#define VALUE 1\n")
    first = described(source, options(folder))
    before = first.source_hash, job(first).key, compile_cubin(job(first)).cubin
    assert described(source, options(folder)).source_hash == before[0]
    (folder / "x_2.h").write_text("#define VALUE 2\n")
    second = described(source, options(folder))
    after = second.source_hash, job(second).key, compile_cubin(job(second)).cubin
    assert all(one != other for one, other in zip(before, after, strict=True))
