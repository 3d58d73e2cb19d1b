"""The forms of [reference], the shapes of its expressions, tolerances, and comparison by a function."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from spec_samples import SGEMM, copy_spec, refused

from autotile.api.tunable import comparison_of
from autotile.core.device import device_profile
from autotile.core.dtypes import DTYPES
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.database.keys import space_hash
from autotile.errors import InputError, SpecError
from autotile.kernel.expressions import ShapeOnly, parse_array_expression
from autotile.kernel.launch import known_names, launch_geometry
from autotile.kernel.library import load_kernel, reference_source
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec, Tolerance, reference_spec, wide_type

OUTPUTS = 'outputs = { C = "alpha * (A @ B) + C" }'
KERNEL = 'kernel = "naive<double>"\nblock = [16, 16]\ngrid = ["ceil_div(N, 16)", "ceil_div(M, 16)"]'


def parsed(reference: str, *, constant: bool = False) -> KernelSpec:
    assert OUTPUTS in SGEMM
    text = SGEMM.replace(OUTPUTS, reference).replace("tolerance = 1e-5", "")
    if constant:
        text = re.sub('(access = "in(out)?")', r'\1, init = "ones"', text.replace(', init = "uniform"', ""))
    return parse_spec(text, "sgemm.toml")


class TestKernels:
    def test_a_kernel(self):
        spec = parsed(KERNEL + '\nelement_type = "float64"\ndefines = { TILE = 16, T = "double", COUNT = "M * N" }')
        kernel = spec.reference.kernel
        assert spec.reference.outputs == {}
        assert kernel.entry == "naive<double>"
        assert kernel.macros({"M": 3, "N": 5}) == {"TILE": 16, "T": "double", "COUNT": 15}
        sizes = {**spec.sizes, "M": 33, "N": 7}
        own = reference_spec(spec, spec.at(sizes))
        assert own.entry == "naive<double>"
        assert launch_geometry(own, own.default, own.at(sizes), device_profile("h100")).grid == (1, 3, 1)
        assert [b.element_type("float32", spec.sizes) for b in own.buffers] == ["float64"] * 3
        assert [s.element_type("float32") for s in own.scalars if s.name == "alpha"] == ["float64"]
        some = parsed(KERNEL + '\narguments = ["C", "A", "B"]')
        assert [argument.name for argument in reference_spec(some, some.at()).arguments] == ["C", "A", "B"]

    def test_double_precision(self):
        wide = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}
        wide |= {name: name for name in ("int32", "bool", "int4")} | {"float4": "double4", "half2": "double2"}
        assert {name: wide_type(name) for name in wide} == wide
        assert all(wide_type(name) in DTYPES for name in DTYPES)

    def test_its_source_counts_and_compiles(self, tmp_path):
        text = 'extern "C" __global__ void sgemm(const float*, const float*, float*, float, int, int, int) {}\n'
        naive = "template <class T> __global__ void naive(T* c) {{ c[0] = {}; }}\n"
        (tmp_path / "sgemm.cu").write_text(text)
        (tmp_path / "naive.cu").write_text(naive.format("TILE * sizeof(T)"))
        more = '\ntemplate = "naive.cu"\narguments = ["C"]\ndefines = { TILE = "M // 16" }'
        toml = tmp_path / "sgemm.toml"
        toml.write_text(SGEMM.replace(OUTPUTS, KERNEL + more))
        kernel = load_kernel(str(toml))
        source = reference_source(kernel)
        own = replace(source, spec=reference_spec(kernel.spec, kernel.spec.at()))
        names = known_names(own.spec, own.spec.default, own.spec.at(), device_profile("h100"))
        config = {**own.spec.default, **kernel.spec.reference.kernel.macros(names)}
        job = compile_job(own, config, own.spec.at(), "sm_90")
        assert list(compile_cubin(job).functions) == ["naive<double>"]
        before = kernel.source_hash
        (tmp_path / "naive.cu").write_text(naive.format("2 * TILE"))
        assert load_kernel(str(toml)).source_hash != before


def test_agreement_a_function_and_files_and_a_hash_of_each_form():
    assert parsed('verify = "agreement"').reference.is_agreement
    assert parsed('function = "solve"').reference.function == "solve"
    forms = [OUTPUTS, KERNEL, 'verify = "agreement"', 'function = "f"']
    forms += [KERNEL + '\narguments = ["C", "A", "B"]', OUTPUTS + "\ntolerance = { C = 1e-3 }"]
    assert len({space_hash(parsed(form)) for form in forms}) == len(forms)


def test_the_content_of_an_expected_file_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = parsed('outputs.C = { file = "./c.npy" }', constant=True)
    hashes = set()
    for value in (1.0, 2.0):
        np.save("c.npy", np.full(3, value))
        hashes.add(space_hash(spec))
    assert len(hashes) == 2
    sha256 = spec.files["outputs.C"].content_hash
    declared = parsed(f'outputs.C = {{ file = "c.npy", sha256 = "{sha256}" }}', constant=True)
    (tmp_path / "c.npy").unlink()
    with pytest.raises(InputError, match=r"c.npy: No such file or directory"):
        space_hash(spec)
    assert {space_hash(declared), space_hash(spec.with_file_hashes({"outputs.C": sha256}))} < hashes
    assert spec.with_file_hashes({}).reference.meaning()["reference_files"] == {"C": "./c.npy"}


def test_tolerances():
    found = [
        parsed(f"{OUTPUTS}\ntolerance = {{ C = {text} }}").reference.tolerances["C"]
        for text in ("{ absolute = 1e-6, relative = 1e-4 }", "1e-3")
    ]
    assert found == [Tolerance(1e-4, 1e-6, is_elementwise=True), Tolerance(1e-3)]
    texts = ["1e-06 and 0.0001 of |expected|", "0.001 of max(|expected|, 3)", "0 of max(|expected|, 3)"]
    assert [each.text(3.0) for each in (*found, Tolerance(0.0))] == texts


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("", "there is no reference"),
        (OUTPUTS + '\nverify = "agreement"', "outputs and verify are both given"),
        ('verify = "trust"', 'expected "agreement" or "nothing"'),
        (OUTPUTS + "\nblock = [16]", "block belongs to a reference kernel"),
        ('kernel = "naive; }"\nblock = [1]\ngrid = [1]', "the name of a __global__ function"),
        ('kernel = "naive"\nblock = [1]', "grid"),
        (KERNEL + '\ntemplate = "../naive.cu"', "a bare file name"),
        (KERNEL + '\nelement_type = "float32"', 'expected "float64"'),
        (KERNEL + '\narguments = ["A", "B"]', "the buffer 'C' is written by the kernel; add it"),
        (KERNEL + '\narguments = ["A", "B", "D"]', "'D' is not an argument"),
        (KERNEL + '\ndefines = { "A B" = 1 }', "is not the name of a macro"),
        (KERNEL + '\ndefines = { X = "1; int y" }', "not an expression"),
        ('outputs.C = { file = "c.pkl" }', "expected a file that ends in .npy"),
        ('outputs.C = { file = "c.npy" }', "the content of A is random"),
        (OUTPUTS + "\ntolerance = { D = 1e-3 }", "D"),
        (OUTPUTS + "\ntolerance = { C = { absolute = -1.0 } }", "from 0"),
        (OUTPUTS + "\ntolerance = { C = 0 }", "above 0"),
        (OUTPUTS + '\nunchecked = ["X"]', "no buffer that is written"),
    ],
)
def test_refusals(reference, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        parsed(reference)


class TestShapes:
    """Errors in expressions are reported when the file is read."""

    TEXTS = (
        "A @ B", "A + B", "2 * A - v", "transpose(A) @ B", "A @ transpose(B)", "sum(A, 1)", "sum(A, -1) + v", "mean(A)",
        "max(B, 0)", "max(B, 2)", "sum(v, -2)", "shift(A, 1, -2)", "shift(A, 1)", "exp(v) / sum(exp(v))", "v @ v",
        "A @ v", "v @ A", "transpose(transpose(A) / sum(A, 1))", "maximum(A, 0) @ minimum(B, v)", "sqrt(abs(S @ A))",
        "S @ transpose(S)",
    )  # fmt: skip

    @given(st.sampled_from(TEXTS), st.lists(st.integers(1, 3), min_size=8, max_size=8))
    def test_they_are_those_that_numpy_computes(self, text, extents):
        a, b, c, d, e, f, g, h = extents
        shapes = {"A": (a, b), "B": (c, d), "v": (e,), "S": (f, g, h)}
        expression = parse_array_expression(text, shapes)

        def outcome(env: dict[str, Any]) -> tuple[int, ...] | str:
            try:
                return tuple(expression.evaluate(env).shape)
            except SpecError as error:
                return f"column {error.column}"

        arrays = {name: np.ones(shape) for name, shape in shapes.items()}
        assert outcome({name: ShapeOnly(shape) for name, shape in shapes.items()}) == outcome(arrays)

    @pytest.mark.parametrize("text", ["maximum(A @ B, -1e999) + C", "alpha * (A @ B) + C / 2", "C / (C - C) + A @ B"])
    def test_what_only_the_device_can_tell_is_left_to_it(self, text):
        assert parsed(f'outputs = {{ C = "{text}" }}')

    def test_the_largest_array_of_an_expression_is_known(self):
        """All pairs of 300 points are 90,000 elements, although 300 go in and 300 come out."""
        expression = parse_array_expression("sum(abs(transpose(X) - X), 0) + 1", {"X"})
        found: object = expression.evaluate({"X": ShapeOnly((1, 300))})
        assert (found.shape, found.largest) == ((300,), 90_000)


def test_what_is_unchecked_needs_no_expression_and_nothing_may_be_checked():
    more = 't = { buffer = "float32", shape = ["N"], access = "inout" }'
    space = copy_spec().text.replace("[reference]", f"{more}\n[reference]")
    partly, wholly, nothing = (
        parse_spec(space.replace('outputs = { y = "x" }', text), "k.toml").reference
        for text in ('unchecked = ["t"]\noutputs = { y = "x" }', 'outputs = { y = "x", t = "t" }', 'verify = "nothing"')
    )
    assert (partly.unchecked, list(partly.outputs), partly.meaning()["unchecked"]) == (("t",), ["y"], ["t"])
    assert "unchecked" not in wholly.meaning()
    assert (nothing.unchecked, nothing.is_agreement) == (("y", "t"), False)


class TestComparison:
    @staticmethod
    def fails(expected: Any, got: Any) -> bool:
        raise ValueError("no")

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (lambda expected, got: np.allclose(expected, got, atol=1), ""),
            (lambda expected, got: None, ""),
            (lambda expected, got: expected == got, "found a difference"),
            (lambda expected, got: f"off by {np.abs(expected - got).max():.1f}", "off by 0.1"),
            (lambda expected, got, tolerance: tolerance == 1e-5, ""),
            (fails.__func__, "the comparison raises ValueError: no"),
        ],
    )
    def test_what_it_says(self, function, said, tmp_path):
        inspection = comparison_of(parse_spec(SGEMM, "sgemm.toml"), function, tmp_path)
        assert inspection.buffers == ("C.expected", "C.value")
        folder = tmp_path / "outputs"
        folder.mkdir()
        for name, values in (("C.expected", [1.0, 2.0]), ("C.value", [1.0, 2.1])):
            np.save(folder / f"{name}.npy", np.array(values))
        wrong, _ = inspection.inspect({}, folder)
        assert said in wrong
        assert bool(said) == bool(wrong)

    def test_it_belongs_to_the_reference(self):
        text = SGEMM.replace("tolerance = 1e-5", 'comparison = "near"')
        assert parse_spec(text, "k.toml").reference.comparison == "near"
        assert "near" in parse_spec(text, "k.toml").reference.notice
        refused(text, OUTPUTS, 'verify = "agreement"', "reference.comparison", "no expected values")
