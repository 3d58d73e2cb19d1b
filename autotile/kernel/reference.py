"""The section ``[reference]`` of a search-space file: how the expected outputs are computed and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autotile.core.dtypes import DTYPES
from autotile.core.model import Value
from autotile.errors import nearest
from autotile.kernel.argument_kind import ElementType
from autotile.kernel.arguments import Argument, BufferArgument, ScalarArgument, WorkspaceArgument, arguments_of_kind
from autotile.kernel.array_expressions import ArrayExpression, parse_array_expression
from autotile.kernel.contents import InputExpression
from autotile.kernel.expressions import Expression, Kind, parse_expression
from autotile.kernel.table import ProblemSection, Table, describe

if TYPE_CHECKING:
    from autotile.kernel.spec import KernelSpec


KERNEL_KEYS = ("template", "block", "grid", "dynamic_smem_bytes", "defines", "arguments", "element_type")
"""Keys of ``[reference]`` that only a reference kernel has."""

MAX_DIMENSIONS = 3
_MAX_DEFINES = 100
_TEMPLATE = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cuh?"
_MACRO = r"(?a)[A-Za-z_]\w*"
_TEXT = r"(?a)[A-Za-z_]\w*(::[A-Za-z_]\w*)*|-?\.?\d[\w.+\-]*"
_NAME = r"(?a)[A-Za-z_]\w*(::[A-Za-z_]\w*)*(<[\w\s,:<>()+*/%.\-]*>)?"

Wide = Literal["float64"]
_WIDE = {"complex64": "complex128", "complex128": "complex128"}


class ReferenceKernel(NamedTuple):
    """A kernel that computes the expected outputs.

    Attributes
    ----------
    entry
        C++ name of the ``__global__`` function.
    template
        File name of its source, in the folder of the template; None for the template itself.
    block, grid, dynamic_smem_bytes
        Its launch, as expressions over sizes, flags, parameters (with the values of the default configuration) and
        ``device.*``.
    defines
        Macros besides those of the default configuration: an expression, or text.
    arguments
        Names of its arguments in order; None for those of the kernel.
    element_type
        ``"float64"`` if every floating-point argument is passed in double precision, as for ``naive<double>``; None if
        the arguments have the types of the kernel's.
    """

    entry: str
    template: str | None
    block: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    dynamic_smem_bytes: Expression | None
    defines: Mapping[str, Expression | str]
    arguments: tuple[str, ...] | None
    element_type: Wide | None

    def meaning(self) -> dict[str, Any]:
        """Return its part of the space hash."""
        return {
            "entry": self.entry,
            "template": self.template,
            "block": [extent.canonical for extent in self.block],
            "grid": [extent.canonical for extent in self.grid],
            "dynamic_smem_bytes": self.dynamic_smem_bytes.canonical if self.dynamic_smem_bytes else "0",
            "defines": {n: e if isinstance(e, str) else e.canonical for n, e in sorted(self.defines.items())},
            "arguments": self.arguments,
            "element_type": self.element_type,
        }

    def macros(self, names: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values of the macros, given the value of every name."""
        return {
            name: value if isinstance(value, str) else value.evaluate(names) for name, value in self.defines.items()
        }


def parse_reference_kernel(table: Table, arguments: Sequence[Argument], kinds: Mapping[str, Kind]) -> ReferenceKernel:
    """Parse the keys of ``[reference]`` that describe a kernel.

    Parameters
    ----------
    table
        The section.
    arguments
        Arguments of the tuned kernel.
    kinds
        Kind of each size, flag, parameter and ``device.*``.

    Raises
    ------
    SpecError
        A key is missing or malformed, or an argument does not exist.
    """
    return ReferenceKernel(
        entry=_matching(
            table, "kernel", _NAME, 'the name of a __global__ function, such as "naive" or "naive<double>"'
        ),
        template=_matching(table, "template", _TEMPLATE, "a bare file name that ends in .cu or .cuh")
        if "template" in table.data
        else None,
        block=table.expressions("block", kinds, max_length=MAX_DIMENSIONS),
        grid=table.expressions("grid", kinds, max_length=MAX_DIMENSIONS),
        dynamic_smem_bytes=table.optional_expression("dynamic_smem_bytes", kinds),
        defines=_defines(table, kinds),
        arguments=_argument_names(table, arguments),
        element_type=_element_type(table, arguments),
    )


