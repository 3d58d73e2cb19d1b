"""Parse the arguments of a kernel: buffers, scalars, workspaces and tensor maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from autotile.core.dtypes import DTYPES
from autotile.errors import listing, nearest
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.launch import MAX_RANK, UNIT_BYTES, strides_bytes
from autotile.kernel.nodes import Kind
from autotile.kernel.spec import (
    PROBLEM_DTYPE,
    Access,
    Argument,
    BufferArgument,
    Distribution,
    KernelSpec,
    ScalarArgument,
    TensorMapArgument,
    WorkspaceArgument,
    parse_element_type,
)
from autotile.kernel.table import ProblemSection, Table, check_array_names, check_names, describe

MAX_AXES = 8


def parse_workspace(table: Table, name: str, frame: ProblemSection, kinds: Mapping[str, Kind]) -> WorkspaceArgument:
    """Parse ``{ workspace = "float32", shape = [...], init = "zeros" }``.

    Parameters
    ----------
    table, name
        The argument's table and name.
    frame
        Sizes and flags.
    kinds
        Kind of every name that the shape may use: sizes, flags, parameters and ``device.*``.
    """
    table.allow(("workspace", "shape", "init"))
    if "init" in table.data and table.text("init") != "zeros":
        raise table.error("init", f'{describe(table.text("init"))} is not accepted; expected "zeros", or no init')
    dtype = parse_element_type(table.text("workspace"), frame.flag_kinds, table.location("workspace"))
    return WorkspaceArgument(name, dtype, table.expressions("shape", kinds, most=MAX_AXES), "init" in table.data)


def parse_tensor_map(
    table: Table, name: str, buffers: Mapping[str, BufferArgument], kinds: Mapping[str, Kind]
) -> TensorMapArgument:
    """Parse ``{ tensor_map = "A", box = [...], swizzle_bytes = ..., ... }``.

    Parameters
    ----------
    table, name
        The argument's table and name.
    buffers
        The kernel's buffers.
    kinds
        Kind of every name that box, strides and bytes may use.
    """
    table.allow(("tensor_map", "box", "element_strides", "swizzle_bytes", "l2_promotion_bytes"))
    target = table.text("tensor_map")
    if target not in buffers:
        cure = f"{nearest(target, buffers)} (buffers: {listing(buffers)})"
        raise table.error("tensor_map", f"{describe(target)} names no buffer{cure}")
    buffer = buffers[target]
    rank = len(buffer.shape)
    if rank > MAX_RANK:
        raise table.error("tensor_map", f"{target} has {rank} axes, a tensor map describes at most {MAX_RANK}")
    box = table.expressions("box", kinds, most=rank)
    one, none = parse_expression("1", {}), parse_expression("0", {})
    has_strides = "element_strides" in table.data
    strides = table.expressions("element_strides", kinds, most=rank) if has_strides else (one,) * rank
    for key, given in (("box", box), ("element_strides", strides)):
        if len(given) != rank:
            raise table.error(key, f"expected {rank} expressions, one for each axis of {target}, got {len(given)}")
    return TensorMapArgument(
        name,
        target,
        box,
        strides,
        table.optional_expression("swizzle_bytes", kinds) or none,
        table.optional_expression("l2_promotion_bytes", kinds) or none,
    )


def check_ragged_maps(spec: KernelSpec, document: Table) -> None:
    """Refuse a ragged shape at which the default configuration's tensor maps cannot be: it would not be verified there.

    Raises
    ------
    SpecError
        Rows of a mapped buffer are no multiple of 16 bytes apart.
    """
    table = document.table("arguments")
    names = {**spec.ragged, **spec.default}
    for argument in spec.tensor_maps:
        if not names.keys() >= frozenset().union(*(side.names for side in argument.box)):
            continue  # the device decides
        if any(side.evaluate(names) == 0 for side in argument.box):
            continue
        buffer = spec.buffer(argument.buffer)
        shape = buffer.extents(spec.ragged)
        sizes_bytes = [DTYPES[buffer.element_type(dtype, spec.ragged)].size_bytes for dtype in spec.dtypes]
        uneven = [stride for size in sizes_bytes for stride in strides_bytes(shape, size) if stride % UNIT_BYTES]
        if uneven:
            raise table.table(argument.name).error(
                "tensor_map",
                f"at the ragged shape, rows of {buffer.name} are {uneven[0]} bytes apart, a tensor map takes multiples "
                f"of {UNIT_BYTES}; give problem.ragged sizes of whole {UNIT_BYTES} bytes",
            )


_KINDS = ("buffer", "scalar", "workspace", "tensor_map")

_Text = TypeVar("_Text", bound=str)


def parse_arguments(
    table: Table, frame: ProblemSection, kinds: Mapping[str, Kind], taken: Mapping[str, str]
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


def _buffer(table: Table, name: str, frame: ProblemSection) -> BufferArgument:
    table.allow(("buffer", "shape", "access", "init", "pass"))
    shape = table.expressions("shape", frame.kinds, most=MAX_AXES)
    frame.check_positive(table, "shape", shape)
    access = _one_of(table, "access", get_args(Access))
    if access == "out" and "init" in table.data:
        raise table.error("init", 'a buffer with access = "out" holds nothing before the run; remove init')
    has_init = "init" in table.data
    init: Distribution = _one_of(table, "init", get_args(Distribution)) if has_init else "normal"
    dtype = parse_element_type(table.text("buffer"), frame.flag_kinds, table.location("buffer"))
    return BufferArgument(name, dtype, shape, access, init, table.boolean("pass", default=True))


def _scalar(table: Table, name: str, frame: ProblemSection) -> ScalarArgument:
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
