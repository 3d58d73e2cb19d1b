"""Buffers in constant memory, and outputs with a content."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_element_types import spec_of

from autotile.cuda.driver import variable_symbols
from autotile.database.keys import space_hash
from autotile.errors import InputError, SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.sources import check_source
from autotile.kernel.spec import reference_spec

FILTER = 'f = { buffer = "float32", shape = [9], access = "in", constant = "d_filter" }'


def test_a_constant_is_given_but_not_passed() -> None:
    spec = spec_of("float32", FILTER)
    buffer = spec.buffer("f")
    assert (buffer.is_passed, buffer.is_given, buffer.constant) == (False, True, "d_filter")
    assert spec.steps[0].arguments == ("x", "y")
    assert space_hash(spec) != space_hash(spec_of("float32", FILTER.replace("d_filter", "e_filter")))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"d_filter"', '"d filter"', "is not the name of a variable"),
        ('"d_filter"', '""', "is not the name of a variable"),
        ('access = "in"', 'access = "out"', "constant memory is read only"),
        ('constant = "d_filter"', 'constant = "d_filter", pass = false', "remove pass"),
    ],
)
def test_refusals(old: str, new: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_of("float32", FILTER.replace(old, new))


def test_the_template_must_have_the_variable() -> None:
    spec = spec_of("float32", FILTER)
    check_source(spec, "__constant__ float d_filter[9];")
    check_source(spec_of("float32", FILTER.replace("d_f", "ns::d_f")), "namespace ns { int d_filter[1]; }")
    with pytest.raises(InputError, match="the template has no variable d_filter; declare it"):
        check_source(spec, "__constant__ float d_filters[9];")


def test_a_reference_kernel_takes_a_listed_buffer_as_a_pointer() -> None:
    reference = '[reference]\nkernel = "naive"\nblock = [32]\ngrid = [1]\n'
    text = spec_of("float32", FILTER).text.partition("[reference]")[0] + reference
    spec = parse_spec(text + 'arguments = ["f", "x", "y"]\n', "k.toml")
    step = reference_spec(spec, "float32", spec.sizes).steps[0]
    assert step.arguments == ("f", "x", "y")
    assert spec.steps[0].arguments == ("x", "y")
    spec = parse_spec(text, "k.toml")
    naive = reference_spec(spec, "float32", spec.sizes)
    assert (naive.steps[0].arguments, naive.buffer("f").constant) == (("x", "y"), "d_filter")


def test_symbols_are_mangled_as_the_compiler_does() -> None:
    from autotile.cuda.compiler import CompileJob, compile_cubin

    source = """
    __constant__ float one[4];
    namespace a { namespace bc { __constant__ float two[4]; } }
    __global__ void k(float* y) { y[0] = one[threadIdx.x] + a::bc::two[threadIdx.x]; }
    """
    cubin = compile_cubin(CompileJob(source, source, str(Path(__file__)), "k", "sm_90", ())).cubin
    for name in ("one", "a::bc::two"):
        assert any(symbol.encode() + b"\0" in cubin for symbol in variable_symbols(name))
