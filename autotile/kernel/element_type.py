"""Element types of arguments as a search-space file declares them."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import ExpressionError, ExpressionText, Location, one_line

PROBLEM_DTYPE = "dtype"
"""Declares that an argument has the problem's element type."""

_NAMES = (PROBLEM_DTYPE, *DTYPES)


@dataclass(frozen=True, slots=True)
class ElementType:
    """A declared type: ``float32``, ``dtype``, or ``float32 if OUT_FP32 else dtype``.

    Attributes
    ----------
    chosen, otherwise
        Names of types, or `PROBLEM_DTYPE`.
    condition
        Condition over flags that selects between the two; None if the type is always ``chosen``.
    """

    chosen: str
    condition: Expression | None = None
    otherwise: str = ""

    def of(self, problem_dtype: str, names: Mapping[str, Value]) -> str:
        """Return the name of the type for a problem of the given dtype, sizes and flags."""
        name = self.chosen if self.condition is None or self.condition.evaluate(names) else self.otherwise
        return problem_dtype if name == PROBLEM_DTYPE else name

    @property
    def names(self) -> tuple[str, ...]:
        """The possible types."""
        return (self.chosen,) if self.condition is None else (self.chosen, self.otherwise)

    def __str__(self) -> str:
        if self.condition is None:
            return self.chosen
        return f"{self.chosen} if {self.condition.text} else {self.otherwise}"


def parse_element_type(text: str, flags: Mapping[str, Kind], location: Location) -> ElementType:
    """Parse an element type.

    Parameters
    ----------
    text
        The type.
    flags
        Names that a condition may use, with their kinds.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not a type, or its condition is not a condition over flags.
    """
    if " " not in text.strip():
        return ElementType(_known(text, location))
    source = ExpressionText(one_line(text))
    try:
        tree = source.parse()
        if not isinstance(tree, ast.IfExp):
            raise source.error(tree, "expected a type, or two as in 'float32 if FLAG else dtype'")
        chosen, test, otherwise = (ast.unparse(part) for part in (tree.body, tree.test, tree.orelse))
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=source.text) from None
    condition = parse_expression(test, flags, location)
    if condition.kind != "boolean":
        raise location.error(f"expected a flag or another condition, but {test} is a {condition.kind}")
    return ElementType(_known(chosen, location), condition, _known(otherwise, location))


def _known(name: str, location: Location) -> str:
    if name not in _NAMES:
        hint = f"{nearest(name, _NAMES)} (known: {listing(_NAMES)})"
        raise location.error(f"the string {name[:60]!r} is not accepted{hint}")
    return name
