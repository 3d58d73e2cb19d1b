"""Nodes of a parsed expression.

``where`` selects the rows to evaluate, as in NumPy's ufuncs. ``and``, ``or`` and ``x if c else y`` narrow it, so that
no row fails on an operand that Python would not have evaluated. Values in the other rows are undefined and never used.

The nodes are named tuples: the first look-up of a process defines them all, and defining a dataclass takes six times as
long.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from autotile.kernel import real_numbers as real
from autotile.kernel import whole_numbers as whole
from autotile.kernel.whole_numbers import EvaluationError, Operand, Rows, any_row

Kind = Literal["number", "real", "boolean", "string"]
"""Kind of a value: a whole number of 64 bits, a real number (float64), a condition, or a text."""

NOUNS: Mapping[Kind, str] = {
    "number": "a whole number",
    "real": "a real number",
    "boolean": "a condition",
    "string": "a string",
}
"""Each kind with its article, for messages."""

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

    value: int | float | bool | str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value."""
        return self.value


class Name(NamedTuple):
    """A parameter, a size, a flag or a property of the device."""

    name: str
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Look up the name; columns of numbers of any width become int64 or float64, those of flags bool."""
        value, kind = env[self.name], _TYPES.get(self.kind)
        if isinstance(value, np.ndarray) and kind is not None:
            return value.astype(kind[0], copy=False)
        return value if kind is None or self.kind == "number" else kind[1](value)


_TYPES: Mapping[Kind, tuple[type[np.generic], type]] = {
    "number": (np.int64, int),
    "real": (np.float64, float),
    "boolean": (np.bool_, bool),
}
"""Types of a column and of a scalar."""


class AsNumber(NamedTuple):
    """A boolean used as 0 or 1."""

    operand: Node
    kind: Kind = "number"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return 0 or 1."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)


class AsReal(NamedTuple):
    """A whole number, or a boolean as 0 or 1, used as a real number."""

    operand: Node
    kind: Kind = "real"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the value as float64."""
        value = self.operand.evaluate(env, where)
        return value.astype(np.float64) if isinstance(value, np.ndarray) else float(value)


class Operation(NamedTuple):
    """An operation on numbers, which are all whole or all real."""

    function: Callable[..., Operand]
    """Function of `autotile.kernel.whole_numbers` or `real_numbers`, of the operands and the selected rows."""
    operands: tuple[Node, ...]
    column: int
    """1-based column of the operation in the text."""
    kind: Kind

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return the result; an error has the column and the rows."""
        values = [operand.evaluate(env, where) for operand in self.operands]
        try:
            return self.function(*values, where)
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


def compiled(node: Node) -> Callable[[Environment], Any]:
    """Return a function of the values of names, all scalars: what `Node.evaluate` does, four times faster.

    It raises `EvaluationError` or an `ArithmeticError` where `Node.evaluate` raises, without a column.
    """
    made: Callable[[Environment], Any]
    match node:
        case Constant(value):
            made = lambda env: value  # noqa: E731 - as are the others
        case Name(name, kind):
            made = operator.itemgetter(name)
            if kind in ("boolean", "real"):
                made = _applied(_TYPES[kind][1], made)
        case AsNumber(operand):
            made = _applied(int, compiled(operand))
        case AsReal(operand):
            made = _applied(float, compiled(operand))
        case Not(operand):
            made = _applied(operator.not_, compiled(operand))
        case Operation(function, operands):
            made = _compiled_operation(function, [compiled(operand) for operand in operands])
        case BooleanOperation(word, operands):
            made = _compiled_boolean(word == "or", [compiled(operand) for operand in operands])
        case Comparison(first, links):
            made = _compiled_comparison(compiled(first), [(COMPARISONS[sign], compiled(part)) for sign, part in links])
        case Membership(operand, members):
            left, others = compiled(operand), [compiled(member) for member in members]
            made = lambda env: left(env) in [other(env) for other in others]  # noqa: E731
        case Conditional(condition, chosen, otherwise):
            holds, first_of, second_of = compiled(condition), compiled(chosen), compiled(otherwise)
            made = lambda env: first_of(env) if holds(env) else second_of(env)  # noqa: E731
        case _:  # such as a rule that is a function in Python
            made = lambda env: node.evaluate(env, True)  # noqa: E731
    return made


def _applied(function: Callable[[Any], Any], operand: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
    return lambda env: function(operand(env))


_EXACT: Mapping[Callable[..., Operand], Callable[[Any, Any], Any]] = {
    whole.add: operator.add,
    whole.subtract: operator.sub,
    whole.multiply: operator.mul,
    whole.floor_divide: operator.floordiv,
    whole.modulo: operator.mod,
    whole.ceil_divide: lambda left, right: -(-left // right),
}
"""Python's function for those of two whole numbers, which is exact as long as the result fits in 64 bits."""
_BUILT_IN: Mapping[Callable[..., Operand], Callable[[Any, Any], Any]] = {whole.minimum: min, whole.maximum: max}


def _compiled_operation(
    function: Callable[..., Operand], operands: Sequence[Callable[[Environment], Any]]
) -> Callable[[Environment], Any]:
    if len(operands) != 2:
        return lambda env: function(*[operand(env) for operand in operands], True)
    left, right = operands
    exact = _EXACT.get(function)
    if exact is not None:

        def evaluate(env: Environment) -> Any:
            value = exact(left(env), right(env))
            return value if whole.INT64_MIN <= value <= whole.INT64_MAX else function(left(env), right(env), True)

        return evaluate
    built_in = _BUILT_IN.get(function)
    if built_in is not None:
        return lambda env: built_in(left(env), right(env))
    return lambda env: function(left(env), right(env), True)


def _compiled_boolean(is_or: bool, operands: Sequence[Callable[[Environment], Any]]) -> Callable[[Environment], Any]:
    def evaluate(env: Environment) -> bool:
        for operand in operands:
            if bool(operand(env)) is is_or:
                return is_or
        return not is_or

    return evaluate


def _compiled_comparison(
    first: Callable[[Environment], Any],
    links: Sequence[tuple[Callable[[Any, Any], Any], Callable[[Environment], Any]]],
) -> Callable[[Environment], Any]:
    if len(links) == 1:
        compare, second = links[0]
        return lambda env: compare(first(env), second(env))

    def evaluate(env: Environment) -> bool:
        left = first(env)
        for compare, operand in links:
            right = operand(env)
            if not compare(left, right):
                return False
            left = right
        return True

    return evaluate


def _negation(value: Operand) -> Operand:
    return ~value if isinstance(value, np.ndarray) else not value


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
