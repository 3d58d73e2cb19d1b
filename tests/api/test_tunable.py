"""Kernels that are written in Python: the same model, checks and messages as for a search-space file."""

import doctest
import gc
import itertools
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from child_python import python
from feature_kernels import FOLDER
from feature_kernels import SCALE_CODE as CODE
from feature_kernels import python_scale as scale

import autotile
from autotile import Buffer, Scalar, Scratch
from autotile.api import tunable, verification
from autotile.core.dtypes import DTYPES
from autotile.core.model import Measurement, Outcome, Trial
from autotile.database.keys import space_hash
from autotile.errors import InputError, ProblemError, SpecError, UnknownKernelError
from autotile.kernel import python_kernel
from autotile.kernel.library import load_kernel
from autotile.kernel.python_kernel import function_name, parameter_names
from autotile.tuning.plan import read_plan
from autotile.tuning.verifying import CandidateCheck

WITH_NAIVE = CODE + "__global__ void naive(const float* x, float* y, int n, float factor) { *y = factor * *x; }\n"


def times(factor):
    return lambda x: factor * x


class TestSameModel:
    def test_it_has_the_hashes_of_the_same_file_and_of_what_it_is_saved_as(self, scale_toml, tmp_path):
        kernel = scale()
        written = kernel.definition
        for read in (load_kernel(scale_toml), load_kernel(kernel.save(tmp_path / "mine.toml"))):
            assert (written.source_hash, space_hash(written.spec)) == (read.source_hash, space_hash(read.spec))
            assert (written.spec.work, written.spec.default) == (read.spec.work, read.spec.default)
        assert autotile.space(tmp_path / "mine.toml", device="h200").valid == kernel.space(device="h200").valid
        copied = pickle.loads(pickle.dumps(kernel))
        assert (repr(copied), copied.to_json()) == (repr(kernel), kernel.to_json())
        assert copied.definition.source_hash == written.source_hash
        with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
            pickle.dumps(scale(rules=[lambda WORK: WORK < 4]))

    def test_what_cannot_be_saved(self, tmp_path):
        (tmp_path / "scale.cu").write_text("mine")
        with pytest.raises(InputError, match=r"scale.cu exists already"):
            scale().save(tmp_path / "mine.toml")
        assert not (tmp_path / "mine.toml").exists()
        scale().save(tmp_path / "mine.toml", overwrite=True)
        assert "THREADS" in (tmp_path / "scale.cu").read_text()
        with pytest.raises(InputError, match=r"rule_1 is a Python function, which a search-space file cannot hold"):
            scale(rules=[lambda WORK: WORK < 4]).save(tmp_path / "other.toml")

    def test_files_are_utf_8_in_every_locale(self, tmp_path):
        program = r"""
import autotile, autotile.api.plans as plans
out = autotile.Buffer("float32", "n", "out")
code = "// d\xe9j\xe0\n__global__ void one(float* y) { y[BLOCK * blockIdx.x + threadIdx.x] = 1; }"
parameters, launch = {"BLOCK": [32]}, {"block": "BLOCK", "grid": "ceil_div(n, BLOCK)"}
autotile.kernel(code, "one", sizes={"n": 32}, parameters=parameters, arguments=[out], launch=launch).save("one.toml")
open("plan.toml", "w").write("[[tune]]\nkernel = './one.toml'")
plans.write_plan(plans.read_plan(plans.Path("plan.toml")), "again.toml")
"""
        (tmp_path / "é").mkdir()
        ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        python("-c", program, cwd=tmp_path / "é", env=ascii_only, check=True)
        assert "déjà" in (tmp_path / "é" / "one.cu").read_text("utf-8")
        assert read_plan(tmp_path / "é" / "again.toml").problems[0].asked_as == str(tmp_path / "é" / "one.toml")

    def test_a_source_of_a_file_is_read_again(self, tmp_path):
        file = tmp_path / "code.cuh"
        file.write_text(CODE)
        kernel = scale(source=file)
        before = kernel.definition
        assert kernel.definition is before
        file.write_text(CODE.replace("factor * x[i]", "x[i] * factor"))
        assert kernel.definition.source_hash != before.source_hash

    def test_includes_of_a_text_are_not_found_beside_other_kernels(self, tmp_path):
        (tmp_path / "common.h").write_text("int common;")
        kernel = scale(source='#include "common.h"\n' + CODE)
        assert "common.h" in kernel.explain(device="h200").fault

    @pytest.mark.parametrize(
        ("launch", "block", "dynamic"),
        [
            (("THREADS", ["ceil_div(n, THREADS * WORK)", 1]), 1, None),
            ((["THREADS", 1, 1], "n", "4 * THREADS"), 3, "4 * THREADS"),
            ({"block": 32, "grid": "n", "min_registers": 8}, 1, None),
        ],
    )
    def test_forms_of_a_launch(self, launch, block, dynamic):
        found = scale(launch=launch).definition.spec.steps[0].launch
        assert len(found.block) == block
        assert (found.dynamic_smem_bytes.text if found.dynamic_smem_bytes else None) == dynamic

    def test_arguments_of_a_list_are_named_as_in_the_code(self):
        listed = [Buffer(np.float32, "n"), Buffer("float32", "n", "out"), Scalar("int32", "n"), np.float32(2)]
        assert [one.name for one in scale(arguments=listed).definition.spec.arguments] == ["x", "y", "n", "factor"]
        with pytest.raises(SpecError, match=r"scale takes 4 parameters \(x, y, n, factor\), but 3 are listed"):
            scale(arguments=listed[:3])
        names = ["argument_0", "argument_1", "argument_2"]
        step = {"entry": "scale", "block": ["THREADS"], "grid": [1], "arguments": names}
        reference = {"argument_1": "argument_0"}
        kernel = scale(entry=None, launch=None, steps=[step], arguments=listed[:3], reference=reference)
        assert [one.name for one in kernel.definition.spec.arguments] == names

    def test_names_of_the_code_that_no_expression_can_have(self):
        source = """__constant__ float weights[8];
        __global__ void k(const float* in, float* out, int lambda) { out[0] = in[0] * weights[lambda]; }"""
        arguments = [Buffer("float32", "n"), Buffer("float32", "n", "out"), Scalar("int32", 2)]
        kernel = autotile.kernel(
            source, "k", sizes={"n": 64}, parameters={"T": [64]}, arguments=arguments, launch=("T", 1), reference="in_"
        )
        assert [argument.name for argument in kernel.definition.spec.arguments] == ["in_", "out", "lambda_"]

    def test_constant_memory_and_content_that_comes_back(self):
        assert Buffer("float32", 8, constant="w").to_table()["constant"] == "w"
        assert Buffer("float32", 8, "inout", restore=True).to_table()["restore"] is True
        assert Buffer("float32", 8).to_table().keys() == {"buffer", "shape", "access"}
        with pytest.raises(InputError, match="options is 3, expected further keys"):
            Buffer("float32", 8, options=3).to_table()

    def test_complex_numbers_are_their_two_parts(self):
        for value in (np.complex64(1 - 2j), Scalar("complex64", 1 - 2j)):
            spec = scale(arguments={"y": Buffer("float32", "n", "inout"), "a": value}, reference="y").definition.spec
            assert spec.scalars[0].default == (1.0, -2.0)

    def test_a_workspace_plain_tables_and_sections(self):
        arguments = {
            "x": {"buffer": "float32", "shape": ["n"], "access": "inout", "init": "ones"},
            "partial": Scratch("float32", ["WORK", "n"], init="zeros"),
        }
        spec = scale(arguments=arguments, reference={"x": "2.0 * x"}).definition.spec
        assert (spec.workspaces[0].name, spec.reference.outputs["x"].text) == ("partial", "2.0 * x")
        assert scale(sections={"limits": {"max_spill_bytes": 0}}).definition.spec.max_spill_bytes == 0


