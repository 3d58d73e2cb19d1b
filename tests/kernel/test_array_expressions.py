import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.errors import SpecError
from autotile.kernel.expressions import ArrayExpression, Kind, Location, parse_array_expression

NAMES = ("A", "B", "v", "alpha", "N")


def parse(text: str) -> ArrayExpression:
    return parse_array_expression(text, NAMES, location=Location("f.toml", "reference.outputs.C", 9))


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        "A": rng.standard_normal((3, 4)).astype(np.float32),
        "B": rng.standard_normal((4, 5)),
        "v": rng.standard_normal(4),
        "alpha": 0.75,
        "N": 4,
    }


CASES = {
    "alpha * (A @ B)": lambda e: 0.75 * (e["A"].astype(float) @ e["B"]),
    "A + v": lambda e: e["A"].astype(float) + e["v"],
    "-A - 1 / N": lambda e: -e["A"].astype(float) - 0.25,
    "A ** 2 / 3": lambda e: e["A"].astype(float) ** 2 / 3,
    "sum(A)": lambda e: e["A"].astype(float).sum(),
    "sum(A, 1)": lambda e: e["A"].astype(float).sum(1),
    "mean(A, -1)": lambda e: e["A"].astype(float).mean(-1),
    "mean(v)": lambda e: e["v"].mean(),
    "max(A, 0)": lambda e: e["A"].astype(float).max(0),
    "exp(v) + log(abs(v)) + sqrt(v * v) + tanh(v)": lambda e: (
        np.exp(e["v"]) + np.log(np.abs(e["v"])) + np.sqrt(e["v"] ** 2) + np.tanh(e["v"])
    ),
    "maximum(A, 0) + minimum(A, v)": lambda e: np.maximum(e["A"], 0.0) + np.minimum(e["A"].astype(float), e["v"]),
    "transpose(A)": lambda e: e["A"].astype(float).T,
    "transpose(transpose(exp(A)) / sum(exp(A), 1))": lambda e: (
        np.exp(e["A"].astype(float)) / np.exp(e["A"].astype(float)).sum(1, keepdims=True)
    ),
    "N": lambda e: 4.0,
}


@pytest.mark.parametrize("text", CASES)
def test_values_are_those_of_numpy_in_float64(text: str) -> None:
    result = parse(text).evaluate(arrays())
    np.testing.assert_allclose(result, CASES[text](arrays()), rtol=1e-14)


def test_what_an_expression_says_of_itself() -> None:
    expression = parse(" alpha *\n(A @ B)")
    assert expression.text == "alpha * (A @ B)"
    assert expression.names == {"alpha", "A", "B"}


def test_matmul_is_replaced_by_the_hook() -> None:
    calls = []

    def product(left: Any, right: Any) -> Any:
        calls.append((left.shape, right.shape, left.dtype))
        return np.full((3, 5), 2.0)

    assert parse("A @ B + 1").evaluate(arrays(), product).tolist() == [[3.0] * 5] * 3
    assert calls == [((3, 4), (4, 5), np.float64)]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(-6, 6), st.integers(-6, 6))
def test_shift_reads_zero_outside(rows: int, columns: int, down: int, right: int) -> None:
    array = np.arange(1.0, rows * columns + 1).reshape(rows, columns)
    expected = [
        [
            array[i + down, j + right] if 0 <= i + down < rows and 0 <= j + right < columns else 0.0
            for j in range(columns)
        ]
        for i in range(rows)
    ]
    text = f"shift(A, {down}, {right})"
    assert parse(text).evaluate({"A": array}).tolist() == expected


def test_what_has_no_finite_value_stays_in_the_result() -> None:
    result = parse("1 / A + log(B)").evaluate({"A": np.array([0.0, 1.0]), "B": np.array([1.0, -1.0])})
    assert np.isinf(result[0])
    assert np.isnan(result[1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A + B", "operands of shape (3, 4) and (4, 5) are not compatible"),
        ("B @ A", "operands of shape (4, 5) and (3, 4) are not compatible"),
        ("A @ alpha", "operands of shape (3, 4) and () are not compatible"),
        ("sum(A, 2)", "axis 2 is out of bounds"),
        ("shift(A, 1)", "takes 2 offsets, got 1"),
    ],
)
def test_shapes_that_do_not_fit(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text).evaluate(arrays())
    assert problem in caught.value.problem
    assert (caught.value.source, caught.value.line, caught.value.column) == ("f.toml", 9, 1)


