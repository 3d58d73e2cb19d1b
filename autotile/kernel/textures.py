"""Textures: objects through which a kernel reads a buffer with addressing, filtering and conversion by the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import listing, nearest
from autotile.kernel.argument_kind import PROBLEM_DTYPE, ArgumentKind, ArgumentScope
from autotile.kernel.table import Table, describe

if TYPE_CHECKING:
    from autotile.kernel.arguments import BufferArgument

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
        target = table.text("texture")
        if target not in scope.buffers:
            hint = f"{nearest(target, scope.buffers)} (buffers: {listing(scope.buffers)})"
            raise table.error("texture", f"{describe(target)} names no buffer{hint}")
        buffer = scope.buffers[target]
        texture = cls(
            name,
            buffer,
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
        for one in self.buffer.dtype.names:
            for name in scope.problem.dtypes if one == PROBLEM_DTYPE else (one,):
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
