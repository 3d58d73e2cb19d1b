from typing import Any

import pytest
from spec_samples import make_spec

from autotile.errors import ConfigError, SpecError
from autotile.kernel.spec import KNOWN_OPTIONS, Build, KernelSpec, controls_file

NAMES = {"N": 64, "FLAG": 1, "REGS": 32, "FAST": True, "T": "unsigned int", "EPS": 0.5, "CONTROLS": "a.txt"}


PARAMETERS = {
    "REGS": [32, 0],
    "FAST": [True, False],
    "T": ["float4", "unsigned int", "cuda::std::uint8_t"],
    "EPS": [0.5, 1, 1e-7],
    "CONTROLS": ["a.txt", "b.txt"],
}


def spec_with(*, defines: dict[str, Any] | None = None, **kernel: Any) -> KernelSpec:
    more = {"kernel": kernel, "kernel.defines": defines or {}, "problem.flags": {"FLAG": 1}}
    return make_spec(PARAMETERS, sizes={"N": 64}, more=more)


def build(**kernel: Any) -> Build:
    return spec_with(**kernel).build


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--maxrregcount={REGS}", ("--maxrregcount=32",)),
        ("--maxrregcount={REGS - 32}", ()),
        ("--use_fast_math={FAST}", ("--use_fast_math",)),
        ("--use_fast_math={not FAST}", ()),
        ("--fmad={FAST}", ("--fmad=true",)),
        ("-Xptxas -dlcm=cg", ("--ptxas-options=-dlcm=cg",)),
        ("--ptxas-options=-O{2 if FAST else 3},-dlcm=ca", ("--ptxas-options=-O2", "--ptxas-options=-dlcm=ca")),
        ("-lineinfo", ("-lineinfo",)),
        ("-O3", ()),
        ("--ptxas-options=--apply-controls={CONTROLS}", ("--ptxas-options=--apply-controls=a.txt",)),
        ("--a-future-option=on", ("--a-future-option=on",)),
    ],
)
def test_options(option, expected):
    found = build(options=[option]).arguments(NAMES)
    assert found == expected
    assert controls_file(expected[0] if expected else "") == ("a.txt" if "controls" in option else "")


@pytest.mark.parametrize(
    "option",
    [
        "-I/etc", "-Ifolder", "--include-path=x", "-DX=1", "-UX", "--pre-include=x", "--pch", "--time=out.csv", "-o",
        "--options-file=x", "-optf=x", "--gpu-architecture=sm_80", "-arch=sm_80", "-Xptxas -o=x",
        "--ptxas-options=-v,--options-file=x", "--ptxas-options=--apply-controls=/etc/passwd",
        "--ptxas-options=--apply-controls=../x", "--ptxas-options=", "--fmad=$(x)", "--fmad=a/b", "--fmad=..",
        "file.cu", "-Xcompiler -O3", "a b c", "", "--maxrregcount={NONE}", "--maxrregcount={REGS", "--use_fastmath",
    ],
)  # fmt: skip
def test_refused_options(option):
    with pytest.raises(SpecError) as raised:
        build(options=[option])
    assert raised.value.key == "kernel.options"


def test_a_value_cannot_make_another_option():
    option = build(options=["--ptxas-options=--apply-controls={CONTROLS}"])
    with pytest.raises(ConfigError, match="file in the kernel's folder"):
        option.arguments({**NAMES, "CONTROLS": "../x"})
    with pytest.raises(ConfigError, match="expected one option"):
        build(options=["--fmad={CONTROLS}"]).arguments({**NAMES, "CONTROLS": "true -I/etc"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("N", "64"),
        ("N // 2 + REGS", "64"),
        ("1e-5f", "1e-5f"),
        ("float4", "float4"),
        ("T", "unsigned int"),
        ("EPS", "0.5"),
        ("FAST", "1"),
        ("N > 64", "0"),
        ("(float)3", "(float)3"),
        ('"a \\"b\\""', '"a \\"b\\""'),
        ("','", "','"),
        ("'\"a\"' if FAST else 'b'", '"a"'),
        ("", ""),
        (4, "4"),
        (0.25, "0.25"),
        (True, "1"),
    ],
)
def test_macros(value, expected):
    assert build(defines={"X": value}).macros(NAMES) == {"X": expected}


@pytest.mark.parametrize(
    ("name", "value"), [("REGS", "1"), ("FLAG", "1"), ("DTYPE", "int"), ("'a b'", "1"), ("X", [1]), ("X", "a\nb")]
)
def test_refused_macros(name, value):
    with pytest.raises(SpecError) as raised:
        build(defines={name: value})
    assert raised.value.key.startswith("kernel.defines")


def test_what_is_compiled_in_and_values_of_parameters():
    assert spec_with().compiled_names == ("FLAG",)
    assert spec_with(defines={"X": "REGS"}).compiled_names == ("FLAG",)
    assert spec_with(defines={"X": "2 * N"}).compiled_names == ("N", "FLAG")
    assert spec_with(options=["--maxrregcount={N}"]).compiled_names == ("N", "FLAG")
    values = {parameter.name: parameter.values for parameter in spec_with().parameters}
    assert values["EPS"] == (0.5, 1.0, 1e-7)
    assert all(type(value) is float for value in values["EPS"])


def test_the_compiler_and_the_meaning_that_is_empty_at_the_defaults():
    assert build(compiler="nvcc", options=["-O3"]).arguments(NAMES) == ("-O3",)
    with pytest.raises(SpecError, match="expected one of nvrtc, nvcc"):
        build(compiler="clang")
    assert build(options=["-lineinfo"]).meaning() == {}
    known = [option for option in KNOWN_OPTIONS if not option.endswith("=")]
    assert spec_with(options=known).options == tuple(known)
    assert build(defines={"X": "N"}).meaning() != build(defines={"X": "N + 1"}).meaning()
    assert build(compiler="nvcc").meaning() == {"compiler": "nvcc"}
