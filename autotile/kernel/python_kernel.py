"""Kernels that are written in Python: their arguments, their document, and the functions that belong to them.

The document is the search-space file that the same kernel would have. What such a file cannot hold is attached to the
parsed kernel: references, rules, and values that a function computes from a configuration. A file names such a value,
``[computed] grid_x = "number"``, and uses it as ``computed.grid_x``; a process without the function, such as the GPU
worker, receives the values with each configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import DTYPES, Array, dtype_name
from autotile.core.model import Sizes
from autotile.core.text import plural
from autotile.errors import InputError, SpecError, listing, nearest, type_text
from autotile.kernel.expressions import Environment, Expression, Location, Node, is_keyword, python_source
from autotile.kernel.functions import Operand
from autotile.kernel.sources import global_functions, read_text
from autotile.kernel.spec import ConfigFunction
from autotile.kernel.table import MAX_ENTRIES

Predicate = Callable[..., Any]
"""A rule as a function of arrays of parameter values, or of one configuration; see `parse_predicate`."""

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
        No effect: a buffer that is written always gets its content back before each launch. It is for the reader.
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
    def array(self) -> Array | None:
        """The content, if one is given."""
        return as_array(self.dtype)

    def to_table(self) -> dict[str, Any]:
        """Return the argument as in a search-space file; a content is not part of it."""
        dtype = self.array.dtype if self.array is not None else self.dtype
        shape = self.array.shape if self.shape is None and self.array is not None else self.shape
        table = {"buffer": _element_type(dtype), "shape": listed(shape), "access": self.access}
        given = {"init": self.init, "constant": self.constant, "restore": self.restore or None}
        return _table(table, given, self.options)


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
        return _table(table, {"check": self.check}, self.options)


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
        return _table(table, {"init": self.init}, self.options)


def _table(required: dict[str, Any], optional: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Return the table of an argument, with those of the optional entries that are not None."""
    if not isinstance(options, Mapping):
        raise InputError(f"options is {options!r:.60}, expected further keys of the argument, as in {{'pass': False}}")
    return required | _present(optional) | dict(options)


