"""The forms of [reference] other than expressions, and tolerances of single outputs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.core.dtypes import DTYPES
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.database.keys import space_hash
from autotile.errors import SpecError
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


def test_a_kernel() -> None:
    spec = parsed(KERNEL + '\nelement_type = "float64"\ndefines = { TILE = 16, T = "double", COUNT = "M * N" }')
    kernel = spec.reference.kernel
    assert kernel is not None
    assert spec.reference.outputs == {}
    assert kernel.entry == "naive<double>"
    assert kernel.macros({"M": 3, "N": 5}) == {"TILE": 16, "T": "double", "COUNT": 15}
    own = reference_spec(spec, "float32", {**spec.sizes, "M": 33, "N": 7})
    assert own.entry == "naive<double>"
    assert launch_geometry(own, own.default, {**spec.sizes, "M": 33, "N": 7}, device_profile("h100")).grid == (
        1,
        3,
        1,
    )
    assert [b.element_type("float32", spec.sizes) for b in own.buffers] == ["float64"] * 3
    assert [s.element_type("float32") for s in own.scalars if s.name == "alpha"] == ["float64"]


def test_a_kernel_takes_some_of_the_arguments() -> None:
    spec = parsed(KERNEL + '\narguments = ["C", "A", "B"]')
    assert [argument.name for argument in reference_spec(spec, "float32", spec.sizes).arguments] == ["C", "A", "B"]


def test_agreement_a_function_and_files() -> None:
    assert parsed('verify = "agreement"').reference.is_agreement
    assert parsed('function = "solve"').reference.function == "solve"
    assert parsed('outputs.C = { file = "c.npy" }', constant=True).reference.files == {"C": "c.npy"}


def test_every_form_gives_a_hash_of_its_own() -> None:
    forms = [OUTPUTS, KERNEL, 'verify = "agreement"', 'function = "f"']
    forms += [KERNEL + '\narguments = ["C", "A", "B"]', OUTPUTS + "\ntolerance = { C = 1e-3 }"]
    assert len({space_hash(parsed(form)) for form in forms}) == len(forms)


def test_tolerances() -> None:
    reference = parsed(OUTPUTS + "\ntolerance = { C = { absolute = 1e-6, relative = 1e-4 } }").reference
    assert reference.tolerances == {"C": Tolerance(1e-4, 1e-6, is_elementwise=True)}
    assert reference.tolerances["C"].text(3.0) == "1e-06 and 0.0001 of |expected|"
    assert parsed(OUTPUTS + "\ntolerance = { C = 1e-3 }").reference.tolerances == {"C": Tolerance(1e-3)}
    assert Tolerance(1e-3).text(3.0) == "0.001 of max(|expected|, 3)"
    assert Tolerance(0.0).text(3.0) == "0 of max(|expected|, 3)"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("", "there is no reference"),
        (OUTPUTS + '\nverify = "agreement"', "outputs and verify are both given"),
        ('verify = "trust"', 'expected "agreement"'),
        (OUTPUTS + "\nblock = [16]", "block belongs to a reference kernel"),
        ('kernel = "naive; }"\nblock = [1]\ngrid = [1]', "the name of a __global__ function"),
        ('kernel = "naive"\nblock = [1]', "grid"),
        ('kernel = "naive"\nblock = [1]\ngrid = ["K / 2"]', "ceil_div"),
        (KERNEL + '\ntemplate = "../naive.cu"', "a bare file name"),
        (KERNEL + '\nelement_type = "float32"', 'expected "float64"'),
        (KERNEL + '\narguments = ["A", "B"]', "the buffer 'C' is written by the kernel; add it"),
        (KERNEL + '\narguments = ["A", "B", "D"]', "'D' is not an argument"),
        (KERNEL + '\ndefines = { "A B" = 1 }', "is not the name of a macro"),
        (KERNEL + '\ndefines = { X = "1; int y" }', "not an expression"),
        ('outputs.C = { file = "c.pkl" }', "expected a .npy file"),
        ('outputs.C = { file = "c.npy" }', "the content of A is random"),
        (OUTPUTS + "\ntolerance = { D = 1e-3 }", "D"),
        (OUTPUTS + "\ntolerance = { C = { absolute = -1.0 } }", "from 0"),
        (OUTPUTS + "\ntolerance = { C = 0 }", "above 0"),
    ],
)
def test_refusals(reference: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parsed(reference)
    assert said in str(caught.value)


def test_double_precision() -> None:
    wide = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}
    assert {name: wide_type(name) for name in wide} == wide
    assert [wide_type(name) for name in ("int32", "bool", "float4", "half2", "int4")] == [
        *("int32", "bool", "double4", "double2", "int4"),
    ]
    assert all(wide_type(name) in DTYPES for name in DTYPES)


def test_the_source_of_a_reference_kernel_counts_and_compiles(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void sgemm(const float*, const float*, float*, float, int, int, int) {}\n'
    (tmp_path / "sgemm.cu").write_text(text)
    (tmp_path / "naive.cu").write_text("template <class T> __global__ void naive(T* c) { c[0] = TILE * sizeof(T); }\n")
    more = '\ntemplate = "naive.cu"\narguments = ["C"]\ndefines = { TILE = "M // 16" }'
    toml = tmp_path / "sgemm.toml"
    toml.write_text(SGEMM.replace(OUTPUTS, KERNEL + more))
    kernel = load_kernel(str(toml))
    source = reference_source(kernel)
    assert source is not None
    own = replace(source, spec=reference_spec(kernel.spec, "float32", kernel.spec.sizes))
    names = known_names(own.spec, own.spec.default, own.spec.sizes, device_profile("h100"))
    assert kernel.spec.reference.kernel is not None
    job = compile_job(own, {**own.spec.default, **kernel.spec.reference.kernel.macros(names)}, "float32", "sm_90")
    assert list(compile_cubin(job).functions) == ["naive<double>"]
    before = kernel.source_hash
    (tmp_path / "naive.cu").write_text("template <class T> __global__ void naive(T* c) { c[0] = 2 * TILE; }\n")
    assert load_kernel(str(toml)).source_hash != before
