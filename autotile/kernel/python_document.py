"""The document of a kernel that is written in Python: the search-space file that the same kernel would have."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import dtype_name
from autotile.errors import InputError, SpecError
from autotile.kernel.predicates import Predicate
from autotile.kernel.syntax import python_source

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
    options
        Further keys of the argument in a search-space file.

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

    @property
    def array(self) -> NDArray[Any] | None:
        """The content, if one is given."""
        return as_array(self.dtype)

    def to_table(self) -> dict[str, Any]:
        """Return the argument as in a search-space file; a content is not part of it."""
        dtype = self.array.dtype if self.array is not None else self.dtype
        shape = self.array.shape if self.shape is None and self.array is not None else self.shape
        table = {"buffer": _dtype(dtype), "shape": _listed(shape), "access": self.access}
        return table | ({"init": self.init} if self.init is not None else {}) | dict(self.options)


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
        table = {"scalar": _dtype(self.dtype), "value": self.value}
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
        table = {"workspace": _dtype(self.dtype), "shape": _listed(self.shape)}
        return table | ({"init": self.init} if self.init is not None else {}) | dict(self.options)


class PythonDocument(NamedTuple):
    """A kernel as a search-space file would state it, and what such a file cannot hold.

    Attributes
    ----------
    document
        Tables of the search-space file by name.
    rules, heuristics
        Rules and heuristics that are functions, by name.
    source
        Text of the template; None if it is a file.
    template
        Path of the template; None if it is a text.
    arrays
        Contents of buffers and expected outputs, by the names of the files that the document gives for them.
    reference
        Function that computes the expected outputs; None if the reference is none.
    """

    document: dict[str, dict[str, Any]]
    rules: dict[str, Predicate]
    heuristics: dict[str, Predicate]
    source: str | None
    template: Path | None
    arrays: dict[str, NDArray[Any]]
    reference: Callable[..., Any] | None


def build_document(
    source: str | os.PathLike[str],
    entry: str,
    *,
    parameters: Mapping[str, Sequence[Any]],
    arguments: Mapping[str, Any] | Sequence[Any],
    launch: Mapping[str, Any] | Sequence[Any] | None,
    reference: Any,
    sizes: Mapping[str, int] | None,
    rules: Mapping[str, Any] | Sequence[Any],
    heuristics: Mapping[str, Any] | Sequence[Any],
    default: Mapping[str, Any] | None,
    name: str | None,
    kernel: Mapping[str, Any],
    problem: Mapping[str, Any],
    work: Mapping[str, Any],
    sections: Mapping[str, Any],
) -> PythonDocument:
    """Return the document for the arguments of `autotile.kernel`.

    Parameters
    ----------
    kernel, problem, work
        Further keys of these sections; those that are None or empty are left out.
    sections
        Further sections, which are merged with those that the other arguments make.
    others
        As for `autotile.kernel`.

    Raises
    ------
    InputError
        An argument has a type that no search-space file could hold.
    """
    text, template = _source(source)
    name = name if name is not None else _kernel_name(entry)
    listed = _named_arguments(arguments, entry, text if text is not None else _peek(template))
    arrays: dict[str, NDArray[Any]] = {}
    tables = {key: _argument(key, value, name, arrays) for key, value in listed.items()}
    launched = _launch(launch)
    text_rules, rule_functions = _rules(rules, "rule")
    text_heuristics, heuristic_functions = _rules(heuristics, "heuristic")
    document: dict[str, Any] = {
        "kernel": {"name": name, "template": _template_name(name, template), "entry": entry, **_given(kernel)},
        "problem": {"sizes": dict(sizes or {}), **_given(problem)},
        "parameters": {key: _listed(values) for key, values in parameters.items()},
        "default": dict(default or {}),
        "rules": text_rules,
        "heuristics": text_heuristics,
        "launch": launched,
        "arguments": tables,
        "reference": _reference(reference, tables, launched, arrays),
        "work": _given(work),
    }
    for key, table in sections.items():
        merged = document.get(key)
        document[key] = {**merged, **table} if isinstance(merged, dict) and isinstance(table, Mapping) else table
    plain = {key: _plain(table, key, name) for key, table in document.items() if table or key in _REQUIRED}
    function = reference if callable(reference) else None
    return PythonDocument(plain, rule_functions, heuristic_functions, text, template, arrays, function)


_REQUIRED = ("kernel", "problem", "parameters", "launch", "arguments", "reference")


def _source(source: str | os.PathLike[str]) -> tuple[str | None, Path | None]:
    """Return the text or the path of a template; a text has a line break, a brace or a semicolon."""
    if isinstance(source, str) and any(mark in source for mark in "\n{;"):
        return source.replace("\r\n", "\n").replace("\r", "\n"), None
    path = Path(source).expanduser()
    if not path.is_file():
        raise InputError(
            f"the source {str(source)[:80]!r} is neither a file that exists nor CUDA C++ code; give a path, or the code"
        )
    return None, path.absolute()


def _peek(template: Path | None) -> str:
    return template.read_text(errors="replace") if template is not None else ""


def _kernel_name(entry: str) -> str:
    """Return a name for a kernel that is given none: the identifier of its entry, without namespaces and templates."""
    words = re.findall(r"[A-Za-z]\w*", entry.partition("<")[0])
    return str(words[-1]) if words else "kernel"


def _template_name(name: str, template: Path | None) -> str:
    is_accepted = template is not None and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cu", template.name)
    return template.name if template is not None and is_accepted else f"{name}.cu"


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None and not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | Mapping | Sequence) and len(value) == 0


def _named_arguments(arguments: Mapping[str, Any] | Sequence[Any], entry: str, source: str) -> dict[str, Any]:
    """Return arguments by name; those of a list are named as in the signature, where it can be read."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    names = parameter_names(source, entry)
    if len(names) != len(arguments) or len(set(names)) != len(names):
        names = tuple(f"argument_{number}" for number in range(len(arguments)))
    return dict(zip(names, arguments, strict=True))


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


