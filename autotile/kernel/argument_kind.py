"""Element types, the base class of the kinds of arguments, and the kinds that a file declares in sections of their own.

These are structs, in the layout of C, and arguments that describe an array to the hardware: tensor maps (TMA) and
textures, with their limits (``cuTensorMapEncodeTiled`` in the CUDA driver API reference, without interleaving).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, get_args

import numpy as np

from autotile.core.dtypes import DTYPES, Dtype, canonical_dtype
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.expressions import (
    NOUNS,
    Expression,
    ExpressionError,
    ExpressionText,
    Location,
    ShapeOnly,
    is_c_identifier,
    one_line,
    parse_expression,
)
from autotile.kernel.functions import Kind
from autotile.kernel.table import ProblemSection, Table, describe

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
    buffers: Mapping[str, ArrayArgument] = {}
    workspaces: Mapping[str, ArrayArgument] = {}
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


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace of known shape and element type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    zeroed: bool

    @property
    def size_bytes(self) -> int:
        """Size in bytes; 0 if a null pointer is passed."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes


class MemoryDemand(NamedTuple):
    """Device memory of one argument over columns of configurations."""

    name: str
    shape: tuple[Column, ...]
    element_bytes: int
    is_workspace: bool

    @property
    def min_extent(self) -> int:
        """Smallest valid extent; a workspace may be empty."""
        return 0 if self.is_workspace else 1

    @property
    def size_bytes(self) -> Any:
        """Size in bytes as float64, as products of absurd extents exceed 64 bits; negative extents count as 0."""
        extents = [max(extent, 0) if isinstance(extent, int) else np.maximum(extent, 0.0) for extent in self.shape]
        return reduce(operator.mul, extents, float(self.element_bytes))


@dataclass(frozen=True, slots=True)
class ArrayArgument(ArgumentKind):
    """A device array: a buffer of the caller's, or a workspace.

    Attributes
    ----------
    shape
        Extents over sizes and flags; those of a workspace over parameters and ``device.*``, too.
    """

    name: str
    dtype: ElementType
    shape: tuple[Expression, ...]

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The extents."""
        return self.shape

    def element_type(self, problem_dtype: str, names: Mapping[str, Value]) -> str:
        """Return the name of the element type for a problem of the given dtype, sizes and flags."""
        return self.dtype.of(problem_dtype, names)

    def extents(self, names: Mapping[str, Value]) -> tuple[int, ...]:
        """Return the number of elements along each axis at the given sizes and flags."""
        return tuple(int(extent.value(names)) for extent in self.shape)

    def memory_demand(self, problem_dtype: str, sizes: Mapping[str, int], evaluate: Evaluate) -> MemoryDemand:
        """Return the size of the array in every configuration."""
        element_bytes = DTYPES[self.element_type(problem_dtype, sizes)].size_bytes
        return MemoryDemand(self.name, tuple(map(evaluate, self.shape)), element_bytes, self.is_workspace)

    @property
    def is_written(self) -> bool:
        """Whether the kernel writes it."""
        return True

    @property
    def is_workspace(self) -> bool:
        """Whether a launch allocates it."""
        return not self.is_given


def canonical_texts(expressions: Sequence[Expression]) -> list[str]:
    """Return the canonical text of each expression."""
    return [expression.canonical for expression in expressions]


MAX_BYTES = 4096
"""Maximum size of all parameters of a kernel before CUDA 12.1 (CUDA C++ Programming Guide, ``__global__`` function
parameters)."""
_POINTER_BYTES = 8

Member: TypeAlias = "ScalarMember | PointerMember | StructMember"


class ScalarMember(NamedTuple):
    """A scalar, a vector, or an array of scalars."""

    name: str
    dtype: str
    """Name of an element type, or `PROBLEM_DTYPE`."""
    values: tuple[Expression | float, ...]
    """Its value; the components of a vector or of an array."""

    def meaning(self) -> Any:
        """Return the member's part of the space hash."""
        values = [value.canonical if isinstance(value, Expression) else value for value in self.values]
        return [self.name, self.dtype, values]


class PointerMember(NamedTuple):
    """Address of a buffer or a workspace."""

    name: str
    target: str

    def meaning(self) -> Any:
        """Return the member's part of the space hash."""
        return [self.name, "pointer", self.target]


