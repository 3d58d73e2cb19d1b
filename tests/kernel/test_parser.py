import contextlib
import textwrap
import tracemalloc
from pathlib import Path

import pytest
from feature_kernels import SPLIT_SPACE, space_text
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import SGEMM, copy_spec, refused

import autotile
from autotile.core.device import EXPRESSION_NAMES
from autotile.core.dtypes import DTYPES
from autotile.errors import SpecError
from autotile.kernel.arguments import BufferArgument, ScalarArgument
from autotile.kernel.expressions import ARRAY_FUNCTIONS, FUNCTIONS, Expression
from autotile.kernel.parser import SECTIONS, derived_ragged, parse_spec

TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"


def refusal(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "sgemm.toml")
    assert caught.value.source == "sgemm.toml"
    return caught.value


def edited(old: str, new: str) -> str:
    assert SGEMM.count(old) == 1
    return SGEMM.replace(old, new)


OBJECTIVE = "\n[metrics]\nwork = '2 * M * N * K'\nrate = 'work / time_us'\n[objective]\nvalue = '{}'\n"


@pytest.mark.parametrize("value", ["1", "dtype_bytes", "BM * BN", "work", "M + 0 * work"])
def test_an_objective_uses_a_measured_value(value):
    for used in ("rate", "registers / BM", "1 / rate + work"):
        parsed = parse_spec(SGEMM + OBJECTIVE.format(used), "sgemm.toml")
        assert parsed.objective.expression.text == used
    error = refusal(SGEMM + OBJECTIVE.format(value))
    assert error.key == "objective.value"
    assert error.problem.startswith("an objective that uses no measured value needs no search; expected one or more of")
    assert all(name in error.problem for name in ("time_us", "registers", "energy_mj", "max_error"))
    with pytest.raises(SpecError) as given:
        autotile.tune("sgemm_2d", M=4096, N=4096, K=4096, replay="auto", objective=value.replace("work", "M * N"))
    assert (given.value.problem, given.value.source) == (error.problem, "--objective")


# --- valid files


def test_every_section_is_read():
    spec = parse_spec(SGEMM, "sgemm.toml")
    assert (spec.name, spec.template, spec.entry) == ("sgemm", "sgemm.cu", "sgemm")
    assert (spec.summary, spec.options) == ("C = alpha A B + beta C", ("--use_fast_math",))
    assert (spec.sizes, spec.ragged) == ({"M": 4096, "N": 4096, "K": 4096}, {"M": 389, "N": 277, "K": 149})
    given = parse_spec(edited("{ M = 389 }", "{ K = 96 }"), "sgemm.toml").ragged  # the others are derived
    assert given == {"M": 389, "N": 277, "K": 96}
    assert spec.dtypes == ("float32", "float64")
    assert [parameter.name for parameter in spec.parameters] == ["BM", "BN", "TM", "STAGED", "LAYOUT"]
    assert spec.parameters[3].values == (False, True)
    assert spec.default == {"BM": 64, "BN": 64, "TM": 8, "STAGED": True, "LAYOUT": "row"}
    assert list(spec.default) == [parameter.name for parameter in spec.parameters]
    assert ([rule.name for rule in spec.rules], spec.heuristics) == (["squarish", "fits"], ())
    assert [expression.text for expression in spec.steps[0].launch.block] == ["BN // TM", "BM // TM"]
    assert spec.steps[0].launch.static_smem_bytes.evaluate({}) == 1024
    assert (spec.min_occupancy, spec.max_spill_bytes) == (0.05, 0)
    assert [argument.name for argument in spec.arguments] == ["A", "B", "C", "M", "alpha"]
    a, b, c, m, alpha = spec.arguments
    assert [type(each) for each in (a, b, c, m, alpha)] == [BufferArgument] * 3 + [ScalarArgument] * 2
    assert (str(a.dtype), a.access, a.init, b.init) == ("dtype", "in", "normal", "uniform")
    assert [axis.text for axis in c.shape] == ["M", "N"]
    assert isinstance(m.binding, Expression)
    assert (alpha.dtype, alpha.default, alpha.check_value) == ("float32", 1.0, 0.75)
    assert spec.reference.outputs["C"].names == {"A", "B", "C", "alpha"}
    assert (spec.reference.reduction.evaluate(spec.sizes), spec.reference.tolerance) == (4096, 1e-5)
    assert (spec.work.flops.evaluate(spec.sizes), spec.source, spec.text) == (2 * 4096**3, "sgemm.toml", SGEMM)


