import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.errors import SpecError
from autotile.kernel.expressions import Kind, Location, parse_expression

KINDS: dict[str, Kind] = {"A": "number", "B": "number", "F": "boolean", "S": "string", "X": "real"}
KINDS |= {"device.sm_count": "number", "device.max_threads_per_block": "number"}


def parse(text: str, kinds: dict[str, Kind] = KINDS) -> Any:
    return parse_expression(text, kinds, Location("f.toml", "rules.r", 7))


def refusal(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert (caught.value.source, caught.value.key, caught.value.line) == ("f.toml", "rules.r", 7)
    return caught.value


# --- the same values as Python, for one configuration and for columns of many


def _numbers(inner: st.SearchStrategy[str], conditions: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
        st.builds("({} ** {})".format, inner, st.integers(0, 3)),
        st.builds("(-{})".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "ceil_div", "gcd", "lcm"]), inner, inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["&", "|", "^"]), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["<<", ">>"]), st.integers(0, 5)),
        st.builds("(~({} + 0))".format, inner),
        st.builds("abs({})".format, inner),
        st.builds("{}({} / 4)".format, st.sampled_from(["floor", "ceil", "round", "int"]), inner),
        st.builds("({} if {} else {})".format, inner, conditions, inner),
        st.builds("({} + {})".format, conditions, inner),
    )


