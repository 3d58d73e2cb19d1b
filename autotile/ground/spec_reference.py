"""The part of a search-space file about the right answer, and about the work to be done."""

from __future__ import annotations

from autotile.ground.arrays import parse_array_expression
from autotile.ground.expressions import Expression, parse_expression
from autotile.ground.spec import Argument, BufferArgument, Reference, ScalarArgument, Work
from autotile.ground.spec_frame import ProblemFrame
from autotile.ground.spec_table import Table
from autotile.ground.spec_trial import try_reference


def parse_reference(table: Table, arguments: tuple[Argument, ...], frame: ProblemFrame) -> Reference:
    """Parse [reference]: one array expression for every buffer that the kernel writes.

    Raises
    ------
    SpecError
        An output is missing, unknown, or names a buffer that only the kernel fills; or its expression has no value or
        another shape.
    """
    table.allow(("outputs", "reduction", "tolerance"))
    outputs = table.table("outputs")
    buffers = [a for a in arguments if isinstance(a, BufferArgument)]
    written = [buffer.name for buffer in buffers if buffer.access != "in"]
    outputs.allow(written)
    for name in written:
        if name not in outputs.data:
            raise outputs.error("", f'the buffer {name!r} is written but has no reference; add {name} = "..."')
    scalars = [a.name for a in arguments if isinstance(a, ScalarArgument)]
    known = sorted({*frame.sizes, *scalars, *(buffer.name for buffer in buffers if buffer.access != "out")})
    expressions = {}
    for name in written:
        place = outputs.place(name)
        expressions[name] = parse_array_expression(
            outputs.text(name), known, frame.kinds, source=place.source, key=place.key, line=place.line
        )
    tolerance = table.number("tolerance") if "tolerance" in table.data else None
    if tolerance is not None and tolerance <= 0:
        raise table.error("tolerance", f"expected a number above 0, got {tolerance}")
    reference = Reference(expressions, _reduction(table, frame), tolerance)
    try_reference(reference, arguments, frame)
    return reference


def parse_work(table: Table, frame: ProblemFrame) -> Work:
    """Parse [work]: the operations and bytes that the problem needs."""
    table.allow(("flops", "bytes"))
    flops, size_bytes = (table.optional_expression(name, frame.kinds) for name in ("flops", "bytes"))
    for name, expression in (("flops", flops), ("bytes", size_bytes)):
        if expression is not None:
            frame.check_positive(table, name, [expression])
    return Work(flops, size_bytes)


def _reduction(table: Table, frame: ProblemFrame) -> Expression:
    if "reduction" not in table.data:
        return parse_expression("1", {})
    reduction = table.expression("reduction", frame.kinds, "number")
    frame.check_positive(table, "reduction", [reduction])
    return reduction