def test_what_may_be_left_out():
    spec = copy_spec()
    assert (spec.summary, spec.options, spec.dtypes, spec.rules) == ("", (), ("float32",), ())
    launch = spec.steps[0].launch
    assert (launch.dynamic_smem_bytes, launch.static_smem_bytes, launch.min_registers) == (None,) * 3
    assert (spec.min_occupancy, spec.max_spill_bytes, spec.reference.reduction.evaluate({})) == (0.0, None, 1)
    assert (spec.reference.tolerance, spec.work.flops, spec.work.bytes) == (None, None, None)
    refused(spec.text, 'y = "x"', 'y = "x + y"', "reference.outputs.y", "unknown name 'y'")  # it holds nothing to read


@pytest.mark.parametrize(
    ("sizes", "ragged"),
    [
        ({"N": 2**27}, {"N": 100_003}),
        ({"N": 100}, {"N": 67}),
        ({"M": 4096, "N": 4096, "K": 4096}, {"M": 389, "N": 277, "K": 149}),
        ({"B": 8, "M": 4096, "N": 4096, "K": 300}, {"B": 7, "M": 389, "N": 277, "K": 149}),
        ({"B": 1, "H": 2, "W": 3, "C": 4}, {"B": 1, "H": 1, "W": 3, "C": 3}),
    ],
)
def test_derived_ragged_sizes(sizes, ragged):
    assert derived_ragged(sizes) == ragged


@given(st.dictionaries(st.sampled_from("ABCDEFGH"), st.integers(1, 10**6), min_size=1))
def test_derived_ragged_sizes_are_odd_and_never_larger(sizes):
    ragged = derived_ragged(sizes)
    assert list(ragged) == list(sizes)
    assert all(size % 2 == 1 and 1 <= size <= sizes[name] for name, size in ragged.items())
    large = [size for name, size in ragged.items() if sizes[name] >= 389]
    assert len(set(large)) == len(large)


def test_the_worked_example_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "file-format.md").read_text(encoding="utf-8")
    example = page.split("`saxpy.toml`, in the same folder:\n\n")[1].split("\n\nAn error is reported")[0]
    spec = parse_spec(textwrap.dedent(example), "saxpy.toml")
    assert [parameter.name for parameter in spec.parameters] == ["BLOCK", "PER_THREAD"]
    assert all(
        f"`{name}`" in page for name in (*EXPRESSION_NAMES, *(d.name for d in DTYPES.values() if not d.components))
    )
    assert all(f"### {name}\n" in page for name in SECTIONS)
    assert all(f"`{name}(" in page for name in (*FUNCTIONS, *ARRAY_FUNCTIONS))


# --- errors: old text, new text, the key, and parts of the message