def _conditions(numbers: st.SearchStrategy[str], inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    comparison = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
    return st.one_of(
        st.builds("({} {} {})".format, numbers, comparison, numbers),
        st.builds("({} {} {} {} {})".format, numbers, comparison, numbers, comparison, numbers),
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or", "==", "!="]), inner),
        st.builds("(not {})".format, inner),
        st.builds("({} {} ({}, {}))".format, numbers, st.sampled_from(["in", "not in"]), numbers, numbers),
        st.builds("(S {} {!r})".format, st.sampled_from(["==", "!="]), st.sampled_from(["x", "yy"])),
        st.just("(S in ['x', 'zzz'])"),
    )


NUMBER_LEAVES = st.one_of(st.sampled_from(["A", "B"]), st.integers(-3, 9).map(str).map("({})".format))
CONDITION_LEAVES = st.sampled_from(["F", "True", "False", "A < B", "B != 0"])
CONDITIONS = _conditions(NUMBER_LEAVES, CONDITION_LEAVES)
NUMBERS = _numbers(NUMBER_LEAVES, CONDITIONS)
DEEP_CONDITIONS = _conditions(NUMBERS, CONDITIONS)
DEEP_NUMBERS = _numbers(NUMBERS, DEEP_CONDITIONS)
STRINGS = st.sampled_from(["x", "yy", "zzz"])
ROW = {"A": st.integers(-5, 12), "B": st.integers(-2, 3), "F": st.booleans(), "S": STRINGS}
ROWS = st.lists(st.fixed_dictionaries(ROW), min_size=1, max_size=6)


def by_python(text: str, row: dict[str, Any]) -> Any:
    """Return the value in Python; None for a division by zero."""
    functions = {name: getattr(math, name) for name in ("gcd", "lcm", "floor", "ceil")}
    try:
        return eval(text, {"ceil_div": lambda a, b: -(-a // b), **functions}, row)
    except ZeroDivisionError:
        return None


def parse_unless_literal_zero_divides(text: str) -> Any:
    try:
        return parse(text)
    except SpecError as error:
        if error.problem != "division by zero":
            raise
        return None


@settings(max_examples=150)
@given(st.one_of(DEEP_NUMBERS, DEEP_CONDITIONS), ROWS)
def test_values_are_those_of_python(text, rows):
    expression = parse_unless_literal_zero_divides(text)
    if expression is None:
        return
    expected = [by_python(text, row) for row in rows]
    assert all(value is None or abs(value) < 2**62 for value in expected)
    for row, value in zip(rows, expected, strict=True):
        if value is None:
            for evaluate in (expression.evaluate, expression.value):
                with pytest.raises(SpecError, match="division by zero"):
                    evaluate(row)
        else:
            for found in (expression.evaluate(row), expression.value(row)):
                assert found == value
                assert isinstance(found, bool if expression.kind == "boolean" else int)
    columns = {name: np.array([row[name] for row in rows]) for name in ("A", "B", "F", "S")}
    if None in expected:
        with pytest.raises(SpecError, match="division by zero"):
            expression.evaluate(columns)
    else:
        result = expression.evaluate(columns)
        if expression.names:
            assert (result.dtype, result.tolist()) == (np.bool_ if expression.kind == "boolean" else np.int64, expected)


def test_what_an_expression_says_of_itself():
    expression = parse("  A %\n B == device.sm_count ")
    assert (expression.text, expression.names) == ("A %  B == device.sm_count", {"A", "B", "device.sm_count"})
    assert expression.kind == "boolean"
    assert expression.evaluate({"A": 7, "B": 4, "device.sm_count": 3}) is True
    assert expression == parse("A %  B == device.sm_count")


# --- real numbers, and functions of whole numbers


def _reals(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["/", "//", "%"]), st.sampled_from(["A", "0.75", "X"])),
        st.builds("(-{})".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
        st.builds("sqrt(abs({}))".format, inner),
        st.builds("({} if {} < X else {})".format, inner, inner, inner),
    )


REALS = _reals(_reals(st.sampled_from(["X", "A", "0.5", "1e-5", "(X > 1)"])))
REAL_ROW = st.fixed_dictionaries({"A": st.integers(-5, 12), "X": st.floats(-1e6, 1e6)})
REAL_ROWS = st.lists(REAL_ROW, min_size=1, max_size=4)


@settings(max_examples=100)
@given(REALS, REAL_ROWS)
def test_real_values_are_those_of_python(text, rows):
    expression = parse(text)
    try:
        expected = [eval(text, {"sqrt": math.sqrt}, row) for row in rows]
    except ZeroDivisionError:
        expected = []
    columns = {name: np.array([row[name] for row in rows]) for name in ("A", "X")}
    if not expected or not np.isfinite(expected).all():
        with pytest.raises(SpecError, match=r"division by zero|not a finite number"):
            expression.evaluate(columns) if expression.names else expression.evaluate({})
        return
    assert [expression.evaluate(row) for row in rows] == expected
    assert [expression.value(row) for row in rows] == expected
    if expression.names:
        assert expression.evaluate(columns).tolist() == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_log2(A)", [0, 1, 2, 62, 63]),
        ("is_power_of_two(A)", [True, True, False, True, False]),
        ("A ^ 1", [0, 3, 2, 2**62 + 1, 2**62]),
        ("log2(min(A, 2))", [0.0, 1.0, 1.0, 1.0, 1.0]),
        ("round(A / 2)", [0, 1, 2, 2**61, 2**61]),
        ("float(A) > 2.5", [False, False, True, True, True]),
        ("A in (1, 3.0)", [True, False, True, False, False]),
        ("A < 3", [True, True, False, False, False]),
        ("'x' if A < 3 else 'y'", ["x", "x", "y", "y", "y"]),
        ("A if A < 3 else A > 3", [1, 2, 0, 1, 1]),
        ("A if A < 3 else 0.5", [1.0, 2.0, 0.5, 0.5, 0.5]),
        ("min(A, 3) / 2", [0.5, 1.0, 1.5, 1.5, 1.5]),
        ("min(A, 3) // 2", [0, 1, 1, 1, 1]),
        ("2.5 // min(A, 3)", [2.0, 1.0, 0.0, 0.0, 0.0]),
        ("min(A, 2, 1.5)", [1.0, 1.5, 1.5, 1.5, 1.5]),
        ("floor(A / 2)", [0, 1, 1, 2**61, 2**61]),
        ("(A < 4) & (A > 1)", [False, True, True, False, False]),
        ("(A > 1) & 1", [0, 1, 1, 1, 1]),
    ],
)
def test_functions_and_the_kinds_of_results(text, value):
    numbers = [1, 2, 3, 2**62, 2**62 + 1]
    assert parse(text).kind == {int: "number", float: "real", bool: "boolean", str: "string"}[type(value[0])]
    assert parse(text).evaluate({"A": np.array(numbers)}).tolist() == value
    assert [parse(text).evaluate({"A": number}) for number in numbers] == value
    assert all(type(parse(text).evaluate({"A": n})) is type(v) for n, v in zip(numbers, value, strict=True))


# --- rows in which an operand is not evaluated never fail


@pytest.mark.parametrize(
    "text",
    [
        "B != 0 and A % B == 0",
        "B == 0 or A % B == 0",
        "A // B > 0 if B != 0 else False",
        "0 < B < A // B",
        "(B != 0 and F) and A // B == A ** (1 if B > 0 else -1)",
        "B > 0 and A * 2 ** (62 if B > 2 else 1) < 100",
        "X > 0 and sqrt(X) < 2.5 and A / (X - 9.0 if A < 6 else 1.0) < 3",
        "floor(log2(B)) if B > 0 else -1",
    ],
)
def test_guards_hold_row_by_row(text):
    a, b, f = np.meshgrid([1, 4, 6], [0, 1, 2], [True, False], indexing="ij")
    columns = {"A": a.ravel(), "B": b.ravel(), "F": f.ravel(), "X": np.select([a < 4, a < 6], [-1.0, 4.0], 9.0).ravel()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    values = [parse(text).evaluate(row) for row in rows]
    assert parse(text).evaluate(columns).tolist() == [parse(text).value(row) for row in rows] == values


def test_scalars_and_columns_mix_and_broadcast_and_narrow_or_empty_ones_do_not_fail():
    result = parse("A * B").evaluate({"A": np.array([[1], [2]]), "B": np.array([10, 20, 30])})
    assert result.tolist() == [[10, 20, 30], [20, 40, 60]]
    assert parse("A + B").evaluate({"A": 1, "B": np.array([1, 2])}).tolist() == [2, 3]
    assert parse("3 if A > 0 else 4").evaluate({"A": np.array([1, 2])}).tolist() == [3, 3]
    narrow = np.array([200], np.uint8)
    assert parse("A * B").evaluate({"A": narrow, "B": narrow}).tolist() == [40_000]
    empty = np.array([], np.int64)
    assert parse("A % B == 0 and A ** B + A * B > 2").evaluate({"A": empty, "B": empty}).tolist() == []
    columns = {"A": np.array([1, 2]), "B": np.array([0, 0])}
    assert parse("B != 0 and A % B == 0").evaluate(columns).tolist() == [False, False]
    assert parse("A % B if B != 0 else 5").evaluate(columns).tolist() == [5, 5]


# --- arithmetic without a 64-bit result


@pytest.mark.parametrize(
    ("text", "env", "problem"),
    [
        ("A % B", {"A": 7, "B": 0}, "division by zero"),
        ("A // B", {"A": 7, "B": 0}, "division by zero"),
        ("ceil_div(A, B)", {"A": 7, "B": 0}, "division by zero"),
        ("A / X", {"A": 1, "X": 0.0}, "division by zero"),
        ("X // A", {"X": 1.5, "A": 0}, "division by zero"),
        ("X ** A", {"X": 0.0, "A": -1}, "division by zero"),
        ("A + B", {"A": 2**62, "B": 2**62}, "does not fit in 64 bits"),
        ("A - B", {"A": -(2**62), "B": 2**62 + 1}, "does not fit in 64 bits"),
        ("A * B", {"A": 2**32, "B": 2**31}, "does not fit in 64 bits"),
        ("-A * B", {"A": -(2**63), "B": 1}, "does not fit in 64 bits"),
        ("A // B", {"A": -(2**63), "B": -1}, "does not fit in 64 bits"),
        ("A ** B", {"A": 2, "B": 63}, "does not fit in 64 bits"),
        ("A ** B ** 63", {"A": 9, "B": 9}, "does not fit in 64 bits"),
        ("floor(X)", {"X": 1e19}, "does not fit in 64 bits"),
        ("abs(A)", {"A": -(2**63)}, "does not fit in 64 bits"),
        ("A << 62", {"A": 2}, "does not fit in 64 bits"),
        ("lcm(A, A - 1)", {"A": 2**62}, "does not fit in 64 bits"),
        ("gcd(A, 0)", {"A": -(2**63)}, "does not fit in 64 bits"),
        ("A ** B", {"A": 2, "B": 64}, "the exponent is not within 0 to 63"),
        ("A ** B", {"A": 2, "B": -1}, "the exponent is not within 0 to 63"),
        ("1 << A", {"A": 63}, "the shift is not within 0 to 62 bits"),
        ("1 >> A", {"A": -1}, "the shift is not within 0 to 62 bits"),
        ("sqrt(X)", {"X": -1.0}, "the square root of a negative number"),
        ("log2(X)", {"X": 0.0}, "the logarithm of a number that is not above 0"),
        ("ceil_log2(A)", {"A": 0}, "the logarithm of a number below 1"),
        ("X * X", {"X": 1e200}, "the result is not a finite number"),
        ("X ** 0.5", {"X": -2.0}, "the result is not a finite number"),
    ],
)
def test_arithmetic_without_an_answer(text, env, problem):
    expression, first = parse(text), next(iter(env))
    columns = {name: np.array([1, value]) for name, value in env.items()}
    mixed = {**columns, first: env[first]}  # a scalar alone for an expression of one name
    for evaluate, values in (
        (expression.evaluate, env),
        (expression.value, env),
        (expression.evaluate, columns),
        (expression.evaluate, mixed),
    ):
        with pytest.raises(SpecError) as caught:
            evaluate(values)
        assert problem in caught.value.problem
        assert all(f"{name} = {value}" in caught.value.problem for name, value in env.items())
        assert caught.value.key == "rules.r"
        assert caught.value.column is not None


@pytest.mark.parametrize(
    ("text", "a", "b", "value"),
    [
        ("A + B", 2**62, 2**62 - 1, 2**63 - 1),
        ("A - B", -(2**62), 2**62, -(2**63)),
        ("A * B", 3037000499, 3037000499, 3037000499**2),
        ("A * B", -(2**32), 2**31, -(2**63)),
        ("A ** B", -2, 63, -(2**63)),
        ("A ** B", 1, 63, 1),
        ("ceil_div(A, B)", -(2**63), 2, -(2**62)),
        ("ceil_div(A, B)", 7, -2, -3),
        ("A // B", -7, 2, -4),
        ("A % B", -7, 2, 1),
    ],
)
def test_arithmetic_at_the_edge(text, a, b, value):
    assert parse(text).evaluate({"A": a, "B": b}) == parse(text).value({"A": a, "B": b}) == value
    assert parse(text).evaluate({"A": np.array([a, 1]), "B": np.array([b, 1])})[0] == value


def test_overflow_counts_only_where_it_is_reached_and_a_fault_names_the_values_that_led_there():
    columns = {"A": np.array([2**62, 3]), "B": np.array([0, 1])}
    assert parse("B == 1 and A * 4 == 12").evaluate(columns).tolist() == [False, True]
    with pytest.raises(SpecError) as caught:
        parse("A > 0 and A % (B - 1) == 0").evaluate({"A": np.array([[0], [5]]), "B": np.array([0, 1, 2])})
    assert "where A = 5, B = 1" in caught.value.problem


# --- errors: the message, the 1-based column, and the caret under it


REFUSED_ALIKE = {
    "only properties of 'device'": {"A > B.real": 5, "device.sm_count.real > 1": 1},
    "S is a string where a number is expected": {"A + S": 5, "S if F else 1": 1, "S & 1": 1},
    "a string is compared with a whole number": {"S == 1": 6, "S in ('x', 3)": 12},
    "'in' takes a list of values": {"A in B": 6, "A in ()": 6},
    "where a condition is expected": {"not A": 5, "1 if A else 2": 6},
    "division by zero": {"A % 0": 5, "ceil_div(A, 0)": 13, "A / 0": 5, "X % 0.0": 5},
    "X is a real number": {"gcd(A, B, X)": 11, "~X": 1},
    "plain arguments only": {"min(*A)": 1, "min(A, B, key=A)": 1},
    "not an expression": {"A = 3": 3, "A > 1; B": 6},
    "is not accepted": {"S == 'a\\x41'": 8, "A >\u2028 1": 4},
}
"""Texts with the columns of their errors, by what these say."""


@pytest.mark.parametrize(
    ("text", "column", "parts"),
    [
        ("A % C == 0", 5, ["unknown name 'C'", "known: A, B, F, S, X, device.*"]),
        ("AA > 1", 1, ["unknown name 'AA'", "did you mean 'A'?"]),
        ("A > device.sm_cout", 5, ["'device.sm_cout' is not a property", "did you mean 'device.sm_count'?"]),
        ("device > 1", 1, ["unknown name 'device'"]),
        ("min > 1", 1, ["'min' is a function; call it"]),
        ("S < 'x'", 5, ["strings have no order for '<'"]),
        ("A < 3 in (1, 2)", 10, ["split with 'and'"]),
        ("A is B", 6, ["use =="]),
        ("A and B > 1", 1, ["A is a whole number where a condition is expected", "A != 0"]),
        ("A / 2 & 1", 1, ["A / 2 is a real number where a whole number is expected", "ceil_div"]),
        ("1 << X", 6, ["X is a real number where a whole number is expected"]),
        ("ceil_div(A, B / 2)", 13, ["B / 2 is a real number"]),
        ("A > 1 & B > 2", 5, ["bind more tightly", "use 'and' or 'or'"]),
        ("X and F", 1, ["X is a real number where a condition is expected"]),
        ("S == X", 6, ["a string is compared with a real number"]),
        ("~F", 1, ["F is a condition; use 'not'"]),
        ("sqrt(A, B)", 1, ["sqrt takes 1 argument, got 2"]),
        ("X > 1e999", 5, ["does not fit in float64"]),
        ("A @ B", 1, ["this operator is not accepted"]),
        ("A > 2j", 5, ["'2j' is not accepted"]),
        ("A > 9223372036854775808", 5, ["does not fit in 64 bits"]),
        ("min(A)", 1, ["min takes 2 to 20 arguments, got 1"]),
        ("max(" + "A," * 21 + ")", 1, ["max takes 2 to 20 arguments, got 21"]),
        ("ceildiv(A, B)", 1, ["'ceildiv' cannot be called", "did you mean 'ceil_div'?"]),
        ("A\x00", 2, ["'\\x00' is not accepted"]),
        *((text, None, ["empty"]) for text in ("", "   ")),
        ("A" * 1001, None, ["has 1001 characters, at most 1000"]),
        ("(" * 500 + "A" + ")" * 499, None, ["not an expression"]),
        *(
            (text, None, ["nested"])
            for text in ("-" * 900 + "A", "not " * 240 + "F", "[" * 150 + "]" * 150, "2" + "**2" * 300)
        ),
        ("A" + "+A" * 400, None, ["nested more than 100 deep"]),
        *((text, column, [said]) for said, texts in REFUSED_ALIKE.items() for text, column in texts.items()),
    ],
)
def test_refusals(text, column, parts):
    error = refusal(text)
    assert column in (None, error.column)
    for part in parts:
        assert part in error.problem
    if error.expression and error.column:
        assert str(error).splitlines()[-1] == " " * (4 + error.column - 1) + "^"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "().__class__.__bases__[0].__subclasses__()", "A.__class__", "lambda: 0",
        "(lambda: A)()", "[A for A in (1, 2)]", "{A for A in (1, 2)}", "{A: B for A in (1, 2)}",
        "(A for A in (1, 2))", "f'{A}'", "(C := 3)", "{'a': 1}", "A[0]", "(A, B)", "[A]", "*A", "await A",
        "(yield A)", "...", "exec('A')", "device['sm_count']", "print(A)", "min(A, B)(3)", "import os",
    ],
)  # fmt: skip
def test_nothing_but_the_language_is_accepted(text):
    problem = refusal(text).problem
    assert any(part in problem for part in ("accepted", "not an expression", "cannot be called", "takes a list"))