class TestSteps:
    def test_they_take_the_place_of_entry_and_launch(self, tmp_path):
        kernel = autotile.kernel(
            FOLDER / "two_step_sum.cu",
            name="two_step_sum",
            sizes={"N": 4096},
            parameters={"BLOCK": [64, 128], "BLOCKS": [32, 64], "LAST": [64], "WRONG": [0]},
            arguments={
                "x": Buffer("float32", [1, "N"], init="uniform"),
                "y": Buffer("float32", 1, "out"),
                "partials": Scratch("float32", "BLOCKS"),
                "N": Scalar("int32", "N"),
                "count": Scalar("int32", "BLOCKS"),
            },
            steps=[
                {"entry": "partial_sums", "block": "BLOCK", "grid": "BLOCKS", "arguments": ["x", "partials", "N"]},
                {"entry": "total", "block": "LAST", "grid": 1, "arguments": ["partials", "y", "count"]},
            ],
            reference={"outputs": {"y": "sum(x, 1)"}, "reduction": "N"},
        )
        spec = kernel.definition.spec
        assert [step.entry for step in spec.steps] == ["partial_sums", "total"]
        assert kernel.explain(device="h200").fault == ""
        for file in (FOLDER / "two_step_sum.toml", kernel.save(tmp_path / "sum.toml")):
            assert space_hash(load_kernel(file).spec) == space_hash(spec)

    def test_an_entry_is_required_without_steps_alone(self):
        with pytest.raises(SpecError, match=r"\[entry\]: the file has \[\[steps\]\]"):
            scale(steps=[{"entry": "scale", "block": 32, "grid": 1}], launch=None)
        with pytest.raises(InputError, match="the entry is None, expected the name of a __global__ function"):
            scale(entry=None)