def _present(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def as_array(value: Any) -> Array | None:
    """Return an array of NumPy or CuPy as one of NumPy; None for anything else, such as one with a mask."""
    if isinstance(value, np.ndarray):
        return None if isinstance(value, np.ma.MaskedArray) else value
    is_cupy = hasattr(value, "__cuda_array_interface__") and hasattr(value, "get")
    return np.asarray(value.get()) if is_cupy else None


def _element_type(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    name = dtype_name(dtype) if dtype is not None else ""  # which NumPy takes for float64
    return name if name in DTYPES else str(getattr(dtype, "__name__", dtype))


def listed(value: Any) -> list[Any]:
    """Return a list, or any iterable, as a list; a single value as a list of it, and None as an empty one.

    Of an iterable that is longer than a file may have it, one entry too many, so that a check says so.
    """
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    many = isinstance(value, Iterable) and not isinstance(value, str)
    return list(islice(value, MAX_ENTRIES + 1)) if many else [value]


ArrayLibrary = Literal["numpy", "cupy"]


ReferenceFunction = tuple[Callable[..., Any], ArrayLibrary]
"""A function that computes the expected outputs over a library's arrays; see `call_with` and `arranged_outputs`."""


def call_with(function: Callable[..., Any], arrays: Mapping[str, Any], scalars: Mapping[str, Any], sizes: Sizes) -> Any:
    """Call a function with what it asks for.

    If its arguments are named as arrays, scalars or sizes, it gets those; with ``**`` it gets all others too. Otherwise
    it gets the arrays, or the arrays and the scalars, in the order of the kernel's arguments. Raise `InputError` if the
    function's arguments are neither.
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
    """Return the outputs that a function returned by name; raise `InputError` if there are too few or too many.

    It returns the array of the only output, a tuple or list with one for each of ``names``, or a mapping.
    """
    expected = ", ".join(names)
    if isinstance(returned, Mapping):
        missing = [name for name in names if name not in returned]
        unknown = [str(name) for name in returned if name not in names]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
            raise InputError(f"it returns a mapping that {what}; expected {expected}")
        return dict(returned)
    if isinstance(returned, tuple) or (isinstance(returned, list) and len(names) > 1):
        if len(returned) != len(names):
            raise InputError(f"it returns {plural(len(returned), 'array')}, expected {len(names)}: {expected}")
        return dict(zip(names, returned, strict=True))
    if returned is None or len(names) > 1:
        what = "nothing" if returned is None else "one array"
        raise InputError(f"it returns {what}, expected {len(names)}: {expected}")
    return {names[0]: returned}


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


def map_rows(function: ConfigFunction, columns: Mapping[str, Array]) -> Array:
    """Return the value of a function of one row, with plain values, in each row of a table, shape (rows,).

    The function is called once for each combination of the values that it reads. It must depend on these alone.
    """
    keys: tuple[str, ...] = ()
    rows = len(next(iter(columns.values()), [()]))
    try:
        while True:
            # The first row of each combination of the keys' values, and the number of each row's combination.
            group, firsts = np.zeros(rows, np.intp), np.zeros(min(rows, 1), np.intp)
            for key in keys:
                values, codes = np.unique(columns[key], return_inverse=True)
                _, firsts, group = np.unique(group * len(values) + codes, return_index=True, return_inverse=True)
            results = []
            for row in firsts.tolist():
                read: set[str] = set()
                config = _ReadConfig({name: column[row].item() for name, column in columns.items()}, read)
                results.append(function(config))
                if not read <= set(keys):  # a branch that reads more: the combinations so far are too coarse
                    keys = tuple(name for name in columns if name in read or name in keys)
                    break
            else:
                return np.array(results)[group]
    except Exception:  # it may need a dictionary, such as to change it; if the function itself fails, so it does again
        plain = [column.tolist() for column in columns.values()]
        return np.array([function(dict(zip(columns, row, strict=True))) for row in zip(*plain, strict=True)])


_COMPARED_ROWS = 256
"""Rows for which a function of booleans or large numbers is called with plain values, too, 0.1 ms of time."""
_LARGE = 1 << 31
"""Product of parameters from which on 64 bits may not hold what a function computes of them."""


def parse_predicate(function: Predicate, parameters: Sequence[str], location: Location) -> Expression:
    """Return a function of parameters as an expression.

    Its arguments are named as parameters, or it takes one mapping of all parameters by name. It is called with arrays
    of equal length, shape (rows,), and returns one boolean for each row. A function that fails with arrays, or returns
    something else, or other booleans than with plain values, is called once for each row with plain values instead.
    Raise `SpecError` if an argument of the function is not a parameter.
    """
    name = getattr(function, "__name__", type(function).__name__)
    shown = "a function" if name == "<lambda>" else f"{name}()"
    names, takes_mapping = tuple(parameters), True
    with suppress(TypeError, ValueError):  # some built-in functions have no signature
        arguments = inspect.signature(function).parameters.values()
        kinds = inspect.Parameter
        required = [a.name for a in arguments if a.default is kinds.empty and a.kind is not kinds.VAR_KEYWORD]
        takes_all = not required and any(a.kind is kinds.VAR_KEYWORD for a in arguments)
        takes_mapping = not takes_all and len(required) == 1 and required[0] not in parameters
        if not (takes_all or takes_mapping):
            names = tuple(a.name for a in arguments if a.name in {*required, *parameters})
    if unknown := [name for name in names if name not in parameters]:
        raise location.error(
            f"{shown} has an argument {unknown[0]!r}, which is not a parameter"
            f"{nearest(unknown[0], parameters)} (parameters: {listing(parameters)}); name its arguments as "
            "parameters, or let it take one mapping of all of them"
        )

    def of_columns(columns: Mapping[str, Array], rows: int) -> NDArray[np.bool_] | None:
        """Return the answer for all rows; None if the function is not one of arrays."""
        try:
            with np.errstate(divide="raise", invalid="raise"):  # as plain values do
                holds = np.asarray(function(dict(columns)) if takes_mapping else function(**columns))
        except Exception:
            return None  # the calls for single rows report it
        return holds if holds.shape == (rows,) and holds.dtype == np.bool_ else None

    def of_plain(values: dict[str, Any]) -> Any:
        return function(dict(values)) if takes_mapping else function(**values)

    def is_of_plain(found: NDArray[np.bool_], columns: Mapping[str, Array]) -> bool:
        """Whether plain values give other answers: two booleans add up to 2, but NumPy's to True; integers wrap."""
        greatest = [float(np.abs(each.astype(float)).max()) for each in columns.values() if each.dtype.kind == "i"]
        if math.prod(greatest) < _LARGE and all(column.dtype != np.bool_ for column in columns.values()):
            return False
        rows = np.arange(len(found))
        for row in rows if len(rows) <= _COMPARED_ROWS else np.random.default_rng(0).choice(rows, _COMPARED_ROWS):
            with suppress(Exception):  # a function of arrays only
                answer = of_plain({name: column[row].item() for name, column in columns.items()})
                if isinstance(answer, bool) and answer != found[row]:
                    return True
        return False

    def of_row(columns: Mapping[str, Array], row: int) -> bool:
        values = {name: column[row].item() for name, column in columns.items()}
        answer: Any = None
        cause = None
        try:
            answer = of_plain(values)
            fault = f"returns {answer!r:.80}"
        except Exception as error:
            fault, cause = f"raises {type(error).__name__}: {error}", error
        if not isinstance(answer, bool):  # ~True is -2, but False of an array
            holds = of_columns({name: column[row : row + 1] for name, column in columns.items()}, 1)
            answer = answer if holds is None else holds[0]
        if np.ndim(answer) == 0 and np.asarray(answer).dtype.kind in "biuf":
            return bool(answer)
        where = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        given = ", given a mapping of all parameters as none of them is an argument" if takes_mapping else ""
        raise location.error(
            f"{shown} {fault}{given}, where {where}; a rule must return True or False for all values of its parameters"
        ) from cause

    def holds(env: Environment) -> Operand:
        columns = np.broadcast_arrays(*(env[name] for name in names))
        shape = columns[0].shape if columns else ()
        flat = {name: column.reshape(-1) for name, column in zip(names, columns, strict=True)}
        rows = len(next(iter(flat.values()), [()]))
        found = of_columns(flat, rows) if rows > 1 else None  # for one, plain values may be meant
        if found is None or is_of_plain(found, flat):
            found = np.array([of_row(flat, row) for row in range(rows)], np.bool_)
        return found.reshape(shape) if shape else bool(found[0])

    node = Node("function", "boolean", value=holds)
    return Expression(shown, frozenset(names), "boolean", location, node)


class PythonDocument(NamedTuple):
    """A kernel as a search-space file would state it, and what such a file cannot hold."""

    document: dict[str, Any]
    rules: dict[str, Predicate]
    heuristics: dict[str, Predicate]
    """Rules and heuristics that are functions, by name."""
    source: str | None
    """Text of the template; None if it is a file."""
    template: Path | None
    """Path of the template; None if it is a text."""
    arrays: dict[str, Array]
    """Contents of buffers and expected outputs, by the names of the files that the document gives for them."""
    reference: Callable[..., Any] | None
    """Function that computes the expected outputs; None if the reference is none."""


_REQUIRED = ("kernel", "problem", "parameters", "arguments", "reference")


def build_document(
    source: str | os.PathLike[str],
    entry: str | None,
    *,
    parameters: Mapping[str, Sequence[Any]],
    arguments: Mapping[str, Any] | Sequence[Any],
    launch: Mapping[str, Any] | Sequence[Any] | None,
    steps: Sequence[Mapping[str, Any]],
    reference: Any,
    sizes: Sizes | None,
    rules: Mapping[str, Any] | Sequence[Any],
    heuristics: Mapping[str, Any] | Sequence[Any],
    default: Mapping[str, Any] | None,
    name: str | None,
    kernel: Mapping[str, Any],
    problem: Mapping[str, Any],
    work: Mapping[str, Any],
    checks: Mapping[str, Any],
    sections: Mapping[str, Any] | None,
) -> PythonDocument:
    """Return the document for the arguments of `autotile.kernel`.

    ``kernel``, ``problem``, ``work`` and ``checks`` are further keys of these sections, the last of the reference;
    those that are None or empty are left out.
    Raise `InputError` if an argument has a type that no search-space file could hold.
    """
    text, template = _source(source)
    if not (isinstance(entry, str) or (entry is None and steps)):
        raise InputError(f"the entry is {entry!r:.60}, expected the name of a __global__ function")
    first = entry if entry is not None else str(next(iter(steps)).get("entry", ""))
    # The identifier of the entry, without namespaces and templates, names a kernel that is given no name.
    words = re.findall(r"[A-Za-z]\w*", first.partition("<")[0])
    name = str(name) if name is not None else words[-1] if words else "kernel"
    code = text if text is not None else read_text(template, "source") if template is not None else ""
    try:
        given = _named_arguments(arguments, first, code, has_steps=entry is None)
        arrays: dict[str, Array] = {}
        tables = {key: _argument(key, value, arrays) for key, value in given.items()}
        launched = _launch(launch)
        text_rules, rule_functions = _rules(rules, "rule")
        text_heuristics, heuristic_functions = _rules(heuristics, "heuristic")
        is_accepted = template is not None and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cu", template.name)
        file = template.name if template is not None and is_accepted else f"{name}.cu"
        document: dict[str, Any] = {
            "kernel": {"name": name, "template": file, **_given({"entry": entry, **kernel})},
            "problem": {"sizes": _mapping(sizes, "sizes"), **_given(problem)},
            "parameters": {key: listed(values) for key, values in _mapping(parameters, "parameters").items()},
            "default": _mapping(default, "default"),
            "rules": text_rules,
            "heuristics": text_heuristics,
            "launch": launched,
            "steps": [_launch(step) for step in steps],
            "arguments": tables,
            "reference": _reference(reference, tables, launched, arrays, code=code),
            "work": _given(work),
        }
        sections = _mapping(sections, "sections")
        for key, table in sections.items():
            document[key] = {**document.get(key, {}), **_mapping(table, key)}
        document["reference"] |= _present(checks)
        kept = (*_REQUIRED, *([] if steps else ["launch"]), *sections)
        plain = {key: _plain(table, key) for key, table in document.items() if table or key in kept}
    except SpecError as error:
        raise SpecError(**{**vars(error), "source": python_source(name)}) from None
    function = reference if callable(reference) else None
    return PythonDocument(plain, rule_functions, heuristic_functions, text, template, arrays, function)


def _source(source: str | os.PathLike[str]) -> tuple[str | None, Path | None]:
    """Return the text or the path of a template; a text has a line break, a brace or a semicolon."""
    if isinstance(source, str) and any(mark in source for mark in "\n{;"):
        if re.search("[\0\ud800-\udfff]", source):  # as of a file that is read with errors="surrogateescape"
            raise InputError("the source is not UTF-8 text without NUL; read its file with the encoding that it has")
        return source.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), None  # as of a file
    try:
        path = Path(source).expanduser()
        is_file = path.is_file()
    except (OSError, TypeError, RuntimeError):  # too long, of another type, or of a user who does not exist
        is_file = False
    if not is_file:
        raise InputError(
            f"the source {str(source)[:80]!r} is neither a file that exists nor CUDA C++ code; give a path, or the code"
        )
    return None, path.absolute()


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise SpecError(f"expected a mapping, got {value!r:.60}, {type_text(type(value))}", key=key)
    return dict(value or {})


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _present(table).items() if not isinstance(v, str | Mapping | Sequence) or len(v)}


