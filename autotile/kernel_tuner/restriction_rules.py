"""Restrictions of Kernel Tuner, in each of their forms, as rules of autotile."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotile.errors import InputError
from autotile.kernel.computed import map_rows, names_read
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.python_strings import evaluate, holds_in_rows, names_in

_PROBES = 500
"""Random configurations by which the parameters are found that a function reads."""
_ALL_NAMES_BELOW = 20_000
"""Number of combinations below which a function is simply given all parameters."""

Params = Mapping[str, Any]


class Restriction(NamedTuple):
    """A condition on a configuration.

    Attributes
    ----------
    holds
        Function of a mapping of parameters.
    names
        Parameters that it may read; None if that is not known.
    text
        The condition itself, where it is a text.
    """

    holds: Callable[[Params], Any]
    names: tuple[str, ...] | None = None
    text: str = ""


def restriction_rules(restrictions: Any, codec: ParameterCodec) -> dict[str, Callable[..., Any]]:
    """Return restrictions as functions of columns of the parameters that autotile declares, by the name of a rule.

    Parameters
    ----------
    restrictions
        None, a text, a function, a constraint of python-constraint, or a list of these and of tuples of one of them
        with the names of its parameters.
    codec
        The parameters.

    Raises
    ------
    InputError
        A restriction has none of these forms.
    """
    if restrictions is None:
        return {}
    listed = restrictions if isinstance(restrictions, list) else [restrictions]
    parsed = [_restriction(each, codec.values) for each in listed]
    return {f"restriction_{number}": _rule(each, codec) for number, each in enumerate(parsed, start=1)}


def check_restrictions(restrictions: Any, params: Params, values: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a configuration meets all restrictions; forms and errors as for `restriction_rules`."""
    listed = restrictions if isinstance(restrictions, list) else [] if restrictions is None else [restrictions]
    return all(_holds(_restriction(each, values), params) for each in listed)


def _restriction(given: Any, values: Mapping[str, Sequence[Any]]) -> Restriction:
    if isinstance(given, str):
        names = tuple(name for name in values if name in names_in(given))
        return Restriction(lambda params: evaluate(given, params), names, given)
    if isinstance(given, tuple) and len(given) in (2, 3) and isinstance(given[1], list | tuple):
        names = tuple(given[1])
        inner = _restriction(given[0], {name: values[name] for name in names})
        return Restriction(lambda params: inner.holds({name: params[name] for name in names}), names)
    if _is_constraint(given):
        return _of_constraint(given, values)
    if callable(given):
        return _of_function(given, tuple(values))
    raise InputError(
        f"a restriction is {given!r:.80}, expected text, a function, a constraint of python-constraint, or a list"
    )


def _is_constraint(given: Any) -> bool:
    return any(
        each.__name__ == "Constraint" and each.__module__.partition(".")[0] == "constraint"
        for each in type(given).__mro__
    )


def _of_constraint(constraint: Any, values: Mapping[str, Sequence[Any]]) -> Restriction:
    """Return a constraint of python-constraint over parameters, in their order."""
    names, kind = tuple(values), type(constraint).__name__
    function = getattr(constraint, "_func", None)
    if function is not None:
        return Restriction(lambda params: function(*(params[name] for name in names)), names)
    if kind in ("InSetConstraint", "NotInSetConstraint"):  # python-constraint applies them to the lists of values
        is_wanted, chosen = kind == "InSetConstraint", constraint._set
        return Restriction(lambda params: all((params[name] in chosen) == is_wanted for name in names), names)
    domains = {name: list(each) for name, each in values.items()}
    return Restriction(lambda params: constraint(list(names), domains, {name: params[name] for name in names}), names)


def _of_function(function: Callable[..., Any], parameters: tuple[str, ...]) -> Restriction:
    """Return a function of a dictionary of parameters, of parameters by name, or of all their values in order."""
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Restriction(function)
    kinds = inspect.Parameter
    plain = [a for a in arguments if a.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [a.name for a in plain if a.default is kinds.empty]
    if required and all(name in parameters for name in required):
        read = tuple(a.name for a in plain if a.name in parameters)
        return Restriction(lambda params: function(**{name: params[name] for name in read}), read)
    if any(a.kind is kinds.VAR_KEYWORD for a in arguments) and not required:
        return Restriction(lambda params: function(**params))
    if any(a.kind is kinds.VAR_POSITIONAL for a in arguments) or len(required) == len(parameters) > 1:
        return Restriction(lambda params: function(*(params[name] for name in parameters)))
    if len(required) == 1:
        return Restriction(function)
    raise InputError(
        f"the restriction {getattr(function, '__name__', function)!s} takes {', '.join(required) or 'nothing'}; "
        "expected one dictionary of parameters, or parameters by name"
    )


def _holds(restriction: Restriction, params: Params) -> bool:
    try:
        return bool(restriction.holds(params))
    except ZeroDivisionError:  # the configuration gives the condition no meaning
        return False


def _rule(restriction: Restriction, codec: ParameterCodec) -> Callable[..., Any]:
    """Return a function whose arguments are named as the parameters that the restriction reads."""

    def holds(config: Params) -> bool:
        return _holds(restriction, codec.decode(config))

    def rule(**columns: Any) -> Any:
        if not any(isinstance(column, np.ndarray) for column in columns.values()):
            return holds(columns)
        arrays = dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))
        if restriction.text and all(codec.is_plain[name] and arrays[name].dtype == np.int64 for name in arrays):
            found = holds_in_rows(restriction.text, arrays)
            if found is not None:
                return found
        return map_rows(holds, arrays).astype(np.bool_)

    names = _names_of(restriction, codec) or tuple(codec.values)[:1]
    arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    rule.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return rule


def _names_of(restriction: Restriction, codec: ParameterCodec) -> tuple[str, ...]:
    if restriction.names is not None:
        return restriction.names
    if len(codec) < _ALL_NAMES_BELOW:
        return tuple(codec.values)
    draw = random.Random(0)
    probes = [{name: draw.choice(values) for name, values in codec.values.items()} for _ in range(_PROBES)]
    read = names_read(lambda params: _holds(restriction, params), probes)
    return tuple(name for name in codec.values if name in read)