LAUNCH = {"block": ["THREADS"], "grid": ["ceil_div(n, THREADS * WORK)"]}


class TestReferences:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (None, {"verify": "agreement"}),
            ("agreement", {"verify": "agreement"}),
            ("factor * x", {"outputs": {"y": "factor * x"}}),
            ({"y": "factor * x"}, {"outputs": {"y": "factor * x"}}),
            ({"outputs": {"y": "factor * x"}, "reduction": 1}, {"outputs": {"y": "factor * x"}, "reduction": 1}),
            ({"kernel": "naive", "block": [1], "grid": [1]}, {"kernel": "naive", "block": [1], "grid": [1]}),
            ("naive", {"kernel": "naive", **LAUNCH}),
            ("naive<double>", {"kernel": "naive<double>", **LAUNCH}),
        ],
    )
    def test_each_form_is_that_of_a_file(self, given, expected):
        assert scale(WITH_NAIVE, reference=given).document["reference"] == expected

    def test_a_function_has_a_name_that_changes_with_its_code(self):
        functions = [lambda x: 2 * x, lambda x: 2 * x, lambda x: 3 * x, np.negative]
        names = [scale(reference=function).document["reference"]["function"] for function in functions]
        assert names[0] == names[1] != names[2]
        assert names[3] == "negative"

    def test_the_name_of_a_function_holds_its_constants_and_is_the_same_in_every_process(self):
        names = [function_name(each) for each in [lambda x, a=a: a * x for a in (2, 3)] + [times(2), times(3)]]
        assert len({*names}) == 4
        of_globals = set()
        days = np.array(["2020-01-01", "2020-01-02"], "M8[D]")  # which no buffer exports
        cases = [(2.0, 1.0, 0), (3.0, 1.0, 0), (3.0, 2.0, 0), (3.0, 2.0, 1), (np.float32(3.0), 2.0, 1), (3.0, days, 1)]
        for a, x, s in [*cases, (3.0, days.view("i8"), 1), (3.0, days[None], 1)]:
            space = {"a": a, "b": np.array(x), "of": s, "__name__": "of_user"}
            exec("def helped(x, *, s=of): return solve(b)\ndef solve(x): return (lambda y: a * helped(y))(x)", space)
            of_globals.add(function_name(space["solve"]))
        assert len(of_globals) == 8
        code = "from autotile.kernel.python_kernel import *; print(function_name(lambda x: x in {'row', 'column'}))"
        assert len({python("-c", code, env={"PYTHONHASHSEED": seed}, check=True).stdout for seed in "0123456789"}) == 1

    def test_an_answer_as_an_array_is_a_file_of_its_content(self):
        answer = np.arange(4096, dtype=np.float32)
        ones = {"x": Buffer("float32", "n", init="ones"), "y": Buffer("float32", "n", "out"), "n": Scalar("int32", "n")}
        made = [scale(reference=values, arguments=ones) for values in (answer, answer.copy(), answer + 1)]
        assert len({space_hash(kernel.definition.spec) for kernel in made}) == 2
        with pytest.raises(SpecError, match="the content of x is random"):
            scale(reference=answer)
        spec = scale(reference={"y": answer}, arguments=ones).definition.spec
        (file,) = spec.reference.files.values()
        assert (np.load(file.path) == answer).all()

    @pytest.mark.parametrize("more", ['#include "references.cuh"\n', "#define MADE(name) void name##_of_all() {}\n"])
    def test_a_function_that_the_code_does_not_name_may_be_in_a_header_or_made_by_a_macro(self, more):
        assert scale(more + CODE, reference="naive").document["reference"] == {"kernel": "naive", **LAUNCH}

    def test_tolerances(self):
        assert scale(WITH_NAIVE, reduction="n", reference="naive").document["reference"]["reduction"] == "n"
        assert scale(tolerance=1e-3).definition.spec.reference.tolerance == 1e-3
        assert scale(tolerance={"y": {"absolute": 0.1}}).definition.spec.reference.tolerances["y"].absolute == 0.1


