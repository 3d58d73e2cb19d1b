"""Element types, and the base class of the kinds of arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from autotile.core.dtypes import DTYPES, canonical_dtype
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.array_shapes import ShapeOnly
from autotile.kernel.expressions import (
    NOUNS,
    Expression,
    ExpressionError,
    ExpressionText,
    Kind,
    Location,
    one_line,
    parse_expression,
)
from autotile.kernel.table import ProblemSection, Table

if TYPE_CHECKING:
    from autotile.kernel.arguments import BufferArgument, MemoryDemand, Workspace, WorkspaceArgument
    from autotile.kernel.descriptors import TensorMap, TensorMapDemand, Texture
    from autotile.kernel.structures import StructValue


PROBLEM_DTYPE = "dtype"
"""Declares that an argument has the problem's element type."""

_NAMES = (PROBLEM_DTYPE, *DTYPES)
_C_TYPES = {
    **{dtype.c_type: name for name, dtype in reversed(DTYPES.items())},
    **{"half": "float16", "bf16": "bfloat16", "char": "int8", "size_t": "uint64", "unsigned": "uint32"},
    **{"unsigned char": "uint8", "short": "int16", "unsigned short": "uint16", "int": "int32", "long": "int64"},
    **{"unsigned int": "uint32", "unsigned long": "uint64", "long long": "int64", "unsigned long long": "uint64"},
    **{f"{name}_t": name for name in DTYPES if "int" in name},
}
"""Element type of each spelling in C that is not its name here."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """A declared type: ``float32``, ``dtype``, or ``float32 if OUT_FP32 else dtype``.

    Attributes
    ----------
    chosen, otherwise
        Names of types, or `PROBLEM_DTYPE`.
    condition
        Condition over flags that selects between the two; None if the type is always ``chosen``.
    """

    chosen: str
    condition: Expression | None = None
    otherwise: str = ""

    def of(self, problem_dtype: str, names: Mapping[str, Value]) -> str:
        """Return the name of the type for a problem of the given dtype, sizes and flags."""
        name = self.chosen if self.condition is None or self.condition.value(names) else self.otherwise
        return problem_dtype if name == PROBLEM_DTYPE else name

    @property
    def names(self) -> tuple[str, ...]:
        """The possible types."""
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
        Names that a condition may use, with their kinds.
    location
        Location of the text, for messages.

    Raises
    ------
    SpecError
        The text is not a type, or its condition is not a condition over flags.
    """
    if " " not in text.strip():
        return ElementType(known_type(text, location))
    source = ExpressionText(one_line(text))
    try:
        tree = source.parse()
        if not isinstance(tree, ast.IfExp):
            raise source.error(tree, "expected a type, or two as in 'float32 if FLAG else dtype'")
        chosen, test, otherwise = (ast.unparse(part) for part in (tree.body, tree.test, tree.orelse))
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=source.text) from None
    condition = parse_expression(test, flags, location)
    if condition.kind != "boolean":
        raise location.error(f"expected a flag or another condition, but {test} is {NOUNS[condition.kind]}")
    return ElementType(known_type(chosen, location), condition, known_type(otherwise, location))


def known_type(name: str, location: Location) -> str:
    """Return the canonical name of an element type, or `PROBLEM_DTYPE`.

    Raises
    ------
    SpecError
        There is no such type.
    """
    known = canonical_dtype(name)
    if known not in _NAMES:
        meant = _C_TYPES.get(name)
        hint = f"; write {meant!r}" if meant else f"{nearest(name, _NAMES)} (known: {listing(_NAMES)})"
        raise location.error(f"the string {name[:60]!r} is not accepted{hint}")
    return known


Column = Any
"""An int64 column with one row per configuration, or one element for all; for a single configuration, an int."""
Mask = Any
"""A bool column, or a bool for a single configuration or for all."""
Evaluate = Callable[[Expression], Column]


def clipped(value: Column, low: int, high: int) -> Column:
    """Return values within two bounds."""
    return min(max(value, low), high) if isinstance(value, int) else np.clip(value, low, high)


"""Evaluates an expression for every row of a table of configurations."""