def test_nested_chains_and_choices_take_no_exponential_time():
    chain = "A" + "".join(" < (1 < A" for _ in range(45)) + " < 9)" * 45
    assert parse(chain).evaluate({"A": np.array([0, 2])}).tolist() == [False, False]
    choice = "(True if F else (1 if F else " * 15 + "A" + "))" * 15
    assert parse(choice).evaluate({"A": 5, "F": False}) == 5
    assert parse("A" + " if F else A" * 80).evaluate({"A": 3, "F": False}) == 3


TOKENS = (
    "A B F S X 0.5 / & << ~ sqrt floor gcd device . sm_count ( ) [ ] , + - * // % ** < == ! and or not in is if else "
    "min 'x' 0 7 1e9 λ # = :"
)


@settings(max_examples=150)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TOKENS.split()), max_size=14).map(" ".join)))
def test_any_text_gives_an_expression_or_a_spec_error(text):
    with contextlib.suppress(SpecError):
        parse(text).evaluate({"A": 3, "B": 2, "F": True, "S": "x", "X": 0.5, "device.sm_count": 132})


def test_columns_count_characters_and_a_long_expression_is_not_repeated():
    error = refusal("S == 'äöü' and A > Z")
    assert (error.column, error.expression[error.column - 1]) == (20, "Z")
    error = refusal("A > 1 and " * 40 + "Z")
    assert (error.expression, error.column) == ("", 401)
    assert len(str(error)) < 300
    with pytest.raises(SpecError, match=r"'device.sm_count' is not accepted here \(known: N\)"):
        parse_expression("N * device.sm_count", {"N": "number"})
