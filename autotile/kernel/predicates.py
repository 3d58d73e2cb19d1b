"""Rules that are Python functions, for kernels that are written in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.errors import SpecError, listing, nearest
from autotile.kernel.expressions import Expression
from autotile.kernel.nodes import Environment, Kind
from autotile.kernel.syntax import Location
from autotile.kernel.whole_numbers import Operand, Rows

Predicate = Callable[..., Any]
"""A rule as a function of arrays of parameter values, or of one configuration; see `parse_predicate`."""


def parse_predicate(function: Predicate, parameters: Sequence[str], location: Location) -> Expression:
    """Return a function of parameters as an expression.

    Parameters
    ----------
    function
        Function whose arguments are named as parameters, or that takes one mapping of all parameters by name. It is
        called with arrays of equal length, shape (rows,), and returns one boolean for each row. A function that fails
        with arrays, or returns something else, is called once for each row with plain values instead.
    parameters
        Names of all parameters.
    location
        Location for messages.

    Raises
    ------
    SpecError
        An argument of the function is not a parameter.
    """
    names, takes_mapping = _arguments(function, parameters, location)
    node = _PredicateNode(function, names, takes_mapping, location)
    return Expression(_name(function), frozenset(names), "boolean", location, node)


def _arguments(function: Predicate, parameters: Sequence[str], location: Location) -> tuple[tuple[str, ...], bool]:
    """Return the parameters that a function depends on, and whether it takes them as one mapping."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return tuple(parameters), True
    kinds = inspect.Parameter
    required = [a for a in arguments if a.default is kinds.empty and a.kind not in (kinds.VAR_KEYWORD,)]
    if any(a.kind is kinds.VAR_KEYWORD for a in arguments) and not required:
        return tuple(parameters), False
    if len(required) == 1 and required[0].name not in parameters:
        return tuple(parameters), True
    for argument in required:
        if argument.name not in parameters:
            raise location.error(
                f"the function {_name(function)} has an argument {argument.name!r}, which is not a parameter"
                f"{nearest(argument.name, parameters)} (parameters: {listing(parameters)}); name its arguments as "
                "parameters, or let it take one mapping of all of them"
            )
    return tuple(a.name for a in required), False


def _name(function: Predicate) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "a function" if name == "<lambda>" else f"{name}()"


class _PredicateNode(NamedTuple):
    function: Predicate
    names: tuple[str, ...]
    takes_mapping: bool
    location: Location
    kind: Kind = "boolean"

    def evaluate(self, env: Environment, where: Rows) -> Operand:
        """Return whether each combination meets the rule."""
        columns = np.broadcast_arrays(*(env[name] for name in self.names))
        shape = columns[0].shape if columns else ()
        flat = {name: column.reshape(-1) for name, column in zip(self.names, columns, strict=True)}
        rows = len(next(iter(flat.values()), [()]))
        holds = self._of_columns(flat, rows) if rows > 1 else None  # for one, plain values may be meant
        if holds is None:
            holds = np.array([self._of_row(flat, row) for row in range(rows)], np.bool_)
        return holds.reshape(shape) if shape else bool(holds[0])

    def _call(self, values: Mapping[str, Any]) -> Any:
        return self.function(dict(values)) if self.takes_mapping else self.function(**values)

    def _of_columns(self, columns: Mapping[str, NDArray[Any]], rows: int) -> NDArray[np.bool_] | None:
        """Return the answer for all rows; None if the function is not one of arrays."""
        try:
            holds = np.asarray(self._call(columns))
        except Exception:
            return None  # the calls for single rows report it
        return holds if holds.shape == (rows,) and holds.dtype == np.bool_ else None

    def _of_row(self, columns: Mapping[str, NDArray[Any]], row: int) -> bool:
        values = {name: column[row].item() for name, column in columns.items()}
        try:
            return bool(self._call(values))
        except Exception as error:
            holds = self._of_columns({name: column[row : row + 1] for name, column in columns.items()}, 1)
            if holds is None:
                raise self._failure(values, error) from error
            return bool(holds[0])

    def _failure(self, values: Mapping[str, Any], error: Exception) -> SpecError:
        where = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        return self.location.error(
            f"{_name(self.function)} raises {type(error).__name__}: {error}, where {where}; a rule must return True or "
            "False for all values of its parameters"
        )