X = np.arange(1000, dtype=np.float32)
OF_ARRAYS = {
    "sizes": None,
    "ragged": None,
    "rules": [],
    "flops": None,
    "bytes": None,
    "arguments": [X, Buffer("float32", [1000], "out"), np.int32(1000), np.float32(2)],
    "launch": ("THREADS", "ceil_div(1000, THREADS * WORK)"),
}


class TestArrays:
    def test_an_input_has_their_type_shape_and_content_and_a_problem_no_sizes(self):
        kernel = scale(**OF_ARRAYS)
        (x, y) = kernel.definition.spec.buffers
        assert (str(x.dtype), [extent.text for extent in x.shape], x.access) == ("float32", ["1000"], "in")
        assert x.content.read("x", (1000,), DTYPES["float32"]).tolist() == X.tolist()
        assert y.content is None
        assert kernel.space(device="h200").valid == 12
        with pytest.raises(InputError, match="--limit is of compiled configurations"):
            kernel.space(limit=3)
        assert str(kernel.best().problem) == "scale float32"

    def test_the_content_is_part_of_the_key(self):
        rest = OF_ARRAYS["arguments"][1:]
        made = [scale(**{**OF_ARRAYS, "arguments": [array, *rest]}) for array in (X, X.copy(), X + 1)]
        assert len({space_hash(kernel.definition.spec) for kernel in made}) == 2

    def test_they_are_saved_beside_the_file(self, tmp_path):
        kernel = scale(**OF_ARRAYS, reference=2 * X)
        saved = load_kernel(kernel.save(tmp_path / "mine.toml"))
        assert (space_hash(saved.spec), len(list(tmp_path.glob("*.npy")))) == (space_hash(kernel.definition.spec), 2)

    def test_an_array_of_an_inout_buffer(self):
        arguments = {"x": Buffer(X, access="inout"), "y": Buffer(np.float64, "n", "out")}
        spec = scale(arguments=arguments, reference=None).definition.spec
        assert [buffer.access for buffer in spec.buffers] == ["inout", "out"]
        assert spec.buffers[0].content is not None


