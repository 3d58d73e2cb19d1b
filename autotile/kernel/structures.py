"""Structs that a kernel takes by value, in the layout of C: scalars, arrays, pointers to buffers, and structs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeAlias

from autotile.core.dtypes import DTYPES, Dtype
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.argument_kind import PROBLEM_DTYPE, ArgumentKind, ArgumentScope, known_type
from autotile.kernel.expressions import Expression
from autotile.kernel.table import Table, describe, is_c_identifier

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
