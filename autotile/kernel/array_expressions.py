"""Array expressions of ``[reference]``: the expected outputs, computed in float64.

A closed language like that of `autotile.kernel.expressions`, over whole arrays: the parser accepts only the listed
parts of a syntax tree, and nothing is executed as Python.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from autotile.core.frozen import dataclass
from autotile.errors import listing, nearest
from autotile.kernel.expressions import ExpressionParser
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import UNKNOWN_LOCATION, ExpressionError, ExpressionText, Location, canonical_text, one_line
from autotile.kernel.whole_numbers import EvaluationError

_CLIPPING = (np.maximum, np.minimum)
"""Operations whose result may be finite although an operand is infinite."""


class ShapeOnly:
    """Stand-in for a finite float64 array: NumPy's functions return the shape of the result, or raise as for an array.

    Parameters
    ----------
    shape
        Shape of the array.
    operands
        Arrays that it is computed from.

    Attributes
    ----------
    largest
        Number of elements of the largest array among it and all that it is computed from.
    """

    def __init__(self, shape: tuple[int, ...], *operands: ShapeOnly) -> None:
        self.shape = shape
        self.largest: int = max(math.prod(shape), *(operand.largest for operand in operands), 0)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def astype(self, dtype: Any, copy: bool = True) -> ShapeOnly:
        """Return the array itself, as all are float64."""
        return self

    def __getitem__(self, index: Any) -> ShapeOnly:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Store nothing."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        for operand in operands:
            if not isinstance(operand, ShapeOnly) and ufunc not in _CLIPPING and not np.isfinite(operand):
                raise ValueError(f"an operand is {operand}, so the result is not finite")
        if ufunc is np.divide and not isinstance(operands[1], ShapeOnly) and operands[1] == 0:
            raise ValueError("the divisor is zero")
        shapes = [np.shape(operand) for operand in operands]
        shape = _product_shape(*shapes) if ufunc is np.matmul else np.broadcast_shapes(*shapes)
        return ShapeOnly(shape, *(operand for operand in operands if isinstance(operand, ShapeOnly)))

    def __array_function__(self, function: Any, types: Any, arguments: tuple[Any, ...], options: Any) -> Any:
        known = _SHAPE_FUNCTIONS.get(function)
        return known(*arguments, **options) if known is not None else NotImplemented


def _reduced(array: ShapeOnly, axis: int | None = None) -> ShapeOnly:
    if axis is None:
        return ShapeOnly((), array)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis {axis} is out of bounds for an array of {array.ndim} axes")
    remaining = list(array.shape)
    del remaining[axis]
    return ShapeOnly(tuple(remaining), array)


def _swapped(array: ShapeOnly, first: int, second: int) -> ShapeOnly:
    shape = list(array.shape)
    shape[first], shape[second] = shape[second], shape[first]
    return ShapeOnly(tuple(shape), array)


def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of ``a @ b``; a vector is a row on the left and a column on the right."""
    if not a or not b:
        raise ValueError("a matrix product does not take scalars; use *")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"{a[-1]} columns against {b[-2 if len(b) > 1 else -1]} rows")
    return (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)


_SHAPE_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.sum: _reduced,
    np.mean: _reduced,
    np.max: _reduced,
    np.swapaxes: _swapped,
    np.zeros_like: lambda array: array,
}


Array = NDArray[np.float64]
MAX_OFFSET = 2**31 - 1
"""Maximum axis or offset in an expression."""

Matmul = Callable[[Array, Array], Array]
_Closure = Callable[[Mapping[str, Any], Matmul], Any]


@dataclass(frozen=True, slots=True)
class ArrayExpression:
    """A parsed array expression.

    Attributes
    ----------
    text
        Text, on one line.
    names
        All arrays and scalars in it.
    """

    text: str
    names: frozenset[str]
    location: Location = field(repr=False, compare=False)
    closure: _Closure = field(repr=False, compare=False)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def evaluate(self, env: Mapping[str, Any], matmul: Matmul | None = None) -> Array:
        """Evaluate in float64.

        Parameters
        ----------
        env
            Array or number for each of ``names``, of any dtype. Arrays of a library that NumPy's functions dispatch to
            (CuPy, for example) are evaluated by that library, on their device.
        matmul
            Implementation of ``@`` for two float64 matrices or stacks of matrices; None for `numpy.matmul`.

        Returns
        -------
        numpy.ndarray
            float64, of the library of the arrays in ``env``. Divisions by zero, overflows and logarithms of negative
            numbers give infinities and NaNs, as on the device.

        Raises
        ------
        SpecError
            Shapes are not compatible.
        """
        try:
            with np.errstate(all="ignore"):
                result = self.closure(env, matmul or np.matmul)
        except ExpressionError as error:
            raise self.location.error(error.problem, column=error.column, expression=self.text) from None
        return np.asarray(result) if isinstance(result, np.generic) else result


