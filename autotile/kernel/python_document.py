"""The document of a kernel that is written in Python: the search-space file that the same kernel would have."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.text import plural
from autotile.errors import InputError, SpecError
from autotile.kernel.computed import Predicate
from autotile.kernel.expressions import is_keyword, python_source
from autotile.kernel.python_arguments import Buffer, Scalar, Scratch, as_array, listed, parameter_names


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

    document: dict[str, Any]
    rules: dict[str, Predicate]
    heuristics: dict[str, Predicate]
    source: str | None
    template: Path | None
    arrays: dict[str, NDArray[Any]]
    reference: Callable[..., Any] | None


def build_document(
    source: str | os.PathLike[str],
    entry: str | None,
    *,
    parameters: Mapping[str, Sequence[Any]],
    arguments: Mapping[str, Any] | Sequence[Any],
    launch: Mapping[str, Any] | Sequence[Any] | None,
    steps: Sequence[Mapping[str, Any]],
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
    if not (isinstance(entry, str) or (entry is None and steps)):
        raise InputError(f"the entry is {entry!r:.60}, expected the name of a __global__ function")
    first = entry if entry is not None else str(next(iter(steps)).get("entry", ""))
    name = str(name) if name is not None else _kernel_name(first)
    given = _named_arguments(
        arguments, first, text if text is not None else _peek(template), name, has_steps=entry is None
    )
    arrays: dict[str, NDArray[Any]] = {}
    tables = {key: _argument(key, value, name, arrays) for key, value in given.items()}
    launched = _launch(launch, name)
    text_rules, rule_functions = _rules(rules, "rule", name)
    text_heuristics, heuristic_functions = _rules(heuristics, "heuristic", name)
    document: dict[str, Any] = {
        "kernel": {"name": name, "template": _template_name(name, template), **_given({"entry": entry, **kernel})},
        "problem": {"sizes": _mapping(sizes, "sizes", name), **_given(problem)},
        "parameters": {key: listed(values) for key, values in _mapping(parameters, "parameters", name).items()},
        "default": _mapping(default, "default", name),
        "rules": text_rules,
        "heuristics": text_heuristics,
        "launch": launched,
        "steps": [_launch(step, name) for step in steps],
        "arguments": tables,
        "reference": _reference(reference, tables, launched, arrays),
        "work": _given(work),
    }
    for key, table in _mapping(sections, "sections", name).items():
        document[key] = {**document.get(key, {}), **_mapping(table, key, name)}
    kept = (*_REQUIRED, *([] if steps else ["launch"]), *sections)
    plain = {key: _plain(table, key, name) for key, table in document.items() if table or key in kept}
    function = reference if callable(reference) else None
    return PythonDocument(plain, rule_functions, heuristic_functions, text, template, arrays, function)


_REQUIRED = ("kernel", "problem", "parameters", "arguments", "reference")


def _source(source: str | os.PathLike[str]) -> tuple[str | None, Path | None]:
    """Return the text or the path of a template; a text has a line break, a brace or a semicolon."""
    if isinstance(source, str) and any(mark in source for mark in "\n{;"):
        return source.replace("\r\n", "\n").replace("\r", "\n"), None
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


def _peek(template: Path | None) -> str:
    return template.read_text(errors="replace") if template is not None else ""


def _mapping(value: Any, key: str, kernel: str) -> dict[str, Any]:
    """Return a mapping that the caller gave; empty for None."""
    if value is not None and not isinstance(value, Mapping):
        what = f"expected a mapping, got {value!r:.60}, a {type(value).__name__}"
        raise SpecError(what, source=python_source(kernel), key=key)
    return dict(value or {})


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


def _named_arguments(arguments: Any, entry: str, source: str, kernel: str, *, has_steps: bool) -> dict[str, Any]:
    """Return arguments by name; those of a list are named as in the signature, where it can be read.

    A name that is a keyword of Python, such as ``in``, gets a ``_``.
    """
    if not isinstance(arguments, list | tuple):
        return _mapping(arguments, "arguments", kernel)
    names = tuple(f"{name}_" if is_keyword(name) else name for name in parameter_names(source, entry))
    if len(names) != len(arguments) or len(set(names)) != len(names) or "" in names:
        if (
            names
            and not has_steps
            and all(isinstance(value, Buffer | Scalar | Scratch) and _is_passed(value) for value in arguments)
        ):
            _check_count(names, len(arguments), kernel, entry)
        names = tuple(f"argument_{number}" for number in range(len(arguments)))
    return dict(zip(names, arguments, strict=True))


def _is_passed(argument: Buffer | Scalar | Scratch) -> bool:
    table = argument.to_table()
    return table.get("pass", True) is True and "constant" not in table


def _check_count(names: Sequence[str], count: int, kernel: str, entry: str) -> None:
    """Raise if a function whose parameters can be read, so that none is a macro, takes another number of them."""
    if count != len(names) and all(names) and not any(name.isupper() for name in names if len(name) > 1):
        found = f"{entry} takes {plural(len(names), 'parameter')} ({', '.join(names)})"
        raise SpecError(f"{python_source(kernel)}: [arguments]: {found}, but {count} are listed; list one for each")


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


def _rules(rules: Any, noun: str, kernel: str) -> tuple[dict[str, str], dict[str, Callable[..., Any]]]:
    """Return the rules that are texts, and those that are functions, by name."""
    if isinstance(rules, str) or callable(rules):
        rules = [rules]
    named: dict[str, Any] = {}
    if isinstance(rules, Iterable) and not isinstance(rules, Mapping):
        for number, rule in enumerate(rules, start=1):
            own = getattr(rule, "__name__", "")
            named[own if own.isidentifier() and own not in named else f"{noun}_{number}"] = rule
    else:
        named = _mapping(rules, f"{noun}s", kernel)
    functions = {name: rule for name, rule in named.items() if callable(rule)}
    return {name: rule for name, rule in named.items() if name not in functions}, functions


_LAUNCH_KEYS = ("block", "grid", "dynamic_smem_bytes")


def _launch(launch: Any, kernel: str) -> dict[str, Any]:
    """Return ``[launch]`` for a mapping, or for a block, a grid and dynamic shared memory in bytes."""
    if isinstance(launch, list | tuple) and 2 <= len(launch) <= len(_LAUNCH_KEYS):
        launch = dict(zip(_LAUNCH_KEYS, launch, strict=False))
    if not isinstance(launch, Mapping | None):
        raise SpecError(
            f"expected a mapping with block and grid, or a tuple of these and of dynamic shared memory in bytes; got "
            f"{launch!r:.60}",
            source=python_source(kernel),
            key="launch",
        )
    table = {key: value for key, value in (launch or {}).items() if value is not None}
    return {key: listed(value) if key in ("block", "grid", "cluster") else value for key, value in table.items()}


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
        return {"function": function_name(reference)}
    if isinstance(reference, str):
        if re.fullmatch(r"[A-Za-z_][\w:]*(<.*>)?", reference) and reference not in arguments:
            own = {key: launch[key] for key in _LAUNCH_KEYS if key in launch}
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


def function_name(function: Callable[..., Any]) -> str:
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
