"""Compare the declared arguments of a function with the parameters that it was compiled with."""

from __future__ import annotations

from collections.abc import Sequence

from autotile.core.text import plural
from autotile.errors import SpecError
from autotile.kernel.global_functions import FunctionParameter, global_functions
from autotile.kernel.spec import KernelSpec, Step


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
