"""Array expressions: the expected outputs of a kernel, and the contents of its inputs.

A closed language like that of `autotile.kernel.expressions`, over whole arrays: the parser accepts only the listed
parts of a syntax tree, and nothing is executed as Python. The shape of every intermediate array is computed, and
bounded, before the array is; `autotile.kernel.array_functions` holds the functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.frozen import dataclass
from autotile.kernel.array_evaluation import Closure, Context, is_array
from autotile.kernel.array_functions import ARRAY_FUNCTIONS, FUNCTIONS, ArrayFunction
from autotile.kernel.array_parser import ArrayParser
from autotile.kernel.array_shapes import ShapeOnly
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import UNKNOWN_LOCATION, ExpressionError, ExpressionText, Location, canonical_text, one_line

__all__ = ["ARRAY_FUNCTIONS", "Array", "ArrayExpression", "Matmul", "ShapeOnly", "parse_array_expression"]

Array = NDArray[Any]
Matmul = Callable[[Any, Any], Any]


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
    closure: Closure = field(repr=False, compare=False)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def shape(self, env: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the value, where ``env`` has `ShapeOnly` in place of arrays.

        Raises
        ------
        SpecError
            As for `evaluate`.
        """
        found: tuple[int, ...] = self.evaluate(env).shape
        return found

    def evaluate(self, env: Mapping[str, Any], matmul: Matmul | None = None) -> Any:
        """Evaluate the expression.

        Parameters
        ----------
        env
            Array or number for each of ``names``, of any dtype. Arrays of CuPy are evaluated by CuPy, on their device.
        matmul
            Implementation of ``@`` for two matrices or stacks of matrices; None for that of the array library.

        Returns
        -------
        numpy.ndarray
            float64, complex128, int64, uint64 or bool, of the library of the arrays in ``env``; real numbers are
            float64, and whole numbers exact. Divisions by zero, overflows and logarithms of negative numbers give
            infinities and NaNs, as on the device. A `ShapeOnly` if one is in ``env``.

        Raises
        ------
        SpecError
            Shapes are not compatible, an index is out of bounds, or an array would be too large.
        """
        values = list(env.values())
        library: ModuleType = sys.modules["cupy"] if any(map(_is_on_device, values)) else np
        only_shapes = any(isinstance(value, ShapeOnly) for value in values)
        context = Context(env, library, matmul or library.matmul, only_shapes)
        try:
            with np.errstate(all="ignore"):
                result = self.closure(context)
        except ExpressionError as error:
            raise self.location.error(error.problem, column=error.column, expression=self.text) from None
        return result if is_array(result) else np.asarray(result)


def parse_array_expression(
    text: str,
    names: Iterable[str],
    kinds: Mapping[str, Kind] | None = None,
    location: Location = UNKNOWN_LOCATION,
    functions: Mapping[str, ArrayFunction] | None = None,
) -> ArrayExpression:
    """Parse and check an array expression, which may begin with assignments: ``t = x @ w; maximum(t, 0)``.

    Parameters
    ----------
    text
        The expression.
    names
        Arrays and scalars that the expression may use.
    kinds
        Kind of each name that scalar expressions may use: the condition of ``x if c else y``, bounds, shapes.
    location
        Location of the text, for messages.
    functions
        Functions in addition to those of the language, such as random sources of inputs.

    Raises
    ------
    SpecError
        The text is not in the language or uses an unknown name.
    """
    line_of_text = one_line(text)
    known = {**FUNCTIONS, **functions} if functions else FUNCTIONS
    parser = ArrayParser(ExpressionText(line_of_text), tuple(names), kinds or {}, known)
    try:
        closure = parser.program()
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line_of_text) from None
    return ArrayExpression(line_of_text, frozenset(parser.used), location, closure)


def _is_on_device(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__")
