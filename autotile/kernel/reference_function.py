"""References that are Python functions: how they are called, and what they may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autotile.errors import InputError

Library = Literal["numpy", "cupy"]


class ReferenceFunction(NamedTuple):
    """A function that computes the expected outputs.

    Attributes
    ----------
    call
        The function, see `call_with` and `arranged_outputs`.
    library
        Whose arrays it takes.
    """

    call: Callable[..., Any]
    library: Library = "numpy"


def call_with(
    function: Callable[..., Any], arrays: Mapping[str, Any], scalars: Mapping[str, Any], sizes: Mapping[str, int]
) -> Any:
    """Call a function with what it asks for.

    Parameters
    ----------
    function
        If its arguments are named as arrays, scalars or sizes, it gets those; with ``**`` it gets all others too.
        Otherwise it gets the arrays, or the arrays and the scalars, in the order of the kernel's arguments.
    arrays, scalars, sizes
        Values by name.

    Raises
    ------
    InputError
        The function's arguments are neither.
    """
    known = {**sizes, **scalars, **arrays}
    try:
        arguments = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C without a signature
        return function(*arrays.values())
    kinds = inspect.Parameter
    if any(a.kind is kinds.VAR_POSITIONAL for a in arguments):
        return function(*arrays.values())
    named = [a for a in arguments if a.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [a for a in arguments if a.default is kinds.empty and a.kind is not kinds.VAR_KEYWORD]
    takes_all = any(a.kind is kinds.VAR_KEYWORD for a in arguments)
    if all(a in named and a.name in known for a in required):
        return function(**(known if takes_all else {a.name: known[a.name] for a in named if a.name in known}))
    for values in ([*arrays.values()], [*arrays.values(), *scalars.values()]):
        if len(required) <= len(values) <= len(arguments):
            return function(*values)
    raise InputError(
        f"it takes {', '.join(a.name for a in required)}; name its arguments after the kernel's: "
        f"{', '.join(known)}, or let it take the arrays in order: {', '.join(arrays)}"
    )


def arranged_outputs(returned: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the outputs by name.

    Parameters
    ----------
    returned
        What the function returned: the array of the only output, a tuple or list with one for each, or a mapping.
    names
        Names of the outputs, in order.

    Raises
    ------
    InputError
        There are too few or too many.
    """
    if isinstance(returned, Mapping):
        missing = [name for name in names if name not in returned]
        unknown = [str(name) for name in returned if name not in names]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
            raise InputError(f"it returns a mapping that {what}; expected {', '.join(names)}")
        return dict(returned)
    if isinstance(returned, tuple) or (isinstance(returned, list) and len(names) > 1):
        if len(returned) != len(names):
            raise InputError(f"it returns {len(returned)} arrays, expected {len(names)}: {', '.join(names)}")
        return dict(zip(names, returned, strict=True))
    if returned is None or len(names) > 1:
        what = "nothing" if returned is None else "one array"
        raise InputError(f"it returns {what}, expected {len(names)}: {', '.join(names)}")
    return {names[0]: returned}
