import contextlib
from typing import Any

import numpy as np
import pytest
from array_cases import CASES as VALUES
from array_cases import KINDS, environment
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.errors import SpecError
from autotile.kernel import functions
from autotile.kernel.expressions import ArrayExpression, Location, ShapeOnly, parse_array_expression
from autotile.kernel.functions import ARRAY_FUNCTIONS

NAMES = ("A", "B", "v", "alpha", "N")
LOCATION = Location("f.toml", "reference.outputs.C", 9)


def parse(text: str) -> ArrayExpression:
    return parse_array_expression(text, NAMES, location=LOCATION)


def parse_case(text: str) -> ArrayExpression:
    return parse_array_expression(text, [name for name in environment() if name != "FLAG"], KINDS, LOCATION)


def test_matmul_is_replaced_by_the_hook():
    calls = []

    def product(left: Any, right: Any) -> Any:
        calls.append((left.shape, right.shape, left.dtype))
        return np.full((3, 5), 2.0)

    assert parse("A @ B + 1").evaluate(environment(), product).tolist() == [[3.0] * 5] * 3
    assert calls == [((3, 4), (4, 5), np.float64)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(-6, 6), st.integers(-6, 6))
def test_shift_reads_zero_outside(rows, columns, down, right):
    array = np.arange(1.0, rows * columns + 1).reshape(rows, columns)
    expected = np.zeros((rows, columns))
    for i, j in np.ndindex(rows, columns):
        if 0 <= i + down < rows and 0 <= j + right < columns:
            expected[i, j] = array[i + down, j + right]
    assert parse(f"shift(A, {down}, {right})").evaluate({"A": array}).tolist() == expected.tolist()


def test_what_has_no_finite_value_stays_in_the_result():
    result = parse("1 / A + log(B)").evaluate({"A": np.array([0.0, 1.0]), "B": np.array([1.0, -1.0])})
    assert np.isinf(result[0])
    assert np.isnan(result[1])


@pytest.mark.parametrize(
    ("text", "column", "parts"),
    [
        ("A @ C", 5, ["unknown name 'C'", "known: A, B, v, alpha, N"]),
        ("alpa * A", 1, ["did you mean 'alpha'?"]),
        ("sum * A", 1, ["unknown name 'sum'; it is a function"]),
        ("relu(A)", 1, ["'relu' cannot be called", "functions: exp, exp2"]),
        ("A.sum()", 1, ["'A.sum' cannot be called"]),
        ("maximum(A)", 1, ["called as maximum(a, b)"]),
        ("sum(A, ax=1)", 1, ["called as sum(x, axis=None, keepdims=False)"]),
        ("sum(A, 0, axis=1)", 1, ["called as sum("]),
        ("sum(A, N)", 8, ["'N' is not a whole number, or an expression of sizes: unknown name 'N'"]),
        ("sum(A, True)", 8, ["'True' is not a whole number"]),
        ("sum(A, 1.0)", 8, ["'1.0' is not a whole number"]),
        ("sum(A, keepdims=1)", 17, ["keepdims of sum is a boolean, as in keepdims=True"]),
        ("pad(A, 1, mode=edge)", 16, ["mode of pad is a text"]),
        ("shift(A)", 1, ["called as shift(x, *offsets)"]),
        ("stack(A)", 7, ["stack takes 1 to 64 arrays in a list"]),
        ("A if alpha else B", 6, ["unknown name 'alpha'"]),
        ("A and B", 1, ["combine arrays with & and |"]),
        ("not A", 1, ["use ~ for arrays"]),
        ("A in B", 1, ["'in' and 'is' are not accepted"]),
        ("[A]", 1, ["is not accepted"]),
        ("A[B, 1.5]", 6, ["'1.5' is not a whole number"]),
        ("t = A; A = t; t", 12, ["'A' already has a meaning"]),
        ("t = u; t", 5, ["unknown name 'u'"]),
        ("t = A; t = A", None, ["expected an expression after the last assignment"]),
        ("import os; A", 1, ["expected an assignment"]),
        ("t = A; while t: t", None, ["not assignments and an expression"]),
        ("A @", None, ["not an expression"]),
        ("-" * 900 + "A", None, ["nested"]),
        ("A" * 1001, None, ["at most 1000"]),
        ("", None, ["empty"]),
        *((text, 1, ["called as exp(x)"]) for text in ("exp(A, B)", "exp(*A)")),
        *((text, 1, ["is not a number"]) for text in ("'x'", "True * A")),
    ],
)
def test_refusals(text, column, parts):
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert (caught.value.source, caught.value.key, caught.value.line) == ("f.toml", "reference.outputs.C", 9)
    if column is not None:
        assert caught.value.column == column
    for part in parts:
        assert part in caught.value.problem


TOKENS = (
    "A B v alpha N ( ) , + - * / ** @ exp sum shift maximum transpose 0 -1 2.5 1e400 . [ ] if = < λ T ; t [ ] : None "
    "... & ~ // % where pad stack reshape einsum argmax zeros 'ij->i' axis keepdims True"
)


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TOKENS.split()), max_size=12).map(" ".join)))
def test_any_text_gives_an_array_or_a_spec_error(text):
    with contextlib.suppress(SpecError):
        assert parse(text).evaluate(environment()).dtype.kind in "biufc"


