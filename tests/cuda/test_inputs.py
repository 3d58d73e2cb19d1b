import numpy as np
import pytest

from autotile.core.dtypes import DTYPES
from autotile.kernel.arguments import BufferArgument, ElementType
from autotile.kernel.expressions import parse_expression
from autotile.kernel.inputs import make_input


def buffer(init: str, name: str = "x") -> BufferArgument:
    return BufferArgument(name, ElementType("dtype"), (parse_expression("4", {}),), "in", init)


def test_the_same_name_and_shape_give_the_same_values() -> None:
    first, second = (make_input(buffer("normal"), (64, 32), "float32") for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, make_input(buffer("normal", "y"), (64, 32), "float32"))
    assert not np.array_equal(first, make_input(buffer("normal"), (64, 32), "float32", seed=1))


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_has_random_inputs_that_are_not_zeros(name: str) -> None:
    stored = make_input(buffer("normal"), (1000,), name)
    assert stored.dtype == DTYPES[name].storage
    values = DTYPES[name].decode(stored)
    assert np.isfinite(values).all()
    assert values.std() > 0.4


def test_plain_distributions() -> None:
    assert not make_input(buffer("zeros"), (8,), "float32").any()
    assert (make_input(buffer("ones"), (8,), "float32") == 1).all()
    np.testing.assert_array_equal(make_input(buffer("arange"), (2, 4), "int32"), np.arange(8).reshape(2, 4))
    uniform = make_input(buffer("uniform"), (1000,), "float64")
    assert 0 <= uniform.min() < 0.1
    assert 0.9 < uniform.max() < 1