def parse_array_expression(
    text: str,
    names: Iterable[str],
    kinds: Mapping[str, Kind] | None = None,
    location: Location = UNKNOWN_LOCATION,
) -> ArrayExpression:
    """Parse and check an array expression.

    Parameters
    ----------
    text
        The expression.
    names
        Arrays and scalars that the expression may use.
    kinds
        Kind of each name that the condition of ``x if c else y`` may use.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not in the language or uses an unknown name.
    """
    line_of_text = one_line(text)
    parser = _Parser(ExpressionText(line_of_text), tuple(names), kinds or {})
    try:
        closure = parser.closure(parser.text.parse())
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line_of_text) from None
    return ArrayExpression(line_of_text, frozenset(parser.used), location, closure)


def shift(array: Array, *offsets: int) -> Array:
    """Shift an array: ``result[i, j] = array[i + d0, j + d1]``, zero outside the array.

    Raises
    ------
    ValueError
        The number of offsets is not the number of axes.
    """
    if len(offsets) != array.ndim:
        raise ValueError(f"shift of a {array.ndim}-dimensional array takes {array.ndim} offsets, got {len(offsets)}")
    result = np.zeros_like(array)
    kept = [max(0, size - abs(offset)) for size, offset in zip(array.shape, offsets, strict=True)]
    to = tuple(slice(max(0, -offset), max(0, -offset) + n) for offset, n in zip(offsets, kept, strict=True))
    at = tuple(slice(max(0, offset), max(0, offset) + n) for offset, n in zip(offsets, kept, strict=True))
    result[to] = array[at]
    return result