KERNEL = [
    ('name = "sgemm"', 'name = "a b"', "kernel.name", ["letters, digits"]),
    ('name = "sgemm"', "name = 3", "kernel.name", ["expected a string, got the number 3"]),
    ('name = "sgemm"\n', "", "kernel", ["'name' is missing"]),
    ('"sgemm.cu"', '"../sgemm.cu"', "kernel.template", ["bare file name that ends in .cu"]),
    ('"sgemm.cu"', '"a\\\\b.cu"', "kernel.template", ["without directories"]),
    ('"sgemm.cu"', '".."', "kernel.template", ["ends in .cu"]),
    ('entry = "sgemm"', 'entry = "a-b"', "kernel.entry", ["expected the C++ name of a __global__ function"]),
    ('"C = alpha A B + beta C"', '"two\\nlines"', "kernel.summary", ["one line"]),
    ("--use_fast_math", "--use_fastmath", "kernel.options", ["did you mean '--use_fast_math'?"]),
    ("--use_fast_math", "-I/etc", "kernel.options", ["'-I/etc' is not accepted"]),
    ('["--use_fast_math"]', '["--restrict", "--restrict"]', "kernel.options", ["listed twice"]),
    ('["--use_fast_math"]', '"--restrict"', "kernel.options", ["expected a list"]),
    ('["--use_fast_math"]', "[1]", "kernel.options", ["expected strings, got the number 1"]),
    ("summary =", "sumary =", "kernel.sumary", ["unknown key 'sumary'", "did you mean 'summary'?"]),
]
SIZES = "{ M = 4096, N = 4096, K = 4096 }"
PROBLEM = [
    (SIZES, "{ M = 0, N = 1, K = 1 }", "problem.sizes.M", ["whole number from 1"]),
    (SIZES, "{ M = 1.5, N = 1, K = 1 }", "problem.sizes.M", ["got the number 1.5"]),
    (SIZES, "{ M = true, N = 1, K = 1 }", "problem.sizes.M", ["got the boolean true"]),
    (SIZES, f"{{ M = {2**31}, N = 1, K = 1 }}", "problem.sizes.M", ["from 1 to 2147483647"]),
    (SIZES, "[4096]", "problem.sizes", ["expected a table, got a list"]),
    ("{ M = 389 }", "{ m = 389 }", "problem.ragged.m", ["unknown key 'm'", "known: M, N, K"]),
    ("{ M = 389 }", "{ M = 0 }", "problem.ragged.M", ["whole number from 1"]),
    ('"float64"]', '"double"]', "problem.dtypes", ["'double' is not accepted; write 'float64'"]),
    ('"float64"]', '"__half"]', "problem.dtypes", ["write 'float16'"]),
    ('"float64"]', '"float65"]', "problem.dtypes", ["'float65' is not accepted", "float16, bfloat16"]),
    ('"float64"]', '"float32"]', "problem.dtypes", ["listed twice"]),
    ('["float32", "float64"]', "[]", "problem.dtypes", ["the list is empty"]),
]
PARAMETERS = [
    ("TM = [4, 8]", "TM = []", "parameters.TM", ["the list is empty"]),
    ("TM = [4, 8]", "TM = 4", "parameters.TM", ["expected a list, got the number 4"]),
    ("TM = [4, 8]", "TM = [4, 8, 4]", "parameters.TM", ["the number 4 is listed twice"]),
    ("TM = [4, 8]", "TM = [4, true]", "parameters.TM", ["different types"]),
    ("TM = [4, 8]", 'TM = [4, "8"]', "parameters.TM", ["different types"]),
    ("TM = [4, 8]", "TM = [nan, 8.0]", "parameters.TM", ["is not finite"]),
    ("TM = [4, 8]", "TM = [[4], [8]]", "parameters.TM", ["not a list"]),
    ("TM = [4, 8]", f"TM = [{2**63}]", "parameters.TM", ["does not fit in 64 bits"]),
    ("TM = [4, 8]", f"TM = [-{2**63}]", "parameters.TM", ["2**63 - 1 at most in magnitude"]),
    ("TM = [4, 8]", f"TM = [{'9' * 4000}]", "parameters.TM", ["more than 30 digits"]),
    ("TM = [4, 8]", f"TM = {list(range(1001))}", "parameters.TM", ["1001 entries, at most 1000"]),
    ('"column"]', '"x;y"]', "parameters.LAYOUT", ["neither a C identifier, a C type nor a C number"]),
    ('"column"]', '""]', "parameters.LAYOUT", ["neither a C identifier, a C type nor a C number"]),
    ("TM = [4, 8]", "T-M = [4, 8]", "parameters.T-M", ["not a C identifier"]),
    ("TM = [4, 8]", '"TÄ" = [4, 8]', "parameters.TÄ", ["not a C identifier"]),
    ("TM = [4, 8]", "__TM = [4, 8]", "parameters.__TM", ["reserved for the compiler"]),
    ("TM = [4, 8]", "lambda = [4, 8]", "parameters.lambda", ["keyword of Python or C++"]),
    ("TM = [4, 8]", "int = [4, 8]", "parameters.int", ["keyword of Python or C++"]),
    ("TM = [4, 8]", "device = [4, 8]", "parameters.device", ["already names the device's properties"]),
    ("TM = [4, 8]", "ceil_div = [4, 8]", "parameters.ceil_div", ["already names a function"]),
    ("TM = [4, 8]", "DTYPE = [4, 8]", "parameters.DTYPE", ["already names the macro"]),
    ("TM = [4, 8]", "K = [4, 8]", "parameters.K", ["already names a size"]),
]
DEFAULT = [
    ("\nTM = 8", "", "default", ["'TM' is missing"]),
    ("\nTM = 8", "\nTM = 6", "default.TM", ["the number 6 is not among the values of TM: 4, 8"]),
    ("\nTM = 8", "\nTM = 8\nTN = 8", "default.TN", ["unknown key 'TN'"]),
    ("STAGED = true", "STAGED = 1", "default.STAGED", ["the number 1 is not among the values of STAGED"]),
    ('LAYOUT = "row"', 'LAYOUT = "diagonal"', "default.LAYOUT", ["'diagonal'"]),
    ("BM = 64", "BM = [64]", "default.BM", ["a list is not among"]),
    ("2 * min(BM, BN)", "min(BM, BN) and BM > 64", "default", ["breaks the rule 'squarish'"]),
]
RULES = [
    ("max(BM, BN)", "max(BM, BX)", "rules.squarish", ["unknown name 'BX'"]),
    ('squarish = "max', 'squarish = "A < max', "rules.squarish", ["unknown name 'A'"]),
    (" <= 2 * min(BM, BN)", "", "rules.squarish", ["expected a condition, but this is a whole number"]),
    ('squarish = "max(BM, BN) <= 2 * min(BM, BN)"', "squarish = true", "rules.squarish", ["expression in a string"]),
    ("squarish =", "squarish-tiles =", "rules.squarish-tiles", ["not a C identifier"]),
    ("[rules]", "[rules.more]", "rules.more", ["expected an expression in a string, got a table"]),
    ("[launch]", '[metrics]\nobjective = "time_us"\n[launch]', "metrics.objective", ["already names the objective"]),
    ("[launch]", '[heuristics]\nsquarish = "BM > 32"\n[launch]', "heuristics.squarish", ["already names a rule"]),
    ("[launch]", '[heuristics]\nl = "BM > 64"\n[launch]', "default", ["breaks the heuristic 'l' at default sizes"]),
]
LAUNCH = [
    ('["BN // TM", "BM // TM"]', "[]", "launch.block", ["the list is empty"]),
    ('["BN // TM", "BM // TM"]', '"BN // TM"', "launch.block", ["expected a list", 'write block = ["BN // TM"]']),
    ('["BN // TM", "BM // TM"]', "128", "launch.block", ["write block = [128]"]),
    ('["BN // TM", "BM // TM"]', "[1, 1, 1, 1]", "launch.block", ["at most 3 expressions"]),
    ('["BN // TM", "BM // TM"]', '["BN > TM"]', "launch.block", ["expected a whole number, but this is a condition"]),
    ('["BN // TM", "BM // TM"]', '["BN / TM"]', "launch.block", ["this is a real number", "ceil_div (rounds up)"]),
    ('["BN // TM", "BM // TM"]', '["LAYOUT"]', "launch.block", ["expected a whole number, but this is a string"]),
    ('["BN // TM", "BM // TM"]', "[1.5]", "launch.block", ["got the number 1.5"]),
    ('["ceil_div(N, BN)", "ceil_div(M, BM)"]\n', '["N % 0"]\n', "launch.grid", ["division by zero"]),
    ("static_smem_bytes = 1024", "static_smem = 1024", "launch.static_smem", ["did you mean 'static_smem_bytes'?"]),
    ("static_smem_bytes = 1024", "static_smem_bytes = true", "launch.static_smem_bytes", ["got the boolean true"]),
]
LIMITS = [
    ("0.05", "1.5", "limits.min_occupancy", ["a fraction from 0 to 1"]),
    ("0.05", "nan", "limits.min_occupancy", ["expected a finite number"]),
    ("0.05", '"5 %"', "limits.min_occupancy", ["expected a number"]),
    ("max_spill_bytes = 0", "max_spill_bytes = -1", "limits.max_spill_bytes", ["whole number from 0"]),
    ("max_spill_bytes = 0", "max_spills = 0", "limits.max_spills", ["did you mean 'max_spill_bytes'?"]),
]
ARGUMENTS = [
    ('access = "inout"', 'access = "in"', "arguments", ["no buffer is written"]),
    ('access = "inout"', 'access = "write"', "arguments.C.access", ["is not accepted", "known: in, out, inout"]),
    (', access = "inout"', "", "arguments.C", ["'access' is missing"]),
    ('init = "uniform"', 'init = "random"', "arguments.B.init", ["known: normal, uniform, zeros, ones, arange"]),
    ('"K", "N"', '"K", "BX"', "arguments.B.shape", ["unknown name 'BX'"]),
    ('"K", "N"', '"K", "device.sm_count"', "arguments.B.shape", ["is not accepted here"]),
    ('"K", "N"', '"K", "N - 300"', "arguments.B.shape", ["N - 300 is -23, expected at least 1 where N = 277"]),
    ('["K", "N"]', "[1, 1, 1, 1, 1, 1, 1, 1, 1]", "arguments.B.shape", ["at most 8 expressions"]),
    ('{ scalar = "int32", value = "M" }', "3", "arguments.M", ["expected a table"]),
    ('scalar = "int32", ', "", "arguments.M", ["exactly one of the keys buffer, scalar, workspace, tensor_map"]),
    ('scalar = "int32"', 'scalar = "int"', "arguments.M.scalar", ["is not accepted", "write 'int32'"]),
    ('scalar = "int32"', 'scalar = "unsigned int"', "arguments.M.scalar", ["write 'uint32'"]),
    ('scalar = "int32"', 'scalar = "size_t"', "arguments.M.scalar", ["write 'uint64'"]),
    ('value = "M" }', 'value = "N" }', "arguments.M", ["'M' already names a size", 'value = "M"']),
    ('value = "M" }', 'value = "Q" }', "arguments.M.value", ["unknown name 'Q'"]),
    ('value = "M" }', 'value = "M", check = 3 }', "arguments.M.check", ["remove check"]),
    ("value = 1.0", "value = true", "arguments.alpha.value", ["expected a number, got the boolean true"]),
    ("value = 1.0, check = 0.75", 'value = "0.5"', "arguments.alpha.value", ["give a real constant without quotes"]),
    ("value = 1.0, ", "", "arguments.alpha", ["'value' is missing"]),
    ("check = 0.75", "check = inf", "arguments.alpha.check", ["expected a finite number"]),
    ('"int32", v', '"int32", buffer = "int32", v', "arguments.M", ["one of the keys buffer, scalar"]),
    ('K"], access = "in" }', 'K"], access = "in", acess = "in" }', "arguments.A.acess", ["did you mean 'access'"]),
    ("check = 0.75", "chek = 0.75", "arguments.alpha.chek", ["did you mean 'check'"]),
    ('value = "M" }', 'value = "M // (M - 4096)" }', "arguments.M.value", ["division by zero where M = 4096"]),
    ('value = "M" }', 'value = "M // (M - 389)" }', "arguments.M.value", ["division by zero where M = 389"]),
    ('"float32", value = 1.0', '"int32", value = 1.5', "arguments.alpha.value", ["a whole number for int32"]),
    ("alpha = {", "BM = {", "arguments.BM", ["already names a parameter"]),
    ("alpha = {", "in = {", "arguments.in", ["keyword", "such as in_; it need not be the name in the source"]),
    ("alpha = {", "K = {", "arguments.K", ["already names a size"]),
]
REFERENCE = [
    ('{ C = "alpha * (A @ B) + C" }', "{}", "reference.outputs", ["'C' is written but has no reference"]),
    ('{ C = "alpha * (A @ B) + C" }', '{ C = "A", A = "B" }', "reference.outputs.A", ["unknown key 'A'"]),
    ("(A @ B) + C", "(A @ B) + D", "reference.outputs.C", ["unknown name 'D'"]),
    ("(A @ B) + C", "(A @ B) + BX", "reference.outputs.C", ["unknown name 'BX'"]),
    ("(A @ B) + C", "(A @ B) + C / 0", "reference.outputs.C", ["the divisor is zero"]),
    ("(A @ B) + C", "(A @ B) + C * (1 / 0)", "reference.outputs.C", ["an operand is inf, so the result is not finite"]),
    ('reduction = "K"', 'reduction = "BX"', "reference.reduction", ["unknown name 'BX'"]),
    ('reduction = "K"', 'reduction = "K - 4096"', "reference.reduction", ["expected at least 1"]),
    ("tolerance = 1e-5", "tolerance = 0", "reference.tolerance", ["a number above 0"]),
    ("tolerance = 1e-5", "tolerances = 1", "reference.tolerances", ["did you mean 'tolerance'?"]),
    ('flops = "2 * M * N * K"', 'flops = "2 * BX"', "work.flops", ["unknown name 'BX'"]),
    ('flops = "2 * M * N * K"', 'flops = "2 ** M"', "work.flops", ["the exponent is not within 0 to 63"]),
    ('\nbytes = "4', '\nbyte = "4', "work.byte", ["did you mean 'bytes'?"]),
    ("[work]", '[work]\nunit = "tensors"', "work.unit", ["not an arithmetic unit", "did you mean 'tensor'?"]),
    ('\nbytes = "4', '\npasses = 0\nbytes = "4', "work.passes", ["1"]),
]


