"""The arguments of a kernel, of each kind: their parsers, their checks and their part in the key of a result.

A kind is a class derived from `ArgumentKind` and listed in `Argument` and `_KINDS`: buffers, scalars, workspaces,
structs by value, and arguments that describe an array to the hardware, tensor maps (TMA) and textures, with their
limits (``cuTensorMapEncodeTiled`` in the CUDA driver API reference, without interleaving).

Code outside this package queries an argument (`is_given`, `is_passed`, `targets`, ...) instead of testing its type. Two
modules have code for each kind, and mypy reports a kind that they lack: `autotile.cuda.packing` packs the parameters of
a launch, `autotile.exchange.cpp_header` writes them in C++.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, chain
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

import msgspec
import numpy as np

from autotile.core.dtypes import DTYPES, Array, Dtype, Shape, canonical_dtype
from autotile.core.model import Sizes, Values, dtype_names
from autotile.errors import ArgumentError, listing, nearest
from autotile.kernel.contents import Content, InputExpression, InputFile, declared_content
from autotile.kernel.expressions import (
    NOUNS,
    Expression,
    ExpressionText,
    Location,
    ShapeOnly,
    is_c_identifier,
    one_line,
    parse_expression,
)
from autotile.kernel.functions import Kinds
from autotile.kernel.table import ProblemSection, Table, check_names, describe, stating

PROBLEM_DTYPE = "dtype"
"""Declares that an argument has the problem's element type."""
MAX_AXES = 8
POINTER_BYTES = 8

_NAMES = (PROBLEM_DTYPE, *DTYPES)
_C_TYPES = {
    **{dtype.c_type: name for name, dtype in reversed(DTYPES.items())},
    **{"half": "float16", "bf16": "bfloat16", "char": "int8", "size_t": "uint64", "unsigned": "uint32"},
    **{"unsigned char": "uint8", "short": "int16", "unsigned short": "uint16", "int": "int32", "long": "int64"},
    **{"unsigned int": "uint32", "unsigned long": "uint64", "long long": "int64", "unsigned long long": "uint64"},
    **{f"{name}_t": name for name in DTYPES if "int" in name},
}
"""Element type of each spelling in C that is not its name here."""

Column = Any
"""An int64 column with one row per configuration, or one element for all; for a single configuration, an int."""
Mask = Any
"""A bool column, or a bool for a single configuration or for all."""
Evaluate = Callable[[Expression], Column]
"""Evaluates an expression for every row of a table of configurations."""


def clipped(value: Column, low: int, high: int) -> Column:
    """Return values within two bounds."""
    return min(max(value, low), high) if isinstance(value, int) else np.clip(value, low, high)


class ElementType(msgspec.Struct, frozen=True):
    """A declared type: ``float32``, ``dtype``, or ``float32 if OUT_FP32 else dtype``."""

    chosen: str
    condition: Expression | None = None
    """Condition over flags; None if the type is always ``chosen``."""
    otherwise: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The possible types."""
        return (self.chosen,) if self.condition is None else (self.chosen, self.otherwise)

    def __str__(self) -> str:
        return (
            self.chosen if self.condition is None else f"{self.chosen} if {self.condition.text} else {self.otherwise}"
        )


def parse_element_type(text: str, flags: Kinds, location: Location) -> ElementType:
    """Parse an element type, whose condition may use flags."""
    if " " not in text.strip():
        return ElementType(_known_type(text, location))
    source = ExpressionText(one_line(text))
    with location.reporting(source.text):
        tree = source.parse()
        if not isinstance(tree, ast.IfExp):
            raise source.error(tree, "expected a type, or two as in 'float32 if FLAG else dtype'")
        chosen, test, otherwise = (ast.unparse(part) for part in (tree.body, tree.test, tree.orelse))
    condition = parse_expression(test, flags, location)
    if condition.kind != "boolean":
        raise location.error(f"expected a flag or another condition, but {test} is {NOUNS[condition.kind]}")
    return ElementType(_known_type(chosen, location), condition, _known_type(otherwise, location))


def _known_type(name: str, location: Location) -> str:
    """Return the canonical name of an element type, or `PROBLEM_DTYPE`."""
    known = canonical_dtype(name)
    if known not in _NAMES:
        raise location.error(f"the string {name[:60]!r} is not accepted{type_hint(name, _NAMES)}")
    return known


def type_hint(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about a name that is none of the known element types."""
    meant = _C_TYPES.get(name)
    return f"; write {meant!r}" if meant in known else f"{nearest(name, known)} (known: {listing(known)})"


def _parts(dtype: str) -> int:
    return 1 if dtype == PROBLEM_DTYPE else DTYPES[dtype].parts


class ArgumentScope(NamedTuple):
    """Names that an argument's table may refer to."""

    problem: ProblemSection
    kinds: Kinds
    """Kind of each size, flag, parameter and ``device.*``."""
    launch_kinds: Kinds
    """The same, and ``step`` in a file with steps."""
    buffers: Mapping[str, BufferArgument] = {}
    workspaces: Mapping[str, WorkspaceArgument] = {}
    operands: Mapping[str, bool] = {}
    """Names of the arguments whose value before a launch is known, with whether they are numbers."""


