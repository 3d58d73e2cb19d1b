"""Scalar expressions of a search-space file: a small closed language over whole numbers, booleans and strings.

A text is parsed once, every part of it checked against what is listed here, and each part's kind settled; evaluation
then works alike on one configuration and on NumPy columns of many. Nothing is ever executed as Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotile.ground import integers
from autotile.ground.integers import NoResultError, Operand, Rows
from autotile.ground.nodes import (
    Arithmetic,
    AsNumber,
    Chain,
    Choice,
    Constant,
    Environment,
    Junction,
    Kind,
    Membership,
    Name,
    Node,
    Not,
)
from autotile.ground.syntax import LanguageError, Place, SyntaxText, listing, nearest, one_line

__all__ = ["FUNCTIONS", "Expression", "Kind", "parse_expression"]

FUNCTIONS: Mapping[str, Callable[[Operand, Operand, Rows], Operand]] = {
    "min": integers.minimum,
    "max": integers.maximum,
    "ceil_div": integers.ceil_divide,
}
"""Functions that may be called; ``min`` and ``max`` take two arguments or more."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Operand, Operand, Rows], Operand]] = {
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

_CURES: Mapping[type[ast.operator], str] = {
    ast.Div: "'/' is not accepted; use '//' (rounds down) or ceil_div(a, b) (rounds up)",
    ast.BitAnd: "'&' is not accepted; use 'and'",
    ast.BitOr: "'|' is not accepted; use 'or'",
    ast.LShift: "'<<' is not accepted; multiply by 2 ** n",
    ast.RShift: "'>>' is not accepted; divide by 2 ** n with '//'",
}