class ArgumentScope(NamedTuple):
    """Names that an argument's table may refer to."""

    problem: ProblemSection
    kinds: Mapping[str, Kind]
    """Kind of each size, flag, parameter and ``device.*``."""
    launch_kinds: Mapping[str, Kind]
    """The same, and ``step`` in a file with steps."""
    buffers: Mapping[str, BufferArgument] = {}
    workspaces: Mapping[str, WorkspaceArgument] = {}
    operands: Mapping[str, bool] = {}
    """Names of the arguments whose value before a launch is known, with whether they are numbers."""
    folder: str = ""
    """Folder of the files that arguments name; that of the search-space file if empty."""


POINTER_BYTES = 8


class ArgumentKind:
    """Base class of the kinds of arguments; a kind overrides what differs from the defaults here."""

    __slots__ = ()

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse the argument's table.

        Raises
        ------
        SpecError
            The table is malformed.
        """
        raise NotImplementedError

    def meaning(self) -> dict[str, Any]:
        """Return the argument's part of `autotile.database.keys.space_hash`, as JSON values.

        It contains everything that a measured time depends on. A change invalidates recorded results; therefore, an
        entry that is added later is omitted at its default.
        """
        raise NotImplementedError

    @property
    def is_passed(self) -> bool:
        """Whether the argument is a parameter of the ``__global__`` function."""
        return True

    @property
    def is_given(self) -> bool:
        """Whether the caller passes an array for it."""
        return False

    @property
    def is_operand(self) -> bool:
        """Whether references may use it: its value before a launch is known."""
        return False

    @property
    def described_buffer(self) -> str:
        """Name of the buffer or workspace that the argument describes to the kernel; "" if there is none."""
        return ""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the buffers and workspaces to which it gives the kernel access."""
        return (self.described_buffer,) if self.described_buffer else ()

    @property
    def repeats_size(self) -> bool:
        """Whether its value is the size of the same name, so that the two may share the name."""
        return False

    @property
    def required_feature(self) -> tuple[str, str]:
        """Hardware feature that it needs, in the plural, and its lowest compute capability; two "" if none."""
        return "", ""

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """All of its expressions."""
        return ()

    def parameter_bytes(self, problem_dtype: str) -> int:
        """Return the size of the parameter that it is passed as, in bytes; of a pointer by default."""
        return POINTER_BYTES

    def operand(self, sizes: Mapping[str, int], *, check: bool) -> ShapeOnly | float | complex:
        """Return its value in a reference; for an array, the shape.

        Parameters
        ----------
        sizes
            Sizes and flags.
        check
            Whether a scalar has its check value.
        """
        raise NotImplementedError

    def check_ragged(self, names: Mapping[str, Value], dtypes: Sequence[str], table: Table) -> None:
        """Raise if the default configuration cannot be launched at the ragged sizes, and so cannot be verified there.

        Parameters
        ----------
        names
            Values of the ragged sizes, the flags and the parameters.
        dtypes
            Element types of the problem.
        table
            The argument's table.

        Raises
        ------
        SpecError
            The ragged sizes do not suit the argument.
        """

    def workspace(self, problem_dtype: str, names: Mapping[str, Value]) -> Workspace | None:
        """Return the device memory that a launch allocates for it, given the value of every name; None if none."""
        return None

    def tensor_map(self, problem_dtype: str, names: Mapping[str, Value]) -> TensorMap | None:
        """Return the tensor map that a launch encodes for it, given the value of every name; None if none."""
        return None

    def texture(self, problem_dtype: str, names: Mapping[str, Value]) -> Texture | None:
        """Return the texture that a launch passes for it, given the value of every name; None if none."""
        return None

    def structure(self, problem_dtype: str, names: Mapping[str, Value]) -> StructValue | None:
        """Return the struct that a launch passes for it, given the value of every name; None if none."""
        return None

    def memory_demand(self, problem_dtype: str, sizes: Mapping[str, int], evaluate: Evaluate) -> MemoryDemand | None:
        """Return the device memory that it occupies in every configuration; None if none."""
        return None

    def tensor_map_demand(
        self, problem_dtype: str, sizes: Mapping[str, int], evaluate: Evaluate
    ) -> TensorMapDemand | None:
        """Return its tensor map in every configuration; None if none."""
        return None


def canonical_texts(expressions: Sequence[Expression]) -> list[str]:
    """Return the canonical text of each expression."""
    return [expression.canonical for expression in expressions]