class ArgumentKind(msgspec.Struct, frozen=True):
    """Base class of the kinds of arguments; a kind overrides what differs from the defaults here.

    Its `parse` reads the argument's table. Its `meaning` is the argument's part of `autotile.database.keys.space_hash`,
    as JSON values: everything that a measured time depends on. A change invalidates recorded results; therefore, an
    entry that is added later is omitted at its default. Its `check_ragged`, if it has one, raises if the default
    configuration cannot be launched, and so not be verified, at the ragged sizes.
    """

    is_given: ClassVar[bool] = False
    """Whether the caller passes an array for it."""

    name: str

    @property
    def is_passed(self) -> bool:
        """Whether the argument is a parameter of the ``__global__`` function."""
        return True

    @property
    def is_operand(self) -> bool:
        """Whether references may use it: its value before a launch is known."""
        return False

    @property
    def described_buffer(self) -> str:
        """Name of the buffer or workspace that the argument describes to the kernel; "" if there is none."""
        buffer: ArrayArgument | None = getattr(self, "buffer", None)
        return "" if buffer is None else buffer.name

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the buffers and workspaces to which it gives the kernel access."""
        return (self.described_buffer,) if self.described_buffer else ()

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """All of its expressions, without those of a buffer that it describes."""
        return tuple(_expressions_in(msgspec.structs.astuple(self)))

    def meaning(self) -> dict[str, Any]:
        """Return the argument's part of the space hash, by default all of its fields."""

        def stated(value: Any) -> Any:
            if isinstance(value, tuple):
                return list(map(stated, value))
            return getattr(value, "canonical", getattr(value, "name", value))

        (key,) = (key for key, kind in _KINDS.items() if isinstance(self, kind))
        return {key: self.name, **{name: stated(getattr(self, name)) for name in self.__struct_fields__[1:]}}

    def parameter_bytes(self, problem_dtype: str) -> int:
        """Return the size of the parameter that it is passed as, in bytes; of a pointer by default."""
        return POINTER_BYTES

    def operand(self, sizes: Sizes, *, check: bool) -> ShapeOnly | float | complex:
        """Return its value in a reference, from sizes and flags; for an array, the shape.

        With ``check``, a scalar has its check value.
        """
        raise NotImplementedError


def _expressions_in(parts: tuple[Any, ...]) -> Iterator[Expression]:
    for part in parts:
        if isinstance(part, Expression):
            yield part
        elif isinstance(part, tuple):
            yield from _expressions_in(part)


class Workspace(msgspec.Struct, frozen=True, gc=False):
    """A workspace of known shape and element type."""

    name: str
    dtype: str
    shape: Shape
    zeroed: bool

    @property
    def size_bytes(self) -> int:
        """Size in bytes; 0 if a null pointer is passed."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes


class ArrayArgument(ArgumentKind, frozen=True):
    """A device array: a buffer of the caller's, or a workspace."""

    dtype: ElementType
    shape: tuple[Expression, ...]
    """Extents over sizes and flags; those of a workspace over parameters and ``device.*``, too."""

    def element_type(self, problem_dtype: str, names: Values) -> str:
        """Return the name of the element type for a problem of the given dtype, sizes and flags."""
        kind = self.dtype
        name = kind.chosen if kind.condition is None or kind.condition.value(names) else kind.otherwise
        return problem_dtype if name == PROBLEM_DTYPE else name

    def extents(self, names: Values) -> Shape:
        """Return the number of elements along each axis at the given sizes and flags."""
        return tuple(int(extent.value(names)) for extent in self.shape)

    @property
    def is_written(self) -> bool:
        """Whether the kernel writes it."""
        return True

    def possible_types(self, problem: ProblemSection) -> Iterator[str]:
        """Return the names of all types that the elements can have."""
        return chain.from_iterable(problem.dtypes if one == PROBLEM_DTYPE else (one,) for one in self.dtype.names)


def _texts(expressions: Sequence[Expression]) -> list[str]:
    return [expression.canonical for expression in expressions]


Access = Literal["in", "out", "inout"]
Number = float | tuple[float, ...]
"""Value of a scalar; a tuple for a vector or a complex number."""