_LANGUAGE = (
    "use names, whole numbers, strings, + - * // % **, comparisons, and/or/not, in, min, max, ceil_div, x if c else y"
)


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    Attributes
    ----------
    text
        The text, on one line.
    names
        Every name in it; device properties as ``"device.sm_count"``.
    kind
        What evaluation gives: ``"number"``, ``"boolean"`` or ``"string"``.
    """

    text: str
    names: frozenset[str]
    kind: Kind
    place: Place = field(repr=False)
    node: Node = field(repr=False)

    def evaluate(self, env: Mapping[str, Any]) -> Any:
        """Evaluate over scalars or columns.

        Parameters
        ----------
        env
            A value for each of ``names``: Python scalars, or arrays that broadcast against each other (whole numbers,
            bool or strings).

        Returns
        -------
        int, bool, str or numpy.ndarray
            A Python scalar where every value is one, else an array (int64, bool or string) of the broadcast shape.

        Raises
        ------
        SpecError
            A division by zero, an exponent outside of 0 to 63, or a result beyond 64 bits, in a row that the expression
            reaches. The message gives the values that led there.
        """
        try:
            value = self.node.evaluate(env, True)
        except NoResultError as error:
            problem = f"{error.problem}{_witness(error.rows, self._columns(env))}"
            raise self.place.error(problem, column=error.column, expression=self.text) from None
        shapes = [np.shape(column) for column in self._columns(env).values() if isinstance(column, np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    def _columns(self, env: Environment) -> dict[str, Operand]:
        return {name: env[name] for name in sorted(self.names)}


def parse_expression(
    text: str, kinds: Mapping[str, Kind], *, source: str = "", key: str = "", line: int | None = None
) -> Expression:
    """Parse and check an expression.

    Parameters
    ----------
    text
        The expression.
    kinds
        The kind of every name that may be used, ``device.*`` included.
    source, key, line
        Where the expression stands, for messages.

    Raises
    ------
    SpecError
        The text is not in the language, uses an unknown name, or mixes kinds.
    """
    place = Place(source, key, line)
    line_of_text = one_line(text)
    parser = _Parser(SyntaxText(line_of_text), kinds)
    try:
        node = parser.node(parser.text.parse())
    except LanguageError as error:
        raise place.error(error.problem, column=error.column, expression=line_of_text) from None
    return Expression(line_of_text, frozenset(parser.names), node.kind, place, node)


class _Parser:
    """Turns a syntax tree into nodes; whatever it does not name is refused."""

    def __init__(self, text: SyntaxText, kinds: Mapping[str, Kind]) -> None:
        self.text = text
        self.kinds = kinds
        self.names: set[str] = set()

    def node(self, tree: ast.expr) -> Node:
        node: Node
        match tree:
            case ast.Constant():
                node = self._constant(tree)
            case ast.Name(id=name):
                node = self._name(tree, name)
            case ast.Attribute(value=ast.Name(id="device"), attr=name):
                node = self._name(tree, f"device.{name}")
            case ast.BinOp():
                node = self._binary(tree)
            case ast.UnaryOp():
                node = self._unary(tree)
            case ast.BoolOp(op=word, values=operands):
                conditions = tuple(self.condition(operand) for operand in operands)
                node = Junction("and" if isinstance(word, ast.And) else "or", conditions)
            case ast.Compare():
                node = self._compare(tree)
            case ast.IfExp():
                node = self._choice(tree)
            case ast.Call():
                node = self._call(tree)
            case ast.Attribute():
                raise self.text.error(tree, "only properties of 'device' are accepted, as in device.sm_count")
            case _:
                raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")
        return node

    def number(self, tree: ast.expr) -> Node:
        node = self.node(tree)
        if node.kind == "boolean":
            return AsNumber(node)
        if node.kind == "string":
            raise self.text.error(
                tree,
                f"{self.text.excerpt(tree)} is a string where a number belongs; strings only go with ==, != and in",
            )
        return node

    def condition(self, tree: ast.expr) -> Node:
        node = self.node(tree)
        if node.kind != "boolean":
            excerpt = self.text.excerpt(tree)
            raise self.text.error(
                tree, f"{excerpt} is a {node.kind} where a condition belongs; compare it, as in {excerpt} != 0"
            )
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
                    tree, f"{self.text.excerpt(tree)} is not a whole number; only whole numbers are accepted"
                )
            case str(value):
                return Constant(value, "string")
            case _:
                raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")

    def _name(self, tree: ast.expr, name: str) -> Node:
        if name in self.kinds:
            self.names.add(name)
            return Name(name, self.kinds[name])
        device = [known for known in self.kinds if known.startswith("device.")]
        plain = [known for known in self.kinds if not known.startswith("device.")]
        if name.startswith("device.") and not device:
            raise self.text.error(tree, f"{name!r} is not accepted here (known: {listing(plain)})")
        if name.startswith("device."):
            raise self.text.error(tree, f"no property {name!r}{nearest(name, device)} (known: {listing(device)})")
        if name in FUNCTIONS:
            raise self.text.error(tree, f"{name!r} is a function; call it, as in {name}(a, b)")
        known = [*plain, "device.*"] if device else plain
        raise self.text.error(tree, f"unknown name {name!r}{nearest(name, plain)} (known: {listing(known)})")

    def _binary(self, tree: ast.BinOp) -> Node:
        operation = _OPERATIONS.get(type(tree.op))
        if operation is None:
            raise self.text.error(tree, _CURES.get(type(tree.op), f"this operator is not accepted; {_LANGUAGE}"))
        left, right = self.number(tree.left), self.number(tree.right)
        divides = isinstance(tree.op, ast.FloorDiv | ast.Mod)
        return self._arithmetic(tree, operation, left, right, divisor=tree.right if divides else None)

    def _arithmetic(
        self,
        tree: ast.expr,
        operation: Callable[[Operand, Operand, Rows], Operand],
        left: Node,
        right: Node,
        divisor: ast.expr | None = None,
    ) -> Node:
        if divisor is not None and isinstance(right, Constant) and right.value == 0:
            raise self.text.error(divisor, "division by zero")
        return Arithmetic(operation, left, right, self.text.column(tree))

    def _unary(self, tree: ast.UnaryOp) -> Node:
        match tree.op:
            case ast.Not():
                return Not(self.condition(tree.operand))
            case ast.USub():
                return Arithmetic(
                    integers.subtract, Constant(0, "number"), self.number(tree.operand), self.text.column(tree)
                )
            case ast.UAdd():
                return self.number(tree.operand)
            case _:
                raise self.text.error(tree, "'~' is not accepted; use 'not'")

    def _compare(self, tree: ast.Compare) -> Node:
        if isinstance(tree.ops[0], ast.In | ast.NotIn):
            return self._membership(tree)
        first = self.node(tree.left)
        links = []
        for operator, operand in zip(tree.ops, tree.comparators, strict=True):
            if type(operator) not in _COMPARISONS:
                raise self.text.error(
                    operand, "'is' and 'in' are not accepted in a chain; use == or split it with 'and'"
                )
            symbol = _COMPARISONS[type(operator)]
            node = self.node(operand)
            if (node.kind == "string") != (first.kind == "string"):
                raise self.text.error(operand, f"a {first.kind} is compared with a {node.kind}, which is never equal")
            if node.kind == "string" and symbol not in ("==", "!="):
                raise self.text.error(
                    operand, f"strings have no order; {symbol!r} is for numbers, strings take == and !="
                )
            links.append((symbol, node))
        return Chain(first, tuple(links))

    def _membership(self, tree: ast.Compare) -> Node:
        if len(tree.ops) > 1:
            raise self.text.error(tree.comparators[1], "'in' is not accepted in a chain; split it with 'and'")
        members = tree.comparators[0]
        if not isinstance(members, ast.List | ast.Tuple) or not members.elts:
            raise self.text.error(members, "'in' takes a list of values, as in BM in (64, 128)")
        operand = self.node(tree.left)
        nodes = tuple(self.node(member) for member in members.elts)
        for member, node in zip(members.elts, nodes, strict=True):
            if (node.kind == "string") != (operand.kind == "string"):
                raise self.text.error(member, f"a {operand.kind} is looked for among values with a {node.kind}")
        found = Membership(operand, nodes)
        return Not(found) if isinstance(tree.ops[0], ast.NotIn) else found

    def _choice(self, tree: ast.IfExp) -> Node:
        condition = self.condition(tree.test)
        chosen, otherwise = self.node(tree.body), self.node(tree.orelse)
        if chosen.kind == otherwise.kind:
            return Choice(condition, chosen, otherwise, chosen.kind)
        return Choice(condition, self.number(tree.body), self.number(tree.orelse), "number")

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in FUNCTIONS:
            called = self.text.excerpt(tree.func)
            raise self.text.error(
                tree, f"{called!r} cannot be called{nearest(called, FUNCTIONS)} (functions: {listing(FUNCTIONS)})"
            )
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self.text.error(tree, f"{name} takes plain arguments only, as in {name}(a, b)")
        if len(tree.args) < 2 or (name == "ceil_div" and len(tree.args) > 2):
            wanted = "two arguments" if name == "ceil_div" else "two arguments or more"
            raise self.text.error(tree, f"{name} takes {wanted}, got {len(tree.args)}")
        result, *others = (self.number(argument) for argument in tree.args)
        for other in others:
            divisor = tree.args[1] if name == "ceil_div" else None
            result = self._arithmetic(tree, FUNCTIONS[name], result, other, divisor)
        return result


def _witness(rows: Rows, columns: Mapping[str, Operand]) -> str:
    """Say the values of the first row at fault: ``" where BM = 64, TM = 0"``."""
    if not columns:
        return ""
    shape = np.broadcast_shapes(np.shape(rows), *(np.shape(column) for column in columns.values()))
    index = np.unravel_index(int(np.argmax(np.broadcast_to(rows, shape))), shape)
    values = {name: np.broadcast_to(column, shape)[index].item() for name, column in columns.items()}
    return " where " + ", ".join(f"{name} = {value}" for name, value in values.items())
