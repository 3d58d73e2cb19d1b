"""Scalar expressions of a search-space file: a closed language over whole and real numbers, booleans and strings.

The parser accepts only the parts of a syntax tree that are listed here and determines the kind of each.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from autotile.core.frozen import cached_property, dataclass
from autotile.errors import listing, nearest
from autotile.kernel import real_numbers, whole_numbers
from autotile.kernel.nodes import (
    FUNCTIONS,
    LOGICAL,
    NOUNS,
    OPERATORS,
    AsNumber,
    AsReal,
    BooleanOperation,
    Comparison,
    Conditional,
    Constant,
    Environment,
    Function,
    Kind,
    Membership,
    Name,
    Node,
    Not,
    Operation,
    Operator,
    compiled,
)
from autotile.kernel.syntax import UNKNOWN_LOCATION, ExpressionError, ExpressionText, Location, canonical_text, one_line
from autotile.kernel.whole_numbers import EvaluationError, Operand, Rows

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}

_LANGUAGE = (
    "use names, numbers, strings, + - * / // % ** & | ^ ~ << >>, comparisons, and/or/not, in, x if c else y and the "
    f"functions {', '.join(FUNCTIONS)}"
)


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
        """Convert a whole or a real number."""
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
            raise self.text.error(tree, f"{excerpt} is {NOUNS[node.kind]} where a condition is expected; {hint}")
        return node

    def _constant(self, tree: ast.Constant) -> Node:
        match tree.value:
            case bool(value):
                return Constant(value, "boolean")
            case int(value) if value <= whole_numbers.INT64_MAX:
                return Constant(value, "number")
            case int():
                raise self.text.error(tree, "the number does not fit in 64 bits")
            case float(value) if np.isfinite(value):
                return Constant(value, "real")
            case float():
                raise self.text.error(tree, "the number does not fit in float64")
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
            raise self.text.error(tree, f"{name!r} is a function; call it, as in {FUNCTIONS[name].usage}")
        if name.startswith("device."):
            known = listing(properties or plain)
            what = "is not a property" if properties else "is not accepted here"
            raise self.text.error(tree, f"{name!r} {what}{nearest(name, properties)} (known: {known})")
        known = listing([*plain, "device.*"] if properties else plain)
        raise self.text.error(tree, f"unknown name {name!r}{nearest(name, plain)} (known: {known})")

    def _binary(self, tree: ast.BinOp) -> Node:
        known = OPERATORS.get(type(tree.op))
        if known is None:
            raise self.text.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        nodes = [self.node(tree.left), self.node(tree.right)]
        if isinstance(tree.op, LOGICAL) and all(node.kind == "boolean" for node in nodes):
            assert known.whole is not None
            return Operation(known.whole, tuple(nodes), self.text.column(tree), "boolean")
        trees = (tree.left, tree.right)
        operands = tuple(self._as_number(part, node) for part, node in zip(trees, nodes, strict=True))
        return self._operation(known, trees, operands, self.text.column(tree))

    def _operation(
        self, known: Operator | Function, trees: tuple[ast.expr, ...], operands: tuple[Node, ...], column: int
    ) -> Operation:
        """Apply an operation to numbers: to whole ones if all are and it can, otherwise to real ones."""
        if known.divides:
            column = self.text.column(trees[-1])
            if isinstance(operands[-1], Constant) and operands[-1].value == 0:
                raise self.text.error(trees[-1], "division by zero")
        real_tree = next((tree for tree, node in zip(trees, operands, strict=True) if node.kind == "real"), None)
        if known.real is None and real_tree is not None:
            hint = "round it with floor(), ceil() or round(), or divide with // or ceil_div"
            excerpt = self.text.excerpt(real_tree)
            raise self.text.error(real_tree, f"{excerpt} is a real number where a whole number is expected; {hint}")
        result = known.result if isinstance(known, Function) else None
        if known.whole is not None and real_tree is None:
            return Operation(known.whole, operands, column, result or "number")
        assert known.real is not None
        return Operation(known.real, tuple(map(_as_real, operands)), column, result or "real")

    def _unary(self, tree: ast.UnaryOp) -> Node:
        column = self.text.column(tree)
        match tree.op:
            case ast.Not():
                return Not(self.condition(tree.operand))
            case ast.USub():
                operand = self._number(tree.operand)
                if operand.kind == "real":
                    return Operation(real_numbers.subtract, (Constant(0.0, "real"), operand), column, "real")
                return Operation(whole_numbers.subtract, (Constant(0, "number"), operand), column, "number")
            case ast.UAdd():
                return self._number(tree.operand)
            case _:
                operand = self.node(tree.operand)
                if operand.kind != "number":
                    excerpt = self.text.excerpt(tree.operand)
                    problem = f"'~' takes a whole number, and {excerpt} is {NOUNS[operand.kind]}"
                    raise self.text.error(tree, f"{problem}; use 'not'" if operand.kind == "boolean" else problem)
                return Operation(whole_numbers.invert, (operand,), column, "number")

    def _comparison(self, tree: ast.Compare) -> Node:
        first = self.node(tree.left)
        links = []
        self._check_precedence(tree)
        for operator, operand in zip(tree.ops, tree.comparators, strict=True):
            symbol = _COMPARISONS.get(type(operator))
            if symbol is None:
                raise self.text.error(operand, "'is' is not accepted, nor 'in' in a chain; use == or split with 'and'")
            node = self.node(operand)
            self._check_comparable(first, operand, node)
            if node.kind == "string" and symbol not in ("==", "!="):
                raise self.text.error(operand, f"strings have no order for {symbol!r}; they take ==, != and in")
            links.append((symbol, node))
        first, *operands = _alike([first, *(node for _, node in links)])
        return Comparison(first, tuple((symbol, node) for (symbol, _), node in zip(links, operands, strict=True)))

    def _membership(self, tree: ast.Compare) -> Node:
        members = tree.comparators[0]
        if not isinstance(members, ast.List | ast.Tuple) or not members.elts:
            raise self.text.error(members, "'in' takes a list of values, as in BM in (64, 128)")
        operand = self.node(tree.left)
        nodes = tuple(self.node(member) for member in members.elts)
        for member, node in zip(members.elts, nodes, strict=True):
            self._check_comparable(operand, member, node)
        operand, *members_alike = _alike([operand, *nodes])
        found = Membership(operand, tuple(members_alike))
        return Not(found) if isinstance(tree.ops[0], ast.NotIn) else found

    def _check_comparable(self, first: Node, tree: ast.expr, node: Node) -> None:
        if (node.kind == "string") != (first.kind == "string"):
            raise self.text.error(
                tree, f"{NOUNS[first.kind]} is compared with {NOUNS[node.kind]}; they are never equal"
            )

    def _check_precedence(self, tree: ast.Compare) -> None:
        """Refuse ``a > 1 & b > 2``, which Python reads as the chain ``a > (1 & b) > 2``."""
        for operand in tree.comparators[:-1]:
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, LOGICAL) and not self._is_enclosed(operand):
                problem = "'&', '|' and '^' bind more tightly than a comparison; use 'and' or 'or', or add parentheses"
                raise self.text.error(operand, problem)

    def _is_enclosed(self, tree: ast.expr) -> bool:
        """Return whether a subexpression stands in parentheses of its own."""
        end = len(self.text.text.encode()[: tree.end_col_offset].decode())
        return self.text.text[: self.text.column(tree) - 1].rstrip().endswith("(") and self.text.text[
            end:
        ].lstrip().startswith(")")

    def _conditional(self, tree: ast.IfExp) -> Node:
        condition = self.condition(tree.test)
        chosen, otherwise = self.node(tree.body), self.node(tree.orelse)
        if chosen.kind != otherwise.kind:
            chosen, otherwise = self._as_number(tree.body, chosen), self._as_number(tree.orelse, otherwise)
        if chosen.kind != otherwise.kind:
            chosen, otherwise = _as_real(chosen), _as_real(otherwise)
        return Conditional(condition, chosen, otherwise, chosen.kind)

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in FUNCTIONS:
            called = self.text.excerpt(tree.func)
            hint = f"{nearest(called, FUNCTIONS)} (functions: {listing(FUNCTIONS)})"
            raise self.text.error(tree, f"{called!r} cannot be called{hint}")
        known = FUNCTIONS[name]
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self.text.error(tree, f"{name} takes plain arguments only, as in {known.usage}")
        if len(tree.args) not in known.arguments:
            raise self.text.error(tree, f"{name} takes {_count_text(known.arguments)}, got {len(tree.args)}")
        operands = [self._number(argument) for argument in tree.args]
        column = self.text.column(tree)
        if len(operands) <= 2:
            return self._operation(known, tuple(tree.args), tuple(operands), column)
        result, *others = operands
        for other, part in zip(others, tree.args[1:], strict=True):
            result = self._operation(known, (tree.args[0], part), (result, other), column)
        return result

    def _unsupported(self, tree: ast.expr) -> ExpressionError:
        return self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes
    ----------
    text
        Text, on one line.
    names
        All names in it; device properties as ``"device.sm_count"``.
    kind
        Kind of the result: ``"number"``, ``"real"``, ``"boolean"`` or ``"string"``.
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
            Value of each of ``names``: Python scalars, or arrays of numbers, booleans or strings that broadcast
            against each other.

        Returns
        -------
        int, float, bool, str or numpy.ndarray
            A Python scalar if all values are scalars, otherwise a read-only array (int64, float64, bool or string) of
            the broadcast shape.

        Raises
        ------
        SpecError
            A division by zero, an exponent outside 0 to 63, a result that exceeds 64 bits, or a real one that is not
            finite, in a row that is evaluated. The message gives the values of the names in that row.
        """
        try:
            value = self.node.evaluate(env, True)
        except EvaluationError as error:
            problem = f"{error.problem}{_first_values(error.rows, self._columns(env))}"
            raise self.location.error(problem, column=error.column, expression=self.text) from None
        shapes = [column.shape for name in self.names if isinstance(column := env[name], np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    def value(self, env: Mapping[str, Any]) -> Any:
        """Evaluate over Python scalars, as `evaluate` does but several times faster.

        Raises
        ------
        SpecError
            As for `evaluate`.
        """
        try:
            return self._compiled(env)
        except (EvaluationError, ArithmeticError):
            return self.evaluate(env)  # which raises with the place in the text

    @cached_property
    def _compiled(self) -> Callable[[Mapping[str, Any]], Any]:
        return compiled(self.node)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def as_number(self) -> Expression:
        """Return the condition as a number, 0 or 1."""
        return replace(self, kind="number", node=AsNumber(self.node))

    def rounded(self) -> Expression:
        """Return a real expression rounded to the nearest whole number; any other as it is."""
        if self.kind != "real":
            return self
        return replace(self, kind="number", node=Operation(real_numbers.nearest_whole, (self.node,), 1, "number"))

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


def _as_real(node: Node) -> Node:
    """Return a number as a real number."""
    if isinstance(node, Constant):
        return Constant(float(node.value), "real")
    return node if node.kind == "real" else AsReal(node)


def _alike(nodes: list[Node]) -> list[Node]:
    """Return operands that are compared: all as real numbers if one is."""
    return [_as_real(node) for node in nodes] if any(node.kind == "real" for node in nodes) else nodes


def _count_text(counts: range) -> str:
    """Return accepted counts of arguments as text: ``"1 argument"``, ``"2 to 20 arguments"``."""
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} arguments"
    return "1 argument" if counts[0] == 1 else f"{counts[0]} arguments"


def _first_values(rows: Rows, columns: Mapping[str, Operand]) -> str:
    """Return the values in the first of the given rows as text: ``" where BM = 64, TM = 0"``."""
    if not columns:
        return ""
    shape = np.broadcast_shapes(np.shape(rows), *(np.shape(column) for column in columns.values()))
    index = np.unravel_index(int(np.argmax(np.broadcast_to(rows, shape))), shape)
    values = {name: np.broadcast_to(column, shape)[index].item() for name, column in columns.items()}
    return " where " + ", ".join(f"{name} = {value}" for name, value in values.items())