class BufferArgument(ArrayArgument, frozen=True):
    """A device array that the caller passes."""

    is_given: ClassVar[bool] = True

    access: Access
    init: str
    """Content in tuning: a name of `autotile.kernel.contents.NAMED`, or the text of ``content``."""
    is_passed: bool = True
    """Whether the kernel takes its address; False for a buffer that is accessed through a tensor map or struct only."""
    content: Content | None = None
    """Content that is computed or read from a file; None for one that is a name alone."""
    is_initialized: bool = True
    """Whether it has its content before each launch: an input, or an output with ``init``."""
    constant: str = ""
    """``__constant__`` variable to which it is copied before a launch; "" if it is passed."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ buffer = "float32", shape = [...], access = "in", ... }``."""
        table.allow(("buffer", "shape", "access", "init", "file", "sha256", "whole", "restore", "pass", "constant"))
        shape = table.expressions("shape", scope.problem.kinds, max_length=MAX_AXES)
        scope.problem.check_positive(table, "shape", shape)
        access = table.choice("access", get_args(Access))
        if "restore" in table.data and (access == "in" or not table.boolean("restore", default=True)):
            raise table.error("restore", "every buffer that is written and has a content is restored; remove restore")
        init, content = declared_content(table, name, scope.problem, scope.operands)
        dtype = parse_element_type(table.text("buffer"), scope.problem.flag_kinds, table.location("buffer"))
        is_initialized = access != "out" or bool(init)
        constant = table.text("constant", "")
        if "constant" in table.data:
            if not all(is_c_identifier(part) for part in constant.split("::")):
                hint = "is not the name of a variable, such as d_filter or ns::filter"
                raise table.error("constant", f"{describe(constant)} {hint}")
            if access != "in":
                raise table.error("constant", 'constant memory is read only; the access of the buffer must be "in"')
            if "pass" in table.data:
                raise table.error("pass", "what is copied to constant memory is not passed; remove pass")
        is_passed = not constant and table.boolean("pass", default=True)
        return cls(name, dtype, shape, access, init or "normal", is_passed, content, is_initialized, constant)

    def meaning(self) -> dict[str, Any]:
        """Return the buffer's part of the space hash."""
        meaning: dict[str, Any] = {
            "buffer": self.name,
            "dtype": str(self.dtype),
            "shape": _texts(self.shape),
            "access": self.access,
            "init": self.content.content_hash if isinstance(self.content, InputFile) else self.init,
        }
        if self.constant:
            meaning["constant"] = self.constant
        elif not self.is_passed:
            meaning["pass"] = False
        if self.is_initialized and not self.is_read:
            meaning["initialized"] = True
        return meaning

    @property
    def is_read(self) -> bool:
        """Whether the kernel may read what the caller passes."""
        return self.access != "out"

    @property
    def is_operand(self) -> bool:
        """Whether references may use it."""
        return self.is_read

    @property
    def is_written(self) -> bool:
        """Whether the kernel writes it."""
        return self.access != "in"

    @property
    def is_zeroed(self) -> bool:
        """Whether its content is zero."""
        return self.init == "zeros" or (isinstance(self.content, InputExpression) and self.content.text in ("0", "0.0"))

    @property
    def targets(self) -> tuple[str, ...]:
        """The buffer itself, if the kernel reads it from constant memory."""
        return (self.name,) if self.constant else ()

    def operand(self, sizes: Sizes, *, check: bool) -> ShapeOnly:
        """Return the shape."""
        return ShapeOnly(self.array_shape(sizes))

    def array_shape(self, names: Values) -> Shape:
        """Return the shape of the array that holds the elements: the components of vectors are its last axis."""
        dtype = DTYPES.get(self.element_type("", names))  # the problem's type, which "" stands for, is no vector
        return dtype.array_shape(self.extents(names)) if dtype is not None else self.extents(names)

    def size_bytes(self, problem_dtype: str, names: Values) -> int:
        """Return the size of the array in bytes."""
        return math.prod(self.extents(names)) * DTYPES[self.element_type(problem_dtype, names)].size_bytes


class WorkspaceArgument(ArrayArgument, frozen=True):
    """Device memory that a launch needs for itself; if an extent is 0, a null pointer is passed."""

    zeroed: bool
    """Whether it is zero before the first launch and left zero by every launch; otherwise its content is undefined."""
    is_passed: bool = True
    """Whether the kernel takes its address; False for one that is accessed through a tensor map or struct only."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ workspace = "float32", shape = [...], init = "zeros" }``."""
        table.allow(("workspace", "shape", "init", "pass"))
        if "init" in table.data and table.text("init") != "zeros":
            raise table.error("init", f'{describe(table.text("init"))} is not accepted; expected "zeros", or no init')
        dtype = parse_element_type(table.text("workspace"), scope.problem.flag_kinds, table.location("workspace"))
        shape = table.expressions("shape", scope.kinds, max_length=MAX_AXES)
        return cls(name, dtype, shape, "init" in table.data, table.boolean("pass", default=True))

    def meaning(self) -> dict[str, Any]:
        """Return the workspace's part of the space hash."""
        shape = _texts(self.shape)
        meaning = {"workspace": self.name, "dtype": str(self.dtype), "shape": shape, "zeroed": self.zeroed}
        return meaning if self.is_passed else {**meaning, "pass": False}

    def workspace(self, problem_dtype: str, names: Values) -> Workspace:
        """Return the workspace of a configuration, given the value of every name."""
        return Workspace(self.name, self.element_type(problem_dtype, names), self.extents(names), self.zeroed)


class ScalarArgument(ArgumentKind, frozen=True):
    """A value passed by the launch: bound (``M``, ``2 ** step``), or a default that a caller may override."""

    dtype: str
    """Name of an element type, or `PROBLEM_DTYPE`."""
    binding: Expression | None
    """Expression that gives its value, over sizes, flags, parameters, ``device.*`` and ``step``."""
    default: Number | None
    """Else its value unless a caller sets another: a number, or a tuple of the components of a vector or of the real
    and the imaginary part of a complex number."""
    check_value: Number | None
    """Value at the ragged sizes in verification (``beta`` other than 0); None for the default."""
    is_per_launch: bool = False
    """Whether its value depends on more than the problem: on parameters, ``device.*`` or ``step``."""

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ scalar = "int32", value = "M" }`` or ``{ scalar = "float32", value = 0.0, check = 0.5 }``."""
        table.allow(("scalar", "value", "check"))
        dtype = _known_type(table.text("scalar"), table.location("scalar"))
        if isinstance(table.require("value"), str):
            if "check" in table.data:
                raise table.error("check", "a value that is bound by the sizes takes no second one; remove check")
            if _parts(dtype) > 1:
                raise table.error("value", f"expected a list of {_parts(dtype)} numbers for {dtype}, not an expression")
            expression = table.expression("value", scope.launch_kinds, "number")
            is_per_launch = bool(expression.names - scope.problem.own_names)
            for sizes, _ in () if is_per_launch else scope.problem.cases(expression.names):
                expression.evaluate(sizes)
            return cls(name, dtype, expression, None, None, is_per_launch)
        value = _constant(table, "value", dtype)
        return cls(name, dtype, None, value, _constant(table, "check", dtype) if "check" in table.data else None)

    def meaning(self) -> dict[str, Any]:
        """Return the scalar's part of the space hash."""
        value = self.default if self.binding is None else self.binding.canonical
        return {"scalar": self.name, "dtype": self.dtype, "value": value, "check": self.check_value}

    @property
    def is_operand(self) -> bool:
        """Whether references may use it."""
        return not self.is_per_launch

    @property
    def repeats_size(self) -> bool:
        """Whether its value is the size of the same name, so that the two may share the name."""
        return self.binding is not None and self.binding.text == self.name

    def operand(self, sizes: Sizes, *, check: bool) -> ShapeOnly | float | complex:
        """Return the value in a reference; the shape of a vector. With ``check``, the check value if there is one."""
        value = self.given(sizes, check=check)
        if isinstance(value, tuple):
            return complex(*value) if DTYPES[self.dtype].is_complex else ShapeOnly((len(value),))
        return value

    def given(self, sizes: Sizes, *, check: bool) -> Number:
        """Return the value at the given sizes and flags; with ``check``, the check value if there is one."""
        if self.binding is not None:
            return int(self.binding.value(sizes))
        assert self.default is not None
        return self.check_value if check and self.check_value is not None else self.default

    def parameter_bytes(self, problem_dtype: str) -> int:
        """Return the size of its type."""
        return DTYPES[self.element_type(problem_dtype)].size_bytes

    def element_type(self, problem_dtype: str) -> str:
        """Return the name of the type for a problem of the given dtype."""
        return problem_dtype if self.dtype == PROBLEM_DTYPE else self.dtype


