"""Python functions of a configuration, for kernels that are written in Python: computed values and rules.

A search-space file names such a value, ``[computed] grid_x = "number"``, and uses it as ``computed.grid_x``; the
function is attached to the parsed file. A process without the function, such as the GPU worker, receives the values
with each configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Value
from autotile.errors import SpecError, listing, nearest
from autotile.kernel.expressions import Environment, Expression, Location, Node
from autotile.kernel.functions import Kind, Operand

PREFIX = "computed."
"""Prefix of the names of computed values in expressions and in the configurations of a worker."""

ConfigFunction = Callable[[Mapping[str, Any]], Any]
"""Function of one configuration: a mapping from each parameter's name to its value."""


class Computed(NamedTuple):
    """A value that depends on the configuration in a way that no expression of the file states."""

    name: str
    """Name with `PREFIX`."""
    kind: Kind
    function: ConfigFunction | None
    """None where only the text of the file is known."""
    location: Location

    def of(self, config: Mapping[str, Value]) -> Value:
        """Return the value for a configuration, which holds it already where there is no function.

        Raises
        ------
        SpecError
            The function failed, or returned a value of another kind.
        """
        if self.function is None:
            return self._known(config)
        try:
            return self._converted(self.function(dict(config)))
        except Exception as error:
            raise self._failure(config, error) from error

    def column(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the value in each row of a table of configurations, shape (rows,).

        Parameters
        ----------
        columns
            Values of each parameter, shape (rows,).

        Raises
        ------
        SpecError
            The function failed, or returned a value of another kind, for some row; or it is not known.
        """
        function = self.function
        if function is None:
            raise self.location.error(f"{self.name} is computed by a function, which is not known here")

        def one(config: Mapping[str, Any]) -> Value:
            try:
                return self._converted(function(config))
            except Exception as error:
                raise self._failure(config, error) from error

        return map_rows(one, columns)

    def _known(self, config: Mapping[str, Value]) -> Value:
        if self.name not in config:
            raise self.location.error(f"{self.name} is computed by a function, which is not known here")
        return config[self.name]

    def _converted(self, value: Any) -> Value:
        if self.kind == "string":
            return str(value)
        number = int(value)
        if number != value or abs(number) >= 2**63:
            raise ValueError(f"it returned {value!r}, expected a whole number of 64 bits")
        return number

    def _failure(self, config: Mapping[str, Any], error: Exception) -> SpecError:
        where = ", ".join(f"{name} = {config[name]!r}" for name in config)
        return self.location.error(
            f"the function of {self.name} raises {type(error).__name__}: {error}, where {where}; it must have a value "
            "for every configuration that the rules allow"
        )


def computed_values(computed: Iterable[Computed], config: Mapping[str, Value]) -> dict[str, Value]:
    """Return the computed values of a configuration by their names with prefix."""
    plain = {name: value for name, value in config.items() if not name.startswith(PREFIX)}
    return {each.name: each.of(plain if each.function is not None else config) for each in computed}


class _ReadConfig(Mapping[str, Any]):
    """A configuration that notes which of its values are read."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        self._values = values
        self._read = read

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values


def names_read(function: ConfigFunction, configs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the values that a function reads in any of some configurations; all of them if it fails."""
    read: set[str] = set()
    for config in configs:
        try:
            function(_ReadConfig(config, read))
        except Exception:
            return set(config)
    return read


def map_rows(function: ConfigFunction, columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the value of a function in each row of a table, shape (rows,).

    The function is called once for each combination of the values that it reads. It must depend on these alone.

    Parameters
    ----------
    function
        Function of one row: a mapping from each column's name to a plain value.
    columns
        Columns of equal length.
    """
    try:
        return _by_combination(function, columns)
    except Exception:  # it may need a dictionary, such as to change it; if the function itself fails, so it does again
        plain = [column.tolist() for column in columns.values()]
        return np.array([function(dict(zip(columns, row, strict=True))) for row in zip(*plain, strict=True)])


def _by_combination(function: ConfigFunction, columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    keys: tuple[str, ...] = ()
    while True:
        firsts, group = _groups([columns[name] for name in keys], len(next(iter(columns.values()), [()])))
        values = []
        for row in firsts:
            read: set[str] = set()
            values.append(function(_ReadConfig({name: column[row].item() for name, column in columns.items()}, read)))
            if not read <= set(keys):  # a branch that reads more: the combinations so far are too coarse
                keys = tuple(name for name in columns if name in read or name in keys)
                break
        else:
            return np.array(values)[group]


def _groups(columns: Sequence[NDArray[Any]], rows: int) -> tuple[list[int], NDArray[np.intp]]:
    """Return the first row of each combination of values, and the number of each row's combination."""
    group, firsts = np.zeros(rows, np.intp), np.zeros(min(rows, 1), np.intp)
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        _, firsts, group = np.unique(group * len(values) + codes, return_index=True, return_inverse=True)
    return firsts.tolist(), group


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
    node = Node("function", "boolean", value=_Predicate(function, names, takes_mapping, location))
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


class _Predicate(NamedTuple):
    function: Predicate
    names: tuple[str, ...]
    takes_mapping: bool
    location: Location

    def __call__(self, env: Environment) -> Operand:
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
