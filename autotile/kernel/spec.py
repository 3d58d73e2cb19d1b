"""A kernel with its search space, as declared in a search-space file; see docs/file-format.md.

The smaller parts are named tuples for the reason that `autotile.ground.nodes` gives.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Literal, NamedTuple

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.array_expressions import ArrayExpression
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import ExpressionError, ExpressionText, Location, one_line

PROBLEM_DTYPE = "dtype"
"""An argument declared with this type takes the problem's own."""

_NAMES = (PROBLEM_DTYPE, *DTYPES)


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type as declared: ``float32``, ``dtype``, or ``float32 if OUT_FP32 else dtype``.

    Attributes
    ----------
    chosen, otherwise
        Names of types, or `PROBLEM_DTYPE`.
    condition
        What decides between them, over flags; None where ``chosen`` is the type.
    """

    chosen: str
    condition: Expression | None = None
    otherwise: str = ""

    def of(self, problem_dtype: str, sizes: Mapping[str, int]) -> str:
        """Name of the type for a problem of a dtype, sizes and flags."""
        name = self.chosen if self.condition is None or self.condition.evaluate(sizes) else self.otherwise
        return problem_dtype if name == PROBLEM_DTYPE else name

    @property
    def names(self) -> tuple[str, ...]:
        """The types that it may be."""
        return (self.chosen,) if self.condition is None else (self.chosen, self.otherwise)

    def __str__(self) -> str:
        if self.condition is None:
            return self.chosen
        return f"{self.chosen} if {self.condition.text} else {self.otherwise}"


def parse_element_type(text: str, flags: Mapping[str, Kind], location: Location) -> ElementType:
    """Parse an element type.

    Parameters
    ----------
    text
        The type.
    flags
        The names that a condition may use, with their kinds.
    location
        Where it stands, for messages.

    Raises
    ------
    SpecError
        It is no type, or its condition is none over flags.
    """
    if " " not in text.strip():
        return ElementType(_known(text, location))
    source = ExpressionText(one_line(text))
    try:
        tree = source.parse()
        if not isinstance(tree, ast.IfExp):
            raise source.error(tree, "expected a type, or two as in 'float32 if FLAG else dtype'")
        chosen, test, otherwise = (ast.unparse(part) for part in (tree.body, tree.test, tree.orelse))
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=source.text) from None
    condition = parse_expression(test, flags, source=location.source, key=location.key, line=location.line)
    if condition.kind != "boolean":
        raise location.error(f"expected a flag or another condition, but {test} is a {condition.kind}")
    return ElementType(_known(chosen, location), condition, _known(otherwise, location))


def _known(name: str, location: Location) -> str:
    if name not in _NAMES:
        raise location.error(
            f"the string {name[:60]!r} is not accepted{nearest(name, _NAMES)} (known: {listing(_NAMES)})"
        )
    return name


Access = Literal["in", "out", "inout"]
Distribution = Literal["normal", "uniform", "zeros", "ones", "arange"]


class Parameter(NamedTuple):
    """One tunable parameter; each value reaches the template as ``-DNAME=VALUE``."""

    name: str
    values: tuple[Value, ...]


class Rule(NamedTuple):
    """A named condition over parameters, sizes and ``device.*``."""

    name: str
    expression: Expression
    is_heuristic: bool = False
    """Whether a configuration that breaks it is valid, but not worth a trial."""

    def __str__(self) -> str:
        return f"{'heuristic' if self.is_heuristic else 'rule'} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch geometry and declared resources, as expressions over parameters, sizes and ``device.*``."""

    block: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    cluster: tuple[Expression, ...]
    """Blocks of a cluster, as the template's ``__cluster_dims__`` says; empty where there are none."""
    dynamic_smem_bytes: Expression | None
    static_smem_bytes: Expression | None
    """What the template declares statically, so that the first gate knows it before compiling."""
    min_registers: Expression | None
    """Registers that a thread needs at the very least (its accumulators, say)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the author accepts of a compiled candidate."""

    min_occupancy: float
    max_spill_bytes: int | None


