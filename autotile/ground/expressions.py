"""Scalar expressions of a search-space file: a small closed language over whole numbers, booleans and strings.

A text is parsed once, every part of it checked against what is listed here, and each part's kind settled; evaluation
then works alike on one configuration and on NumPy columns of many. Nothing is ever executed as Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from autotile.ground.frozen import dataclass
from autotile.ground.grammar import FUNCTIONS, Grammar
from autotile.ground.integers import NoResultError, Operand, Rows
from autotile.ground.nodes import AsNumber, Environment, Kind, Node
from autotile.ground.syntax import LanguageError, Place, SyntaxText, one_line

__all__ = ["FUNCTIONS", "Expression", "Kind", "parse_expression"]


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
    place: Place = field(repr=False, compare=False)
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
            A Python scalar where every value is one, else a read-only array (int64, bool or string) of the
            broadcast shape.

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
        shapes = [column.shape for name in self.names if isinstance(column := env[name], np.ndarray)]
        return np.broadcast_to(value, np.broadcast_shapes(*shapes)) if shapes else value

    def as_number(self) -> Expression:
        """The same condition as 0 or 1."""
        return replace(self, kind="number", node=AsNumber(self.node))

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
    grammar = Grammar(SyntaxText(line_of_text), kinds)
    try:
        node = grammar.node(grammar.text.parse())
    except LanguageError as error:
        raise place.error(error.problem, column=error.column, expression=line_of_text) from None
    return Expression(line_of_text, frozenset(grammar.names), node.kind, place, node)


def _witness(rows: Rows, columns: Mapping[str, Operand]) -> str:
    """Say the values of the first row at fault: ``" where BM = 64, TM = 0"``."""
    if not columns:
        return ""
    shape = np.broadcast_shapes(np.shape(rows), *(np.shape(column) for column in columns.values()))
    index = np.unravel_index(int(np.argmax(np.broadcast_to(rows, shape))), shape)
    values = {name: np.broadcast_to(column, shape)[index].item() for name, column in columns.items()}
    return " where " + ", ".join(f"{name} = {value}" for name, value in values.items())
