"""The section ``[reference]`` of a search-space file: how the expected outputs are computed and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from autotile.kernel.arguments import Argument, BufferArgument, arguments_of_kind
from autotile.kernel.array_expressions import ArrayExpression, parse_array_expression
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.table import ProblemSection, Table


class Reference(NamedTuple):
    """Computation of the expected outputs, in float64."""

    outputs: Mapping[str, ArrayExpression]
    reduction: Expression
    """Number of terms summed into each output element; the tolerance grows with its square root."""
    tolerance: float | None
    """Tolerance that replaces the one computed from dtypes and ``reduction``."""


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
            shape, expected = np.shape(expression.evaluate({**sizes, **operands})), buffers[name].array_shape(sizes)
            if shape != expected:
                at = " ".join(f"{size}={value}" for size, value in sizes.items())
                problem_text = f"the result has the shape {shape}, but the buffer {name} has {expected}, at {at}"
                raise expression.location.error(problem_text, expression=expression.text)


def _problems(problem: ProblemSection) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Yield the sizes to test, with whether scalars have their check values."""
    for sizes, check in ((problem.sizes, False), (problem.ragged, True)):
        yield sizes, check
        for flag in problem.flags:
            yield {**sizes, flag: 1 - sizes[flag]}, check


def parse_reference(table: Table, arguments: tuple[Argument, ...], problem: ProblemSection) -> Reference:
    """Parse ``[reference]``: one array expression for each buffer that the kernel writes.

    Raises
    ------
    SpecError
        An output is missing or unknown, or its expression is malformed, uses a buffer that is not initialized, or has
        no value or the wrong shape.
    """
    table.allow(("outputs", "reduction", "tolerance"))
    outputs = table.table("outputs")
    written = [buffer.name for buffer in arguments_of_kind(arguments, BufferArgument) if buffer.is_written]
    outputs.allow(written)
    for name in written:
        if name not in outputs.data:
            raise outputs.error("", f'the buffer {name!r} is written but has no reference; add {name} = "..."')
    known = sorted({*problem.sizes, *(argument.name for argument in arguments if argument.is_operand)})
    expressions = {
        name: parse_array_expression(outputs.text(name), known, problem.kinds, outputs.location(name))
        for name in written
    }
    tolerance = table.number("tolerance") if "tolerance" in table.data else None
    if tolerance is not None and tolerance <= 0:
        raise table.error("tolerance", f"expected a number above 0, got {tolerance}")
    reference = Reference(expressions, _reduction(table, problem), tolerance)
    check_reference(reference, arguments, problem)
    return reference


def _reduction(table: Table, problem: ProblemSection) -> Expression:
    if "reduction" not in table.data:
        return parse_expression("1", {})
    reduction = table.expression("reduction", problem.kinds, "number")
    problem.check_positive(table, "reduction", [reduction])
    return reduction
