"""The section ``[reference]`` of a search-space file: how the expected outputs are computed and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autotile.errors import nearest
from autotile.kernel.arguments import Argument, BufferArgument, arguments_of_kind
from autotile.kernel.array_expressions import ArrayExpression, parse_array_expression
from autotile.kernel.contents import InputExpression
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.nodes import Kind
from autotile.kernel.reference_kernel import KERNEL_KEYS, ReferenceKernel, parse_reference_kernel
from autotile.kernel.table import ProblemSection, Table, describe

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
