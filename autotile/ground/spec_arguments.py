"""The part of a search-space file about data: the kernel's arguments, the right answer, and the work to be done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from autotile.ground.arrays import parse_array_expression
from autotile.ground.dtypes import DTYPES
from autotile.ground.expressions import Expression, Kind, parse_expression
from autotile.ground.spec import (
    PROBLEM_DTYPE,
    Access,
    Argument,
    BufferArgument,
    Distribution,
    Reference,
    ScalarArgument,
    Work,
)
from autotile.ground.spec_names import check_array_names, check_names
from autotile.ground.spec_table import Table, describe
from autotile.ground.syntax import listing, nearest

Shapes = tuple[Mapping[str, int], Mapping[str, int]]
"""The default sizes and the ragged ones."""

MAX_AXES = 8

_Text = TypeVar("_Text", bound=str)


def parse_arguments(table: Table, shapes: Shapes, taken: Mapping[str, str]) -> tuple[Argument, ...]:
    """Parse [arguments], in the kernel's own order.

    Parameters
    ----------
    table
        The section.
    shapes
        Default and ragged sizes; every expression is tried at both.
    taken
        Names of sizes and parameters. A scalar may be named like the size that it passes on.

    Raises
    ------
    SpecError
        An argument is malformed, or no buffer is written.
    """
    sizes = shapes[0]
    check_names(table, what="an argument", taken={name: what for name, what in taken.items() if name not in sizes})
    check_array_names(table)
    arguments = tuple(_argument(table, name, shapes) for name in table.data)
    if not any(isinstance(argument, BufferArgument) and argument.access != "in" for argument in arguments):
        raise table.error("", 'no buffer is written; give one access = "out" or "inout"')
    for argument in arguments:
        if argument.name in sizes and not _passes_on(argument):
            cure = f'use another name, or make it a scalar with value = "{argument.name}"'
            raise table.error(argument.name, f"{argument.name!r} already names a size; {cure}")
    return arguments


def parse_reference(table: Table, arguments: Iterable[Argument], shapes: Shapes) -> Reference:
    """Parse [reference]: one array expression for every buffer that the kernel writes.

    Raises
    ------
    SpecError
        An output is missing, unknown, or names a buffer that only the kernel fills.
    """
    table.allow(("outputs", "reduction", "tolerance"))
    outputs = table.table("outputs")
    written = [a.name for a in arguments if isinstance(a, BufferArgument) and a.access != "in"]
    outputs.allow(written)
    for name in written:
        if name not in outputs.data:
            raise outputs.error("", f'the buffer {name!r} is written but has no reference; add {name} = "..."')
    known = {*shapes[0], *(a.name for a in arguments if not (isinstance(a, BufferArgument) and a.access == "out"))}
    expressions = {}
    for name in written:
        place = outputs.document.place(outputs.path(name))
        expressions[name] = parse_array_expression(
            outputs.text(name), sorted(known), source=place.source, key=place.key, line=place.line
        )
    tolerance = table.number("tolerance") if "tolerance" in table.data else None
    if tolerance is not None and tolerance <= 0:
        raise table.error("tolerance", f"expected a number above 0, got {tolerance}")
    return Reference(expressions, _reduction(table, shapes), tolerance)


def parse_work(table: Table, sizes: Mapping[str, int]) -> Work:
    """Parse [work]: the operations and bytes that the problem needs."""
    table.allow(("flops", "bytes"))
    kinds = _kinds(sizes)
    flops, size_bytes = (table.optional_expression(name, kinds) for name in ("flops", "bytes"))
    for name, expression in (("flops", flops), ("bytes", size_bytes)):
        if expression is not None:
            _check_at(table, name, expression, sizes)
    return Work(flops, size_bytes)


def _passes_on(argument: Argument) -> bool:
    """Whether an argument is a scalar whose value is the size of the same name."""
    value = argument.value if isinstance(argument, ScalarArgument) else None
    return isinstance(value, Expression) and value.text == argument.name


def _argument(arguments: Table, name: str, shapes: Shapes) -> Argument:
    table = arguments.table(name)
    if ("buffer" in table.data) == ("scalar" in table.data):
        raise table.error("", 'expected one of buffer = "<dtype>" and scalar = "<dtype>"')
    return _buffer(table, name, shapes) if "buffer" in table.data else _scalar(table, name, shapes)


def _buffer(table: Table, name: str, shapes: Shapes) -> BufferArgument:
    table.allow(("buffer", "shape", "access", "init"))
    shape = table.expressions("shape", _kinds(shapes[0]), most=MAX_AXES)
    for axis in shape:
        for sizes in shapes:
            _check_at(table, "shape", axis, sizes)
    access = _one_of(table, "access", get_args(Access))
    if access == "out" and "init" in table.data:
        raise table.error("init", 'a buffer with access = "out" holds nothing before the run; remove init')
    has_init = "init" in table.data
    init: Distribution = _one_of(table, "init", get_args(Distribution)) if has_init else "normal"
    return BufferArgument(name, _dtype(table, "buffer"), shape, access, init)


def _scalar(table: Table, name: str, shapes: Shapes) -> ScalarArgument:
    table.allow(("scalar", "value", "check"))
    dtype = _dtype(table, "scalar")
    if isinstance(table.require("value"), str):
        if "check" in table.data:
            raise table.error("check", "a value bound by the sizes needs no second one; remove check")
        expression = table.expression("value", _kinds(shapes[0]), "number")
        for sizes in shapes:
            expression.evaluate(sizes)
        return ScalarArgument(name, dtype, expression, None)
    value = _constant(table, "value", dtype)
    return ScalarArgument(name, dtype, value, _constant(table, "check", dtype) if "check" in table.data else None)


def _constant(table: Table, name: str, dtype: str) -> float:
    value = table.number(name)
    if dtype in DTYPES and DTYPES[dtype].is_integer and not value.is_integer():
        raise table.error(name, f"expected a whole number for {dtype}, got {value}")
    return value


def _dtype(table: Table, name: str) -> str:
    return _one_of(table, name, (PROBLEM_DTYPE, *DTYPES))


def _one_of(table: Table, name: str, known: tuple[_Text, ...]) -> _Text:
    text = table.text(name)
    for choice in known:
        if choice == text:
            return choice
    raise table.error(name, f"{describe(text)} is not accepted{nearest(text, known)} (known: {listing(known)})")


def _reduction(table: Table, shapes: Shapes) -> Expression:
    if "reduction" not in table.data:
        return parse_expression("1", {})
    reduction = table.expression("reduction", _kinds(shapes[0]), "number")
    for sizes in shapes:
        _check_at(table, "reduction", reduction, sizes)
    return reduction


def _check_at(table: Table, name: str, expression: Expression, sizes: Mapping[str, int]) -> None:
    value = expression.evaluate(sizes)
    if value < 1:
        at = ", ".join(f"{size} = {sizes[size]}" for size in sorted(expression.names))
        raise table.error(name, f"{expression.text} is {value}, expected at least 1" + (f" where {at}" if at else ""))


def _kinds(sizes: Mapping[str, int]) -> dict[str, Kind]:
    return dict.fromkeys(sizes, "number")