def _file_of(name: str, array: NDArray[Any], arrays: dict[str, NDArray[Any]]) -> str:
    """Add an array, and return the name of its file, which tells its content apart from others."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).data)
    file = f"{name}-{digest.hexdigest()[:16]}.npy"
    arrays[file] = array
    return file


def _argument(name: str, value: Any, kernel: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the table of an argument; the content of an array is added to ``arrays``."""
    if isinstance(value, Mapping):
        return dict(value)
    if as_array(value) is not None:
        value = Buffer(value)
    if isinstance(value, Buffer):
        table, array = value.to_table(), value.array
        if array is not None and value.access != "out":
            table |= {"file": _file_of(name, array, arrays), "whole": True}
        return table
    if isinstance(value, Scalar | Scratch):
        return value.to_table()
    if isinstance(value, np.generic):
        return Scalar(value.dtype, value.item()).to_table()
    raise SpecError(
        f"expected a Buffer, a Scalar, a Scratch, a NumPy array or number, or a table as in a search-space file; got "
        f"a {type(value).__name__}",
        source=python_source(kernel),
        key=f"arguments[{name!r}]",
    )


def _rules(rules: Mapping[str, Any] | Sequence[Any], noun: str) -> tuple[dict[str, str], dict[str, Callable[..., Any]]]:
    """Return the rules that are texts, and those that are functions, by name."""
    if isinstance(rules, str) or callable(rules):
        rules = [rules]
    named: dict[str, Any] = {}
    if isinstance(rules, Mapping):
        named = dict(rules)
    else:
        for number, rule in enumerate(rules, start=1):
            own = getattr(rule, "__name__", "")
            named[own if own.isidentifier() and own not in named else f"{noun}_{number}"] = rule
    functions = {name: rule for name, rule in named.items() if callable(rule)}
    return {name: rule for name, rule in named.items() if name not in functions}, functions


def _launch(launch: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any]:
    """Return ``[launch]`` for a mapping, or for a block, a grid and dynamic shared memory in bytes."""
    if launch is None:
        return {}
    if not isinstance(launch, Mapping):
        launch = dict(zip(("block", "grid", "dynamic_smem_bytes"), launch, strict=False))
    table = {key: value for key, value in launch.items() if value is not None}
    return {key: _listed(value) if key in ("block", "grid", "cluster") else value for key, value in table.items()}


_FORMS = {"outputs", "kernel", "function", "verify"}
_AGREEMENT = {"verify": "agreement"}


def _reference(
    reference: Any,
    arguments: Mapping[str, Mapping[str, Any]],
    launch: Mapping[str, Any],
    arrays: dict[str, NDArray[Any]],
) -> dict[str, Any]:
    """Return ``[reference]`` for any of the forms that `autotile.kernel` accepts."""
    written = [name for name, table in arguments.items() if table.get("access") in ("out", "inout")]
    if reference is None or (isinstance(reference, str) and reference == "agreement"):
        return dict(_AGREEMENT)
    if callable(reference):
        return {"function": _function_name(reference)}
    if isinstance(reference, str):
        if re.fullmatch(r"[A-Za-z_][\w:]*(<.*>)?", reference) and reference not in arguments:
            own = {key: launch[key] for key in ("block", "grid", "dynamic_smem_bytes") if key in launch}
            return {"kernel": reference, **own}
        return {"outputs": dict.fromkeys(written[:1], reference)}
    if isinstance(reference, Mapping):
        if not reference.keys() & _FORMS or reference.keys() & set(written):
            reference = {"outputs": reference}
        outputs = reference.get("outputs", {})
    else:
        outputs = dict.fromkeys(written[:1], reference)
        reference = {"outputs": outputs}
    converted = {name: _expected(name, value, arrays) for name, value in outputs.items()}
    return {**reference, "outputs": converted} if converted else dict(reference)


def _function_name(function: Callable[..., Any]) -> str:
    """Return a name that changes with the code of a function, so that results belong to the reference they passed."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name}-{hashlib.sha256(_code_text(code).encode()).hexdigest()[:16]}"


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *code.co_varnames, *constants])


def _expected(name: str, value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """Return the reference of one output: an expression, a table, or the file of an array."""
    array = as_array(value)
    return value if array is None else {"file": _file_of(f"expected-{name}", array, arrays)}


def _dtype(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return [value] if isinstance(value, str | int) else list(value)


def _plain(value: Any, key: str, kernel: str) -> Any:
    """Return a value in the types of TOML; NumPy's numbers become Python's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{key}[{name!r}]", kernel) for name, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(each, key, kernel) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str | int | float):
        return value
    raise SpecError(
        f"expected text, numbers, booleans, or lists and tables of them; got {value!r:.60}, a {type(value).__name__}",
        source=python_source(kernel),
        key=key,
    )