def _named_arguments(arguments: Any, entry: str, source: str, *, has_steps: bool) -> dict[str, Any]:
    """Return arguments by name; those of a list are named as in the signature, where it can be read.

    A name that is a keyword of Python, such as ``in``, gets a ``_``.
    """
    if not isinstance(arguments, list | tuple):
        return _mapping(arguments, "arguments")
    names = tuple(f"{name}_" if is_keyword(name) else name for name in parameter_names(source, entry, len(arguments)))
    if len(names) == len(arguments) and len(set(names)) == len(names) and "" not in names:
        return dict(zip(names, arguments, strict=True))
    tables = [each.to_table() for each in arguments if isinstance(each, Buffer | Scalar | Scratch)]
    passed = [table for table in tables if table.get("pass", True) is True and "constant" not in table]
    has_macro = any(name.isupper() for name in names if len(name) > 1)
    are_all_read = bool(names) and all(names) and not has_macro
    if are_all_read and not has_steps and len(passed) == len(arguments) != len(names):
        found = f"{entry} takes {plural(len(names), 'parameter')} ({', '.join(names)})"
        fault = f"{found}, but {plural(len(arguments), 'is', 'are')} listed; list one for each"
        raise SpecError(fault, key="arguments")
    if not names and re.fullmatch(_FUNCTION, entry) and (fault := _lacks(source, entry, ())):
        raise SpecError(f"{entry!r} is no {fault}; expected the name of a __global__ function", key="entry")
    return {f"argument_{number}": value for number, value in enumerate(arguments)}


