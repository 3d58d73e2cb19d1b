"""The element type of an argument: a name, the problem's own, or one of two as the flags say."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from autotile.ground.dtypes import DTYPES
from autotile.ground.expressions import Expression, Kind, parse_expression
from autotile.ground.frozen import dataclass
from autotile.ground.syntax import LanguageError, Place, SyntaxText, listing, nearest, one_line

PROBLEM_DTYPE = "dtype"
"""An argument declared with this type takes the problem's own."""

_NAMES = (PROBLEM_DTYPE, *DTYPES)


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type as declared: ``float32``, ``dtype``, or ``float32 if OUT_FP32 else dtype``.

    Attributes
    ----------
    chosen, otherwise
        Names of types, or `PROBLEM_DTYPE`.
    condition
        What decides between them, over flags; None where ``chosen`` is the type.
    """

    chosen: str
    condition: Expression | None = None
    otherwise: str = ""

    def of(self, problem_dtype: str, sizes: Mapping[str, int]) -> str:
        """Name of the type for a problem of a dtype, sizes and flags."""
        name = self.chosen if self.condition is None or self.condition.evaluate(sizes) else self.otherwise
        return problem_dtype if name == PROBLEM_DTYPE else name

    @property
    def names(self) -> tuple[str, ...]:
        """The types that it may be."""
        return (self.chosen,) if self.condition is None else (self.chosen, self.otherwise)

    def __str__(self) -> str:
        if self.condition is None:
            return self.chosen
        return f"{self.chosen} if {self.condition.text} else {self.otherwise}"


def parse_element_type(text: str, flags: Mapping[str, Kind], place: Place) -> ElementType:
    """Parse an element type.

    Parameters
    ----------
    text
        The type.
    flags
        The names that a condition may use, with their kinds.
    place
        Where it stands, for messages.

    Raises
    ------
    SpecError
        It is no type, or its condition is none over flags.
    """
    if " " not in text.strip():
        return ElementType(_known(text, place))
    source = SyntaxText(one_line(text))
    try:
        tree = source.parse()
        if not isinstance(tree, ast.IfExp):
            raise source.error(tree, "expected a type, or two as in 'float32 if FLAG else dtype'")
        chosen, test, otherwise = (ast.unparse(part) for part in (tree.body, tree.test, tree.orelse))
    except LanguageError as error:
        raise place.error(error.problem, column=error.column, expression=source.text) from None
    condition = parse_expression(test, flags, source=place.source, key=place.key, line=place.line)
    if condition.kind != "boolean":
        raise place.error(f"expected a flag or another condition, but {test} is a {condition.kind}")
    return ElementType(_known(chosen, place), condition, _known(otherwise, place))


def _known(name: str, place: Place) -> str:
    if name not in _NAMES:
        raise place.error(f"the string {name[:60]!r} is not accepted{nearest(name, _NAMES)} (known: {listing(_NAMES)})")
    return name
