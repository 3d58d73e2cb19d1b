"""Exact 64-bit integer arithmetic over Python integers and NumPy columns alike.

Every function takes scalars or int64 arrays that broadcast, and ``where``: the rows that count, at least one. A row
outside of it may hold anything and never faults. A result beyond 64 bits is an error, never a wrapped number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operand = Any
"""A Python scalar or a NumPy column."""

Rows = bool | NDArray[np.bool_]
"""Rows that count: all of them, or those that are true."""

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_EXPONENT = 63
"""Any base but -1, 0 and 1 leaves 64 bits beyond this exponent."""


class NoResultError(Exception):
    """An operation without an integer result; ``rows`` are those at fault (True: a scalar is).

    Whoever knows the expression's text fills in ``column``.
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
    """``left // right``, rounded towards minus infinity."""
    divisor = _nonzero(right, where)
    _refuse((left == INT64_MIN) & (divisor == -1), where, "the result does not fit in 64 bits")
    return left // divisor


def modulo(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left % right``, with the sign of ``right``."""
    return left % _nonzero(right, where)


def ceil_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left / right`` rounded towards plus infinity."""
    return add(floor_divide(left, right, where), modulo(left, right, where) != 0, where)


def power(base: Operand, exponent: Operand, where: Rows) -> Operand:
    """``base ** exponent`` for exponents of 0 to `MAX_EXPONENT`."""
    _refuse((exponent < 0) | (exponent > MAX_EXPONENT), where, f"the exponent is not within 0 to {MAX_EXPONENT}")
    if not isinstance(base, np.ndarray) and not isinstance(exponent, np.ndarray):
        return _checked(base**exponent)
    bounded = np.clip(exponent, 0, MAX_EXPONENT)
    result = np.ones(np.broadcast_shapes(np.shape(base), np.shape(bounded)), np.int64)
    for step in range(int(np.max(bounded, initial=0))):
        result = multiply(result, np.where(step < bounded, base, 1), where)
    return result


def minimum(left: Operand, right: Operand, where: Rows) -> Operand:
    """Lesser of the two."""
    return _choose(min, np.minimum, left, right)


def maximum(left: Operand, right: Operand, where: Rows) -> Operand:
    """Greater of the two."""
    return _choose(max, np.maximum, left, right)


def _choose(scalar: Callable[..., Any], column: Callable[..., Any], left: Operand, right: Operand) -> Operand:
    either_column = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return (column if either_column else scalar)(left, right)


def _exact(operation: Callable[[Any, Any], Any], left: Operand, right: Operand, where: Rows) -> Operand:
    """Apply +, - or *: where the extremes could leave 64 bits, once more in Python's unbounded integers."""
    if not isinstance(left, np.ndarray) and not isinstance(right, np.ndarray):
        return _checked(operation(left, right))
    corners = [operation(a, b) for a in _extremes(left) for b in _extremes(right)]
    if not corners or (min(corners) >= INT64_MIN and max(corners) <= INT64_MAX):
        return operation(left, right)
    wide = np.asarray(operation(np.asarray(left, object), np.asarray(right, object)))
    lost = ((wide < INT64_MIN) | (wide > INT64_MAX)).astype(bool)
    _refuse(lost, where, "the result does not fit in 64 bits")
    return np.where(lost, 0, wide).astype(np.int64)


def _extremes(value: Operand) -> tuple[int, ...]:
    if not isinstance(value, np.ndarray):
        return (int(value),)
    return (int(value.min()), int(value.max())) if value.size else ()


def _checked(value: int) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise NoResultError("the result does not fit in 64 bits", True)
    return value


def _nonzero(divisor: Operand, where: Rows) -> Any:
    """Give the divisor, with ones in the rows that do not count in place of zeros."""
    _refuse(divisor == 0, where, "division by zero")
    return np.where(divisor == 0, 1, divisor) if isinstance(divisor, np.ndarray) else divisor


def _refuse(bad: Rows, where: Rows, problem: str) -> None:
    rows = bad & where
    if any_row(rows):
        raise NoResultError(problem, rows)


def any_row(rows: Rows) -> bool:
    """Whether any row counts; `numpy.any` takes microseconds for a single one."""
    return bool(rows.any()) if isinstance(rows, np.ndarray) else bool(rows)
