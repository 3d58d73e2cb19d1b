"""The part of a search-space file about data: the kernel's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, get_args

from autotile.ground.dtypes import DTYPES
from autotile.ground.element_types import PROBLEM_DTYPE, parse_element_type
from autotile.ground.expressions import Expression
from autotile.ground.spec import Access, Argument, BufferArgument, Distribution, ScalarArgument
from autotile.ground.spec_frame import ProblemFrame
from autotile.ground.spec_names import check_array_names, check_names
from autotile.ground.spec_table import Table, describe
from autotile.ground.syntax import listing, nearest

MAX_AXES = 8

_Text = TypeVar("_Text", bound=str)


def parse_arguments(table: Table, frame: ProblemFrame, taken: Mapping[str, str]) -> tuple[Argument, ...]:
    """Parse [arguments], in the kernel's own order.

    Parameters
    ----------
    table
        The section.
    frame
        Sizes and flags.
    taken
        Names of sizes, flags and parameters. A scalar may be named like the size that it passes on.

    Raises
    ------
    SpecError
        An argument is malformed, or no buffer is written.
    """
    sizes = frame.sizes.keys() - frame.flags  # a flag is a macro, and would be replaced where an argument is named
    check_names(table, what="an argument", taken={name: what for name, what in taken.items() if name not in sizes})
    check_array_names(table)
    arguments = tuple(_argument(table, name, frame) for name in table.data)
    if not any(isinstance(argument, BufferArgument) and argument.access != "in" for argument in arguments):
        raise table.error("", 'no buffer is written; give one access = "out" or "inout"')
    for argument in arguments:
        if argument.name in sizes and not _passes_on(argument):
            cure = f'use another name, or make it a scalar with value = "{argument.name}"'
            raise table.error(argument.name, f"{argument.name!r} already names a size; {cure}")
    return arguments


def _passes_on(argument: Argument) -> bool:
    """Whether an argument is a scalar whose value is the size of the same name."""
    value = argument.value if isinstance(argument, ScalarArgument) else None
    return isinstance(value, Expression) and value.text == argument.name


def _argument(arguments: Table, name: str, frame: ProblemFrame) -> Argument:
    table = arguments.table(name)
    if ("buffer" in table.data) == ("scalar" in table.data):
        raise table.error("", 'expected one of buffer = "<dtype>" and scalar = "<dtype>"')
    return _buffer(table, name, frame) if "buffer" in table.data else _scalar(table, name, frame)


def _buffer(table: Table, name: str, frame: ProblemFrame) -> BufferArgument:
    table.allow(("buffer", "shape", "access", "init"))
    shape = table.expressions("shape", frame.kinds, most=MAX_AXES)
    frame.check_positive(table, "shape", shape)
    access = _one_of(table, "access", get_args(Access))
    if access == "out" and "init" in table.data:
        raise table.error("init", 'a buffer with access = "out" holds nothing before the run; remove init')
    has_init = "init" in table.data
    init: Distribution = _one_of(table, "init", get_args(Distribution)) if has_init else "normal"
    dtype = parse_element_type(table.text("buffer"), frame.flag_kinds, table.document.place(table.path("buffer")))
    return BufferArgument(name, dtype, shape, access, init)


def _scalar(table: Table, name: str, frame: ProblemFrame) -> ScalarArgument:
    table.allow(("scalar", "value", "check"))
    dtype = _one_of(table, "scalar", (PROBLEM_DTYPE, *DTYPES))
    if isinstance(table.require("value"), str):
        if "check" in table.data:
            raise table.error("check", "a value bound by the sizes needs no second one; remove check")
        expression = table.expression("value", frame.kinds, "number")
        for sizes in (frame.sizes, frame.ragged):
            expression.evaluate(sizes)
        return ScalarArgument(name, dtype, expression, None)
    value = _constant(table, "value", dtype)
    return ScalarArgument(name, dtype, value, _constant(table, "check", dtype) if "check" in table.data else None)


def _constant(table: Table, name: str, dtype: str) -> float:
    value = table.number(name)
    if dtype in DTYPES and DTYPES[dtype].is_integer and not value.is_integer():
        raise table.error(name, f"expected a whole number for {dtype}, got {value}")
    return value


def _one_of(table: Table, name: str, known: tuple[_Text, ...]) -> _Text:
    text = table.text(name)
    for choice in known:
        if choice == text:
            return choice
    raise table.error(name, f"{describe(text)} is not accepted{nearest(text, known)} (known: {listing(known)})")
