"""The part of a search-space file about what only the kernel sees: workspaces and tensor maps."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.ground.dtypes import DTYPES
from autotile.ground.element_types import parse_element_type
from autotile.ground.expressions import Kind, parse_expression
from autotile.ground.spec import BufferArgument, KernelSpec, TensorMapArgument, WorkspaceArgument
from autotile.ground.spec_frame import ProblemFrame
from autotile.ground.spec_table import Table, describe
from autotile.ground.syntax import listing, nearest
from autotile.ground.tensor_maps import MAX_RANK, UNIT_BYTES, strides_bytes

MAX_AXES = 8


def parse_workspace(table: Table, name: str, frame: ProblemFrame, kinds: Mapping[str, Kind]) -> WorkspaceArgument:
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
    dtype = parse_element_type(table.text("workspace"), frame.flag_kinds, table.place("workspace"))
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