def transpose(array: Array) -> Array:
    """Swap the last two axes: transpose each matrix of a stack; return a vector or scalar unchanged."""
    return np.swapaxes(array, -1, -2) if array.ndim > 1 else array


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the language and its signature."""

    operation: Callable[..., Any]
    usage: str
    arrays: int = 1
    whole_numbers: range = range(1)
    """Allowed counts of literal whole numbers after the arrays: an axis, or offsets."""


_OPTIONAL_AXIS = range(2)
_FUNCTIONS: Mapping[str, _Function] = {
    "exp": _Function(np.exp, "exp(x)"),
    "log": _Function(np.log, "log(x)"),
    "sqrt": _Function(np.sqrt, "sqrt(x)"),
    "abs": _Function(np.abs, "abs(x)"),
    "tanh": _Function(np.tanh, "tanh(x)"),
    "transpose": _Function(transpose, "transpose(x)"),
    "maximum": _Function(np.maximum, "maximum(a, b)", arrays=2),
    "minimum": _Function(np.minimum, "minimum(a, b)", arrays=2),
    "sum": _Function(np.sum, "sum(x) or sum(x, axis)", whole_numbers=_OPTIONAL_AXIS),
    "mean": _Function(np.mean, "mean(x) or mean(x, axis)", whole_numbers=_OPTIONAL_AXIS),
    "max": _Function(np.max, "max(x) or max(x, axis)", whole_numbers=_OPTIONAL_AXIS),
    "shift": _Function(shift, "shift(x, d0, d1, ...), one offset for each axis", whole_numbers=range(1, 9)),
}

ARRAY_FUNCTIONS = tuple(_FUNCTIONS)
"""Functions of the language."""

_OPERATIONS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}

_LANGUAGE = f"use names, numbers, + - * / ** @, x if c else y and the functions {', '.join(ARRAY_FUNCTIONS)}"


class _Parser:
    """Converts each part of a syntax tree to a closure; raises `ExpressionError` if it is not in the language."""

    def __init__(self, text: ExpressionText, known: tuple[str, ...], kinds: Mapping[str, Kind]) -> None:
        self.text = text
        self.known = known
        self.kinds = kinds
        self.used: set[str] = set()

    def closure(self, tree: ast.expr) -> _Closure:
        match tree:
            case ast.Constant():
                return self._constant(tree)
            case ast.Name(id=name):
                return self._name(tree, name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply(tree, np.negative, self.closure(operand))
            case ast.BinOp():
                return self._binary(tree)
            case ast.IfExp():
                return self._conditional(tree)
            case ast.Call():
                return self._call(tree)
            case _:
                raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")

    def _constant(self, tree: ast.Constant) -> _Closure:
        if isinstance(tree.value, bool) or not isinstance(tree.value, int | float):
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a number; {_LANGUAGE}")
        try:
            value = np.float64(tree.value)
        except OverflowError:
            raise self.text.error(tree, "the number does not fit in float64") from None
        return lambda env, matmul: value

    def _name(self, tree: ast.expr, name: str) -> _Closure:
        if name not in self.known:
            hint = "; it is a function" if name in ARRAY_FUNCTIONS else nearest(name, self.known)
            raise self.text.error(tree, f"unknown name {name!r}{hint} (known: {listing(self.known)})")
        self.used.add(name)
        return lambda env, matmul: _as_float64(env[name])

    def _binary(self, tree: ast.BinOp) -> _Closure:
        left, right = self.closure(tree.left), self.closure(tree.right)
        if isinstance(tree.op, ast.MatMult):
            return self._matmul(tree, left, right)
        operation = _OPERATIONS.get(type(tree.op))
        if operation is None:
            raise self.text.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        return self._apply(tree, operation, left, right)

    def _conditional(self, tree: ast.IfExp) -> _Closure:
        """Convert ``x if c else y``, where ``c`` is a scalar expression over sizes and flags."""
        parser = ExpressionParser(self.text, self.kinds)
        condition = parser.condition(tree.test)
        chosen, otherwise = self.closure(tree.body), self.closure(tree.orelse)
        self.used |= parser.names

        def selected(env: Mapping[str, Any], matmul: Matmul) -> Any:
            names = {name: int(env[name]) for name in parser.names}
            try:
                holds = condition.evaluate(names, True)
            except EvaluationError as error:
                raise self.text.error(tree.test, error.problem) from None
            return (chosen if holds else otherwise)(env, matmul)

        return selected

    def _matmul(self, tree: ast.expr, left: _Closure, right: _Closure) -> _Closure:
        def product(env: Mapping[str, Any], matmul: Matmul) -> Any:
            return self._guarded(tree, matmul, left(env, matmul), right(env, matmul))

        return product

    def _apply(self, tree: ast.expr, operation: Callable[..., Any], *operands: _Closure) -> _Closure:
        def result(env: Mapping[str, Any], matmul: Matmul) -> Any:
            return self._guarded(tree, operation, *(operand(env, matmul) for operand in operands))

        return result

    def _guarded(self, tree: ast.expr, operation: Callable[..., Any], *operands: Any) -> Any:
        try:
            return operation(*operands)
        except ValueError as error:
            shapes = " and ".join(str(np.shape(operand)) for operand in operands)
            raise self.text.error(tree, f"operands of shape {shapes} are not compatible: {error}") from None

    def _call(self, tree: ast.Call) -> _Closure:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in ARRAY_FUNCTIONS:
            called = self.text.excerpt(tree.func)
            raise self.text.error(tree, f"{called!r} cannot be called{nearest(called, ARRAY_FUNCTIONS)} ({_LANGUAGE})")
        function = _FUNCTIONS[name]
        arrays, whole = tree.args[: function.arrays], tree.args[function.arrays :]
        plain = not tree.keywords and not any(isinstance(argument, ast.Starred) for argument in tree.args)
        if not plain or len(arrays) < function.arrays or len(whole) not in function.whole_numbers:
            raise self.text.error(tree, f"{name} is called as {function.usage}, with plain arguments")
        numbers = [self._whole_number(argument) for argument in whole]
        operands = [self.closure(argument) for argument in arrays]
        return self._apply(tree, lambda *values: function.operation(*values, *numbers), *operands)

    def _whole_number(self, tree: ast.expr) -> int:
        sign, literal = (-1, tree.operand) if _is_negation(tree) else (1, tree)
        value = literal.value if isinstance(literal, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int) or value > MAX_OFFSET:
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a literal whole number up to {MAX_OFFSET}")
        return sign * value


def _as_float64(value: Any) -> Any:
    """Return an array in float64, on its device; anything else as a NumPy scalar, which all array libraries accept.

    Complex values become complex128.
    """
    is_complex = isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    wide = np.complex128 if is_complex else np.float64
    return value.astype(wide, copy=False) if np.ndim(value) else wide(value)


def _is_negation(tree: ast.expr) -> TypeGuard[ast.UnaryOp]:
    return isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub)