MISTAKES = {
    "rules['rule_1']]: column 1: unknown name 'THREAD'; did you mean 'THREADS'": {"rules": ["THREAD < 2"]},
    "[launch['grid']]: column": {"launch": {"block": "THREADS", "grid": "n +"}},
    "[arguments['x']]: expected a Buffer, a Scalar": {"arguments": {"x": "float32"}},
    "[arguments['x']['access']]": {"arguments": {"x": Buffer("float32", "n", "write")}},
    "[sizes['n']]: expected a whole number": {"sizes": {"n": 0}},
    "[parameters['WORK']]: the number 1 is listed twice": {"parameters": {"THREADS": [32], "WORK": [1, 1]}},
    "[parameters['WORK']]: 1001 entries, at most 1000": {"parameters": {"THREADS": [32], "WORK": itertools.count(1)}},
    "[entry]: 'scal' is no function of the code; did you mean 'scale'?": {
        "entry": "scal",
        "name": "scale",
        "arguments": [Buffer("dtype", "n"), Buffer("dtype", "n", "out"), Scalar("int32", "n"), Scalar("float32", 2.0)],
    },
    "[rules['rule_1']]: a function has an argument 'X', which is not": {"rules": [lambda X, WORK: X < WORK]},
    "[default['WORK']]: the number 3 is not among the values": {"default": {"THREADS": 128, "WORK": 3}},
    "[flops]: ": {"flops": "n +"},
    "[reference": {"reference": "factor * xx"},
    "[reference]: 'xx' is neither an argument nor a function of the code; did you mean 'x'?": {"reference": "xx"},
    "[reference['tolerance']]: expected a finite number, got the number nan": {"tolerance": math.nan},
    "[reference['outputs']]: expected a mapping, got 5": {"reference": {"outputs": 5}},
    "[reference]: expected a mapping, got 6": {"sections": {"reference": 6}, "tolerance": 1.0},
    "[arguments['x']['buffer']]: the string 'None'": {"arguments": {"x": Buffer(None, "n")}},
    "[arguments['x']['buffer']]: the string 'clongdouble'": {"arguments": {"x": Buffer(np.clongdouble, "n")}},
    "or a table as in a search-space file; got a MaskedArray": {"arguments": {"x": np.ma.masked_less(np.ones(2), 1)}},
    "[arguments['x']]: an array of the type object; convert": {"arguments": {"x": np.array([None])}},
    "[arguments['x']]: an array of the type >f4; convert": {"arguments": {"x": np.zeros(2, ">f4")}},
    "[dtypes]": {"dtypes": ["float33"]},
    "[sizes]: expected a mapping, got 5": {"sizes": 5},
    "[default]: expected a mapping": {"default": [1]},
    "[arguments]: expected a mapping, got 'x'": {"arguments": "x"},
    "[rules]: expected a mapping": {"rules": 5},
    "[launch]: expected a mapping with block and grid": {"launch": "THREADS"},
    "[sections]: expected a mapping": {"sections": 5},
    "[limits]: expected a mapping": {"sections": {"limits": 5}},
    "[nosuch]: unknown section 'nosuch'": {"sections": {"nosuch": {}}},
    "[limits['max_spill_bytes']]: expected text, numbers": {"sections": {"limits": {"max_spill_bytes": object()}}},
}


class TestMessages:
    @pytest.mark.parametrize("message", MISTAKES, ids=range(len(MISTAKES)))
    def test_a_mistake_names_the_argument(self, message):
        with pytest.raises(SpecError) as raised:
            scale(**MISTAKES[message])
        assert message in str(raised.value)
        assert str(raised.value).startswith("<kernel scale>: [")

    @pytest.mark.parametrize("source", ["no/such.cu", "x" * 5000, 5, "a\0b", "~nobody_of_this_name/x.cu"])
    def test_a_source_that_does_not_exist(self, source):
        with pytest.raises(InputError, match=r"is neither a file that exists nor CUDA C\+\+ code"):
            scale(source=source)

    def test_a_source_that_is_no_text(self):
        with pytest.raises(InputError, match="the source is not UTF-8 text"):
            scale(CODE + "// \udcfc")
        with pytest.raises(InputError, match="without NUL"):
            scale(CODE + "// \0")


class TestEveryFunction:
    def test_takes_such_a_kernel(self, tmp_path):
        kernel = scale()
        assert autotile.space(kernel, device="h200").valid == kernel.space(device="h200").valid == 12
        assert all(check.holds for check in autotile.explain(kernel, device="h200", WORK=2).checks)
        assert autotile.best(kernel, n=100, device="h200").tier == "default"
        assert autotile.get_best_kernel(kernel, n=1000) is kernel.best(n=1000)
        assert (autotile.list(kernel).studies, autotile.trials(kernel).trials) == ((), ())

    def test_a_rewritten_source_is_judged(self, tmp_path, monkeypatch, device):
        def judge(kernel, rewritten, problem, **_):
            times = Trial(kernel.spec.default, Outcome.OK, "", "finals", measurement=Measurement(5.0, 4.9, 5.1))
            return CandidateCheck(problem, device, times, times, None, 75)

        monkeypatch.setattr(verification, "judge", judge)
        (tmp_path / "mine.cu").write_text("// rewritten")
        found = autotile.check(tmp_path / "mine.cu", scale())
        assert found.verdict == "right"
        assert repr(found).endswith("for scale n=4096 float32 on NVIDIA H200 (profile): right, 5.000 us>")

    def test_tuning_needs_a_gpu_or_a_recording_and_known_words(self):
        with pytest.raises(InputError, match="no recording of scale n=77"):
            scale().tune(n=77, progress=False, options=autotile.TuneOptions(replay="auto"))
        with pytest.raises(ProblemError, match="scale has no size 'trails'"):
            scale().tune(trails=3)
        with pytest.raises(InputError, match="trials is 0"):
            scale().tune(trials=0)

        assert scale().best().problem.sizes == {"n": 4096}
        assert scale().best({"n": 512}).problem.sizes == {"n": 512}
        for sizes, said in (({"n": 512}, "n is given twice"), ([512], r"the sizes are \[512\], expected a mapping")):
            with pytest.raises(InputError, match=said):
                scale().best(sizes, n=9)

    def test_two_kernels_of_one_name_are_served_apart_and_neither_by_its_name(self):
        first, second = scale(), scale(default={"THREADS": 64, "WORK": 2})
        assert first.best(n=1000).config == {"THREADS": 128, "WORK": 1}
        assert second.best(n=1000).config == {"THREADS": 64, "WORK": 2}
        with pytest.raises(UnknownKernelError):
            autotile.space("scale")