def reference_spec(spec: KernelSpec, dtype: str, sizes: Mapping[str, int]) -> KernelSpec:
    """Return the reference kernel as a kernel of its own, without parameters that are tuned.

    Parameters
    ----------
    spec
        The tuned kernel; its reference is a kernel.
    dtype, sizes
        Element type of the problem, and its sizes and flags.
    """
    kernel = spec.reference.kernel
    assert kernel is not None
    known = {argument.name: argument for argument in spec.arguments}
    names = kernel.arguments if kernel.arguments is not None else tuple(known)
    arguments = [known[name] if kernel.arguments is None else _passed(known[name]) for name in names]
    arguments += [replace(buffer, is_passed=False) for buffer in _further_buffers(spec, names)]
    if kernel.element_type is not None:  # constant memory has the type that the source declares
        arguments = [_widened(argument, dtype, sizes) if argument.is_passed else argument for argument in arguments]
    launch = replace(
        spec.steps[0].launch,
        block=kernel.block,
        grid=kernel.grid,
        cluster=(),
        is_cooperative=False,
        dynamic_smem_bytes=kernel.dynamic_smem_bytes,
        static_smem_bytes=None,
        min_registers=None,
    )
    passed = tuple(argument.name for argument in arguments if argument.is_passed)
    step = replace(spec.steps[0], entry=kernel.entry, launch=launch, arguments=passed, when=None, times=None, swap=())
    return replace(spec, steps=(step,), arguments=tuple(arguments))


def _passed(argument: Argument) -> Argument:
    """Return a listed argument: the address of a buffer is passed, also where the kernel reads constant memory."""
    return replace(argument, is_passed=True, constant="") if isinstance(argument, BufferArgument) else argument


def _further_buffers(spec: KernelSpec, names: Sequence[str]) -> list[BufferArgument]:
    """Return the buffers that a kernel with the named arguments reads although it does not take their addresses."""
    described = {target for argument in spec.arguments if argument.name in names for target in argument.targets}
    return [b for b in spec.buffers if b.name not in names and (b.constant or b.name in described)]


def reference_config(spec: KernelSpec, names: Mapping[str, int]) -> dict[str, Value]:
    """Return the parameters of a reference kernel: the default, except those in ``names``."""
    return {name: names.get(name, value) for name, value in spec.default.items()}


def wide_type(dtype: str) -> str:
    """Return the type of double precision for a floating-point type or vector; other types are returned unchanged."""
    kind = DTYPES[dtype]
    if kind.components:
        return f"double{kind.components}" if not kind.component.is_integer else dtype
    return dtype if kind.is_integer else _WIDE.get(dtype, "float64")


def _widened(argument: Argument, dtype: str, sizes: Mapping[str, int]) -> Argument:
    match argument:
        case BufferArgument():
            return replace(argument, dtype=ElementType(wide_type(argument.element_type(dtype, sizes))))
        case WorkspaceArgument():
            return replace(argument, dtype=ElementType(wide_type(argument.dtype.of(dtype, sizes))))
        case ScalarArgument():
            return replace(argument, dtype=wide_type(argument.element_type(dtype)))
        case _:
            return argument


def _element_type(table: Table, arguments: Sequence[Argument]) -> Wide | None:
    if "element_type" not in table.data:
        return None
    if table.text("element_type") != "float64":
        raise table.error(
            "element_type",
            f'{describe(table.text("element_type"))} is not accepted; expected "float64", to pass floating-point '
            "arguments in double precision, or no element_type",
        )
    fixed = [argument.name for argument in arguments if argument.described_buffer]
    if fixed and "arguments" not in table.data:
        raise table.error("element_type", f"the tensor map {fixed[0]!r} has the type of its buffer; name the arguments")
    return "float64"


def _argument_names(table: Table, arguments: Sequence[Argument]) -> tuple[str, ...] | None:
    if "arguments" not in table.data:
        return None
    known = [argument.name for argument in arguments]
    names = table.texts("arguments")
    for name in names:
        if name not in known:
            raise table.error("arguments", f"{name[:60]!r} is not an argument of the kernel: {', '.join(known)}")
    for argument in arguments:
        if isinstance(argument, BufferArgument) and argument.is_written and argument.name not in names:
            raise table.error("arguments", f"the buffer {argument.name!r} is written by the kernel; add it")
    return names


