"""Parser of array expressions: converts each part of a syntax tree to a closure."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autotile.errors import listing, nearest
from autotile.kernel import array_shapes as shapes
from autotile.kernel.array_evaluation import (
    ARITHMETIC,
    BITS,
    Closure,
    Context,
    comparing,
    elements_at,
    has_shape,
    inverted,
    is_array,
    operand,
    plain,
    result_of,
    shape_of,
    sliced,
)
from autotile.kernel.array_functions import OPTION_TYPES, ArrayFunction, bounded, numeric
from autotile.kernel.expressions import ExpressionParser
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import ExpressionError, ExpressionText
from autotile.kernel.whole_numbers import EvaluationError

_CONSTANTS = {"pi": math.pi, "inf": math.inf}

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}

_FINITE_OF_INFINITE = ("maximum", "minimum", "where", "clip")
"""Functions whose result may be finite although an operand is infinite."""

_MAX_ITEMS = 64
"""Maximum number of arrays in a list, and of indices."""

_LANGUAGE = (
    "use names, numbers, + - * / // % ** @, & | ^ ~ << >>, comparisons, x[i, a:b], x.T, x if c else y and functions"
)


class ArrayParser:
    """Converts syntax trees to closures; raises `ExpressionError` for what is not in the language.

    Parameters
    ----------
    text
        Text of the tree, for messages.
    known
        Names of arrays and scalars.
    kinds
        Kind of each name that scalar expressions may use.
    functions
        Functions by name.

    Attributes
    ----------
    used
        Names used so far, without those that the text assigns.
    """

    def __init__(
        self,
        text: ExpressionText,
        known: tuple[str, ...],
        kinds: Mapping[str, Kind],
        functions: Mapping[str, ArrayFunction],
    ) -> None:
        self.text = text
        self.known = known
        self.kinds = kinds
        self.functions = functions
        self.used: set[str] = set()
        self._locals: set[str] = set()
        self._converters: Mapping[type[ast.expr], Callable[[Any], Closure]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.Compare: self._comparison,
            ast.IfExp: self._conditional,
            ast.Call: self._call,
            ast.Subscript: self._subscript,
            ast.Attribute: self._attribute,
        }

    def program(self) -> Closure:
        """Convert the text: assignments, and the expression of the result."""
        assigned, last = self.text.parse_statements()
        steps: list[tuple[str, Closure]] = []
        for name, tree in assigned:
            if name in self.known or name in self._locals or name in self.functions:
                raise self.text.error(tree, f"{name!r} already has a meaning; assign to another name")
            steps.append((name, self.closure(tree)))
            self._locals.add(name)
        result = self.closure(last)
        if not steps:
            return result

        def run(context: Context) -> Any:
            env = dict(context.env)
            context = context._replace(env=env)
            for name, step in steps:
                env[name] = step(context)
            return result(context)

        return run

    def closure(self, tree: ast.expr) -> Closure:
        """Convert an expression."""
        known = self._converters.get(type(tree))
        if known is not None:
            return known(tree)
        if isinstance(tree, ast.BoolOp):
            raise self.text.error(tree, "'and' and 'or' take single conditions; combine arrays with & and |")
        raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")

    def _attribute(self, tree: ast.Attribute) -> Closure:
        if tree.attr != "T":
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")
        reverse = self._computed(tree, lambda shape: shape[::-1], lambda xp, x: xp.transpose(x))
        return reverse(self.closure(tree.value))

    def _constant(self, tree: ast.Constant) -> Closure:
        value = tree.value
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a number; {_LANGUAGE}")
        try:
            value = bounded(value) if isinstance(value, int) else value
        except OverflowError:
            raise self.text.error(tree, "the number does not fit in float64") from None
        return lambda context: value

    def _name(self, tree: ast.Name) -> Closure:
        name = tree.id
        if name in self._locals:
            return lambda context: context.env[name]
        if name in self.known:
            self.used.add(name)
            return lambda context: operand(context.env[name])
        if name in _CONSTANTS:
            return lambda context: _CONSTANTS[name]
        hint = "; it is a function" if name in self.functions else nearest(name, self.known)
        raise self.text.error(tree, f"unknown name {name!r}{hint} (known: {listing(self.known)})")

    def _unary(self, tree: ast.UnaryOp) -> Closure:
        operand = self.closure(tree.operand)
        match tree.op:
            case ast.USub():
                return self._computed(tree, shapes.same, lambda xp, x: -numeric(x))(operand)
            case ast.UAdd():
                return operand
            case ast.Invert():
                return self._computed(tree, shapes.same, inverted)(operand)
            case _:
                raise self.text.error(tree, "'not' takes a single condition; use ~ for arrays")

    def _binary(self, tree: ast.BinOp) -> Closure:
        left, right = self.closure(tree.left), self.closure(tree.right)
        if isinstance(tree.op, ast.MatMult):
            return self._product(tree, left, right)
        compute = ARITHMETIC.get(type(tree.op)) or BITS.get(type(tree.op))
        if compute is None:
            raise self.text.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        divides = isinstance(tree.op, ast.Div | ast.FloorDiv | ast.Mod)
        return self._computed(tree, shapes.elementwise, compute, divides=divides)(left, right)

    def _product(self, tree: ast.expr, left: Closure, right: Closure) -> Closure:
        def product(context: Context) -> Any:
            compute = self._computed(tree, shapes.product, lambda _, a, b: context.matmul(numeric(a), numeric(b)))
            return compute(left, right)(context)

        return product

    def _comparison(self, tree: ast.Compare) -> Closure:
        operands = [self.closure(operand) for operand in (tree.left, *tree.comparators)]
        links: list[Closure] = []
        for symbol, left, right in zip(tree.ops, operands, operands[1:], strict=False):
            name = _COMPARISONS.get(type(symbol))
            if name is None:
                raise self.text.error(tree, f"'in' and 'is' are not accepted; {_LANGUAGE}")
            compare = self._computed(tree, shapes.elementwise, comparing(name), takes_infinity=True)
            links.append(compare(left, right))
        result = links[0]
        for link in links[1:]:
            result = self._computed(tree, shapes.elementwise, lambda xp, a, b: xp.logical_and(a, b))(result, link)
        return result

    def _conditional(self, tree: ast.IfExp) -> Closure:
        """Convert ``x if c else y``, where ``c`` is a scalar expression."""
        parser = ExpressionParser(self.text, self.kinds)
        condition = self._scalar(tree.test, parser, parser.condition(tree.test))
        chosen, otherwise = self.closure(tree.body), self.closure(tree.orelse)
        return lambda context: (chosen if condition(context) else otherwise)(context)

    def _scalar(self, tree: ast.expr, parser: ExpressionParser, node: Any) -> Closure:
        """Return the value of a parsed scalar expression."""
        self.used |= parser.names

        def value(context: Context) -> Any:
            names = {name: _of_kind(plain(context.env[name]), self.kinds[name]) for name in parser.names}
            try:
                return node.evaluate(names, True)
            except EvaluationError as error:
                raise self.text.error(tree, error.problem) from None

        return value

    def _whole(self, tree: ast.expr) -> Closure:
        """Convert a whole number: a scalar expression."""
        parser = ExpressionParser(self.text, self.kinds)
        try:
            node = parser.node(tree)
        except ExpressionError as error:
            excerpt = self.text.excerpt(tree)
            problem = f"{excerpt!r} is not a whole number, or an expression of sizes: {error.problem}"
            raise ExpressionError(problem, error.column) from None
        if node.kind != "number":
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a whole number")
        return self._scalar(tree, parser, node)

    def _wholes(self, tree: ast.expr) -> Closure:
        """Convert a whole number, None, or a tuple of whole numbers or of such tuples."""
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        if not isinstance(tree, ast.Tuple | ast.List):
            return self._whole(tree)
        items = [self._wholes(item) for item in tree.elts]
        return lambda context: tuple(item(context) for item in items)

    def _computed(
        self,
        tree: ast.expr,
        rule: Callable[..., shapes.Shape],
        compute: Callable[..., Any],
        *,
        kinds: Sequence[str] = (),
        divides: bool = False,
        takes_infinity: bool = False,
    ) -> Callable[..., Closure]:
        """Return a function of operands that gives their result.

        Parameters
        ----------
        tree
            Where errors are.
        rule, compute
            Shape of the result, and the result, as of `ArrayFunction`.
        kinds
            What each operand is: ``"array"``, which includes numbers, ``"arrays"`` or ``"option"``; by default arrays.
        divides
            Whether the last operand must not be a literal zero.
        takes_infinity
            Whether the result may be finite although an operand is infinite.
        """

        def of(*operands: Closure) -> Closure:
            def result(context: Context) -> Any:
                values = [operand(context) for operand in operands]
                try:
                    return result_of(
                        context,
                        rule,
                        compute,
                        values,
                        kinds or ("array",) * len(values),
                        divides=divides,
                        takes_infinity=takes_infinity,
                    )
                except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError, AttributeError) as error:
                    if isinstance(error, MemoryError) and context.library is not np:
                        raise  # of the device's memory; the host's may suffice
                    found = " and ".join(str(shape_of(value)) for value in values if has_shape(value))
                    if rule in (shapes.elementwise, shapes.product):
                        raise self.text.error(tree, f"operands of shape {found} are not compatible: {error}") from None
                    raise self.text.error(tree, f"{error}{f' (of shape {found})' if found else ''}") from None

            return result

        return of

    def _subscript(self, tree: ast.Subscript) -> Closure:
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if len(parts) > _MAX_ITEMS:
            raise self.text.error(tree, f"at most {_MAX_ITEMS} indices are accepted")
        indices = [self._index(part) for part in parts]
        array = self.closure(tree.value)

        def result(context: Context) -> Any:
            index = [part(context) for part in indices]
            compute = self._computed(
                tree,
                lambda shape: shapes.indexed(shape, [shape_of(part) if is_array(part) else part for part in index]),
                lambda xp, x: elements_at(xp, x, index),
            )
            return compute(array)(context)

        return result

    def _index(self, tree: ast.expr) -> Closure:
        match tree:
            case ast.Constant(value=None):
                return lambda context: None
            case ast.Constant(value=value) if value is ...:
                return lambda context: ...
            case ast.Slice(lower=lower, upper=upper, step=step):
                bounds = [self._whole(bound) if bound is not None else None for bound in (lower, upper, step)]
                return lambda context: sliced(self.text, tree, [bound(context) if bound else None for bound in bounds])
            case _:
                is_scalar = all(not isinstance(n, ast.Name) or n.id in self.kinds for n in ast.walk(tree))
                return self._whole(tree) if is_scalar else self.closure(tree)

    def _call(self, tree: ast.Call) -> Closure:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in self.functions:
            called = self.text.excerpt(tree.func)
            hint = f"{nearest(called, self.functions)} (functions: {', '.join(self.functions)})"
            raise self.text.error(tree, f"{called!r} cannot be called{hint}")
        function = self.functions[name]
        arguments = self._arguments(tree, name, function)
        operands = [self._argument(name, option, argument) for option, argument in arguments]

        kinds = [_operand_kind(option) for option, _ in arguments]
        takes_infinity = name in _FINITE_OF_INFINITE
        return self._computed(tree, function.shape, function.compute, kinds=kinds, takes_infinity=takes_infinity)(
            *operands
        )

    def _arguments(self, tree: ast.Call, name: str, function: ArrayFunction) -> list[tuple[str, Any]]:
        """Return each operand of the signature with its syntax tree, or with the literal of its default."""
        refusal = self.text.error(tree, f"{name} is called as {function.usage(name)}")
        if any(isinstance(argument, ast.Starred) for argument in tree.args) or len(tree.args) > _MAX_ITEMS:
            raise refusal
        given: dict[str, Any] = {}
        positional = list(tree.args)
        signature = [part.partition("=") for part in function.signature.split()]
        for option, _, _ in signature:
            if option.startswith("*"):
                rest = positional[0].elts if len(positional) == 1 and isinstance(positional[0], _LISTS) else positional
                if not rest:
                    raise refusal
                given[option] = list(rest)
                positional = []
            elif positional:
                given[option] = positional.pop(0)
        for keyword in tree.keywords:
            if keyword.arg not in [option for option, _, _ in signature] or keyword.arg in given:
                raise refusal
            given[keyword.arg] = keyword.value
        arguments: list[tuple[str, Any]] = []
        for option, has_default, default in signature:
            if option not in given and not has_default:
                raise refusal
            arguments.append((option, given[option] if option in given else ast.parse(default, mode="eval").body))
        if positional:
            raise refusal
        return arguments

    def _argument(self, name: str, option: str, tree: Any) -> Closure:
        """Convert an operand of a call."""
        if option.startswith("*"):
            return self._tuple(tree, self.closure if option == "*arrays" else self._whole)
        kind = OPTION_TYPES.get(option)
        if kind in _EXAMPLES:
            return self._literal(name, option, tree)
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        if kind == "arrays":
            if not isinstance(tree, _LISTS) or not 1 <= len(tree.elts) <= _MAX_ITEMS:
                raise self.text.error(tree, f"{name} takes 1 to {_MAX_ITEMS} arrays in a list, as in {name}((a, b))")
            return self._tuple(tree.elts, self.closure)
        convert = {"whole numbers": self._wholes, "whole number": self._whole}.get(str(kind), self.closure)
        return convert(tree)

    def _tuple(self, trees: Sequence[ast.expr], convert: Callable[[ast.expr], Closure]) -> Closure:
        items = [convert(tree) for tree in trees]
        return lambda context: tuple(item(context) for item in items)

    def _literal(self, name: str, option: str, tree: ast.expr) -> Closure:
        kind = OPTION_TYPES[option]
        literal = tree.value if isinstance(tree, ast.Constant) else None
        if not isinstance(literal, str if kind == "text" else bool):
            raise self.text.error(tree, f"{option} of {name} is a {kind}, as in {option}={_EXAMPLES[kind]}")
        return lambda context: literal


def _of_kind(value: Any, kind: Kind) -> Any:
    """Return a value in the type of its kind: a size may be given as a real number."""
    return int(value) if kind == "number" else value


_LISTS = (ast.Tuple, ast.List)
_EXAMPLES = {"text": "'edge'", "boolean": "True"}


def _operand_kind(option: str) -> str:
    """Return what an operand of a signature is, for a rule."""
    if option in ("*arrays", "arrays"):
        return "arrays"
    return "option" if option.startswith("*") or option in OPTION_TYPES else "array"