SHAPES = [
    ("sum(A @ B, 0)", "the result has the shape (4096,), but the buffer C has (4096, 4096), at M=4096"),
    (
        "transpose(A @ B)",
        "the result has the shape (277, 389), but the buffer C has (389, 277), at the ragged sizes M=389",
    ),
    ("alpha", "the result has the shape ()"),
]
REFERENCE += [("alpha * (A @ B) + C", text, "reference.outputs.C", [said]) for text, said in SHAPES]
WORKSPACES_AND_FLAGS = [
    ('init = "zeros"', 'init = "ones"', "arguments.counters.init", ['expected "zeros", or no init']),
    ('workspace = "float32"', 'workspace = "float"', "arguments.partials.workspace", ["write 'float32'"]),
    ('"SPLIT_K if', '"SPLITS if', "arguments.partials.shape", ["did you mean 'SPLIT_K'"]),
    ('workspace = "float32",', 'workspace = "float32", access = "in",', "arguments.partials.access", ["unknown key"]),
    ("beta * C", "beta * partials", "reference.outputs.C", ["unknown name 'partials'"]),
    ("TRANS_A = 0,", "TRANS_A = 2,", "problem.flags.TRANS_A", ["whole number from 0 to 1"]),
    ("TRANS_A = 0,", "TRANS_A = true,", "problem.flags.TRANS_A", ["whole number"]),
    ("TRANS_A = 0,", "M = 0,", "problem.flags.M", ["already names a size"]),
    ("TILE = [8,", "TRANS_A = [8,", "parameters.TRANS_A", ["already names a flag"]),
    ("M = {", 'TRANS_A = { scalar = "int32", value = "TRANS_A" }\nM = {', "arguments.TRANS_A", ["a flag"]),
    ("float32 if OUT_FP32", "floate32 if OUT_FP32", "arguments.C.buffer", ["did you mean 'float32'"]),
    ("float32 if OUT_FP32", "float32 if M > 1", "arguments.C.buffer", ["unknown name 'M'"]),
    ("float32 if OUT_FP32", "float32 if OUT_FP32 + 1", "arguments.C.buffer", ["is a whole number"]),
    ("float32 if OUT_FP32 else dtype", "float32 or dtype", "arguments.C.buffer", ["a type, or two as in"]),
    ("transpose(A) if TRANS_A", "transpose(A) if TURN_A", "reference.outputs.C", ["unknown name 'TURN_A'"]),
    ("transpose(A) if TRANS_A", "transpose(A) if A", "reference.outputs.C", ["unknown name 'A'"]),
    ("transpose(B) if TRANS_B else B", "B", "reference.outputs.C", ["are not compatible"]),  # where TRANS_B is inverted
]
TENSOR_MAPS = [
    ('map = "A"', 'map = "M"', "arguments.A_map.tensor_map", ["names no buffer or workspace (known: A, B)"]),
    ('box = ["ROWS", "COLUMNS"]', 'box = ["ROWS"]', "arguments.A_map.box", ["expected 2 expressions"]),
    ('box = ["ROWS"', 'box = ["ROW"', "arguments.A_map.box", ["did you mean 'ROWS'"]),
    ('"SWIZZLE", l2', '"SWIZZLE", element_strides = [1], l2', "arguments.A_map.element_strides", ["expected 2"]),
    ("N = 276 }", "N = 277 }", "arguments.A_map.tensor_map", ["rows of A are 1108 bytes apart"]),
    ("pass = false", "pass = 0", "arguments.A.pass", ["expected true or false"]),
    ('tensor_map = "A", box', 'tensor_map = "B", box', "arguments.A", ["'A' is not passed, has no tensor map"]),
    ("l2_promotion_bytes", "l2_promotion", "arguments.A_map.l2_promotion", ["unknown key"]),
    ('["M", "N"]', '[1, 1, 1, 1, "M", "N"]', "arguments.A_map.tensor_map", ["A has 6 axes, a tensor map describes at"]),
]
SHAPES_OF_PARAMETERS = [
    ('["STEPS", "N"]', '["2 * STEPS", "N"]', "reference.outputs.rows", ["the result has the shape (1, 100000), but"]),
    ('["STEPS",', '["STEPS - 1",', "arguments.rows.shape", ["STEPS - 1 is 0, expected at least 1 where STEPS = 1"]),
    ('["STEPS", "N"]', '["device.sm_count", "N"]', "arguments.rows.shape", ["'device.sm_count' is not accepted here"]),
    ('reduction = "STEPS"', 'reduction = "STEPS - 1"', "reference.reduction", ["STEPS - 1 is 0, expected at least 1"]),
]
BASES = {"sgemm": SGEMM, "split": SPLIT_SPACE, "tiled": space_text("several_steps"), "transpose": TRANSPOSE.read_text()}
REFUSALS = {
    "sgemm": [*KERNEL, *PROBLEM, *PARAMETERS, *DEFAULT, *RULES, *LAUNCH, *LIMITS, *ARGUMENTS, *REFERENCE],
    "split": WORKSPACES_AND_FLAGS,
    "tiled": SHAPES_OF_PARAMETERS,
    "transpose": TENSOR_MAPS,
}


