"""Parse the launches of a kernel: ``[launch]``, or ``[[steps]]`` for several kernels of one computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotile.errors import listing, nearest
from autotile.kernel.arguments import Argument, BufferArgument, WorkspaceArgument
from autotile.kernel.nodes import Kind
from autotile.kernel.source_text import is_entry
from autotile.kernel.spec import STEP, Launch, Step
from autotile.kernel.table import Table, describe

MAX_DIMENSIONS = 3

MAX_STEPS = 64
"""Maximum number of steps in a file."""

_LAUNCH = ("block", "grid", "cluster", "dynamic_smem_bytes", "static_smem_bytes", "min_registers", "cooperative")
_STEP = ("entry", "arguments", "when", "times", "swap", "main", *_LAUNCH)


def has_steps(document: Table) -> bool:
    """Return whether a file has ``[[steps]]``."""
    return "steps" in document.data


def launch_kinds(document: Table, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the kind of each name that the expressions of a launch may use, and the values of scalars.

    Parameters
    ----------
    document
        The file.
    kinds
        Kind of each size, flag, parameter and ``device.*``.

    Raises
    ------
    SpecError
        The file has steps, and a size, flag or parameter named ``step``.
    """
    if not has_steps(document):
        return dict(kinds)
    if STEP in kinds:
        raise document.error("steps", f"{STEP!r} is the number of a launch among those of its step; rename yours")
    return {**kinds, STEP: "number"}


def parse_steps(document: Table, arguments: Sequence[Argument], kinds: Mapping[str, Kind]) -> tuple[Step, ...]:
    """Parse ``[[steps]]``; without it, ``[launch]`` and ``entry`` of ``[kernel]`` are the only step.

    Parameters
    ----------
    document
        The file.
    arguments
        Its arguments.
    kinds
        Kind of each size, flag, parameter and ``device.*``.

    Raises
    ------
    SpecError
        A section is missing, malformed or superfluous, or an argument is passed to no step.
    """
    passed = {argument.name: argument for argument in arguments if argument.is_passed}
    kernel = document.table("kernel")
    if not has_steps(document):
        launch = _launch(document.table("launch"), kinds)
        return (Step(_entry(kernel), launch, tuple(passed)),)
    for table, name in ((document, "launch"), (kernel, "entry")):
        if name in table.data:
            raise table.error(name, "the file has [[steps]], of which each has its own; remove this one")
    tables = document.tables("steps", max_length=MAX_STEPS)
    steps = tuple(_step(table, passed, kinds, launch_kinds(document, kinds)) for table in tables)
    if sum(step.is_main for step in steps) > 1:
        raise document.error("steps", "several steps have main = true; expected one at most")
    taken = {name for step in steps for name in step.arguments}
    for name in passed:
        if name not in taken:
            raise document.error(f"arguments.{name}", f"no step takes {name!r}; add it to its arguments, or remove it")
    return steps


def _step(
    table: Table, passed: Mapping[str, Argument], kinds: Mapping[str, Kind], own_kinds: Mapping[str, Kind]
) -> Step:
    table.allow(_STEP)
    names = table.names("arguments", tuple(passed)) if "arguments" in table.data else tuple(passed)
    return Step(
        entry=_entry(table),
        launch=_launch(table, own_kinds),
        arguments=names,
        when=table.expression("when", kinds, "boolean") if "when" in table.data else None,
        times=table.optional_expression("times", kinds),
        swap=_swap(table, passed) if "swap" in table.data else (),
        is_main=table.boolean("main", default=False),
    )


def _launch(table: Table, kinds: Mapping[str, Kind]) -> Launch:
    if table.key == "launch":
        table.allow(_LAUNCH)
    return Launch(
        block=table.expressions("block", kinds, max_length=MAX_DIMENSIONS),
        grid=table.expressions("grid", kinds, max_length=MAX_DIMENSIONS),
        cluster=table.expressions("cluster", kinds, max_length=MAX_DIMENSIONS) if "cluster" in table.data else (),
        dynamic_smem_bytes=table.optional_expression("dynamic_smem_bytes", kinds),
        static_smem_bytes=table.optional_expression("static_smem_bytes", kinds),
        min_registers=table.optional_expression("min_registers", kinds),
        is_cooperative=table.boolean("cooperative", default=False),
    )


def _entry(table: Table) -> str:
    entry = table.text("entry")
    if not is_entry(entry):
        raise table.error(
            "entry",
            "expected the C++ name of a __global__ function, such as 'softmax', 'space::softmax' or "
            f"'softmax<BLOCK, float>'; got {describe(entry)}",
        )
    return entry


def _swap(table: Table, passed: Mapping[str, Argument]) -> tuple[str, ...]:
    """Parse the names of two arrays of the same shape and type, that the kernel writes."""
    known = [name for name, argument in passed.items() if _is_swappable(argument)]
    names = table.texts("swap")
    for name in names:
        if name not in known:
            hint = f"{nearest(name, known)} (known: {listing(known)})"
            raise table.error("swap", f"{name[:60]!r} is not a workspace or an array that the kernel writes{hint}")
    if len(names) != 2:
        raise table.error("swap", f"expected the names of two arrays, got {len(names)}")
    first, second = (_layout(passed[name]) for name in names)
    if first != second:
        raise table.error("swap", f"{names[0]} and {names[1]} differ in type or shape; declare both alike")
    return names


def _is_swappable(argument: Argument) -> bool:
    return isinstance(argument, WorkspaceArgument) or (isinstance(argument, BufferArgument) and argument.is_written)


def _layout(argument: Argument) -> tuple[str, tuple[str, ...]]:
    assert isinstance(argument, BufferArgument | WorkspaceArgument)
    return str(argument.dtype), tuple(extent.canonical for extent in argument.shape)