def _constant(table: Table, name: str, dtype: str) -> Number:
    """Return a number; for a vector or a complex type, a tuple; for bool, true and false are accepted too."""
    given, parts = table.require(name), _parts(dtype)
    if dtype == "bool" and isinstance(given, bool):
        return float(given)
    if parts > 1 and (not isinstance(given, list) or len(given) != parts):
        raise table.error(name, f"expected a list of {parts} numbers for {dtype}, got {describe(given)}")
    if parts == 1:
        return _number(table, name, given, dtype)
    return tuple(_number(table, name, part, dtype) for part in given)


def _number(table: Table, name: str, given: Any, dtype: str) -> float:
    """Return a part of an entry as a number in the range of its type, which is whole for an integer type."""
    number = msgspec.structs.replace(table, data={name: given}).number(name)
    if dtype not in DTYPES:  # that of the problem
        return number
    component = DTYPES[dtype].component
    if component.is_integer and not number.is_integer():
        raise table.error(name, f"expected a whole number for {dtype}, got {number}")
    exact = number if number == given else given  # a whole number beyond 2**53
    try:
        encode_value("", [exact, 0] if component.is_complex else exact, component)
    except ArgumentError:
        raise table.error(name, f"{describe(given)} does not fit in {component.name}") from None
    return exact


MAX_STRUCT_BYTES = 4096
"""Maximum size of all parameters of a kernel before CUDA 12.1 (CUDA C++ Programming Guide, ``__global__`` function
parameters)."""