@pytest.mark.parametrize(
    ("base", "old", "new", "key", "parts"), [(base, *row) for base, rows in REFUSALS.items() for row in rows]
)
def test_refusals_name_the_key_and_the_cure(base, old, new, key, parts):
    error = refused(BASES[base], old, new, key, parts[0], count=1)
    for part in parts:
        assert part in error.problem
    line = BASES[base].replace(old, new, 1).splitlines()[error.line - 1]
    assert any(part in line for part in key.split("."))


def test_a_fault_in_an_expression_has_a_line_a_column_and_a_caret():
    error = refusal(edited("max(BM, BN)", "max(BM, BQ)"))
    number = 1 + SGEMM[: SGEMM.index("squarish =")].count("\n")
    assert (error.line, error.column) == (number, 9)
    assert str(error).startswith(f"sgemm.toml:{number}: [rules.squarish]: column 9: unknown name 'BQ'")
    assert str(error).splitlines()[1:] == ["    max(BM, BQ) <= 2 * min(BM, BN)", "            ^"]


HEURISTIC = 'few_blocks = "BM * BN >= 4096"\n'


def test_heuristics_are_read_apart_from_rules_and_under_their_deprecated_name():
    spec = parse_spec(edited("[launch]", f"[heuristics]\n{HEURISTIC}\n[launch]"), "sgemm.toml")
    names = [str(rule) for rule in (*spec.rules, *spec.heuristics)]
    assert names == ["rule 'squarish'", "rule 'fits'", "heuristic 'few_blocks'"]
    former = parse_spec(edited("[launch]", f"[pruning]\n{HEURISTIC}\n[launch]"), "sgemm.toml")
    assert [str(rule) for rule in former.heuristics] == ["heuristic 'few_blocks'"]
    error = refusal(edited("[launch]", f"[heuristics]\n{HEURISTIC}\n[pruning]\n{HEURISTIC}\n[launch]"))
    assert error.key == "pruning"
    assert "deprecated name of [heuristics]" in error.problem
    assert "pruning" not in refusal(SGEMM + "\n[prunings]\nx = 1\n").problem.partition("(known")[2]