_FUNCTION = r"[A-Za-z_][\w:]*(<.*>)?"


def _lacks(code: str, entry: str, others: Iterable[str]) -> str:
    """Return that a name is no function of the code; "" if it is, or a macro or a header may make it one."""
    function = entry.partition("<")[0].rpartition("::")[2]
    if re.search(rf'\b{function}\b|##|#\s*include\s*"', code):
        return ""
    return f"function of the code{nearest(function, [*others, *(each.name for each in global_functions(code))])}"


def parameter_names(source: str, entry: str, count: int | None = None) -> tuple[str, ...]:
    """Return the names of a function's parameters as its definition declares them; empty where none is found.

    Of several declarations, the last that names ``count`` parameters: definitions follow, and overloads have others.
    """
    named = re.search(r"(?s)(\w+)\s*(?:<.*>)?\s*\Z", entry)  # after a namespace, or the type of an overload
    functions = (each for each in global_functions(source) if named is not None and each.name == named[1])
    found = [tuple(name for name, _ in each.parameters) for each in functions]
    whole = [names for names in found if len(names) == count and all(names)]
    return whole[-1] if whole else next(iter(found), ())


def _file_of(name: str, array: Array, arrays: dict[str, Array], key: str) -> str:
    """Add an array, and return the name of its file, which tells its content apart from others."""
    if dtype_name(array.dtype) not in DTYPES:
        cure = f"convert it with astype() to one of {listing(DTYPES)}, in the byte order of this machine"
        raise SpecError(f"an array of the type {array.dtype}; {cure}", key=key)
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).data)
    file = f"{name}-{digest.hexdigest()[:16]}.npy"
    arrays[file] = array
    return file