class StructMember(NamedTuple):
    """A member of a struct: a scalar, a vector or an array of them, an address, or another struct."""

    name: str
    dtype: str = ""
    """Name of an element type, or `PROBLEM_DTYPE`; "" for an address or a struct."""
    values: tuple[Expression | float, ...] = ()
    """Value of a scalar; the components of a vector or of an array."""
    target: str = ""
    """Buffer or workspace whose address it is."""
    members: tuple[StructMember, ...] = ()

    def meaning(self) -> Any:
        """Return the member's part of the space hash."""
        if self.target:
            return [self.name, "pointer", self.target]
        if self.members:
            return [self.name, "struct", [member.meaning() for member in self.members]]
        values = [value.canonical if isinstance(value, Expression) else value for value in self.values]
        return [self.name, self.dtype, values]

    def extent(self, problem_dtype: str) -> tuple[int, int]:
        """Return size and alignment in C, in bytes, for an element type of the problem."""
        if self.target:
            return POINTER_BYTES, POINTER_BYTES
        if self.members:
            end, alignments = 0, []
            for size, alignment in (member.extent(problem_dtype) for member in self.members):
                end = round_up(end, alignment) + size
                alignments.append(alignment)
            return round_up(end, max(alignments)), max(alignments)
        dtype = self.element(problem_dtype)
        return dtype.size_bytes * (len(self.values) // dtype.parts), dtype.alignment_bytes

    def element(self, problem_dtype: str) -> Dtype:
        """Return the type of a scalar."""
        return DTYPES[problem_dtype if self.dtype == PROBLEM_DTYPE else self.dtype]

    def placed(self, problem_dtype: str, start: int = 0) -> Iterator[tuple[int, StructMember]]:
        """Yield the scalars and addresses in a struct, with their offsets."""
        if not self.members:
            yield start, self
        for member in self.members:
            size, alignment = member.extent(problem_dtype)
            start = round_up(start, alignment)
            yield from member.placed(problem_dtype, start)
            start += size


def round_up(value: Column, unit: int) -> Column:
    """Return the next multiple of a unit."""
    return -(-value // unit) * unit


class StructValue(NamedTuple):
    """A struct in the layout of C, except for the addresses in it; compares by value."""

    name: str
    size_bytes: int
    scalars: tuple[tuple[int, str, tuple[Any, ...]], ...]
    """Offset, element type and value of each scalar, or the components of a vector: expressions, or numbers."""
    pointers: tuple[tuple[int, str], ...]
    """Offset and target of each pointer."""


class StructArgument(ArgumentKind, frozen=True):
    """A struct that is passed by value."""

    members: tuple[StructMember, ...]

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ struct = { n = { scalar = "int32", value = "N" }, x = { pointer = "x" } } }``."""
        table.allow(("struct",))
        struct = cls(name, _members(table.table("struct"), scope))
        for dtype in scope.problem.dtypes:
            size_bytes = struct.parameter_bytes(dtype)
            if size_bytes > MAX_STRUCT_BYTES:
                expected = f"expected at most {MAX_STRUCT_BYTES}; pass the data as a buffer"
                raise table.error("struct", f"the struct has {size_bytes} bytes, {expected}")
        return struct

    def meaning(self) -> dict[str, Any]:
        """Return the struct's part of the space hash."""
        return {"struct": self.name, "members": [member.meaning() for member in self.members]}

    def leaves(self, problem_dtype: str = "float32") -> Iterator[tuple[int, StructMember]]:
        """Yield its scalars and addresses, those of inner structs too, with their offsets."""
        return StructMember(self.name, members=self.members).placed(problem_dtype)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the buffers and workspaces that it points to."""
        return tuple(leaf.target for _, leaf in self.leaves() if leaf.target)

    def parameter_bytes(self, problem_dtype: str) -> int:
        """Return the size of the struct."""
        return StructMember(self.name, members=self.members).extent(problem_dtype)[0]

    def layout(self, problem_dtype: str, names: Values | None = None) -> StructValue:
        """Return the struct for a problem of the given dtype; given no value of names, its values are expressions."""
        scalars: list[tuple[int, str, tuple[Any, ...]]] = []
        pointers: list[tuple[int, str]] = []
        for offset, leaf in self.leaves(problem_dtype):
            if leaf.target:
                pointers.append((offset, leaf.target))
                continue
            element, values = leaf.element(problem_dtype), leaf.values
            if names is not None:
                values = tuple(int(v.value(names)) if isinstance(v, Expression) else v for v in values)
            for first in range(0, len(values), element.parts):
                place = offset + first // element.parts * element.size_bytes
                scalars.append((place, element.name, values[first : first + element.parts]))
        return StructValue(self.name, self.parameter_bytes(problem_dtype), tuple(scalars), tuple(pointers))


def _members(table: Table, scope: ArgumentScope) -> tuple[StructMember, ...]:
    if not table.data:
        raise table.error("", "the struct has no members; give at least one")
    for name in table.data:
        table.check_identifier(name)
    return tuple(_member(table.table(name), name, scope) for name in table.data)


def _member(table: Table, name: str, scope: ArgumentScope) -> StructMember:
    """Parse a member; the value of a scalar may be a list, an array or several vectors one after the other."""
    if "struct" in table.data:
        table.allow(("struct",))
        return StructMember(name, members=_members(table.table("struct"), scope))
    if "pointer" in table.data:
        table.allow(("pointer",))
        return StructMember(name, target=_named_array(table, "pointer", {**scope.buffers, **scope.workspaces}).name)
    if "scalar" not in table.data:
        raise table.error("", "expected exactly one of the keys scalar, pointer, struct")
    table.allow(("scalar", "value"))
    dtype = _known_type(table.text("scalar"), table.location("scalar"))
    given = table.require("value")
    entries = table.entries("value") if isinstance(given, list) else [given]
    if len(entries) % _parts(dtype):
        raise table.error("value", f"expected {_parts(dtype)} numbers for each {dtype}, got {len(entries)}")
    values: list[Expression | float] = []
    for entry in entries:
        if isinstance(entry, str):
            expression = table.parse("value", entry, scope.kinds, "number")
            if expression.names <= scope.problem.own_names:
                for sizes, _ in scope.problem.cases(expression.names):
                    expression.value(sizes)
            values.append(expression)
            continue
        values.append(float(entry) if isinstance(entry, bool) else _number(table, "value", entry, dtype))
    return StructMember(name, dtype, tuple(values))


def _named_array(
    table: Table, entry: str, known: Mapping[str, ArrayArgument], what: str = "names no buffer or workspace"
) -> ArrayArgument:
    target = table.text(entry)
    table.check_known(entry, target, known, what)
    return known[target]


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


def strides_bytes(shape: tuple[Any, ...], element_bytes: int) -> tuple[Any, ...]:
    """Return the strides, in bytes, of all axes of a row-major array except the innermost; for columns, columns."""
    return tuple(accumulate(reversed(shape[1:]), operator.mul, initial=element_bytes))[:0:-1]


def _misaligned_stride(shape: Shape, element_bytes: int) -> int:
    """Return the first stride, in bytes, that is not a multiple of `UNIT_BYTES`; 0 if there is none."""
    return next((stride for stride in strides_bytes(shape, element_bytes) if stride % UNIT_BYTES), 0)


def _all(masks: Sequence[Mask]) -> Mask:
    return reduce(operator.and_, masks, True)


def _any(masks: Sequence[Mask]) -> Mask:
    return reduce(operator.or_, masks)


def extents_text(columns: Sequence[Column], number_format: str = ",") -> str:
    """Return the extents of a single configuration: ``"1,024 x 8"``."""
    return " x ".join(format(column, number_format) for column in columns)


def _or(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


class TensorMap(msgspec.Struct, frozen=True):
    """A tensor map except for the address, of one configuration or, in columns, of many.

    Axes are from the outermost to the innermost, extents and box in elements.
    """

    name: str
    buffer: str
    dtype: str
    shape: tuple[Column, ...]
    box: tuple[Column, ...]
    element_strides: tuple[Column, ...]
    swizzle_bytes: Column
    l2_promotion_bytes: Column

    @property
    def is_absent(self) -> Mask:
        """Whether the configuration does not use the map: an extent of its box, or of the workspace, is 0."""
        return _any([extent == 0 for extent in (*self.box, *self.shape)])

    @property
    def strides_bytes(self) -> tuple[Column, ...]:
        """Strides of all axes except the innermost, in bytes."""
        return strides_bytes(self.shape, DTYPES[self.dtype].size_bytes)

    def fits(self) -> Mask:
        """Return the rows in which the hardware accepts the map, or the map is absent."""
        return self.is_absent | _all(self._conditions())

    def explain(self) -> str:
        """Return the first condition that a single configuration violates, as one line; "" if there is none."""
        if self.is_absent:
            return ""
        element_bytes, swizzle, along = DTYPES[self.dtype].size_bytes, self.swizzle_bytes, "along the innermost axis"
        inner_bytes = clipped(self.box[-1], 0, MAX_BOX + 1) * element_bytes
        violations = (
            f"has rows {_misaligned_stride(self.shape, element_bytes):,} bytes apart in the shape "
            f"{extents_text(self.shape)}, expected a multiple of {UNIT_BYTES}",
            f"has the shape {extents_text(self.shape)}, which is beyond what a map can address",
            f"has a box of {extents_text(self.box, '')} elements, expected 1 to {MAX_BOX} along each axis",
            f"has a box of {inner_bytes} bytes {along}, expected a multiple of {UNIT_BYTES}",
            f"has swizzle_bytes = {swizzle}, expected one of {_or(SWIZZLES)}",
            f"has a box of {inner_bytes} bytes {along}, more than its swizzle_bytes = {swizzle}",
            f"has element strides of {extents_text(self.element_strides, '')}, expected 1 to {MAX_ELEMENT_STRIDE}, and "
            f"1 {along}",
            f"has l2_promotion_bytes = {self.l2_promotion_bytes}, expected one of {_or(L2_PROMOTIONS)}",
        )
        pairs = zip(self._conditions(), violations, strict=True)
        return next((f"the tensor map {self.name} of {self.buffer} {fault}" for holds, fault in pairs if not holds), "")

    def _conditions(self) -> list[Mask]:
        """Return the rows in which each condition holds, in the order of the messages of `explain`."""
        # Of columns in float64, as products of absurd extents exceed 64 bits.
        exact = [extent if isinstance(extent, int) else np.asarray(extent, np.float64) for extent in self.shape]
        element_bytes, swizzle, steps = DTYPES[self.dtype].size_bytes, self.swizzle_bytes, self.element_strides
        strides = strides_bytes(tuple(exact), element_bytes)
        inner_bytes = clipped(self.box[-1], 0, MAX_BOX + 1) * element_bytes
        return [
            _all([stride % UNIT_BYTES == 0 for stride in strides]),
            _all([*(extent <= MAX_EXTENT for extent in self.shape), *(s < MAX_STRIDE_BYTES for s in strides)]),
            _all([(side >= 1) & (side <= MAX_BOX) for side in self.box]),
            inner_bytes % UNIT_BYTES == 0,
            _any([swizzle == value for value in SWIZZLES]),
            (swizzle == 0) | (inner_bytes <= swizzle),
            _all([(step >= 1) & (step <= MAX_ELEMENT_STRIDE) for step in steps]) & (steps[-1] == 1),
            _any([self.l2_promotion_bytes == value for value in L2_PROMOTIONS]),
        ]


class TensorMapArgument(ArgumentKind, frozen=True):
    """A descriptor of a buffer or a workspace for the tensor memory accelerator, passed by value."""

    buffer: ArrayArgument
    box: tuple[Expression, ...]
    """Extents, in elements, that one copy moves along each axis of the array."""
    element_strides: tuple[Expression, ...]
    """Distance of the elements that are moved, along each axis."""
    swizzle_bytes: Expression
    l2_promotion_bytes: Expression

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ tensor_map = "A", box = [...], swizzle_bytes = ..., ... }``."""
        table.allow(("tensor_map", "box", "element_strides", "swizzle_bytes", "l2_promotion_bytes"))
        known: dict[str, ArrayArgument] = {**scope.buffers, **scope.workspaces}
        buffer = _named_array(table, "tensor_map", known)
        target, rank = buffer.name, len(buffer.shape)
        for dtype in buffer.possible_types(scope.problem):
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

    def check_ragged(self, names: Values, dtypes: Sequence[str], table: Table) -> None:
        """Raise if rows of the buffer are not a multiple of 16 bytes apart at the ragged sizes."""
        extents = (*self.box, *self.buffer.shape)
        if not names.keys() >= frozenset().union(*(extent.names for extent in extents)):
            return  # an extent depends on the device
        if any(extent.evaluate(names) == 0 for extent in extents):
            return
        for dtype in dtypes:
            shape = self.buffer.extents({**names, **dtype_names(dtype)})
            misaligned = _misaligned_stride(shape, DTYPES[self.buffer.element_type(dtype, names)].size_bytes)
            if misaligned:
                raise table.error(
                    "tensor_map",
                    f"at the ragged sizes, rows of {self.buffer.name} are {misaligned} bytes apart, a tensor map takes "
                    f"multiples of {UNIT_BYTES}; set problem.ragged to sizes of whole {UNIT_BYTES} bytes",
                )

    def parameter_bytes(self, problem_dtype: str) -> int:
        """Return the size of a tensor map."""
        return TENSOR_MAP_BYTES

    def tensor_map(self, problem_dtype: str, sizes: Values, evaluate: Evaluate) -> TensorMap:
        """Return the tensor map of a problem, for the configurations in which ``evaluate`` evaluates expressions."""
        extents = (tuple(map(evaluate, each)) for each in (self.buffer.shape, self.box, self.element_strides))
        modes = map(evaluate, (self.swizzle_bytes, self.l2_promotion_bytes))
        dtype = self.buffer.element_type(problem_dtype, sizes)
        return TensorMap(self.name, self.buffer.name, dtype, *extents, *modes)


Filter = Literal["point", "linear"]
AddressMode = Literal["clamp", "border", "wrap", "mirror"]
ReadMode = Literal["element", "normalized_float"]

_MAX_TEXTURE_AXES = 2
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
    shape: Shape
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
    def misalignment(self) -> str:
        """Fault of the distance of rows, which textures cannot have; "" if they can."""
        if len(self.shape) == 1 or self.pitch_bytes % PITCH_BYTES == 0:
            return ""
        hint = f"choose sizes whose rows are multiples of {PITCH_BYTES} bytes"
        return f"rows of {self.buffer} are {self.pitch_bytes} bytes apart, which textures cannot have; {hint}"


class TextureArgument(ArgumentKind, frozen=True):
    """A ``cudaTextureObject_t`` over a buffer: linear memory of one axis, or rows of two."""

    buffer: ArrayArgument
    filter: Filter
    address: AddressMode
    read: ReadMode
    normalized: bool

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ texture = "image", filter = "linear", address = "clamp", ... }``."""
        table.allow(("texture", "filter", "address", "read", "normalized"))
        texture = cls(
            name,
            _named_array(table, "texture", scope.buffers, "names no buffer"),
            table.choice("filter", get_args(Filter), "point"),
            table.choice("address", get_args(AddressMode), "clamp"),
            table.choice("read", get_args(ReadMode), "element"),
            table.boolean("normalized", default=False),
        )
        axes, target = len(texture.buffer.shape), texture.buffer.name
        if axes > _MAX_TEXTURE_AXES:
            expected = f"a texture of device memory has 1 or {_MAX_TEXTURE_AXES}"
            raise table.error("texture", f"{target} has {axes} axes; {expected}")
        if texture.buffer.is_written:
            raise table.error("texture", f'textures are read only; the access of {target} must be "in"')
        for possible in texture.buffer.possible_types(scope.problem):
            dtype = DTYPES[possible]
            if dtype.component.name not in _COMPONENTS or dtype.components not in _COMPONENT_COUNTS:
                hint = f"expected {listing(_COMPONENTS)}, or vectors of 2 or 4 of them"
                raise table.error("texture", f"{target} is {possible}, which textures do not hold; {hint}")
            if texture.read == "normalized_float" and dtype.component.name not in _NORMALIZABLE:
                raise table.error("read", f"only integers of 8 and 16 bits are read as fractions, not {possible}")
            if texture.filter == "linear" and texture.read == "element" and dtype.is_integer:
                raise table.error("filter", f'{possible} is filtered only with read = "normalized_float"')
        is_fetched = texture.filter == "point" and not texture.normalized and texture.address in ("clamp", "border")
        if axes == 1 and not is_fetched:
            hint = "a texture of one axis is read with tex1Dfetch, without filter, address and normalized"
            raise table.error("texture", f"{hint}; declare {target} with two axes, [1, n]")
        if texture.address in ("wrap", "mirror") and not texture.normalized:
            raise table.error("address", f'address = "{texture.address}" needs normalized = true')
        if fault := texture.texture(scope.problem.dtypes[0], scope.problem.sizes).misalignment:
            raise table.error("texture", fault)
        return texture

    def check_ragged(self, names: Values, dtypes: Sequence[str], table: Table) -> None:
        """Raise if rows of the buffer are not a multiple of 32 bytes apart at the ragged sizes."""
        for dtype in dtypes:
            if fault := self.texture(dtype, {**names, **dtype_names(dtype)}).misalignment:
                raise table.error("texture", f"at the ragged sizes, {fault} for problem.ragged")

    def texture(self, problem_dtype: str, names: Values) -> Texture:
        """Return the texture of a problem."""
        dtype, shape = self.buffer.element_type(problem_dtype, names), self.buffer.extents(names)
        return Texture(self.name, self.buffer.name, dtype, shape, *msgspec.structs.astuple(self)[2:])


Argument = BufferArgument | ScalarArgument | WorkspaceArgument | TensorMapArgument | StructArgument | TextureArgument

_KINDS: Mapping[str, type[Argument]] = {
    "buffer": BufferArgument,
    "scalar": ScalarArgument,
    "workspace": WorkspaceArgument,
    "tensor_map": TensorMapArgument,
    "struct": StructArgument,
    "texture": TextureArgument,
}
"""Kinds of arguments by the key that identifies their tables."""

_Kind = TypeVar("_Kind", bound=Argument)
_Declared = TypeVar("_Declared", BufferArgument, WorkspaceArgument)


def parse_arguments(table: Table, scope: ArgumentScope, taken: Mapping[str, str]) -> tuple[Argument, ...]:
    """Parse ``[arguments]``, in the order of the kernel's parameters.

    ``taken`` holds the names of sizes, flags and parameters. A scalar may have the name of the size that it passes.
    """
    problem = scope.problem
    sizes = problem.own_names - {*problem.flags}  # a flag is a macro, which would replace the name of a parameter
    check_names(table, what="an argument", taken={name: what for name, what in taken.items() if name not in sizes})
    entries = {name: table.table(name) for name in table.data}
    kind_of: dict[str, type[Argument]] = {}
    for name, entry in entries.items():
        kinds = [kind for key, kind in _KINDS.items() if key in entry.data]
        if len(kinds) != 1:
            raise entry.error("", f"expected exactly one of the keys {', '.join(_KINDS)}")
        kind_of[name] = kinds[0]
    operands = {
        name: kind is ScalarArgument
        for name, kind in kind_of.items()
        if kind is ScalarArgument or (kind is BufferArgument and entries[name].data.get("access") != "out")
    }
    scope = scope._replace(operands=operands)

    def all_of(kind: type[_Declared]) -> dict[str, _Declared]:
        return {name: kind.parse(entry, name, scope) for name, entry in entries.items() if kind_of[name] is kind}

    buffers = all_of(BufferArgument)
    if not any(buffer.is_written for buffer in buffers.values()):
        raise table.error("", 'no buffer is written; give one access = "out" or "inout"')
    workspaces = all_of(WorkspaceArgument)
    scope = scope._replace(buffers=buffers, workspaces=workspaces)
    known: dict[str, Argument] = {**buffers, **workspaces}
    arguments = tuple(known.get(name) or kind_of[name].parse(entry, name, scope) for name, entry in entries.items())
    described = {target for argument in arguments for target in argument.targets}
    for argument in arguments:  # before shapes and contents are computed, where the name would mean both
        repeats_size = isinstance(argument, ScalarArgument) and argument.repeats_size
        if argument.name in sizes and not repeats_size:
            hint = f'use another name, or make it a scalar with value = "{argument.name}"'
            raise table.error(argument.name, f"{argument.name!r} already names a size; {hint}")
    for argument in arguments:
        if not argument.is_passed and argument.name not in described:
            hint = f'add {argument.name}_map = {{ tensor_map = "{argument.name}", ... }}, or remove pass'
            what = f"{argument.name!r} is not passed, has no tensor map, and no struct points to it"
            raise table.error(argument.name, f"{what}; {hint}")
    contents = {name: b.content for name, b in buffers.items() if isinstance(b.content, InputExpression)}
    known_names = {*problem.sizes, *(argument.name for argument in arguments if argument.is_operand)}
    for name, content in contents.items():
        reached, pending = {name}, [*content.inputs]
        while pending:
            other = pending.pop()
            if other == name:
                raise content.expression.location.error(f"the content of {name} depends on itself")
            if other not in reached and other in contents:
                pending += contents[other].inputs
            reached.add(other)
        for unknown in sorted(content.inputs - known_names):
            fault = f"the value of {unknown} depends on the configuration; use sizes and other inputs"
            raise content.expression.location.error(fault, expression=content.text)
    extents = [extent.names for buffer in buffers.values() for extent in buffer.shape]
    used = frozenset().union(*extents, *(content.names for content in contents.values()))
    for values, check in problem.cases(used) if contents else ():
        given = {a.name: a.operand(values, check=check) for a in arguments if a.is_operand}
        for name, content in contents.items():
            with stating(values, used, is_ragged=check):
                shape = buffers[name].array_shape(values)
                found = content.shape({**values, **given}, shape)
                if found not in ((), shape):
                    fault = f"the content has the shape {found}, but the buffer {name} has {shape}"
                    raise content.expression.location.error(fault, expression=content.text)
    return arguments


def arguments_of_kind(arguments: Sequence[Argument], kind: type[_Kind]) -> tuple[_Kind, ...]:
    """Return the arguments of one kind, in order."""
    return tuple(argument for argument in arguments if isinstance(argument, kind))


def encode_scalar(scalar: ScalarArgument, value: Any, problem_dtype: str) -> Any:
    """Convert a value to the type of a scalar argument; see `encode_value`."""
    return encode_value(f"scalar {scalar.name}", value, DTYPES[scalar.element_type(problem_dtype)])


def encoded(values: Array, dtype: Dtype) -> tuple[Array, Mask]:
    """Return numbers as a type stores them, and which of them fit in it."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = dtype.encode(values)
    kept = dtype.decode(stored)
    fits = (kept == values) if dtype.is_integer else (np.isinf(kept) == np.isinf(values))
    return stored, fits & (np.abs(values) <= dtype.largest)


