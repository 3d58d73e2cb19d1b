"""Nodes of a parsed expression and the exact integer arithmetic that evaluates them.

``where`` selects the rows to evaluate, as in NumPy's ufuncs. ``and``, ``or`` and ``x if c else y`` narrow it, so that
no row fails on an operand that Python would not have evaluated. Values in the other rows are undefined and never used.

The nodes are named tuples: the first look-up of a process defines them all, and defining a dataclass takes six times as
long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

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


class EvaluationError(Exception):
    """An operation has no integer result in the given rows (True for a scalar).

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
    _refuse((left == INT64_MIN) & (divisor == -1), where, "the result does not fit in 64 bits")
    return left // divisor


def modulo(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left % right``, with the sign of ``right``."""
    return left % _nonzero(right, where)


def ceil_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left / right``, rounded up."""
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
    """``min(left, right)``."""
    return _select(min, np.minimum, left, right)


def maximum(left: Operand, right: Operand, where: Rows) -> Operand:
    """``max(left, right)``."""
    return _select(max, np.maximum, left, right)


def _select(scalar: Callable[..., Any], column: Callable[..., Any], left: Operand, right: Operand) -> Operand:
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
    _refuse(overflows, where, "the result does not fit in 64 bits")
    return np.where(overflows, 0, wide).astype(np.int64)


def _extremes(value: Operand) -> tuple[int, ...]:
    if not isinstance(value, np.ndarray):
        return (int(value),)
    return (int(value.min()), int(value.max())) if value.size else ()


def _checked(value: int) -> int:
    if not INT64_MIN <= value <= INT64_MAX:
        raise EvaluationError("the result does not fit in 64 bits", True)
    return value


def _nonzero(divisor: Operand, where: Rows) -> Any:
    """Return the divisor, with ones instead of zeros in the rows that are not selected."""
    _refuse(divisor == 0, where, "division by zero")
    return np.where(divisor == 0, 1, divisor) if isinstance(divisor, np.ndarray) else divisor


def _refuse(bad: Rows, where: Rows, problem: str) -> None:
    rows = bad & where
    if any_row(rows):
        raise EvaluationError(problem, rows)


def any_row(rows: Rows) -> bool:
    """Return whether any row is selected; `numpy.any` takes microseconds for a scalar."""
    return bool(rows.any()) if isinstance(rows, np.ndarray) else bool(rows)


Kind = Literal["number", "boolean", "string"]
Environment = Mapping[str, Operand]

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Node(Protocol):
    """A node of an expression; its kind is known when the text is parsed."""

    @property
    def kind(self) -> Kind:
        """Kind of the result."""

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value in the rows of ``where``, which selects at least one."""


class Constant(NamedTuple):
    """A literal."""

    value: int | bool | str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value."""
        return self.value


class Name(NamedTuple):
    """A parameter, a size, a flag or a property of the device."""

    name: str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Look up the name; columns of numbers of any width become int64, columns and scalars of flags bool."""
        value = env[self.name]
        if isinstance(value, np.ndarray) and self.kind != "string":
            return value.astype(np.int64 if self.kind == "number" else np.bool_, copy=False)
        return bool(value) if self.kind == "boolean" else value


class AsNumber(NamedTuple):
    """A boolean used as 0 or 1."""

    operand: Node
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return 0 or 1."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)


class Arithmetic(NamedTuple):
    """An arithmetic operation on two numbers."""

    operation: Callable[[Operand, Operand, Rows], Operand]
    left: Node
    right: Node
    column: int
    """1-based column of the operation in the text."""
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the result; an error has the column and the rows."""
        left, right = self.left.evaluate(env, where), self.right.evaluate(env, where)
        try:
            return self.operation(left, right, where)
        except EvaluationError as error:
            error.column = self.column
            raise


class Not(NamedTuple):
    """Negation."""

    operand: Node
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the negation of the operand."""
        return _negation(self.operand.evaluate(env, where))


class BooleanOperation(NamedTuple):
    """``and`` or ``or`` over several conditions, each evaluated only in rows that the previous ones leave undecided."""

    word: Literal["and", "or"]
    operands: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the combined condition, evaluated from left to right."""
        is_or = self.word == "or"
        undecided: Any = True
        for operand in self.operands:
            selected = where & undecided
            if not any_row(selected):
                break
            value = operand.evaluate(env, selected)
            undecided = undecided & (_negation(value) if is_or else value)
        return _negation(undecided) if is_or else undecided


class Comparison(NamedTuple):
    """A comparison such as ``a < b <= c``; each operand is evaluated once, in rows where the previous links hold."""

    first: Node
    links: tuple[tuple[str, Node], ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return whether every link holds."""
        holds: Any = True
        left = self.first.evaluate(env, where)
        for comparison, operand in self.links:
            selected = where & holds
            if not any_row(selected):
                break
            right = operand.evaluate(env, selected)
            holds = holds & COMPARISONS[comparison](left, right)
            left = right
        return holds


class Membership(NamedTuple):
    """``x in (a, b, c)``."""

    operand: Node
    members: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return whether the operand equals a member."""
        value = self.operand.evaluate(env, where)
        found: Any = False
        for member in self.members:
            found = found | (value == member.evaluate(env, where))
        return found


class Conditional(NamedTuple):
    """``x if c else y``; each branch is evaluated only in the rows that select it."""

    condition: Node
    chosen: Node
    otherwise: Node
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value of the selected branch in each row."""
        condition = self.condition.evaluate(env, where)
        if not isinstance(condition, np.ndarray):
            return (self.chosen if condition else self.otherwise).evaluate(env, where)
        first, second = where & condition, where & ~condition
        if not any_row(second):
            return self.chosen.evaluate(env, where)
        if not any_row(first):
            return self.otherwise.evaluate(env, where)
        return np.where(condition, self.chosen.evaluate(env, first), self.otherwise.evaluate(env, second))


def _negation(value: Operand) -> Operand:
    return ~value if isinstance(value, np.ndarray) else not value
