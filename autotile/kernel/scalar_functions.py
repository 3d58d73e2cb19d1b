"""Operators and functions of scalar expressions, each on whole numbers, on real numbers, or on both."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

from autotile.kernel import real_numbers as real
from autotile.kernel import whole_numbers as whole
from autotile.kernel.nodes import Kind
from autotile.kernel.whole_numbers import Operand

MAX_ARGUMENTS = 20
"""Maximum number of arguments of a call."""


class Operator(NamedTuple):
    """A binary operator.

    Attributes
    ----------
    whole
        Function for two whole numbers; None if the operands are converted to real numbers.
    real
        Function for two real numbers; None if it takes whole numbers only.
    divides
        Whether the right operand must not be zero.
    """

    whole: Callable[..., Operand] | None
    real: Callable[..., Operand] | None
    divides: bool = False


OPERATORS: Mapping[type[ast.operator], Operator] = {
    ast.Add: Operator(whole.add, real.add),
    ast.Sub: Operator(whole.subtract, real.subtract),
    ast.Mult: Operator(whole.multiply, real.multiply),
    ast.Div: Operator(None, real.divide, divides=True),
    ast.FloorDiv: Operator(whole.floor_divide, real.floor_divide, divides=True),
    ast.Mod: Operator(whole.modulo, real.modulo, divides=True),
    ast.Pow: Operator(whole.power, real.power),
    ast.BitAnd: Operator(whole.bit_and, None),
    ast.BitOr: Operator(whole.bit_or, None),
    ast.BitXor: Operator(whole.bit_xor, None),
    ast.LShift: Operator(whole.shift_left, None),
    ast.RShift: Operator(whole.shift_right, None),
}

LOGICAL = (ast.BitAnd, ast.BitOr, ast.BitXor)
"""Operators that combine two conditions to a condition, as in Python."""


class Function(NamedTuple):
    """A function of the language.

    Attributes
    ----------
    usage
        A call, for messages.
    whole, real
        Functions as of `Operator`.
    result
        Kind of the result; None for that of the operands.
    arguments
        Accepted counts of arguments; the function is applied from left to right to more than two.
    divides
        Whether the last argument must not be zero.
    """

    usage: str
    whole: Callable[..., Operand] | None
    real: Callable[..., Operand] | None
    result: Kind | None = None
    arguments: range = range(1, 2)
    divides: bool = False


_SEVERAL = range(2, MAX_ARGUMENTS + 1)

FUNCTIONS: Mapping[str, Function] = {
    "min": Function("min(a, b)", whole.minimum, real.minimum, arguments=_SEVERAL),
    "max": Function("max(a, b)", whole.maximum, real.maximum, arguments=_SEVERAL),
    "ceil_div": Function("ceil_div(a, b)", whole.ceil_divide, None, arguments=range(2, 3), divides=True),
    "gcd": Function("gcd(a, b)", whole.greatest_divisor, None, arguments=_SEVERAL),
    "lcm": Function("lcm(a, b)", whole.least_multiple, None, arguments=_SEVERAL),
    "ceil_log2": Function("ceil_log2(a)", whole.ceil_log2, None),
    "is_power_of_two": Function("is_power_of_two(a)", whole.is_power_of_two, None, "boolean"),
    "abs": Function("abs(a)", whole.absolute, real.absolute),
    "floor": Function("floor(a)", whole.unchanged, real.floor, "number"),
    "ceil": Function("ceil(a)", whole.unchanged, real.ceil, "number"),
    "round": Function("round(a)", whole.unchanged, real.nearest_whole, "number"),
    "int": Function("int(a)", whole.unchanged, real.truncate, "number"),
    "float": Function("float(a)", None, whole.unchanged),
    "sqrt": Function("sqrt(a)", None, real.square_root),
    "log2": Function("log2(a)", None, real.log2),
    "log": Function("log(a)", None, real.log),
    "exp": Function("exp(a)", None, real.exponential),
}
"""Functions of the language."""
