"""Arguments and references of kernels that are written in Python: typed tables, and functions over arrays."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import dtype_name
from autotile.errors import InputError

Size = int | str
"""A number, or an expression of a search-space file for one."""


@dataclass(frozen=True)
class Buffer:
    """A device array that the caller passes.

    Attributes
    ----------
    dtype
        Element type: a name such as ``"float32"``, ``"dtype"`` for that of the problem, or a NumPy dtype. Or an array
        of NumPy or CuPy, which is its content in tuning, and gives type and shape.
    shape
        Extents, row-major: numbers, or expressions over sizes, flags and parameters; None for those of the array.
    access
        ``"in"``, ``"out"`` or ``"inout"``.
    init
        Content of an ``in`` or ``inout`` buffer in tuning, such as ``"uniform"``; None for ``"normal"``.
    constant
        Name of the ``__constant__`` array that the buffer is copied to; None if the kernel takes its address.
    restore
        Whether a buffer that is written gets its content back before each launch, as all do; stated for the reader.
    options
        Further keys of the argument in a search-space file, such as ``{"pass": False}``.

    Examples
    --------
    >>> Buffer("float32", ["M", "N"], "out").to_table()
    {'buffer': 'float32', 'shape': ['M', 'N'], 'access': 'out'}
    """

    dtype: Any
    shape: Size | Sequence[Size] | None = None
    access: str = "in"
    init: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    constant: str | None = None
    restore: bool = False

    @property
    def array(self) -> NDArray[Any] | None:
        """The content, if one is given."""
        return as_array(self.dtype)

    def to_table(self) -> dict[str, Any]:
        """Return the argument as in a search-space file; a content is not part of it."""
        dtype = self.array.dtype if self.array is not None else self.dtype
        shape = self.array.shape if self.shape is None and self.array is not None else self.shape
        table = {"buffer": _element_type(dtype), "shape": listed(shape), "access": self.access}
        given = {"init": self.init, "constant": self.constant, "restore": self.restore or None}
        return table | {key: value for key, value in given.items() if value is not None} | dict(self.options)


@dataclass(frozen=True)
class Scalar:
    """A scalar argument.

    Attributes
    ----------
    dtype
        Element type, as for `Buffer`.
    value
        An expression over sizes and flags, which binds the value to the problem; or a number, which the caller may
        override.
    check
        With a number: the value at the ragged sizes; None for the same one.

    Examples
    --------
    >>> Scalar("int32", "N").to_table()
    {'scalar': 'int32', 'value': 'N'}
    """

    dtype: Any
    value: float | str
    check: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_table(self) -> dict[str, Any]:
        """Return the argument as in a search-space file."""
        table = {"scalar": _element_type(self.dtype), "value": self.value}
        return table | ({"check": self.check} if self.check is not None else {}) | dict(self.options)


@dataclass(frozen=True)
class Scratch:
    """A workspace: device memory that a launch needs for itself.

    Attributes
    ----------
    dtype, shape
        As for `Buffer`; the extents may also depend on parameters.
    init
        ``"zeros"`` if it must be zero before the first launch, and is left zero by every launch.
    """

    dtype: Any
    shape: Size | Sequence[Size]
    init: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_table(self) -> dict[str, Any]:
        """Return the argument as in a search-space file."""
        table = {"workspace": _element_type(self.dtype), "shape": listed(self.shape)}
        return table | ({"init": self.init} if self.init is not None else {}) | dict(self.options)


def parameter_names(source: str, entry: str) -> tuple[str, ...]:
    """Return the names of a function's parameters as its definition declares them; empty where none is found."""
    function = re.escape(entry.partition("<")[0].rpartition("::")[2].strip())
    match = re.search(rf"__global__[^;{{}}]*?\b{function}\s*\(", source)
    if match is None:
        return ()
    depth, start, declared = 1, match.end(), []
    for position in range(match.end(), len(source)):
        character = source[position]
        depth += (character in "(<[") - (character in ")>]")
        if depth == 0 or (character == "," and depth == 1):
            declared.append(source[start:position])
            start = position + 1
        if depth == 0:
            break
    found = [re.search(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*$", text.partition("=")[0]) for text in declared]
    return tuple(match[1] if match else "" for match in found)


def as_array(value: Any) -> NDArray[Any] | None:
    """Return an array of NumPy or CuPy as one of NumPy; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    is_cupy = hasattr(value, "__cuda_array_interface__") and hasattr(value, "get")
    return np.asarray(value.get()) if is_cupy else None


def _element_type(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    name = dtype_name(dtype)
    return name if name.isidentifier() else type(dtype).__name__


def listed(value: Any) -> list[Any]:
    """Return a list, or any iterable, as a list; a single value as a list of it, and None as an empty one."""
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


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