def _defines(table: Table, kinds: Mapping[str, Kind]) -> dict[str, Expression | str]:
    entries = table.table("defines", optional=True)
    if len(entries.data) > _MAX_DEFINES:
        raise table.error("defines", f"at most {_MAX_DEFINES} macros are accepted")
    defines: dict[str, Expression | str] = {}
    for name, value in entries.data.items():
        if not re.fullmatch(_MACRO, name):
            raise entries.error(name, f"{name!r} is not the name of a macro")
        text = repr(value) if isinstance(value, bool | float) else value
        if isinstance(text, str) and text not in kinds and re.fullmatch(_TEXT, text) and text not in _BOOLEANS:
            defines[name] = text
        else:
            defines[name] = entries.any_expression(name, text, kinds)
    return defines


_BOOLEANS = ("True", "False")


def _matching(table: Table, name: str, pattern: str, expected: str) -> str:
    text = table.text(name)
    if not re.fullmatch(pattern, text):
        raise table.error(name, f"expected {expected}; got {describe(text)}")
    return text


FORMS = ("outputs", "kernel", "function", "verify")
"""Keys of which a reference has one."""


class Tolerance(NamedTuple):
    """Allowed error of an element: ``absolute + relative * max(|expected|, scale)``.

    The scale is the root mean square of the output's expected values; with ``is_elementwise`` it is 0, as in
    `numpy.isclose`.
    """

    relative: float
    absolute: float = 0.0
    is_elementwise: bool = False

    def text(self, scale: float) -> str:
        """Return the criterion for outputs of the given scale as text."""
        largest = "|expected|" if self.is_elementwise else f"max(|expected|, {scale:.3g})"
        parts = [f"{self.absolute:.2g}"] if self.absolute else []
        if self.relative or not parts:
            parts.append(f"{self.relative:.2g} of {largest}")
        return " and ".join(parts)

    def meaning(self) -> Any:
        """Return its part of the space hash."""
        return {"absolute": self.absolute, "relative": self.relative} if self.is_elementwise else self.relative


class Reference(NamedTuple):
    """How the expected outputs are computed, and how closely a kernel must match them.

    Attributes
    ----------
    outputs
        Expression of the values of each output, in float64; empty for the other forms.
    reduction
        Number of terms summed into each output element; the tolerance grows with its square root.
    tolerance
        Tolerance that replaces the one computed from dtypes and ``reduction``.
    tolerances
        Tolerances of single outputs, which take precedence.
    kernel
        Kernel that computes the outputs.
    files
        File of the values of each output that is not an expression: a ``.npy`` file, at the default sizes.
    function
        Name of the Python function that computes the outputs; the function itself is attached to the kernel.
    is_agreement
        Whether there is no reference, and configurations are compared with each other.
    comparison
        Name of the Python function that compares the outputs, instead of tolerances; it is attached to the kernel.
    unchecked
        Written buffers that are not compared with anything.
    """

    outputs: Mapping[str, ArrayExpression]
    reduction: Expression
    tolerance: float | None
    tolerances: Mapping[str, Tolerance] = {}
    kernel: ReferenceKernel | None = None
    files: Mapping[str, str] = {}
    function: str | None = None
    is_agreement: bool = False
    comparison: str | None = None
    unchecked: tuple[str, ...] = ()

    @property
    def notice(self) -> str:
        """Notice to the user on results that were verified with it, as one line; "" for nothing."""
        if self.is_agreement:
            return (
                "NO REFERENCE: configurations were only compared with each other, so an error that they share is not "
                "found; add a reference"
            )
        if self.comparison is not None:
            name = self.comparison.partition("-")[0]
            return f"outputs were compared by {name}, once for each configuration, at the tuned sizes only"
        if self.files:
            return (
                f"the reference of {', '.join(self.files)} is a file: it was compared at the default sizes only, "
                "not at the ragged ones"
            )
        if self.unchecked:
            return f"NOT VERIFIED: nothing was compared with {', '.join(self.unchecked)}"
        return ""

    def meaning(self) -> dict[str, Any]:
        """Return its part of the space hash; what is at its default is left out."""
        meaning: dict[str, Any] = {
            "outputs": {name: e.canonical for name, e in self.outputs.items()},
            "reduction": self.reduction.canonical,
            "tolerance": self.tolerance,
        }
        if self.tolerances:
            meaning["tolerances"] = {name: t.meaning() for name, t in sorted(self.tolerances.items())}
        if self.kernel is not None:
            meaning["reference_kernel"] = self.kernel.meaning()
        if self.files:
            meaning["reference_files"] = dict(self.files)
        if self.function is not None:
            meaning["reference_function"] = self.function
        if self.comparison is not None:
            meaning["comparison"] = self.comparison
        if self.is_agreement:
            meaning["verify"] = "agreement"
        if self.unchecked:
            meaning["unchecked"] = sorted(self.unchecked)
        return meaning