class BufferArgument(NamedTuple):
    """A device array that the caller hands over."""

    name: str
    dtype: ElementType
    shape: tuple[Expression, ...]
    access: Access
    init: Distribution
    passed: bool = True
    """Whether the kernel takes its address; a buffer that is reached through a tensor map alone is not passed."""

    def element_type(self, problem_dtype: str, sizes: Mapping[str, int]) -> str:
        """Name of the element type for a problem of the given dtype, sizes and flags."""
        return self.dtype.of(problem_dtype, sizes)

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape at the given sizes."""
        return tuple(int(extent.evaluate(sizes)) for extent in self.shape)


class ScalarArgument(NamedTuple):
    """A value passed by the call.

    A scalar whose value is an expression is bound by the problem (``M``); one whose value is a number is a default
    that a caller may override (``alpha``).
    """

    name: str
    dtype: str
    value: Expression | float
    check_value: float | None
    """A second value, used at the ragged shape when verifying (``beta`` other than 0, say)."""

    def element_type(self, problem_dtype: str) -> str:
        """Name of the type for a problem of the given dtype."""
        return problem_dtype if self.dtype == PROBLEM_DTYPE else self.dtype


class WorkspaceArgument(NamedTuple):
    """Device memory that a launch needs for itself: the caller never sees it."""

    name: str
    dtype: ElementType
    shape: tuple[Expression, ...]
    """Over sizes, flags, parameters and ``device.*``; where an extent is 0, a null pointer is passed."""
    zeroed: bool
    """Zero before the first launch, and left zero by every launch; otherwise it may hold anything."""


class TensorMapArgument(NamedTuple):
    """A descriptor of a buffer for the tensor memory accelerator, passed by value (compute capability 9.0)."""

    name: str
    buffer: str
    """Name of the buffer."""
    box: tuple[Expression, ...]
    """Elements that one copy moves along each axis, in the order of the buffer's shape."""
    element_strides: tuple[Expression, ...]
    """Distance of the elements that are moved, along each axis."""
    swizzle_bytes: Expression
    l2_promotion_bytes: Expression


Argument = BufferArgument | ScalarArgument | WorkspaceArgument | TensorMapArgument


class Reference(NamedTuple):
    """How the right answer is computed, in float64."""

    outputs: Mapping[str, ArrayExpression]
    reduction: Expression
    """Terms summed into each output element; the tolerance grows with its square root."""
    tolerance: float | None
    """Replaces the tolerance computed from dtype and ``reduction``."""


class Work(NamedTuple):
    """Operations and bytes that the problem needs at least, for TFLOP/s and GB/s."""

    flops: Expression | None
    bytes: Expression | None


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything a search-space file says, parsed and checked."""

    name: str
    summary: str
    template: str
    """File name of the template."""
    entry: str
    options: tuple[str, ...]
    architecture: str | None
    """The one target to compile for, such as ``sm_90a``; None for whatever the device is."""
    minimum_compute_capability: str | None
    """Such as ``"8.0"``; devices below it are not served."""
    sizes: Mapping[str, int]
    """What a problem is made of: sizes and, behind them, flags, each with its default."""
    flags: tuple[str, ...]
    """The names in ``sizes`` that are 0 or 1."""
    ragged: Mapping[str, int]
    """A second shape for verifying, no size a multiple of a tile; flags at their defaults."""
    dtypes: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    default: Mapping[str, Value]
    rules: tuple[Rule, ...]
    heuristics: tuple[Rule, ...]
    """Conditions on what the search tries; see `Rule.is_heuristic`."""
    launch: Launch
    limits: Limits
    arguments: tuple[Argument, ...]
    reference: Reference
    work: Work
    source: str
    """The file it was read from, as the user named it."""
    text: str
    """The file's text."""

    def is_optional(self, name: str) -> bool:
        """Whether a size or flag takes its default where it is not given: flags, and sizes whose default is 1."""
        return name in self.flags or self.sizes[name] == 1

    def ragged_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The ragged shape of a problem: its sizes are the file's, its flags are kept."""
        return {name: sizes[name] if name in self.flags else ragged for name, ragged in self.ragged.items()}

    @property
    def buffers(self) -> tuple[BufferArgument, ...]:
        """The array arguments, in order."""
        return tuple(a for a in self.arguments if isinstance(a, BufferArgument))

    def buffer(self, name: str) -> BufferArgument:
        """The array argument of a name.

        Raises
        ------
        KeyError
            There is none.
        """
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    @property
    def scalars(self) -> tuple[ScalarArgument, ...]:
        """The scalar arguments, in order."""
        return tuple(a for a in self.arguments if isinstance(a, ScalarArgument))

    @property
    def workspaces(self) -> tuple[WorkspaceArgument, ...]:
        """The workspaces, in order."""
        return tuple(a for a in self.arguments if isinstance(a, WorkspaceArgument))

    @property
    def tensor_maps(self) -> tuple[TensorMapArgument, ...]:
        """The tensor maps, in order."""
        return tuple(a for a in self.arguments if isinstance(a, TensorMapArgument))