@lru_cache(maxsize=4096)
def bound_fault(name: str, value: int, dtype: str) -> str:
    """Return why a bound scalar cannot have a value, as `encode_value` says it; "" if it can."""
    try:
        encode_value(f"scalar {name}", value, DTYPES[dtype])
    except ArgumentError as error:
        return str(error)
    return ""


def encode_value(what: str, value: Any, dtype: Dtype) -> Any:
    """Convert a value to an element type.

    The value is a number, the components of a vector, or the two parts of a complex number; ``what`` names it. The
    result is a NumPy scalar of the type's storage, or an array of shape (components,). Raise `ArgumentError` if the
    value is not a number, or does not fit in the type: it is too large, or not an integer for an integer type.
    """
    given = np.asarray(value)
    if dtype.is_complex and given.shape == (2,) and given.dtype.kind in "biuf":
        given = np.asarray(complex(*given))
    if given.shape != dtype.array_shape(()) or given.dtype.kind not in ("biufc" if dtype.is_complex else "biuf"):
        expected = f"{dtype.components} numbers" if dtype.components else "a number"
        raise ArgumentError(
            f"{what} is {value!r}, expected {expected} that fit{'' if dtype.components else 's'} in {dtype.name}"
        )
    stored, fits = encoded(given.reshape(-1), dtype)
    if not fits.all():
        raise ArgumentError(f"{what} is {value!r}, which does not fit in {dtype.name}")
    return stored if dtype.components else stored[0]


def decode_scalar(scalar: ScalarArgument, stored: Any, problem_dtype: str) -> Any:
    """Return the value of an encoded scalar: a float or complex, or an array of a vector's components."""
    dtype = DTYPES[scalar.element_type(problem_dtype)]
    decoded = dtype.decode(np.atleast_1d(stored))
    return decoded if dtype.components else decoded[0].item()
