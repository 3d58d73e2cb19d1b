import pytest

from autotile.errors import SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.sources import check_signature, signature_fault

SPEC = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "inner::scale<B>"
[problem]
sizes = { N = 64 }
[parameters]
B = [32, 64]
[default]
B = 32
[launch]
block = ["B"]
grid = [1]
[arguments]
x = { buffer = "float32", shape = ["N"], access = "inout" }
a = { scalar = "float64", value = 2.0 }
N = { scalar = "int32", value = "N" }
[reference]
outputs = { x = "a * x" }
"""
SOURCE = "namespace inner { template <int B> __global__ void scale(float* x, double const a, int n) {} }"


def fault(taken: tuple[int, ...] | None, source: str = SOURCE) -> str:
    spec = parse_spec(SPEC, "scale.toml")
    return signature_fault(spec, spec.steps[0], "float32", taken, source)


def test_parameters_that_fit() -> None:
    assert fault((8, 8, 4)) == ""
    assert fault(None) == ""


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ((8, 8), "takes 2 parameters, but 3 are declared as arguments; remove N from"),
        ((8, 4, 4), "the argument a has 8 bytes, but parameter 2 of inner::scale<B> (double const a) has 4"),
        ((4, 8, 4), "the argument x has 8 bytes"),
        ((), "remove x from"),
    ],
)
def test_parameters_that_do_not_fit(taken: tuple[int, ...], words: str) -> None:
    assert words in fault(taken)


def test_a_parameter_that_is_not_declared() -> None:
    assert "add parameter 4 of inner::scale<B> to [arguments]" in fault((8, 8, 4, 4))
    longer = SOURCE.replace("int n", "int n, const float4 b")
    assert "add parameter 4 of inner::scale<B> (const float4 b) to [arguments]" in fault((8, 8, 4, 16), longer)


def test_the_error_names_the_file() -> None:
    spec = parse_spec(SPEC, "scale.toml")
    with pytest.raises(SpecError, match=r"scale\.toml.*arguments"):
        check_signature(spec, spec.steps[0], "float32", (8,), SOURCE)
