"""Arguments that describe an array to the hardware: tensor maps (TMA) and textures, with their limits.

Limits: ``cuTensorMapEncodeTiled`` in the CUDA driver API reference, for maps without interleaving.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.argument_kind import (
    PROBLEM_DTYPE,
    ArgumentKind,
    ArgumentScope,
    Column,
    Evaluate,
    Mask,
    canonical_texts,
    clipped,
)
from autotile.kernel.expressions import Expression, parse_expression
from autotile.kernel.table import Table, describe

if TYPE_CHECKING:
    from autotile.kernel.arguments import BufferArgument, WorkspaceArgument


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
    buffer: BufferArgument | WorkspaceArgument
    box: tuple[Expression, ...]
    element_strides: tuple[Expression, ...]
    swizzle_bytes: Expression
    l2_promotion_bytes: Expression

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        """Parse ``{ tensor_map = "A", box = [...], swizzle_bytes = ..., ... }``."""
        table.allow(("tensor_map", "box", "element_strides", "swizzle_bytes", "l2_promotion_bytes"))
        known: dict[str, BufferArgument | WorkspaceArgument] = {**scope.buffers, **scope.workspaces}
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
    buffer: BufferArgument
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


def _element_types(buffer: BufferArgument | WorkspaceArgument, scope: ArgumentScope) -> Iterator[str]:
    """Return the names of all types that the array's elements can have."""
    return chain.from_iterable(scope.problem.dtypes if one == PROBLEM_DTYPE else (one,) for one in buffer.dtype.names)