def _argument(name: str, value: Any, arrays: dict[str, Array]) -> dict[str, Any]:
    """Return the table of an argument; the content of an array is added to ``arrays``."""
    if isinstance(value, Mapping):
        return dict(value)
    key = f"arguments[{name!r}]"
    if as_array(value) is not None:
        value = Buffer(value)
    if isinstance(value, Buffer):
        table, array = value.to_table(), value.array
        if array is not None and value.access != "out":
            table |= {"file": _file_of(name, array, arrays, key), "whole": True}
        return table
    if isinstance(value, Scalar | Scratch):
        return value.to_table()
    if isinstance(value, np.generic):
        return Scalar(value.dtype, value.item()).to_table()
    expected = "expected a Buffer, a Scalar, a Scratch, a NumPy array or number, or a table as in a search-space file"
    raise SpecError(f"{expected}; got {type_text(type(value))}", key=key)


def _rules(rules: Any, noun: str) -> tuple[dict[str, str], dict[str, Callable[..., Any]]]:
    if isinstance(rules, str) or callable(rules):
        rules = [rules]
    named: dict[str, Any] = {}
    if isinstance(rules, Iterable) and not isinstance(rules, Mapping):
        for number, rule in enumerate(rules, start=1):
            own = getattr(rule, "__name__", "")
            named[own if own.isidentifier() and own not in named else f"{noun}_{number}"] = rule
    else:
        named = _mapping(rules, f"{noun}s")
    functions = {name: rule for name, rule in named.items() if callable(rule)}
    return {name: rule for name, rule in named.items() if name not in functions}, functions


_LAUNCH_KEYS = ("block", "grid", "dynamic_smem_bytes")