def test_lines_are_found_in_every_way_of_writing_a_table_and_of_a_fault_of_the_syntax():
    text = edited("sizes = { M = 4096, N = 4096, K = 4096 }\nragged = { M = 389 }\n", "").replace(
        "[parameters]", "[problem.sizes]\nM = 4096\nN = 0\nK = 4096\n\n[parameters]"
    )
    error = refusal(text)
    assert (error.key, text.splitlines()[(error.line or 0) - 1]) == ("problem.sizes.N", "N = 0")
    assert refusal(edited('name = "sgemm"', "name = 7")).line == 2
    assert refusal("x = 1\n" + ".".join("a" * 40_000) + " = 1").line == 2
    assert refusal("[kernel]\nname = \n").line == 2


# --- texts that are not search-space files

MUST_BE_THERE = ("kernel", "problem", "parameters", "launch", "arguments", "reference")


def without(section: str) -> str:
    return "\n\n".join(block for block in SGEMM.split("\n\n") if not block.startswith(f"[{section}]"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[kernel]\nname = \n", "not TOML"),
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deep"),
        ("x = " + "9" * 10_000, "not TOML"),
        (".".join("a" * 40_000) + " = 1", "a dotted key has more than 16 parts"),
        ("[kernel]\nname = 'a'\n[" + ".".join("a" * 40_000) + "]\n", "a dotted key has more than 16 parts"),
        ("#" * (2**20 + 1), "at most 1048576"),
        ("", "the section [kernel] is missing"),
        ("x = 1", "unknown section 'x'"),
        ("kernel = 3", "expected a table, got the number 3"),
        ("[[kernel]]\nname = 'a'\n[problem]\n", "expected a table, got a list"),
        ("\ud800", ""),
        ('"a\\u001b[2J" = 1', "'a\\x1b[2J' is not a valid key"),
        ("[kernel]\n" + "k" * 101 + " = 1", "at most 100 printable characters"),
        ('x = """\n[' + " " * 100_000 + '\n"""', "unknown section 'x'"),
        ("[operation]\n[kernels.a]\n[kernels.b]", "of an operation, not of a kernel; name one of its kernels: a, b"),
        (SGEMM + "\n[limit]\nx = 1\n", "unknown section 'limit'; did you mean 'limits'?"),
        (
            edited("[rules]\n", "[rules]\n" + "".join(f'r{n} = "BM > 0"\n' for n in range(1001))),
            "1003 entries, at most",
        ),
        *((without(name), f"the section [{name}] is missing") for name in MUST_BE_THERE),
    ],
)
def test_what_is_no_such_file(text, part):
    assert part in refusal(text).problem


def test_a_file_whose_lines_look_like_long_keys_takes_little_memory():
    """Each line of a text was stored with the line before it that looked like the name of a section."""
    long = "k" * 100_000
    inside = "".join(f"a{number}=\n" for number in range(500))
    broad = ", ".join(f"b{number} = {{}}" for number in range(2_000))
    nested = "x = " + "".join(f"{{ {'c' * 100} = " for _ in range(150)) + f"{{ {broad} }}" + " }" * 150
    for text in (f'x = """\n[{long}\n{inside}"""', nested):
        tracemalloc.start()
        try:
            assert "unknown section 'x'" in refusal(text).problem
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20 * 2**20


@settings(max_examples=80)
@given(st.data())
def test_a_damaged_file_gives_a_spec_error_or_a_spec(data):
    start = data.draw(st.integers(0, len(SGEMM) - 1))
    length = data.draw(st.integers(0, 12))
    junk = data.draw(st.text(st.sampled_from('ab0.=[]{}",\n-*()\\ \x00é'), max_size=6))
    with contextlib.suppress(SpecError):
        parse_spec(SGEMM[:start] + junk + SGEMM[start + length :], "sgemm.toml")