@pytest.mark.parametrize("text", VALUES)
def test_values_and_shapes(text):
    expression = parse_case(text)
    result = expression.evaluate(environment())
    expected = np.asarray(VALUES[text])
    np.testing.assert_allclose(result, expected, rtol=1e-14, atol=1e-14)
    is_whole = expected.dtype.kind in "biu"
    assert (result.dtype.kind in "biu") == is_whole
    assert not is_whole or result.tolist() == expected.tolist()
    shapes = {name: ShapeOnly(value.shape) if np.ndim(value) else value for name, value in environment().items()}
    assert expression.shape(shapes) == expected.shape


@pytest.mark.parametrize("name", ARRAY_FUNCTIONS)
def test_every_function_is_among_the_cases_or_alike(name):
    alike = {"cbrt", "arcsin", "arccos", "arctan", "arccosh", "arctanh", "isnan", "isinf", "fmod", "copysign"}
    alike |= {"floor_divide", "angle", "float"}
    assert name in alike or any(f"{name}(" in text for text in VALUES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A + B", "operands of shape (3, 4) and (4, 5) are not compatible"),
        ("B @ A", "operands of shape (4, 5) and (3, 4) are not compatible"),
        ("A @ alpha", "operands of shape (3, 4) and () are not compatible"),
        ("sum(A, 2)", "axis 2 is out of bounds"),
        ("shift(A, 1)", "takes 2 offsets, got 1"),
        ("v[4]", "the index 4 is out of bounds for an axis of 4"),
        ("v[i + 1]", "indices from 1 to 4 for an axis of 4"),
        ("v[v]", "indices must be whole numbers"),
        ("v[v > 0]", "the shape of x[mask] depends on values"),
        ("A[0, 0, 0]", "3 indices for a 2-dimensional array"),
        ("A[i, None, i]", "must stand side by side"),
        ("v[::0]", "the step of a slice is 0"),
        ("v & 1", "& takes whole numbers"),
        ("v << 1", "<< takes whole numbers"),
        ("i & 2.5", "& takes whole numbers; convert with int"),
        ("2.5 | i", "| takes whole numbers; convert with int"),
        ("~2.5 + i", "~ takes whole numbers; convert with int"),
        ("zeros(N ** 30)", "more than 4,294,967,296 elements"),
        ("v[:, None, None, None] + zeros(9999, 9999, 99)", "more than 4,294,967,296 elements"),
        ("repeat(v, -1)", "would have the shape (-4,)"),
        ("reshape(A, 5, -1)", "has no shape"),
        ("einsum('ij,jk', A, B)", "einsum takes subscripts"),
        ("einsum('ij,ik->jk', A, B)", "has the extents 3 and 4"),
        ("einsum('ii->i', A)", "the axis 'i' has the extents 3 and 4"),
        ("einsum('i->i', A)", "'i' for a 2-dimensional array"),
        ("einsum('ijk->ijk', A)", "'ijk' for a 2-dimensional array"),
        ("einsum('ij->ii', A)", "the result 'ii' does not name axes of the operands, each once"),
        ("einsum('ij->ik', A)", "the result 'ik' does not name axes of the operands, each once"),
        ("einsum('ij,jk->ik', A)", "one group an array, here 1"),
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
        ("A if N // (K - 2) == 0 else v", "division by zero"),
        ("t = A; t @ t", "4 columns against 3 rows"),
    ],
)
def test_faults_of_values(text, said):
    with pytest.raises(SpecError) as caught:
        parse_case(text).evaluate(environment())
    assert said in caught.value.problem
    assert (caught.value.source, caught.value.line) == ("f.toml", 9)
    assert text[(caught.value.column or 0) - 1 :] in (
        text,
        "::0]",
        "zeros(9999, 9999, 99)",
        "t @ t",
        "N // (K - 2) == 0 else v",
    )


def test_an_array_larger_than_half_of_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(functions, "MAX_HOST_ELEMENTS", 12)
    assert parse_case("A + 1").evaluate(environment()).shape == (3, 4)
    with pytest.raises(SpecError, match=r"shape \(4, 5\), more than half of this machine's memory"):
        parse_case("B + 1").evaluate(environment())


def test_an_expression_has_a_text_and_names_also_of_functions_and_a_size_may_be_a_real_number():
    expression = parse(" alpha *\n(A @ B)")
    assert (expression.text, expression.names) == ("alpha * (A @ B)", {"alpha", "A", "B"})
    assert parse_array_expression("sum(sum)", ["sum"]).evaluate({"sum": np.ones(3)}) == 3.0
    expression = parse_array_expression("pad(x, (0, -N % 4))[:N]", ["x", "N"], KINDS)
    assert expression.evaluate({"x": np.ones(6), "N": 6.0}).shape == (6,)


@pytest.mark.parametrize("text", ["einsum('i,j->ij', x, x)", "einsum('i,j->', x, x)", "einsum('i,j,k->k', x, y, x)"])
def test_an_einsum_of_too_many_products_is_refused_by_its_shapes(text):
    expression = parse_array_expression(text, ["x", "y"])
    small, large, huge = (ShapeOnly((extent,)) for extent in (64, 2**16, 2**23))
    assert len(expression.shape({"x": small, "y": small})) == len(text.partition("->")[2].partition("'")[0])
    expression.shape({"x": large, "y": ShapeOnly((1,))})
    with pytest.raises(SpecError, match=r"multiplications|elements"):
        expression.shape({"x": huge, "y": huge})
