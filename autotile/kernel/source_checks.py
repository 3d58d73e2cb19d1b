"""Checks of a source against its search space: macros before compilation, and compiled parameters after it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autotile.core.text import plural
from autotile.errors import InputError, SpecError
from autotile.kernel.source_text import FunctionParameter, global_functions, strip_comments
from autotile.kernel.spec import KernelSpec, Step

_DIRECTIVE = re.compile(r"^[^\S\n]*#[^\S\n]*(if|endif|define)(?:\w*[^\S\n]+(\w+))?([^\n]*)", re.MULTILINE)


def check_source(spec: KernelSpec, source: str) -> None:
    """Raise if a template defines a parameter itself, or lacks a ``__constant__`` variable.

    Raises
    ------
    InputError
        The template defines a macro of the search space, so that its values would have no effect, or it includes no
        files of the author and lacks a variable.
    """
    only = {parameter.name: str(parameter.values[0]) for parameter in spec.parameters if len(parameter.values) == 1}
    names = [*(parameter.name for parameter in spec.parameters), *spec.flags, *spec.build.defines]
    for name, text in _definitions(names, source):
        if only.get(name) == text:  # the same value again has no effect
            continue
        cure = f"remove it, or put it between #ifndef {name} and #endif"
        raise InputError(f"{spec.source}: #define {name} in the template overrides the values of {name}; {cure}")
    for buffer in spec.buffers:
        name = buffer.constant.rpartition("::")[2]
        if name and not re.search(rf"\b{name}\b", source) and not re.search(r'#\s*include\s*"', source):
            hint = f"declare it as in __constant__ {buffer.dtype} {name}[...];"
            raise InputError(f"{spec.source}: {buffer.name}: the template has no variable {buffer.constant}; {hint}")


def _definitions(names: Iterable[str], source: str) -> list[tuple[str, str]]:
    """Return the macros of these names that the source defines outside of any ``#if``, with their texts."""
    defined = {name for name in names if re.search(rf"#\s*define\s+{name}\b", source)}
    if not defined:
        return []
    found, depth = [], 0
    for match in _DIRECTIVE.finditer(strip_comments(source)):
        if match[1] == "define":
            found += [(match[2], match[3].strip())] if depth == 0 and match[2] in defined else []
        else:
            depth += 1 if match[1] == "if" else -1
    return found


def check_signature(
    spec: KernelSpec, step: Step, problem_dtype: str, parameter_bytes: Sequence[int] | None, source: str
) -> None:
    """Raise if a launch would not pass what the function takes.

    Parameters
    ----------
    spec, step, problem_dtype
        The kernel, the step that launches the function, and the element type of the problem.
    parameter_bytes
        Size of each parameter of the compiled function; None if it is not known.
    source
        Text of the template, from which the types of the parameters are quoted where they can be read.

    Raises
    ------
    SpecError
        The number or the size of the parameters differs.
    """
    fault = signature_fault(spec, step, problem_dtype, parameter_bytes, source)
    if fault:
        raise SpecError(fault, source=spec.source, key="arguments")


def signature_fault(
    spec: KernelSpec, step: Step, problem_dtype: str, parameter_bytes: Sequence[int] | None, source: str
) -> str:
    """Return how the arguments differ from the parameters, as one line; "" if they do not. See `check_signature`."""
    if parameter_bytes is None:
        return ""
    arguments = {argument.name: argument for argument in spec.arguments}
    declared = [(name, arguments[name].parameter_bytes(problem_dtype)) for name in step.arguments]
    count = len(parameter_bytes)
    for position, ((name, passed), taken) in enumerate(zip(declared, parameter_bytes, strict=False)):
        if passed != taken:
            return (
                f"the argument {name} has {plural(passed, 'byte')}, but "
                f"{_parameter(step.entry, position, count, source)} has {taken}; give the argument the type of the "
                "parameter, and list the arguments in the order of the parameters"
            )
    if len(declared) == count:
        return ""
    if len(declared) < count:
        lacking = _parameter(step.entry, len(declared), count, source)
        cure = f"add {lacking} to [arguments]"
    else:
        cure = f"remove {declared[count][0]} from [arguments], or set pass = false"
    return f"{step.entry} takes {plural(count, 'parameter')}, but {len(declared)} are declared as arguments; {cure}"


_MAX_QUOTED = 120


def _parameter(entry: str, position: int, count: int, source: str) -> str:
    """Return a parameter as a message names it, with its type and name where the source tells."""
    written = _written_parameters(entry, count, source)
    quoted = " ".join(filter(None, written[position]))[:_MAX_QUOTED] if written else ""
    return f"parameter {position + 1} of {entry}" + (f" ({quoted})" if quoted else "")


def _written_parameters(entry: str, count: int, source: str) -> tuple[tuple[str, str], ...]:
    """Return type and name of each parameter of a function as its source has them; empty if that is not certain."""
    name = entry.partition("<")[0].rpartition(")")[2].rpartition("::")[2].strip()
    found = {
        tuple(map(_type_and_name, function.parameters))
        for function in global_functions(source)
        if function.name == name and len(function.parameters) == count
    }
    return found.pop() if len(found) == 1 else ()


def _type_and_name(parameter: FunctionParameter) -> tuple[str, str]:
    return parameter.type, parameter.name
