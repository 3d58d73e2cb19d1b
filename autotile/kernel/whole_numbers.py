"""Exact arithmetic on whole numbers of 64 bits, for one configuration or for columns of many.

``where`` selects the rows to evaluate, as in NumPy's ufuncs. Values in the other rows are undefined and never used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operand = Any
"""A Python scalar or a NumPy column."""

Rows = bool | NDArray[np.bool_]
"""Selected rows: all of them, or those that are true."""

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_EXPONENT = 63
"""Every base except -1, 0 and 1 exceeds 64 bits beyond this exponent."""
MAX_SHIFT = 62
"""``1 << 63`` exceeds 64 bits."""
_TOO_LARGE = "the result does not fit in 64 bits"


class EvaluationError(Exception):
    """An operation has no result in the given rows (True for a scalar).

    ``column`` is set by the node, which knows its position in the text.
    """

    def __init__(self, problem: str, rows: Rows) -> None:
        self.problem = problem
        self.rows = rows
        self.column: int | None = None
        super().__init__(problem)


def add(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left + right``."""
    return _exact(operator.add, left, right, where)


def subtract(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left - right``."""
    return _exact(operator.sub, left, right, where)


def multiply(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left * right``."""
    return _exact(operator.mul, left, right, where)


def floor_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left // right``, rounded down."""
    divisor = _nonzero(right, where)
    refuse((left == INT64_MIN) & (divisor == -1), where, _TOO_LARGE)
    return left // divisor


def modulo(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left % right``, with the sign of ``right``."""
    return left % _nonzero(right, where)


def ceil_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left / right``, rounded up."""
    return add(floor_divide(left, right, where), modulo(left, right, where) != 0, where)


def power(base: Operand, exponent: Operand, where: Rows) -> Operand:
    """``base ** exponent`` for exponents of 0 to `MAX_EXPONENT`."""
    refuse((exponent < 0) | (exponent > MAX_EXPONENT), where, f"the exponent is not within 0 to {MAX_EXPONENT}")
    if not isinstance(base, np.ndarray) and not isinstance(exponent, np.ndarray):
        return _checked(base**exponent)
    bounded = np.clip(exponent, 0, MAX_EXPONENT)
    result = np.ones(np.broadcast_shapes(np.shape(base), np.shape(bounded)), np.int64)
    for step in range(int(np.max(bounded, initial=0))):
        result = multiply(result, np.where(step < bounded, base, 1), where)
    return result


def minimum(left: Operand, right: Operand, where: Rows) -> Operand:
    """``min(left, right)``."""
    return _paired(min, np.minimum, left, right)


def maximum(left: Operand, right: Operand, where: Rows) -> Operand:
    """``max(left, right)``."""
    return _paired(max, np.maximum, left, right)


def absolute(value: Operand, where: Rows) -> Operand:
    """``abs(value)``."""
    refuse(value == INT64_MIN, where, _TOO_LARGE)
    return abs(value)


def greatest_divisor(left: Operand, right: Operand, where: Rows) -> Operand:
    """``gcd(left, right)``, which is not negative."""
    return _paired(math.gcd, np.gcd, absolute(left, where), absolute(right, where))


def least_multiple(left: Operand, right: Operand, where: Rows) -> Operand:
    """``lcm(left, right)``, which is not negative; 0 if one of them is 0."""
    a, b = absolute(left, where), absolute(right, where)
    return multiply(a // maximum(_paired(math.gcd, np.gcd, a, b), 1, where), b, where)


def bit_and(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left & right``."""
    return left & right


def bit_or(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left | right``."""
    return left | right


def bit_xor(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left ^ right``."""
    return left ^ right


def invert(value: Operand, where: Rows) -> Operand:
    """``~value``, which is ``-value - 1``."""
    return ~value


def shift_left(value: Operand, bits: Operand, where: Rows) -> Operand:
    """``value << bits`` for 0 to 62 bits."""
    bounded = _shift(bits, where)
    return multiply(value, 1 << bounded if isinstance(bounded, int) else np.left_shift(np.int64(1), bounded), where)


def shift_right(value: Operand, bits: Operand, where: Rows) -> Operand:
    """``value >> bits`` for 0 to 62 bits; rounds down."""
    return value >> _shift(bits, where)


def ceil_log2(value: Operand, where: Rows) -> Operand:
    """Return the smallest n with ``2 ** n >= value``, for values of at least 1."""
    refuse(value < 1, where, "the logarithm of a number below 1")
    if not isinstance(value, np.ndarray):
        return (int(value) - 1).bit_length()
    return np.searchsorted(_POWERS_OF_TWO, value).astype(np.int64)


def is_power_of_two(value: Operand, where: Rows) -> Operand:
    """Return whether the value is 1, 2, 4, ..."""
    return (value > 0) & (value & (maximum(value, 1, where) - 1) == 0)


def unchanged(value: Operand, where: Rows) -> Operand:
    """Return the value, as ``floor``, ``ceil`` and ``round`` do with a whole number."""
    return value


_POWERS_OF_TWO = 2 ** np.arange(63, dtype=np.int64)


def _shift(bits: Operand, where: Rows) -> Any:
    refuse((bits < 0) | (bits > MAX_SHIFT), where, f"the shift is not within 0 to {MAX_SHIFT} bits")
    return np.clip(bits, 0, MAX_SHIFT) if isinstance(bits, np.ndarray) else int(bits)


def _paired(scalar: Callable[..., Any], column: Callable[..., Any], left: Operand, right: Operand) -> Operand:
    either_column = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return (column if either_column else scalar)(left, right)


def _exact(operation: Callable[[Any, Any], Any], left: Operand, right: Operand, where: Rows) -> Operand:
    """Apply +, - or *; if the extremes could exceed 64 bits, repeat it with Python's unbounded integers."""
    if not isinstance(left, np.ndarray) and not isinstance(right, np.ndarray):
        return _checked(operation(left, right))
    corners = [operation(a, b) for a in _extremes(left) for b in _extremes(right)]
    if not corners or (min(corners) >= INT64_MIN and max(corners) <= INT64_MAX):
        return operation(left, right)
    wide = np.asarray(operation(np.asarray(left, object), np.asarray(right, object)))
    overflows = ((wide < INT64_MIN) | (wide > INT64_MAX)).astype(bool)
    refuse(overflows, where, _TOO_LARGE)
    return np.where(overflows, 0, wide).astype(np.int64)


def _extremes(value: Operand) -> tuple[int, ...]:
    if not isinstance(value, np.ndarray):
        return (int(value),)
    return (int(value.min()), int(value.max())) if value.size else ()


def _checked(value: int) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise EvaluationError(_TOO_LARGE, True)
    return value


def _nonzero(divisor: Operand, where: Rows) -> Any:
    """Return the divisor, with ones instead of zeros in the rows that are not selected."""
    refuse(divisor == 0, where, "division by zero")
    return np.where(divisor == 0, 1, divisor) if isinstance(divisor, np.ndarray) else divisor


def refuse(bad: Rows, where: Rows, problem: str) -> None:
    """Raise `EvaluationError` if a selected row is bad."""
    rows = bad & where
    if any_row(rows):
        raise EvaluationError(problem, rows)


def any_row(rows: Rows) -> bool:
    """Return whether any row is selected; `numpy.any` takes microseconds for a scalar."""
    return bool(rows.any()) if isinstance(rows, np.ndarray) else bool(rows)
