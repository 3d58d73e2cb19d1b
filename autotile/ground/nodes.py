"""The parts of a parsed expression; each evaluates itself over scalars or over NumPy columns.

``where`` marks the rows whose value is wanted. `and`, `or` and `x if c else y` narrow it, so that no row fails on an
operand that Python would not have reached; what such a row holds meanwhile is never used.

They are named tuples, as the first look-up of a process waits for their definition, and that of a dataclass takes six
times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from autotile.ground.integers import NoResultError, Operand, Rows, any_row

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
    """Anything that can be evaluated; its kind is settled when the text is parsed."""

    @property
    def kind(self) -> Kind:
        """What evaluation gives."""

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Value in the rows of ``where``, of which there is at least one."""


class Constant(NamedTuple):
    """A literal."""

    value: int | bool | str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Value of the literal."""
        return self.value


class Name(NamedTuple):
    """A parameter, a size or a property of the device."""

    name: str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Look the name up; columns of numbers and booleans of any width become int64 and bool, flags become bool."""
        value = env[self.name]
        if isinstance(value, np.ndarray) and self.kind != "string":
            return value.astype(np.int64 if self.kind == "number" else np.bool_, copy=False)
        return bool(value) if self.kind == "boolean" else value


class AsNumber(NamedTuple):
    """A boolean used as 0 or 1."""

    operand: Node
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """0 or 1."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)


class Arithmetic(NamedTuple):
    """An operation of `autotile.ground.integers` on two numbers."""

    operation: Callable[[Operand, Operand, Rows], Operand]
    left: Node
    right: Node
    column: int
    """1-based column of the operation in the text."""
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Result of the operation; an error carries the column and the rows."""
        left, right = self.left.evaluate(env, where), self.right.evaluate(env, where)
        try:
            return self.operation(left, right, where)
        except NoResultError as error:
            error.column = self.column
            raise


class Not(NamedTuple):
    """Negation."""

    operand: Node
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Opposite of the operand."""
        return _opposite(self.operand.evaluate(env, where))


class Junction(NamedTuple):
    """``and`` or ``or`` over several conditions, each evaluated only where those before it leave the answer open."""

    word: Literal["and", "or"]
    operands: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Combine the conditions from left to right."""
        is_or = self.word == "or"
        undecided: Any = True
        for operand in self.operands:
            wanted = where & undecided
            if not any_row(wanted):
                break
            value = operand.evaluate(env, wanted)
            undecided = undecided & (_opposite(value) if is_or else value)
        return _opposite(undecided) if is_or else undecided


class Chain(NamedTuple):
    """A comparison such as ``a < b <= c``; each operand is evaluated once, and only where those before it hold."""

    first: Node
    links: tuple[tuple[str, Node], ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Whether every link holds."""
        holds: Any = True
        left = self.first.evaluate(env, where)
        for comparison, operand in self.links:
            wanted = where & holds
            if not any_row(wanted):
                break
            right = operand.evaluate(env, wanted)
            holds = holds & COMPARISONS[comparison](left, right)
            left = right
        return holds


class Membership(NamedTuple):
    """``x in (a, b, c)``."""

    operand: Node
    members: tuple[Node, ...]
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Whether the operand equals a member."""
        value = self.operand.evaluate(env, where)
        found: Any = False
        for member in self.members:
            found = found | (value == member.evaluate(env, where))
        return found


class Choice(NamedTuple):
    """``x if c else y``; each branch is evaluated only where it is chosen."""

    condition: Node
    chosen: Node
    otherwise: Node
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Value of the branch that each row chooses."""
        condition = self.condition.evaluate(env, where)
        if not isinstance(condition, np.ndarray):
            return (self.chosen if condition else self.otherwise).evaluate(env, where)
        first, second = where & condition, where & ~condition
        if not any_row(second):
            return self.chosen.evaluate(env, where)
        if not any_row(first):
            return self.otherwise.evaluate(env, where)
        return np.where(condition, self.chosen.evaluate(env, first), self.otherwise.evaluate(env, second))


def _opposite(value: Operand) -> Operand:
    return ~value if isinstance(value, np.ndarray) else not value
