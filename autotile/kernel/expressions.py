"""Scalar expressions of a search-space file: a closed language over integers, booleans and strings.

The parser accepts only the parts of a syntax tree that are listed here and determines the kind of each.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from autotile.core.frozen import dataclass
from autotile.errors import listing, nearest
from autotile.kernel import nodes as integers
from autotile.kernel.nodes import (
    Arithmetic,
    AsNumber,
    BooleanOperation,
    Comparison,
    Conditional,
    Constant,
    Environment,
    EvaluationError,
    Kind,
    Membership,
    Name,
    Node,
    Not,
    Operand,
    Rows,
)
from autotile.kernel.syntax import UNKNOWN_LOCATION, ExpressionError, ExpressionText, Location, canonical_text, one_line

Operation = Callable[[Operand, Operand, Rows], Operand]
"""An operation of `autotile.kernel.nodes` on two operands, over the selected rows."""

FUNCTIONS: Mapping[str, Operation] = {
    "min": integers.minimum,
    "max": integers.maximum,
    "ceil_div": integers.ceil_divide,
}
"""Functions of the language; ``min`` and ``max`` take two or more arguments."""

_OPERATIONS: Mapping[type[ast.operator], Operation] = {
    ast.Add: integers.add,
    ast.Sub: integers.subtract,
    ast.Mult: integers.multiply,
    ast.FloorDiv: integers.floor_divide,
    ast.Mod: integers.modulo,
    ast.Pow: integers.power,
}

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}

_HINTS: Mapping[type[ast.operator], str] = {
    ast.Div: "'/' is not accepted; use '//' (rounds down) or ceil_div(a, b) (rounds up)",
    ast.BitAnd: "'&' is not accepted; use 'and'",
    ast.BitOr: "'|' is not accepted; use 'or'",
    ast.LShift: "'<<' is not accepted; multiply with '* 2 ** n'",
    ast.RShift: "'>>' is not accepted; divide with '// 2 ** n'",
}

_LANGUAGE = (
    "use names, whole numbers, strings, + - * // % **, comparisons, and/or/not, in, min, max, ceil_div, x if c else y"
)

MAX_ARGUMENTS = 20
"""Maximum number of arguments of a call."""


class ExpressionParser:
    """Converts a syntax tree to nodes; methods raise `ExpressionError` for parts that are not in the language.

    Parameters
    ----------
    text
        Text of the tree, for messages.
    kinds
        Kind of each name that the expression may use.

    Attributes
    ----------
    names
        Names used so far.
    """

    def __init__(self, text: ExpressionText, kinds: Mapping[str, Kind]) -> None:
        self.text = text
        self.kinds = kinds
        self.names: set[str] = set()

    def node(self, tree: ast.expr) -> Node:
        """Convert an expression of any kind."""
        node: Node
        match tree:
            case ast.Constant():
                node = self._constant(tree)
            case ast.Name(id=name):
                node = self._name(tree, name)
            case ast.Attribute(value=ast.Name(id="device" | "computed" as group), attr=name):
                node = self._name(tree, f"{group}.{name}")
            case ast.BinOp():
                node = self._binary(tree)
            case ast.UnaryOp():
                node = self._unary(tree)
            case ast.BoolOp(op=word, values=operands):
                conditions = tuple(self.condition(operand) for operand in operands)
                node = BooleanOperation("and" if isinstance(word, ast.And) else "or", conditions)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                node = self._membership(tree)
            case ast.Compare():
                node = self._comparison(tree)
            case ast.IfExp():
                node = self._conditional(tree)
            case ast.Call():
                node = self._call(tree)
            case ast.Attribute():
                raise self.text.error(tree, "only properties of 'device' are accepted, as in device.sm_count")
            case _:
                raise self._unsupported(tree)
        return node

    def _number(self, tree: ast.expr) -> Node:
        return self._as_number(tree, self.node(tree))

    def _as_number(self, tree: ast.expr, node: Node) -> Node:
        if node.kind == "string":
            excerpt = self.text.excerpt(tree)
            raise self.text.error(tree, f"{excerpt} is a string where a number is expected; strings take ==, != and in")
        return AsNumber(node) if node.kind == "boolean" else node

    def condition(self, tree: ast.expr) -> Node:
        """Convert a condition."""
        node = self.node(tree)
        if node.kind != "boolean":
            excerpt = self.text.excerpt(tree)
            hint = f"compare it, as in {excerpt} != 0"
            raise self.text.error(tree, f"{excerpt} is a {node.kind} where a condition is expected; {hint}")
        return node

    def _constant(self, tree: ast.Constant) -> Node:
        match tree.value:
            case bool(value):
                return Constant(value, "boolean")
            case int(value) if value <= integers.INT64_MAX:
                return Constant(value, "number")
            case int():
                raise self.text.error(tree, "the number does not fit in 64 bits")
            case float():
                raise self.text.error(
                    tree, f"{self.text.excerpt(tree)} is not a whole number, and only those are accepted"
                )
            case str(value):
                return Constant(value, "string")
            case _:
                raise self._unsupported(tree)

    def _name(self, tree: ast.expr, name: str) -> Node:
        if name in self.kinds:
            self.names.add(name)
            return Name(name, self.kinds[name])
        properties = [known for known in self.kinds if known.startswith("device.")]
        plain = [known for known in self.kinds if not known.startswith("device.")]
        if name in FUNCTIONS:
            raise self.text.error(tree, f"{name!r} is a function; call it, as in {name}(a, b)")
        if name.startswith("device."):
            known = listing(properties or plain)
            what = "is not a property" if properties else "is not accepted here"
            raise self.text.error(tree, f"{name!r} {what}{nearest(name, properties)} (known: {known})")
        known = listing([*plain, "device.*"] if properties else plain)
        raise self.text.error(tree, f"unknown name {name!r}{nearest(name, plain)} (known: {known})")

    def _binary(self, tree: ast.BinOp) -> Node:
        operation = _OPERATIONS.get(type(tree.op))
        if operation is None:
            raise self.text.error(tree, _HINTS.get(type(tree.op), f"this operator is not accepted; {_LANGUAGE}"))
        left, right = self._number(tree.left), self._number(tree.right)
        if isinstance(tree.op, ast.FloorDiv | ast.Mod):
            return self._division(operation, left, right, tree.right)
        return Arithmetic(operation, left, right, self.text.column(tree))

    def _division(self, operation: Operation, left: Node, right: Node, divisor: ast.expr) -> Node:
        if isinstance(right, Constant) and right.value == 0:
            raise self.text.error(divisor, "division by zero")
        return Arithmetic(operation, left, right, self.text.column(divisor))

    def _unary(self, tree: ast.UnaryOp) -> Node:
        match tree.op:
            case ast.Not():
                return Not(self.condition(tree.operand))
            case ast.USub():
                zero = Constant(0, "number")
                return Arithmetic(integers.subtract, zero, self._number(tree.operand), self.text.column(tree))
            case ast.UAdd():
                return self._number(tree.operand)
            case _:
                raise self.text.error(tree, "'~' is not accepted; use 'not'")

    def _comparison(self, tree: ast.Compare) -> Node:
        first = self.node(tree.left)
        links = []
        for operator, operand in zip(tree.ops, tree.comparators, strict=True):
            symbol = _COMPARISONS.get(type(operator))
            if symbol is None:
                raise self.text.error(operand, "'is' is not accepted, nor 'in' in a chain; use == or split with 'and'")
            node = self.node(operand)
            self._check_comparable(first, operand, node)
            if node.kind == "string" and symbol not in ("==", "!="):
                raise self.text.error(operand, f"strings have no order for {symbol!r}; they take ==, != and in")
            links.append((symbol, node))
        return Comparison(first, tuple(links))

    def _membership(self, tree: ast.Compare) -> Node:
        members = tree.comparators[0]
        if not isinstance(members, ast.List | ast.Tuple) or not members.elts:
            raise self.text.error(members, "'in' takes a list of values, as in BM in (64, 128)")
        operand = self.node(tree.left)
        nodes = tuple(self.node(member) for member in members.elts)
        for member, node in zip(members.elts, nodes, strict=True):
            self._check_comparable(operand, member, node)
        found = Membership(operand, nodes)
        return Not(found) if isinstance(tree.ops[0], ast.NotIn) else found

    def _check_comparable(self, first: Node, tree: ast.expr, node: Node) -> None:
        if (node.kind == "string") != (first.kind == "string"):
            raise self.text.error(tree, f"a {first.kind} is compared with a {node.kind}; they are never equal")

    def _conditional(self, tree: ast.IfExp) -> Node:
        condition = self.condition(tree.test)
        chosen, otherwise = self.node(tree.body), self.node(tree.orelse)
        if chosen.kind != otherwise.kind:
            chosen, otherwise = self._as_number(tree.body, chosen), self._as_number(tree.orelse, otherwise)
        return Conditional(condition, chosen, otherwise, chosen.kind)

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in FUNCTIONS:
            called = self.text.excerpt(tree.func)
            hint = f"{nearest(called, FUNCTIONS)} (functions: {listing(FUNCTIONS)})"
            raise self.text.error(tree, f"{called!r} cannot be called{hint}")
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self.text.error(tree, f"{name} takes plain arguments only, as in {name}(a, b)")
        maximum = 2 if name == "ceil_div" else MAX_ARGUMENTS
        if not 2 <= len(tree.args) <= maximum:
            expected = "2 arguments" if maximum == 2 else f"2 to {maximum} arguments"
            raise self.text.error(tree, f"{name} takes {expected}, got {len(tree.args)}")
        result, *others = (self._number(argument) for argument in tree.args)
        if name == "ceil_div":
            return self._division(FUNCTIONS[name], result, others[0], tree.args[1])
        for other in others:
            result = Arithmetic(FUNCTIONS[name], result, other, self.text.column(tree))
        return result

    def _unsupported(self, tree: ast.expr) -> ExpressionError:
        return self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    Attributes
    ----------
    text
        Text, on one line.
    names
        All names in it; device properties as ``"device.sm_count"``.
    kind
        Kind of the result: ``"number"``, ``"boolean"`` or ``"string"``.
    """

    text: str
    names: frozenset[str]
    kind: Kind
    location: Location = field(repr=False, compare=False)
    node: Node = field(repr=False)

    def evaluate(self, env: Mapping[str, Any]) -> Any:
        """Evaluate over scalars or columns.

        Parameters
        ----------
        env
            Value of each of ``names``: Python scalars, or arrays of integers, booleans or strings that broadcast
            against each other.

        Returns
        -------
        int, bool, str or numpy.ndarray
            A Python scalar if all values are scalars, otherwise a read-only array (int64, bool or string) of the
            broadcast shape.

        Raises
        ------
        SpecError
            A division by zero, an exponent outside 0 to 63, or a result that exceeds 64 bits, in a row that is
            evaluated. The message gives the values of the names in that row.
        """
        try:
            value = self.node.evaluate(env, True)
        except EvaluationError as error:
            problem = f"{error.problem}{_first_values(error.rows, self._columns(env))}"
            raise self.location.error(problem, column=error.column, expression=self.text) from None
        shapes = [column.shape for name in self.names if isinstance(column := env[name], np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def as_number(self) -> Expression:
        """Return the condition as a number, 0 or 1."""
        return replace(self, kind="number", node=AsNumber(self.node))

    def _columns(self, env: Environment) -> dict[str, Operand]:
        return {name: env[name] for name in sorted(self.names)}


def parse_expression(text: str, kinds: Mapping[str, Kind], location: Location = UNKNOWN_LOCATION) -> Expression:
    """Parse and check an expression.

    Parameters
    ----------
    text
        The expression.
    kinds
        Kind of each name that it may use, including ``device.*``.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not in the language, uses an unknown name, or mixes kinds.
    """
    line_of_text = one_line(text)
    parser = ExpressionParser(ExpressionText(line_of_text), kinds)
    try:
        node = parser.node(parser.text.parse())
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line_of_text) from None
    return Expression(line_of_text, frozenset(parser.names), node.kind, location, node)


def _first_values(rows: Rows, columns: Mapping[str, Operand]) -> str:
    """Return the values in the first of the given rows as text: ``" where BM = 64, TM = 0"``."""
    if not columns:
        return ""
    shape = np.broadcast_shapes(np.shape(rows), *(np.shape(column) for column in columns.values()))
    index = np.unravel_index(int(np.argmax(np.broadcast_to(rows, shape))), shape)
    values = {name: np.broadcast_to(column, shape)[index].item() for name, column in columns.items()}
    return " where " + ", ".join(f"{name} = {value}" for name, value in values.items())