@pytest.mark.parametrize(
    ("text", "column", "parts"),
    [
        ("A @ C", 5, ["unknown name 'C'", "known: A, B, v, alpha, N"]),
        ("alpa * A", 1, ["did you mean 'alpha'?"]),
        ("sum * A", 1, ["unknown name 'sum'; it is a function"]),
        ("relu(A)", 1, ["'relu' cannot be called", "functions: exp, exp2"]),
        ("A.sum()", 1, ["'A.sum' cannot be called"]),
        ("A.real", 1, ["'A.real' is not accepted"]),
        ("exp()", 1, ["called as exp(x)"]),
        ("exp(A, B)", 1, ["called as exp(x)"]),
        ("maximum(A)", 1, ["called as maximum(a, b)"]),
        ("sum(A, ax=1)", 1, ["called as sum(x, axis=None, keepdims=False)"]),
        ("sum(A, 0, axis=1)", 1, ["called as sum("]),
        ("exp(*A)", 1, ["called as exp(x)"]),
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
        ("'x'", 1, ["is not a number"]),
        ("True * A", 1, ["is not a number"]),
        ("9" * 900, 1, ["does not fit in float64"]),
        ("t = A; A = t; t", 12, ["'A' already has a meaning"]),
        ("t = A; t = t; t", 12, ["'t' already has a meaning"]),
        ("t = u; t", 5, ["unknown name 'u'"]),
        ("t = A; t = A", None, ["expected an expression after the last assignment"]),
        ("A.x = A; A", 1, ["expected an assignment"]),
        ("import os; A", 1, ["expected an assignment"]),
        ("t = A; while t: t", None, ["not assignments and an expression"]),
        ("lambda: A", 1, ["is not accepted"]),
        ("__import__('os')", 1, ["cannot be called"]),
        ("A @", None, ["not an expression"]),
        ("-" * 900 + "A", None, ["nested"]),
        ("A" * 1001, None, ["at most 1000"]),
        ("", None, ["empty"]),
    ],
)
def test_refusals(text: str, column: int | None, parts: list[str]) -> None:
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


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TOKENS.split()), max_size=12).map(" ".join)))
def test_any_text_gives_an_array_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        assert parse(text).evaluate(arrays()).dtype.kind in "biufc"


class TestChoicesAndStacks:
    KINDS: Mapping[str, Kind] = {"TURN": "boolean", "M": "number"}

    def evaluate(self, text: str, **env: Any) -> np.ndarray:
        names = ["A", "B", "TURN", "M"]
        return parse_array_expression(text, names, self.KINDS).evaluate({"TURN": 0, "M": 1.0, **env})

    @pytest.mark.parametrize("turn", [0, 1])
    def test_a_flag_chooses(self, turn: int) -> None:
        a = np.arange(6.0).reshape(2, 3)
        found = self.evaluate("2 * (transpose(A) if TURN else A)", A=a, TURN=turn)
        np.testing.assert_array_equal(found, 2 * (a.T if turn else a))

    def test_what_is_not_chosen_is_not_computed(self) -> None:
        found = self.evaluate("A if M > 1 or not TURN else A @ B", A=np.ones(3), B=np.ones((2, 2)))
        np.testing.assert_array_equal(found, np.ones(3))

    def test_a_division_by_zero_in_a_condition_is_told(self) -> None:
        with pytest.raises(SpecError, match="zero"):
            self.evaluate("A if M // (M - 1) == 0 else B", A=np.ones(1), B=np.ones(1))

    @pytest.mark.parametrize(
        ("a", "b"), [((4, 2, 3), (4, 3, 5)), ((1, 2, 3), (4, 3, 5)), ((4, 2, 3), (3, 5)), ((2, 1, 2, 3), (4, 3, 5))]
    )
    def test_stacks_of_matrices_broadcast(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        left, right = rng.standard_normal(a), rng.standard_normal(b)
        np.testing.assert_allclose(self.evaluate("A @ B", A=left, B=right), left @ right)
        turned = self.evaluate("transpose(transpose(B) @ transpose(A))", A=left, B=right)
        np.testing.assert_allclose(turned, left @ right)

    def test_a_vector_has_no_transpose(self) -> None:
        np.testing.assert_array_equal(self.evaluate("transpose(A)", A=np.arange(3.0)), np.arange(3.0))
