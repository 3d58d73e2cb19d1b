"""References that leave buffers unchecked."""

import pytest

from autotile.errors import SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec

TEXT = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale"
[problem]
sizes = { N = 1000 }
[parameters]
BLOCK = [32, 64]
[default]
BLOCK = 64
[launch]
block = ["BLOCK"]
grid = ["ceil_div(N, BLOCK)"]
[arguments]
Y = { buffer = "float32", shape = ["N"], access = "inout" }
T = { buffer = "float32", shape = ["N"], access = "inout" }
[reference]
"""


def parsed(reference: str) -> KernelSpec:
    return parse_spec(TEXT + reference, "scale.toml")


def test_what_is_unchecked_needs_no_expression() -> None:
    reference = parsed('unchecked = ["T"]\noutputs = { Y = "2 * Y" }').reference
    assert reference.unchecked == ("T",)
    assert list(reference.outputs) == ["Y"]
    assert reference.meaning()["unchecked"] == ["T"]
    assert "unchecked" not in parsed('outputs = { Y = "2 * Y", T = "T" }').reference.meaning()


def test_nothing_may_be_checked() -> None:
    reference = parsed('verify = "nothing"').reference
    assert reference.unchecked == ("Y", "T")
    assert not reference.is_agreement


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ('verify = "none"', 'expected "agreement" or "nothing"'),
        ('unchecked = ["X"]\noutputs = { Y = "2 * Y" }', "no buffer that is written"),
        ('outputs = { Y = "2 * Y" }', "has no reference"),
    ],
)
def test_messages(reference: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parsed(reference)
