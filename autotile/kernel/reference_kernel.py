"""A reference that is computed by another kernel: ``[reference] kernel = "naive"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autotile.core.dtypes import DTYPES
from autotile.core.model import Value
from autotile.kernel.argument_kind import ElementType
from autotile.kernel.arguments import Argument, BufferArgument, ScalarArgument, WorkspaceArgument
from autotile.kernel.expressions import Expression
from autotile.kernel.nodes import Kind
from autotile.kernel.table import Table, describe

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
