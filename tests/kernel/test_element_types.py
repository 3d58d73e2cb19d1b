"""Element types in search-space files."""

from __future__ import annotations

import numpy as np
import pytest

from autotile.core.dtypes import DTYPES
from autotile.cuda.packing import by_value
from autotile.errors import SpecError
from autotile.kernel.arguments import scalar_value
from autotile.kernel.inputs import make_input
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec

SPACE = """
[kernel]
name = "k"
template = "k.cu"
entry = "k"

[problem]
sizes = { N = 4096 }

[parameters]
BLOCK = [64, 128]

[default]
BLOCK = 64

[launch]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]

[arguments]
x = { buffer = "@type", shape = ["N"], access = "in" }
y = { buffer = "@type", shape = ["N"], access = "out" }
@more

[reference]
outputs = { y = "x" }
"""


def spec_of(dtype: str, more: str = "") -> KernelSpec:
    return parse_spec(SPACE.replace("@type", dtype).replace("@more", more), "k.toml")


@pytest.mark.parametrize("name", DTYPES)
def test_inputs_of_every_type(name: str) -> None:
    spec = spec_of(name)
    buffer, dtype = spec.buffer("x"), DTYPES[name]
    shape = buffer.array_shape(spec.sizes)
    assert shape == dtype.array_shape((4096,))
    stored = make_input(buffer, shape, name)
    assert (stored.shape, stored.dtype) == (shape, np.dtype(dtype.storage))
    values = dtype.decode(stored)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 1
    np.testing.assert_array_equal(dtype.encode(values), stored)
    assert (make_input(buffer, shape, name, seed=1) != stored).any()


def test_another_name_of_a_type_is_the_same_type() -> None:
    assert spec_of("float8_e4m3").buffer("x").meaning() == spec_of("float8_e4m3fn").buffer("x").meaning()


def test_the_components_of_vectors_are_an_axis_in_references() -> None:
    text = SPACE.replace("@type", "float4").replace("@more", "")
    parse_spec(text.replace('y = "x"', 'y = "shift(x, 1, 0)"'), "k.toml")
    with pytest.raises(SpecError, match=r"shape \(4096,\), but the buffer y has \(4096, 4\)"):
        parse_spec(text.replace('y = "x"', 'y = "sum(x, 1)"'), "k.toml")


def test_vectors_and_complex_numbers_by_value() -> None:
    more = """
    origin = { scalar = "float3", value = [1, 2.5, -3] }
    factor = { scalar = "complex64", value = [0.5, -1] }
    bright = { scalar = "bool", value = true }
    """
    spec = spec_of("float32", more)
    origin, factor, bright = (scalar_value(s, spec.sizes, "float32", check=False) for s in spec.scalars)
    np.testing.assert_array_equal(origin, np.array([1, 2.5, -3], np.float32))
    assert by_value(origin).dtype.itemsize == 12
    assert by_value(origin).shape == (1,)
    assert factor == np.complex64(0.5 - 1j)
    assert bright == np.bool_(True)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('v = { scalar = "float3", value = [1, 2] }', "a list of 3 numbers"),
        ('v = { scalar = "float3", value = 1 }', "a list of 3 numbers"),
        ('v = { scalar = "int2", value = [1, 2.5] }', "a whole number"),
        ('v = { scalar = "float2", value = "N" }', "a list of 2 numbers"),
        ('v = { scalar = "float5", value = 1 }', "is not accepted; did you mean"),
        ('m = { tensor_map = "x", box = [8] }', "a tensor map cannot describe x of type float4"),
    ],
)
def test_malformed_values(more: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_of("float4", more)


def test_a_vector_is_no_type_of_a_problem() -> None:
    text = SPACE.replace("@type", "float4").replace("@more", "").replace("4096 }", '4096 }\ndtypes = ["float4"]')
    with pytest.raises(SpecError, match="'float4' is a vector"):
        parse_spec(text, "k.toml")
