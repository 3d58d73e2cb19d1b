"""Each operation of array expressions has NumPy's values, and the shape that was computed without the arrays."""

import numpy as np
import pytest
from array_cases import CASES, KINDS, environment

from autotile.errors import SpecError
from autotile.kernel.expressions import ShapeOnly, parse_array_expression
from autotile.kernel.functions import ARRAY_FUNCTIONS


@pytest.mark.parametrize("text", CASES)
def test_values_and_shapes(text: str) -> None:
    names = [name for name in environment() if name != "FLAG"]
    expression = parse_array_expression(text, names, KINDS)
    result = expression.evaluate(environment())
    expected = np.asarray(CASES[text])
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
    if expected.dtype.kind in "biu":
        assert result.dtype.kind in "biu"
        assert result.tolist() == expected.tolist()
    shapes = {name: ShapeOnly(value.shape) if np.ndim(value) else value for name, value in environment().items()}
    assert expression.shape(shapes) == expected.shape


@pytest.mark.parametrize("name", ARRAY_FUNCTIONS)
def test_every_function_is_among_the_cases_or_alike(name: str) -> None:
    alike = {"cbrt", "arcsin", "arccos", "arctan", "tanh", "arccosh", "arctanh", "isnan", "isinf", "fmod", "copysign"}
    alike |= {"floor_divide", "angle", "float", "mean", "sqrt", "log", "minimum", "maximum"}
    assert name in alike or any(f"{name}(" in text for text in CASES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v[4]", "the index 4 is out of bounds for an axis of 4"),
        ("v[i + 1]", "indices from 1 to 4 for an axis of 4"),
        ("v[v]", "indices must be whole numbers"),
        ("v[v > 0]", "the shape of x[mask] depends on values"),
        ("A[0, 0, 0]", "3 indices for an array of 2 axes"),
        ("A[i, None, i]", "must stand side by side"),
        ("v[::0]", "the step of a slice is 0"),
        ("v & 1", "& takes whole numbers"),
        ("v << 1", "<< takes whole numbers"),
        ("i & 2.5", "& takes whole numbers; convert with int"),
        ("i << 0.5", "<< takes whole numbers; convert with int"),
        ("2.5 | i", "| takes whole numbers; convert with int"),
        ("~2.5 + i", "~ takes whole numbers; convert with int"),
        ("zeros(N ** 30)", "more than 4,294,967,296 elements"),
        ("v[:, None, None, None] + zeros(9999, 9999, 99)", "more than 4,294,967,296 elements"),
        ("repeat(v, -1)", "would have the shape (-4,)"),
        ("reshape(A, 5, -1)", "has no shape"),
        ("einsum('ij,jk', A, B)", "einsum takes subscripts"),
        ("einsum('ij,ik->jk', A, B)", "has the extents 3 and 4"),
        ("einsum('ii->i', A)", "the axis 'i' has the extents 3 and 4"),
        ("einsum('i->i', A)", "'i' for an array of 2 axes"),
        ("einsum('ijk->ijk', A)", "'ijk' for an array of 2 axes"),
        ("einsum('ij->ii', A)", "the result 'ii' does not name axes of the operands, each once"),
        ("einsum('ij->ik', A)", "the result 'ik' does not name axes of the operands, each once"),
        ("einsum('ij->i', A, A)", "one group for each of 2 arrays"),
        ("einsum('ij,jk->ik', A)", "one group for each of 1 arrays"),
        ("einsum('i1->i', A)", "einsum takes subscripts"),
        ("einsum('...j->j', A)", "einsum takes subscripts"),
        ("concatenate((A, v))", "do not fit along axis 0"),
        ("stack((A, v))", "arrays of different shapes"),
        ("pad(v, -1)", "widths from 0"),
        ("pad(v, 1, mode='mirror')", "the mode 'mirror' is not known"),
        ("bincount(i, K)", "indices from 0 to 3 for an axis of 2"),
        ("correlate(v, image)", "a filter of 2 axes on an array of 1"),
        ("correlate(v, zeros(9))", "pad the array"),
        ("segment_sum(v, i)", "offsets must be whole numbers that ascend"),
        ("arange(0, N, 0)", "the step is 0"),
        ("sum(A, axis=(0, 0))", "an axis is repeated"),
        ("N // (K - 2)", "division"),
        ("t = A; t @ t", "4 columns against 3 rows"),
    ],
)
def test_faults(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_array_expression(text, [*environment()], KINDS).evaluate(environment())
    assert said in caught.value.problem


def test_an_operand_may_have_the_name_of_a_function() -> None:
    assert parse_array_expression("sum(sum)", ["sum"]).evaluate({"sum": np.ones(3)}) == 3.0


def test_a_size_may_be_a_real_number() -> None:
    expression = parse_array_expression("pad(x, (0, -N % 4))[:N]", ["x", "N"], KINDS)
    assert expression.evaluate({"x": np.ones(6), "N": 6.0}).shape == (6,)


@pytest.mark.parametrize(
    "text",
    [
        "einsum('i,j->ij', x, x)",
        "einsum('i,j->ji', x, x)",
        "einsum('i,j->', x, x)",
        "einsum('i,j->i', x, x)",
        "einsum('i,j,k->k', x, y, x)",
    ],
)
def test_an_einsum_of_too_many_products_is_refused_by_its_shapes(text: str) -> None:
    expression = parse_array_expression(text, ["x", "y"])
    small, large, huge = (ShapeOnly((extent,)) for extent in (64, 2**16, 2**23))
    assert len(expression.shape({"x": small, "y": small})) == len(text.partition("->")[2].partition("'")[0])
    expression.shape({"x": large, "y": ShapeOnly((1,))})
    with pytest.raises(SpecError, match=r"multiplications|elements"):
        expression.shape({"x": huge, "y": huge})


@pytest.mark.parametrize(("text", "same"), [("i & 2.0", "i & 2"), ("1.0 << i", "1 << i"), ("i | 4 / 2", "i | 2")])
def test_a_whole_value_of_a_real_number_counts_as_a_whole_number(text: str, same: str) -> None:
    names = [name for name in environment() if name != "FLAG"]
    found, expected = (parse_array_expression(one, names, KINDS).evaluate(environment()) for one in (text, same))
    assert found.dtype.kind in "iu"
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("j ** 2", "i"),
        ("j ** 0", "i"),
        ("j ** -1", "f"),
        ("j ** j", "f"),
        ("2 ** j", "f"),
        ("j ** 2.0", "f"),
        ("N ** 3", "i"),
    ],
)
def test_a_power_of_whole_numbers_is_whole_where_its_exponent_is_a_literal_that_is_not_negative(
    text: str, kind: str
) -> None:
    expression = parse_array_expression(text, ["j", "N"], KINDS)
    j = np.array([1, 2, 4], np.int32)
    found = np.asarray(expression.evaluate({"j": j, "N": 4}))
    assert found.dtype.kind == kind
    expected = {
        "j ** 2": [1, 4, 16],
        "j ** 0": [1, 1, 1],
        "j ** -1": [1.0, 0.5, 0.25],
        "j ** j": [1.0, 4.0, 256.0],
        "2 ** j": [2.0, 4.0, 16.0],
        "j ** 2.0": [1.0, 4.0, 16.0],
        "N ** 3": 64,
    }
    assert found.tolist() == expected[text]