class TestDisplay:
    def test_a_repr_is_one_line_and_a_notebook_shows_parameters_and_rules(self):
        kernel = scale()
        assert repr(kernel) == "<TunableKernel: scale, 2 parameters, 12 combinations, default THREADS=128 WORK=1>"
        html = kernel._repr_html_()
        assert "<th>THREADS</th><td>32 64 128 256</td>" in html
        assert "<th>enough_blocks</th><td>n &gt;= THREADS * WORK</td>" in html

    @pytest.mark.parametrize("module", [tunable, python_kernel])
    def test_examples_in_docstrings_are_right(self, module):
        names = {"kernel": autotile.kernel, "Buffer": Buffer, "Scalar": Scalar}
        assert doctest.testmod(module, extraglobs=names).failed == 0


def test_rules_that_are_functions_hold_for_one_configuration_and_for_what_is_exported(recording, tmp_path):
    kernel = scale(rules=[lambda WORK: WORK < 4])
    assert scale().tune(n=1048576, replay=recording).winner.config["WORK"] == 4
    assert autotile.db_clean(scale(), stale=True, dry_run=True).studies == ()
    for one, problems in ((scale(), 1), (kernel, 0)):
        file = {"output": tmp_path / "scale.hpp", "architectures": ["sm_90"]}
        assert autotile.export(one, **file, format="c-header").document["problems"] == problems
        assert [each["problems"] for each in autotile.bundle(one, **file).document["kernels"]] == [problems]
    assert "scale" in repr(autotile.bundle([(scale(), {"n": 1048576})], **file))
    assert kernel.explain(THREADS=64, WORK=2, device="h200").fault == ""
    assert kernel.explain(THREADS=64, WORK=4, device="h200").fault != ""


def test_no_file_is_left_behind(tmp_path):
    script = (
        f"import sys; sys.path.append({str(FOLDER.parent)!r})\n"
        "from feature_kernels import python_scale\n"
        "print(python_scale().definition.template_path)\n"
    )
    done = python("-c", script, env={"TMPDIR": str(tmp_path)}, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "entry", "names"),
    [
        ("__global__ void f(int a, const float *__restrict__ b, T c[4])", "f", ("a", "b", "c")),
        ("template <int B> __global__ void __launch_bounds__(B) g(P<int, 3> x, float y = 1.f)", "ns::g<2>", ("x", "y")),
        ("__global__ void h()", "h", ()),
        ("void f(int a)", "f", ()),
    ],
)
def test_names_of_parameters_are_read_from_the_code(code, entry, names):
    assert parameter_names(code + " {}", entry) == names


@pytest.mark.parametrize("declared", ["f(int*, int)", "f(int* p, int q)", "f(int b)", "f(int b, int c, int d)"])
@pytest.mark.parametrize("entry", ["f", "(void (*)(vec<int>*, int))f", "s::f<2>"])
def test_of_several_declarations_the_definition_with_as_many_parameters_has_the_names(declared, entry):
    code = f"__global__ void {declared};\n__global__ void f(int* x, int n) {{ }}"
    assert parameter_names(code, entry, 2) == ("x", "n")


def test_a_source_may_begin_with_the_mark_of_utf_8():
    assert scale("\ufeff" + CODE).definition.source_hash == scale().definition.source_hash