def check_reference(reference: Reference, arguments: tuple[Argument, ...], problem: ProblemSection) -> None:
    """Evaluate the shape of each output, at the default and the ragged sizes, and with each flag inverted.

    Raises
    ------
    SpecError
        Shapes are not compatible, an axis does not exist, a divisor is zero, or an output does not have the shape of
        its buffer.
    """
    buffers = {buffer.name: buffer for buffer in arguments_of_kind(arguments, BufferArgument)}
    for sizes, check in _problems(problem):
        operands = {a.name: a.operand(sizes, check=check) for a in arguments if a.is_operand}
        for name, expression in reference.outputs.items():
            shape, expected = expression.shape({**sizes, **operands}), buffers[name].array_shape(sizes)
            if shape != expected:
                at = " ".join(f"{size}={value}" for size, value in sizes.items())
                problem_text = f"the result has the shape {shape}, but the buffer {name} has {expected}, at {at}"
                if not shape and expected == (1,):
                    problem_text += "; write reshape(..., 1)"
                raise expression.location.error(problem_text, expression=expression.text)


def _problems(problem: ProblemSection) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Yield the sizes to test, with whether scalars have their check values."""
    for sizes, check in ((problem.sizes, False), (problem.ragged, True)):
        yield sizes, check
        for flag in problem.flags:
            yield {**sizes, flag: 1 - sizes[flag]}, check


def parse_reference(
    table: Table, arguments: tuple[Argument, ...], problem: ProblemSection, kinds: Mapping[str, Kind]
) -> Reference:
    """Parse ``[reference]``, which has one of five forms: ``outputs``, a kernel, a function, files, or agreement.

    Parameters
    ----------
    table
        The section.
    arguments, problem
        Arguments of the kernel, and its sizes and flags.
    kinds
        Kind of each size, flag, parameter and ``device.*``.

    Raises
    ------
    SpecError
        An output is missing or unknown, or its expression is malformed, uses a buffer that is not initialized, or has
        no value or the wrong shape.
    """
    table.allow(
        ("outputs", "kernel", "function", "verify", "unchecked", "comparison", "reduction", "tolerance", *KERNEL_KEYS)
    )
    forms = [form for form in ("outputs", "kernel", "function", "verify") if form in table.data]
    if len(forms) != 1:
        what = f"{' and '.join(forms)} are both given" if forms else "there is no reference"
        raise table.error(
            "",
            f"{what}; expected one of outputs (expressions or files), kernel (another kernel), function (of Python) "
            'and verify = "agreement" (none: configurations are compared with each other)',
        )
    form = forms[0]
    if form != "kernel":
        for name in KERNEL_KEYS:
            if name in table.data:
                raise table.error(name, f"{name} belongs to a reference kernel; add kernel, or remove it")
    written = [buffer.name for buffer in arguments_of_kind(arguments, BufferArgument) if buffer.is_written]
    reduction = _reduction(table, problem)
    tolerance, tolerances = _tolerances(table, written)
    unchecked = _unchecked(table, written)
    comparison = table.text("comparison") if "comparison" in table.data else None
    if comparison is not None and form == "verify":
        raise table.error("comparison", "there are no expected values to compare with; remove comparison")
    common = Reference({}, reduction, tolerance, tolerances, unchecked=unchecked, comparison=comparison)
    match form:
        case "kernel":
            return common._replace(kernel=parse_reference_kernel(table, arguments, kinds))
        case "function":
            return common._replace(function=table.text("function"))
        case "verify":
            return _verified(table, common, tuple(written))
    checked = [name for name in written if name not in unchecked]
    outputs, files = _outputs(table.table("outputs"), checked, arguments, problem)
    reference = common._replace(outputs=outputs, files=files)
    check_reference(reference, arguments, problem)
    return reference


def _verified(table: Table, common: Reference, written: tuple[str, ...]) -> Reference:
    """Return a reference without expected outputs: agreement of the configurations, or nothing."""
    match table.text("verify"):
        case "agreement":
            return common._replace(is_agreement=True)
        case "nothing":
            return common._replace(unchecked=written)
        case other:
            raise table.error("verify", f'{describe(other)} is not accepted; expected "agreement" or "nothing"')


def _unchecked(table: Table, written: list[str]) -> tuple[str, ...]:
    """Parse the names of written buffers that are not compared."""
    names = table.texts("unchecked", optional=True)
    for name in names:
        if name not in written:
            raise table.error("unchecked", f"{name[:60]!r} is no buffer that is written{nearest(name, written)}")
    return names


def _outputs(
    table: Table, written: list[str], arguments: tuple[Argument, ...], problem: ProblemSection
) -> tuple[dict[str, ArrayExpression], dict[str, str]]:
    """Parse the expression or the file of each output."""
    table.allow(written)
    for name in written:
        if name not in table.data:
            raise table.error("", f'the buffer {name!r} is written but has no reference; add {name} = "..."')
    known = sorted({*problem.sizes, *(argument.name for argument in arguments if argument.is_operand)})
    outputs: dict[str, ArrayExpression] = {}
    files: dict[str, str] = {}
    for name in written:
        if isinstance(table.data[name], dict):
            entry = table.table(name)
            entry.allow(("file",))
            files[name] = entry.text("file")
            if not files[name].endswith(".npy"):
                raise entry.error("file", f"{describe(files[name])} is not accepted; expected a .npy file")
            if drawn := random_inputs(arguments):
                cure = f'give {drawn[0]} a file, too, or a constant content such as init = "ones"'
                raise entry.error("file", f"the file holds one answer, but the content of {drawn[0]} is random; {cure}")
        else:
            text = (
                "; ".join(table.texts(name)) if isinstance(table.data[name], list) else table.text(name, multiline=True)
            )
            outputs[name] = parse_array_expression(text, known, problem.kinds, table.location(name))
    return outputs, files


def random_inputs(arguments: Sequence[Argument]) -> list[str]:
    """Return the names of the buffers whose contents depend on the seed."""
    names: list[str] = []
    for buffer in arguments_of_kind(arguments, BufferArgument):
        drawn = buffer.content.generators if isinstance(buffer.content, InputExpression) else ()
        if buffer.is_initialized and (drawn or (buffer.content is None and buffer.init in ("normal", "uniform"))):
            names.append(buffer.name)
    return names


def _tolerances(table: Table, written: list[str]) -> tuple[float | None, dict[str, Tolerance]]:
    """Parse ``tolerance``: a number for all outputs, or a table of those of single outputs."""
    if "tolerance" not in table.data:
        return None, {}
    if not isinstance(table.data["tolerance"], dict):
        return _positive(table, "tolerance"), {}
    entries = table.table("tolerance")
    entries.allow(written)
    return None, {name: _tolerance(entries, name) for name in entries.data}


def _tolerance(table: Table, name: str) -> Tolerance:
    if not isinstance(table.data[name], dict):
        return Tolerance(_positive(table, name))
    entry = table.table(name)
    entry.allow(("absolute", "relative"))
    values = {key: entry.number(key) for key in entry.data}
    if not values or min(values.values()) < 0 or max(values.values()) == 0:
        raise table.error(name, "expected absolute, relative, or both, from 0, and one of them above 0")
    return Tolerance(values.get("relative", 0.0), values.get("absolute", 0.0), is_elementwise=True)


def _positive(table: Table, name: str) -> float:
    value = table.number(name)
    if value <= 0:
        raise table.error(name, f"expected a number above 0, got {value}")
    return value


def _reduction(table: Table, problem: ProblemSection) -> Expression:
    if "reduction" not in table.data:
        return parse_expression("1", {})
    reduction = table.expression("reduction", problem.kinds, "number")
    problem.check_positive(table, "reduction", [reduction])
    return reduction