class StructMember(NamedTuple):
    """A struct within another."""

    name: str
    members: tuple[Member, ...]

    def meaning(self) -> Any:
        """Return the member's part of the space hash."""
        return [self.name, "struct", [member.meaning() for member in self.members]]


class PlacedScalar(NamedTuple):
    """A scalar or vector in a struct of known layout."""

    offset: int
    dtype: str
    values: tuple[Expression | float, ...]
    """Its value; the components of a vector."""


class StructLayout(NamedTuple):
    """Layout of a struct for an element type of the problem."""

    size_bytes: int
    scalars: tuple[PlacedScalar, ...]
    pointers: tuple[tuple[int, str], ...]
    """Offset and target of each pointer."""


class StructValue(NamedTuple):
    """A struct of one configuration, except for the addresses in it; compares by value."""

    name: str
    size_bytes: int
    scalars: tuple[tuple[int, str, tuple[float, ...]], ...]
    """Offset, element type and value of each scalar, or the components of a vector."""
    pointers: tuple[tuple[int, str], ...]
    """Offset and target of each pointer."""


@dataclass(frozen=True, slots=True)
class StructArgument(ArgumentKind):
    """A struct that is passed by value."""

    name: str
    members: tuple[Member, ...]

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ struct = { n = { scalar = "int32", value = "N" }, x = { pointer = "x" } } }``."""
        table.allow(("struct",))
        struct = cls(name, _members(table.table("struct"), scope))
        for dtype in scope.problem.dtypes:
            size_bytes = _Layout(dtype).size(struct.members)
            if size_bytes > MAX_BYTES:
                hint = "pass the data as a buffer"
                raise table.error("struct", f"the struct has {size_bytes} bytes, expected at most {MAX_BYTES}; {hint}")
        return struct

    def meaning(self) -> dict[str, Any]:
        """Return the struct's part of the space hash."""
        return {"struct": self.name, "members": [member.meaning() for member in self.members]}

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The expressions of all members."""
        return tuple(
            value
            for member in _flat(self.members)
            if isinstance(member, ScalarMember)
            for value in member.values
            if isinstance(value, Expression)
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the buffers and workspaces that it points to."""
        return tuple(member.target for member in _flat(self.members) if isinstance(member, PointerMember))

    def structure(self, problem_dtype: str, names: Mapping[str, Value]) -> StructValue:
        """Return the struct of a configuration, given the value of every name."""
        size_bytes, scalars, pointers = self.layout(problem_dtype)
        evaluated = ((offset, dtype, tuple(_value_of(v, names) for v in values)) for offset, dtype, values in scalars)
        return StructValue(self.name, size_bytes, tuple(evaluated), pointers)

    def parameter_bytes(self, problem_dtype: str) -> int:
        """See `ArgumentKind.parameter_bytes`."""
        return self.layout(problem_dtype).size_bytes

    def layout(self, problem_dtype: str) -> StructLayout:
        """Return the layout in C, for a problem of the given dtype."""
        layout = _Layout(problem_dtype)
        scalars: list[PlacedScalar] = []
        pointers: list[tuple[int, str]] = []
        for offset, member in layout.placed(self.members, 0):
            if isinstance(member, PointerMember):
                pointers.append((offset, member.target))
            else:
                scalars += layout.split(offset, member)
        return StructLayout(layout.size(self.members), tuple(scalars), tuple(pointers))


def _value_of(value: Expression | float, names: Mapping[str, Value]) -> float:
    return int(value.value(names)) if isinstance(value, Expression) else value


def _flat(members: tuple[Member, ...]) -> Iterator[ScalarMember | PointerMember]:
    for member in members:
        if isinstance(member, StructMember):
            yield from _flat(member.members)
        else:
            yield member