def _launch(launch: Any) -> dict[str, Any]:
    """Return ``[launch]`` for a mapping, or for a block, a grid and dynamic shared memory in bytes."""
    if isinstance(launch, list | tuple) and 2 <= len(launch) <= len(_LAUNCH_KEYS):
        launch = dict(zip(_LAUNCH_KEYS, launch, strict=False))
    if not isinstance(launch, Mapping | None):
        expected = "expected a mapping with block and grid, or a tuple of these and of dynamic shared memory in bytes"
        raise SpecError(f"{expected}; got {launch!r:.60}", key="launch")
    table = _present(launch or {})
    return {key: listed(value) if key in ("block", "grid", "cluster") else value for key, value in table.items()}


def _reference(
    reference: Any,
    arguments: Mapping[str, Mapping[str, Any]],
    launch: Mapping[str, Any],
    arrays: dict[str, Array],
    *,
    code: str,
) -> dict[str, Any]:
    """Return ``[reference]`` for any of the forms that `autotile.kernel` accepts."""
    written = [name for name, table in arguments.items() if table.get("access") in ("out", "inout")]
    if reference is None or (isinstance(reference, str) and reference == "agreement"):
        return {"verify": "agreement"}
    if callable(reference):
        return {"function": function_name(reference)}
    if isinstance(reference, str):
        if re.fullmatch(_FUNCTION, reference) and reference not in arguments:
            if fault := _lacks(code, reference, arguments):
                expected = "expected an expression of arguments, or the name of a __global__ function"
                raise SpecError(f"{reference!r} is neither an argument nor a {fault}; {expected}", key="reference")
            return {"kernel": reference, **{key: launch[key] for key in _LAUNCH_KEYS if key in launch}}
        return {"outputs": dict.fromkeys(written[:1], reference)}
    if not isinstance(reference, Mapping):
        reference = {"outputs": dict.fromkeys(written[:1], reference)}
    elif not reference.keys() & {"outputs", "kernel", "function", "verify"} or reference.keys() & set(written):
        reference = {"outputs": reference}
    outputs: dict[str, Any] = {}
    key = "reference['outputs']"
    for name, value in _mapping(reference.get("outputs"), key).items():
        if (array := as_array(value)) is not None:
            value = {"file": _file_of(f"expected-{name}", array, arrays, f"{key}[{name!r}]")}  # noqa: PLW2901
        outputs[name] = value
    return {**reference, "outputs": outputs} if outputs else dict(reference)


def function_name(function: Callable[..., Any]) -> str:
    """Return a name that changes with the code of a function, and with numbers, texts and arrays that it holds.

    It holds defaults, what is around it, and the globals that it names, so that results belong to the reference that
    they passed; also all of that of the functions of its own module among these.
    """

    def text(value: Any) -> str:
        if isinstance(value, CodeType):
            return " ".join([value.co_code.hex(), *value.co_names, *value.co_varnames, *map(text, value.co_consts)])
        # Each process has an order of its own in sets.
        return " ".join(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)

    name = str(getattr(function, "__qualname__", type(function).__name__))
    if not isinstance(getattr(function, "__code__", None), CodeType):
        return name

    def named(code: CodeType) -> set[str]:
        return {*code.co_names}.union(*(named(each) for each in code.co_consts if isinstance(each, CodeType)))

    parts, functions = list[str](), [cast("FunctionType", function)]
    for each in functions:  # those that they name are appended
        cells = (cell.cell_contents for cell in each.__closure__ or () if cell != CellType())
        around = each.__globals__
        globals_named = (around[one] for one in sorted(named(each.__code__)) if one in around)
        parts.append(text(each.__code__))
        for value in [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values(), *cells, *globals_named]:
            if isinstance(value, int | float | str):
                parts.append(text(value))
            elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
                parts.append(f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
            elif isinstance(value, FunctionType) and value.__module__ == each.__module__ and value not in functions:
                functions.append(value)
    return f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def _plain(value: Any, key: str) -> Any:
    """Return a value in the types of TOML; NumPy's numbers become Python's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{key}[{name!r}]") for name, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(each, key) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str | int | float):
        return value
    expected = "expected text, numbers, booleans, or lists and tables of them"
    raise SpecError(f"{expected}; got {value!r:.60}, {type_text(type(value))}", key=key)
