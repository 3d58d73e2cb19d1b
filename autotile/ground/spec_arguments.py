"""The part of a search-space file about data: the kernel's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from autotile.ground.dtypes import DTYPES
from autotile.ground.element_types import PROBLEM_DTYPE, parse_element_type
from autotile.ground.expressions import Expression, Kind
from autotile.ground.spec import Access, Argument, BufferArgument, Distribution, ScalarArgument, TensorMapArgument
from autotile.ground.spec_frame import ProblemFrame
from autotile.ground.spec_names import check_array_names, check_names
from autotile.ground.spec_table import Table, describe
from autotile.ground.spec_workspaces import MAX_AXES, parse_tensor_map, parse_workspace
from autotile.ground.syntax import listing, nearest

_KINDS = ("buffer", "scalar", "workspace", "tensor_map")

_Text = TypeVar("_Text", bound=str)


def parse_arguments(
    table: Table, frame: ProblemFrame, kinds: Mapping[str, Kind], taken: Mapping[str, str]
) -> tuple[Argument, ...]:
    """Parse [arguments], in the kernel's own order.

    Parameters
    ----------
    table
        The section.
    frame
        Sizes and flags.
    kinds
        Kind of every name that a workspace or a tensor map may use.
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
    entries = {name: table.table(name) for name in table.data}
    for entry in entries.values():
        if sum(1 for kind in _KINDS if kind in entry.data) != 1:
            what = "one of buffer, scalar and workspace, each with a type, and tensor_map with a buffer's name"
            raise entry.error("", f"expected {what}")
    buffers = {name: _buffer(entry, name, frame) for name, entry in entries.items() if "buffer" in entry.data}
    if all(buffer.access == "in" for buffer in buffers.values()):
        raise table.error("", 'no buffer is written; give one access = "out" or "inout"')

    def argument_of(name: str, entry: Table) -> Argument:
        if name in buffers:
            return buffers[name]
        if "scalar" in entry.data:
            return _scalar(entry, name, frame)
        if "workspace" in entry.data:
            return parse_workspace(entry, name, frame, kinds)
        return parse_tensor_map(entry, name, buffers, kinds)

    arguments = tuple(argument_of(name, entry) for name, entry in entries.items())
    _check_passed(table, arguments)
    for argument in arguments:
        if argument.name in sizes and not _passes_on(argument):
            cure = f'use another name, or make it a scalar with value = "{argument.name}"'
            raise table.error(argument.name, f"{argument.name!r} already names a size; {cure}")
    return arguments


def _passes_on(argument: Argument) -> bool:
    """Whether an argument is a scalar whose value is the size of the same name."""
    value = argument.value if isinstance(argument, ScalarArgument) else None
    return isinstance(value, Expression) and value.text == argument.name


def _check_passed(table: Table, arguments: Iterable[Argument]) -> None:
    """Refuse a buffer that the kernel cannot reach."""
    mapped = {argument.buffer for argument in arguments if isinstance(argument, TensorMapArgument)}
    for argument in arguments:
        if isinstance(argument, BufferArgument) and not argument.passed and argument.name not in mapped:
            cure = f'add {argument.name}_map = {{ tensor_map = "{argument.name}", ... }}, or remove pass'
            raise table.error(argument.name, f"{argument.name!r} is neither passed nor has a tensor map; {cure}")


def _buffer(table: Table, name: str, frame: ProblemFrame) -> BufferArgument:
    table.allow(("buffer", "shape", "access", "init", "pass"))
    shape = table.expressions("shape", frame.kinds, most=MAX_AXES)
    frame.check_positive(table, "shape", shape)
    access = _one_of(table, "access", get_args(Access))
    if access == "out" and "init" in table.data:
        raise table.error("init", 'a buffer with access = "out" holds nothing before the run; remove init')
    has_init = "init" in table.data
    init: Distribution = _one_of(table, "init", get_args(Distribution)) if has_init else "normal"
    dtype = parse_element_type(table.text("buffer"), frame.flag_kinds, table.place("buffer"))
    return BufferArgument(name, dtype, shape, access, init, table.boolean("pass", default=True))


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