class _Layout:
    """Sizes, alignments and offsets in C for a problem's element type."""

    def __init__(self, problem_dtype: str) -> None:
        self._problem_dtype = problem_dtype

    def size(self, members: tuple[Member, ...]) -> int:
        """Return the size of a struct: a multiple of its alignment."""
        end = 0
        for member in members:
            end = _aligned(end, self._alignment(member)) + self._member_bytes(member)
        return _aligned(end, max(map(self._alignment, members)))

    def placed(self, members: tuple[Member, ...], start: int) -> Iterator[tuple[int, ScalarMember | PointerMember]]:
        """Yield the offset of each member, with those of structs within the struct in their place."""
        end = start
        for member in members:
            offset = _aligned(end, self._alignment(member))
            if isinstance(member, StructMember):
                yield from self.placed(member.members, offset)
            else:
                yield offset, member
            end = offset + self._member_bytes(member)

    def split(self, offset: int, member: ScalarMember) -> Iterator[PlacedScalar]:
        """Yield the elements of an array, or the one scalar or vector."""
        element = self._dtype(member)
        for first in range(0, len(member.values), element.parts):
            values = member.values[first : first + element.parts]
            yield PlacedScalar(offset + first // element.parts * element.size_bytes, element.name, values)

    def _dtype(self, member: ScalarMember) -> Dtype:
        return DTYPES[self._problem_dtype if member.dtype == PROBLEM_DTYPE else member.dtype]

    def _alignment(self, member: Member) -> int:
        match member:
            case ScalarMember():
                return self._dtype(member).alignment_bytes
            case PointerMember():
                return _POINTER_BYTES
            case StructMember():
                return max(map(self._alignment, member.members))

    def _member_bytes(self, member: Member) -> int:
        match member:
            case ScalarMember():
                dtype = self._dtype(member)
                return dtype.size_bytes * (len(member.values) // dtype.parts)
            case PointerMember():
                return _POINTER_BYTES
            case StructMember():
                return self.size(member.members)


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _members(table: Table, scope: ArgumentScope) -> tuple[Member, ...]:
    if not table.data:
        raise table.error("", "the struct has no members; give at least one")
    for name in table.data:
        if not is_c_identifier(name):
            raise table.error(name, f"{name!r} is not a C identifier; use letters, digits and '_', no digit first")
    return tuple(_member(table.table(name), name, scope) for name in table.data)


def _member(table: Table, name: str, scope: ArgumentScope) -> Member:
    if "struct" in table.data:
        table.allow(("struct",))
        return StructMember(name, _members(table.table("struct"), scope))
    if "pointer" in table.data:
        table.allow(("pointer",))
        return PointerMember(name, _target(table, scope))
    if "scalar" in table.data:
        table.allow(("scalar", "value"))
        return _scalar(table, name, scope)
    raise table.error("", "expected exactly one of the keys scalar, pointer, struct")


def _target(table: Table, scope: ArgumentScope) -> str:
    known = (*scope.buffers, *scope.workspaces)
    target = table.text("pointer")
    if target not in known:
        hint = f"{nearest(target, known)} (known: {listing(known)})"
        raise table.error("pointer", f"{describe(target)} names no buffer or workspace{hint}")
    return target


def _scalar(table: Table, name: str, scope: ArgumentScope) -> ScalarMember:
    """Parse a scalar; a list is an array, or several vectors one after the other."""
    dtype = known_type(table.text("scalar"), table.location("scalar"))
    parts = 1 if dtype == PROBLEM_DTYPE else DTYPES[dtype].parts
    given = table.require("value")
    entries = table.entries("value") if isinstance(given, list) else [given]
    if len(entries) % parts:
        raise table.error("value", f"expected {parts} numbers for each {dtype}, got {len(entries)}")
    values = tuple(_value(table, entry, scope) for entry in entries)
    is_integer = dtype in DTYPES and DTYPES[dtype].is_integer
    for value in values:
        if is_integer and isinstance(value, float) and not value.is_integer():
            raise table.error("value", f"expected a whole number for {dtype}, got {value}")
    return ScalarMember(name, dtype, values)


def _value(table: Table, entry: Any, scope: ArgumentScope) -> Expression | float:
    if isinstance(entry, str):
        expected = table.parse("value", entry, scope.kinds, "number")
        if expected.names <= scope.problem.own_names:
            for sizes in (scope.problem.sizes, scope.problem.ragged):
                expected.value(sizes)
        return expected
    if isinstance(entry, bool):
        return float(entry)
    return Table(table.document, table.key, {"value": entry}).number("value")


_Array = TypeVar("_Array")

TENSOR_MAP_CAPABILITY = "9.0"
"""CUDA C++ Programming Guide, features per compute capability."""

MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_EXTENT = 2**32
MAX_STRIDE_BYTES = 2**40
UNIT_BYTES = 16
"""Alignment of the address, and unit of the row pitch and of the innermost extent of a box."""
TENSOR_MAP_BYTES = 128
"""Size of a tensor map (CUDA driver API, ``CUtensorMap``)."""
SWIZZLES = (0, 32, 64, 128)
L2_PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map except for the address: axes from the outermost to the innermost, extents and box in elements."""

    name: str
    buffer: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_bytes: int
    l2_promotion_bytes: int

    @property
    def is_absent(self) -> bool:
        """Whether the configuration does not use the map: an extent of its box, or of the workspace, is 0."""
        return 0 in self.box or 0 in self.shape

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Strides of all axes except the innermost, in bytes."""
        return strides_bytes(self.shape, DTYPES[self.dtype].size_bytes)


def strides_bytes(shape: tuple[Any, ...], element_bytes: int) -> tuple[Any, ...]:
    """Return the strides, in bytes, of all axes of a row-major array except the innermost; for columns, columns."""
    return tuple(accumulate(reversed(shape[1:]), operator.mul, initial=element_bytes))[:0:-1]


def misaligned_stride(shape: tuple[int, ...], element_bytes: int) -> int:
    """Return the first stride, in bytes, that is not a multiple of `UNIT_BYTES`; 0 if there is none."""
    return next((stride for stride in strides_bytes(shape, element_bytes) if stride % UNIT_BYTES), 0)


@dataclass(frozen=True, slots=True)
class TensorMapDemand:
    """One tensor map over columns of configurations; see `autotile.space.limits.Demand`."""

    name: str
    buffer: str
    shape: tuple[Column, ...]
    element_bytes: int
    box: tuple[Column, ...]
    element_strides: tuple[Column, ...]
    swizzle_bytes: Column
    l2_promotion_bytes: Column

    def fits(self) -> Mask:
        """Return the rows in which the hardware accepts the map, or the map is absent."""
        return self._absent() | reduce(operator.and_, [holds for holds, _ in self._conditions()])

    def explain(self) -> str:
        """Return the first violated condition of the first row, as one line; "" if there is none."""
        if np.ravel(self._absent())[0]:
            return ""
        violations = (violation() for holds, violation in self._conditions() if not np.ravel(holds)[0])
        return next((f"the tensor map {self.name} of {self.buffer} {violation}" for violation in violations), "")

    def _absent(self) -> Mask:
        return reduce(operator.or_, [extent == 0 for extent in (*self.box, *self.shape)])

    def _conditions(self) -> list[tuple[Mask, Callable[[], str]]]:
        """Return the rows in which each condition holds, with the message for a first row in which it does not."""
        inner_bytes = clipped(self.box[-1], 0, MAX_BOX + 1) * self.element_bytes
        swizzle, promotion = self.swizzle_bytes, self.l2_promotion_bytes
        along = "along the innermost axis"
        return [
            *self._layout_conditions(),
            (
                _all_within(self.box, MAX_BOX),
                lambda: f"has a box of {_by(self.box)} elements, expected 1 to {MAX_BOX} along each axis",
            ),
            (
                inner_bytes % UNIT_BYTES == 0,
                lambda: f"has a box of {_first(inner_bytes)} bytes {along}, expected a multiple of {UNIT_BYTES}",
            ),
            (
                _is_among(swizzle, SWIZZLES),
                lambda: f"has swizzle_bytes = {_first(swizzle)}, expected one of {_or(SWIZZLES)}",
            ),
            (
                (swizzle == 0) | (inner_bytes <= swizzle),
                lambda: (
                    f"has a box of {_first(inner_bytes)} bytes {along}, more than its swizzle_bytes = {_first(swizzle)}"
                ),
            ),
            (
                _all_within(self.element_strides, MAX_ELEMENT_STRIDE) & (self.element_strides[-1] == 1),
                lambda: (
                    f"has element strides of {_by(self.element_strides)}, expected 1 to {MAX_ELEMENT_STRIDE}, and 1 "
                    f"{along}"
                ),
            ),
            (
                _is_among(promotion, L2_PROMOTIONS),
                lambda: f"has l2_promotion_bytes = {_first(promotion)}, expected one of {_or(L2_PROMOTIONS)}",
            ),
        ]

    def _layout_conditions(self) -> list[tuple[Mask, Callable[[], str]]]:
        """Return the conditions on the shape."""
        # Of columns in float64, as products of absurd extents exceed 64 bits.
        exact = [extent if isinstance(extent, int) else np.asarray(extent, np.float64) for extent in self.shape]
        strides = strides_bytes(tuple(exact), self.element_bytes)

        def shape() -> str:
            return " x ".join(f"{_first(extent):,}" for extent in self.shape)

        def misaligned() -> str:
            stride = misaligned_stride(tuple(map(_first, self.shape)), self.element_bytes)
            return f"has rows {stride:,} bytes apart in the shape {shape()}, expected a multiple of {UNIT_BYTES}"

        bounded = [*(extent <= MAX_EXTENT for extent in self.shape), *(s < MAX_STRIDE_BYTES for s in strides)]
        return [
            (reduce(operator.and_, [stride % UNIT_BYTES == 0 for stride in strides], True), misaligned),
            (
                reduce(operator.and_, bounded, True),
                lambda: f"has the shape {shape()}, which is beyond what a map can address",
            ),
        ]


def _all_within(columns: tuple[Column, ...], maximum: int) -> Mask:
    return reduce(operator.and_, [(column >= 1) & (column <= maximum) for column in columns])


def _is_among(column: Column, values: tuple[int, ...]) -> Mask:
    return reduce(operator.or_, [column == value for value in values])


def _by(columns: tuple[Column, ...]) -> str:
    return " x ".join(str(_first(column)) for column in columns)


def _first(column: Column) -> int:
    return int(np.ravel(column)[0])


def _or(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


@dataclass(frozen=True, slots=True)
class TensorMapArgument(ArgumentKind):
    """A descriptor of a buffer or a workspace for the tensor memory accelerator, passed by value.

    Attributes
    ----------
    buffer
        The array that it describes.
    box
        Extents, in elements, that one copy moves along each axis of the array.
    element_strides
        Distance of the elements that are moved, along each axis.
    """

    name: str
    buffer: ArrayArgument
    box: tuple[Expression, ...]
    element_strides: tuple[Expression, ...]
    swizzle_bytes: Expression
    l2_promotion_bytes: Expression

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ tensor_map = "A", box = [...], swizzle_bytes = ..., ... }``."""
        table.allow(("tensor_map", "box", "element_strides", "swizzle_bytes", "l2_promotion_bytes"))
        known: dict[str, ArrayArgument] = {**scope.buffers, **scope.workspaces}
        buffer = _named_array(table, "tensor_map", known, "buffer or workspace")
        target, rank = buffer.name, len(buffer.shape)
        for dtype in _element_types(buffer, scope):
            if DTYPES[dtype].components or DTYPES[dtype].is_complex:
                hint = "declare the buffer with the type of the parts and one more axis"
                raise table.error("tensor_map", f"a tensor map cannot describe {target} of type {dtype}; {hint}")
        if rank > MAX_RANK:
            raise table.error("tensor_map", f"{target} has {rank} axes, a tensor map describes at most {MAX_RANK}")
        box = table.expressions("box", scope.kinds, max_length=rank)
        one, zero = parse_expression("1", {}), parse_expression("0", {})
        has_strides = "element_strides" in table.data
        strides = table.expressions("element_strides", scope.kinds, max_length=rank) if has_strides else (one,) * rank
        for key, given in (("box", box), ("element_strides", strides)):
            if len(given) != rank:
                raise table.error(key, f"expected {rank} expressions, one for each axis of {target}, got {len(given)}")
        swizzle_bytes = table.optional_expression("swizzle_bytes", scope.kinds) or zero
        l2_promotion_bytes = table.optional_expression("l2_promotion_bytes", scope.kinds) or zero
        return cls(name, buffer, box, strides, swizzle_bytes, l2_promotion_bytes)

    def meaning(self) -> dict[str, Any]:
        """Return the map's part of the space hash."""
        return {
            "tensor_map": self.name,
            "buffer": self.buffer.name,
            "box": canonical_texts(self.box),
            "element_strides": canonical_texts(self.element_strides),
            "swizzle_bytes": self.swizzle_bytes.canonical,
            "l2_promotion_bytes": self.l2_promotion_bytes.canonical,
        }

    @property
    def described_buffer(self) -> str:
        """Name of the buffer or workspace."""
        return self.buffer.name

    @property
    def required_feature(self) -> tuple[str, str]:
        """Tensor maps and their lowest compute capability."""
        return "tensor maps", TENSOR_MAP_CAPABILITY

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Box, strides, swizzle and L2 promotion."""
        return (*self.box, *self.element_strides, self.swizzle_bytes, self.l2_promotion_bytes)

    def check_ragged(self, names: Mapping[str, Value], dtypes: Sequence[str], table: Table) -> None:
        """Raise if rows of the buffer are not a multiple of 16 bytes apart at the ragged sizes."""
        extents = (*self.box, *self.buffer.shape)
        if not names.keys() >= frozenset().union(*(extent.names for extent in extents)):
            return  # an extent depends on the device
        if any(extent.evaluate(names) == 0 for extent in extents):
            return
        shape = self.buffer.extents(names)
        sizes_bytes = [DTYPES[self.buffer.element_type(dtype, names)].size_bytes for dtype in dtypes]
        misaligned = next(filter(None, (misaligned_stride(shape, size) for size in sizes_bytes)), 0)
        if misaligned:
            raise table.error(
                "tensor_map",
                f"at the ragged sizes, rows of {self.buffer.name} are {misaligned} bytes apart, a tensor map takes "
                f"multiples of {UNIT_BYTES}; set problem.ragged to sizes of whole {UNIT_BYTES} bytes",
            )

    def parameter_bytes(self, problem_dtype: str) -> int:
        """See `ArgumentKind.parameter_bytes`."""
        return TENSOR_MAP_BYTES

    def tensor_map(self, problem_dtype: str, names: Mapping[str, Value]) -> TensorMap:
        """Return the tensor map of a configuration, given the value of every name."""

        def value(expression: Expression) -> int:
            return int(expression.value(names))

        return TensorMap(
            self.name,
            self.buffer.name,
            self.buffer.element_type(problem_dtype, names),
            self.buffer.extents(names),
            tuple(map(value, self.box)),
            tuple(map(value, self.element_strides)),
            value(self.swizzle_bytes),
            value(self.l2_promotion_bytes),
        )

    def tensor_map_demand(self, problem_dtype: str, sizes: Mapping[str, int], evaluate: Evaluate) -> TensorMapDemand:
        """Return the tensor map in every configuration."""
        return TensorMapDemand(
            self.name,
            self.buffer.name,
            tuple(map(evaluate, self.buffer.shape)),
            DTYPES[self.buffer.element_type(problem_dtype, sizes)].size_bytes,
            tuple(map(evaluate, self.box)),
            tuple(map(evaluate, self.element_strides)),
            evaluate(self.swizzle_bytes),
            evaluate(self.l2_promotion_bytes),
        )


Filter = Literal["point", "linear"]
AddressMode = Literal["clamp", "border", "wrap", "mirror"]
ReadMode = Literal["element", "normalized_float"]

MAX_AXES = 2
PITCH_BYTES = 32
"""Multiple that rows must be, ``texturePitchAlignment`` of all current devices."""
_NORMALIZABLE = ("int8", "uint8", "int16", "uint16")
_COMPONENTS = ("float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32")
_COMPONENT_COUNTS = (0, 2, 4)


class Texture(NamedTuple):
    """A texture except for the address of its buffer."""

    name: str
    buffer: str
    dtype: str
    shape: tuple[int, ...]
    """Elements along each axis, one axis or two."""
    filter: Filter
    address: AddressMode
    read: ReadMode
    is_normalized: bool
    """Whether coordinates are from 0 to 1."""

    @property
    def pitch_bytes(self) -> int:
        """Distance of rows in bytes."""
        return self.shape[-1] * DTYPES[self.dtype].size_bytes

    @property
    def is_aligned(self) -> bool:
        """Whether the distance of rows is one that textures can have."""
        return len(self.shape) == 1 or self.pitch_bytes % PITCH_BYTES == 0


@dataclass(frozen=True, slots=True)
class TextureArgument(ArgumentKind):
    """A ``cudaTextureObject_t`` over a buffer: linear memory of one axis, or rows of two."""

    name: str
    buffer: ArrayArgument
    filter: Filter
    address: AddressMode
    read: ReadMode
    is_normalized: bool

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ texture = "image", filter = "linear", address = "clamp", ... }``."""
        table.allow(("texture", "filter", "address", "read", "normalized"))
        texture = cls(
            name,
            _named_array(table, "texture", scope.buffers, "buffer"),
            _choice(table, "filter", get_args(Filter)),
            _choice(table, "address", get_args(AddressMode)),
            _choice(table, "read", get_args(ReadMode)),
            table.boolean("normalized", default=False),
        )
        texture._check(table, scope)
        return texture

    def _check(self, table: Table, scope: ArgumentScope) -> None:
        """Raise if the hardware has no such texture."""
        axes, target = len(self.buffer.shape), self.buffer.name
        if axes > MAX_AXES:
            raise table.error("texture", f"{target} has {axes} axes; a texture of device memory has 1 or {MAX_AXES}")
        if self.buffer.is_written:
            raise table.error("texture", f'textures are read only; the access of {target} must be "in"')
        for name in _element_types(self.buffer, scope):
            dtype = DTYPES[name]
            if dtype.component.name not in _COMPONENTS or dtype.components not in _COMPONENT_COUNTS:
                hint = f"expected {listing(_COMPONENTS)}, or vectors of 2 or 4 of them"
                raise table.error("texture", f"{target} is {name}, which textures do not hold; {hint}")
            if self.read == "normalized_float" and dtype.component.name not in _NORMALIZABLE:
                raise table.error("read", f"only integers of 8 and 16 bits are read as fractions, not {name}")
            if self.filter == "linear" and self.read == "element" and dtype.is_integer:
                raise table.error("filter", f'{name} is filtered only with read = "normalized_float"')
        if axes == 1 and (self.filter == "linear" or self.is_normalized or self.address not in ("clamp", "border")):
            hint = "a texture of one axis is read with tex1Dfetch, without filter, address and normalized"
            raise table.error("texture", f"{hint}; declare {target} with two axes, [1, n]")
        if self.address in ("wrap", "mirror") and not self.is_normalized:
            raise table.error("address", f'address = "{self.address}" needs normalized = true')
        sizes = scope.problem.sizes
        if not self.texture(scope.problem.dtypes[0], sizes).is_aligned:
            raise table.error("texture", self._misalignment(scope.problem.dtypes[0], sizes))

    def _misalignment(self, dtype: str, names: Mapping[str, Value]) -> str:
        pitch_bytes = self.texture(dtype, names).pitch_bytes
        hint = f"choose sizes whose rows are multiples of {PITCH_BYTES} bytes"
        return f"rows of {self.buffer.name} are {pitch_bytes} bytes apart, which textures cannot have; {hint}"

    def meaning(self) -> dict[str, Any]:
        """Return the texture's part of the space hash."""
        return {
            "texture": self.name,
            "buffer": self.buffer.name,
            "filter": self.filter,
            "address": self.address,
            "read": self.read,
            "normalized": self.is_normalized,
        }

    @property
    def described_buffer(self) -> str:
        """Name of the buffer."""
        return self.buffer.name

    def check_ragged(self, names: Mapping[str, Value], dtypes: Sequence[str], table: Table) -> None:
        """Raise if rows of the buffer are not a multiple of 32 bytes apart at the ragged sizes."""
        for dtype in dtypes:
            if not self.texture(dtype, names).is_aligned:
                problem = f"at the ragged sizes, {self._misalignment(dtype, names)} for problem.ragged"
                raise table.error("texture", problem)

    def texture(self, problem_dtype: str, names: Mapping[str, Value]) -> Texture:
        """Return the texture of a problem."""
        return Texture(
            self.name,
            self.buffer.name,
            self.buffer.element_type(problem_dtype, names),
            self.buffer.extents(names),
            self.filter,
            self.address,
            self.read,
            self.is_normalized,
        )


def _choice(table: Table, name: str, known: tuple[Any, ...]) -> Any:
    """Return one of several texts; the first if the entry is missing."""
    text = table.text(name, known[0])
    if text not in known:
        raise table.error(name, f"{describe(text)} is not accepted{nearest(text, known)} (known: {listing(known)})")
    return text


def _named_array(table: Table, entry: str, known: Mapping[str, _Array], what: str) -> _Array:
    """Return the array that an entry names."""
    target = table.text(entry)
    if target not in known:
        raise table.error(
            entry, f"{describe(target)} names no {what}{nearest(target, known)} (known: {listing(known)})"
        )
    return known[target]


def _element_types(buffer: ArrayArgument, scope: ArgumentScope) -> Iterator[str]:
    """Return the names of all types that the array's elements can have."""
    return chain.from_iterable(scope.problem.dtypes if one == PROBLEM_DTYPE else (one,) for one in buffer.dtype.names)
