"""Element types, the tolerance of results that are computed in them, and arrays in ``.npy`` files."""

from __future__ import annotations

import io
import math
import os
import re
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from autotile.core.documents import open_regular
from autotile.errors import DataError, InputError

Array = NDArray[Any]
Shape = tuple[int, ...]


class Dtype(msgspec.Struct, frozen=True):
    """An element type of buffers and scalars.

    A vector, such as ``float4``, is stored as a last axis of its components: see `array_shape`. Its encoding, its
    tolerance and its comparison are those of the components, `component`.
    """

    name: str
    c_type: str
    """CUDA C++ type; the template itself includes ``cuda_fp16.h``, ``cuda_bf16.h`` or ``cuda_fp8.h``."""
    storage: str
    """NumPy dtype that holds the bits of a component; ``uint16`` and ``uint8`` for types that NumPy does not have."""
    unit_roundoff: float
    """Half the distance from 1 to the next larger value; 0 for integers."""
    components: int = 0
    """Number of components of a vector; 0 for any other type."""
    component_name: str = ""
    """Element type of the components of a vector."""

    @property
    def component_bytes(self) -> int:
        """Size of a component in bytes; that of an element if the type is no vector."""
        return np.dtype(self.storage).itemsize

    @property
    def size_bytes(self) -> int:
        """Size of an element in bytes."""
        return self.component_bytes * (self.components or 1)

    @property
    def alignment_bytes(self) -> int:
        """Alignment of an element in CUDA C++ (CUDA C++ Programming Guide, built-in vector types)."""
        if self.components == 3:
            return self.component_bytes
        return min(self.size_bytes, _MAX_ALIGNMENT_BYTES)

    @property
    def parts(self) -> int:
        """How many real numbers a value consists of: the components of a vector, the two parts of a complex number."""
        return 2 if self.is_complex else self.components or 1

    @property
    def component(self) -> Dtype:
        """Type of the components of a vector; the type itself if it is no vector."""
        return DTYPES[self.component_name] if self.component_name else self

    @property
    def is_integer(self) -> bool:
        """Whether the type is an integer type or bool, whose results are exact."""
        return self.unit_roundoff == 0.0

    @property
    def is_complex(self) -> bool:
        """Whether values are complex."""
        return self.storage.startswith("complex")

    @property
    def largest(self) -> float:
        """Value to which larger ones are rounded: the largest finite one of an 8-bit float, else infinity."""
        return _FP8_LARGEST.get(self.component.name, math.inf)

    def array_shape(self, shape: Sequence[int]) -> Shape:
        """Return the shape of the array that holds elements of the given shape."""
        return (*shape, self.components) if self.components else tuple(shape)

    def encode(self, values: Array) -> Array:
        """Round values to this type, and return the stored bits.

        8-bit floats saturate as the constructors of ``cuda_fp8.h`` do: a value that is too large, or infinite, becomes
        the largest finite one.
        """
        match self.component.name:
            case "bfloat16":
                bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
                rounded = (bits >> 16) & 1  # to nearest, ties to even; in place, as inputs are large
                rounded += 0x7FFF
                rounded += bits
                rounded >>= 16
                return rounded.astype(np.uint16)
            case "float8_e4m3fn" | "float8_e5m2" as name:
                table, flat = _fp8_table(name), values.reshape(-1)
                encoded = np.empty(flat.size, np.uint8)
                for start in range(0, flat.size, _FP8_CHUNK):
                    bits = flat[start : start + _FP8_CHUNK].astype(np.float64).view(np.uint64)
                    has_lower = (bits & np.uint64((1 << _KEY_SHIFT) - 1)) != 0
                    keys = ((bits >> np.uint64(_KEY_SHIFT)) << np.uint64(1)) | has_lower
                    encoded[start : start + _FP8_CHUNK] = table[keys]
                return encoded.reshape(values.shape)
            case _:
                return values.astype(self.storage)

    def decode(self, stored: Array) -> Array:
        """Return the values of stored bits as float64 or complex128, exact except for 64-bit integers above 2**53.

        The array may be on a device.
        """
        match self.component.name:
            case "bfloat16":
                return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            case "float8_e5m2":
                return (stored.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
            case "float8_e4m3fn":
                # Through float16, whose exponents are larger by 8: the shifted bits times 2**8.
                bits = stored.astype(np.uint16)
                values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(np.float16).astype(np.float64) * 256.0
                values[(stored & 0x7F) == 0x7F] = np.nan
                return values
            case _:
                return stored.astype(np.complex128 if self.is_complex else np.float64)


_MAX_ALIGNMENT_BYTES = 16
_FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest finite value: 1.75 * 2**8 and 1.75 * 2**15 (OCP 8-bit Floating Point Specification)."""
_FP8_NAN = 0x7F
_FP8_CHUNK = 1 << 20
"""Number of values that are encoded at a time, to bound the memory."""
_KEY_SHIFT = 48
"""The upper 16 bits of a float64, with 4 bits of its fraction, hold every boundary between 8-bit floats; whether any
lower bit is set tells the rest."""


@cache
def _fp8_table(name: str) -> NDArray[np.uint8]:
    """Return the bits of each key of `Dtype.encode`, rounded to nearest, ties to even."""
    keys = np.arange(1 << 17, dtype=np.uint64)
    values = ((keys >> np.uint64(1)) << np.uint64(_KEY_SHIFT) | (keys & np.uint64(1))).view(np.float64)
    finite = DTYPES[name].decode(np.arange(_FP8_NAN, dtype=np.uint8))
    finite = finite[np.isfinite(finite)]
    middles, magnitudes = (finite[1:] + finite[:-1]) / 2, np.abs(values)
    below, above = (np.searchsorted(middles, magnitudes, side) for side in ("left", "right"))
    code = np.where(below % 2, above, below)  # the two differ for a tie only
    code[np.isnan(values)] = _FP8_NAN
    table: NDArray[np.uint8] = (code | (np.signbit(values) << 7)).astype(np.uint8)
    return table


_SCALARS = (
    Dtype("float16", "__half", "float16", 2.0**-11),
    Dtype("bfloat16", "__nv_bfloat16", "uint16", 2.0**-8),
    Dtype("float32", "float", "float32", 2.0**-24),
    Dtype("float64", "double", "float64", 2.0**-53),
    Dtype("int8", "signed char", "int8", 0.0),
    Dtype("uint8", "unsigned char", "uint8", 0.0),
    Dtype("int16", "short", "int16", 0.0),
    Dtype("uint16", "unsigned short", "uint16", 0.0),
    Dtype("int32", "int", "int32", 0.0),
    Dtype("uint32", "unsigned int", "uint32", 0.0),
    Dtype("int64", "long long", "int64", 0.0),
    Dtype("uint64", "unsigned long long", "uint64", 0.0),
    Dtype("bool", "bool", "bool", 0.0),
    Dtype("float8_e4m3fn", "__nv_fp8_e4m3", "uint8", 2.0**-4),
    Dtype("float8_e5m2", "__nv_fp8_e5m2", "uint8", 2.0**-3),
    Dtype("complex64", "float2", "complex64", 2.0**-24),
    Dtype("complex128", "double2", "complex128", 2.0**-53),
)
"""Unit roundoffs from IEEE 754 and the OCP specification (8, 4 and 3 significant bits of the types it lacks). Complex
types have the layout of ``cuFloatComplex`` and ``cuDoubleComplex``, which are ``float2`` and ``double2``."""

_VECTORS = {
    "char": "int8",
    "uchar": "uint8",
    "short": "int16",
    "ushort": "uint16",
    "int": "int32",
    "uint": "uint32",
    "long": "int64",
    "ulong": "uint64",
    "longlong": "int64",
    "ulonglong": "uint64",
    "float": "float32",
    "double": "float64",
}
"""Types of components by the names of CUDA's vectors; ``long`` has 64 bits on Linux."""


_NAMED_VECTORS = (
    *((f"{prefix}{n}", f"{prefix}{n}", of, n) for prefix, of in _VECTORS.items() for n in (2, 3, 4)),
    ("half2", "__half2", "float16", 2),
    ("bfloat162", "__nv_bfloat162", "bfloat16", 2),
)
_SCALAR = {dtype.name: dtype for dtype in _SCALARS}
DTYPES = _SCALAR | {
    name: Dtype(name, c_type, _SCALAR[of].storage, _SCALAR[of].unit_roundoff, components, of)
    for name, c_type, of, components in _NAMED_VECTORS
}
"""Element types by name."""

_ALIASES = {
    "float8_e4m3": "float8_e4m3fn",
    "__half2": "half2",
    "__nv_bfloat162": "bfloat162",
    "nv_bfloat162": "bfloat162",
}


def canonical_dtype(name: str) -> str:
    """Return the name in `DTYPES` of a type that has other names too; any other text unchanged."""
    return _ALIASES.get(name, name)


def dtype_name(dtype: object) -> str:
    """Return the name of an element type: of a name, a NumPy dtype or what `numpy.dtype` takes, or a PyTorch dtype.

    What names no element type here is returned as text, for a message.
    """
    text = canonical_dtype(str(dtype).removeprefix("torch."))
    if text in DTYPES:
        return text
    try:
        found = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return text
    return str(found.name) if found.isnative and found.name in DTYPES else text


def known_dtype(dtype: object) -> str:
    """Return the name of an element type, see `dtype_name`; raise `InputError` if it names none."""
    if (name := dtype_name(dtype)) in DTYPES:
        return name
    raise InputError(f"there is no dtype {name!r}; expected one of {', '.join(DTYPES)}")


_SAFETY = 8.0


def output_tolerance(output: Dtype, inputs: Iterable[Dtype], reduction: int) -> float:
    """Return the allowed error of an output element, relative to the larger of its magnitude and the output's RMS.

    The error of a sum of n products, accumulated sequentially with unit roundoff u, grows like a random walk: for
    inputs of equal magnitude, to about 0.4 u sqrt(n) of the result's RMS (Higham, Accuracy and Stability of Numerical
    Algorithms, section 2.8). The largest error of 1e8 elements is at six standard deviations, 2.5 u sqrt(n). The factor
    8 leaves a margin of three and still rejects TF32 (an error near 3e-4) in fp32 products of lengths up to 400,000.

    The accumulator is assumed to be fp32 or the widest input, whichever is wider. A narrower output adds the roundoff
    of its final rounding. Integers must be exact. ``reduction`` is the number of terms of a sum.
    """
    if output.is_integer:
        return 0.0
    single = 2.0**-24
    widest = min([d.unit_roundoff for d in [*inputs, output] if not d.is_integer])
    accumulator = min(single, widest)
    rounding = output.unit_roundoff if output.unit_roundoff > accumulator else 0.0
    return 2.0 * rounding + _SAFETY * accumulator * math.sqrt(max(reduction, 1))


_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
"""Format of the header's length by version of the file."""
_MAX_HEADER_BYTES = 10_000
_MAX_AXES = 32
_MAX_ARRAY_BYTES = 2**62

_ENTRY = rb"'(descr|fortran_order|shape)' *: *('[^']*'|True|False|\([0-9L, ]*\))"
_HEADER = rb" *\{ *(?:" + _ENTRY + rb" *(?:, *|(?=\}))){3}\} *\n?"
_EXTENT = rb"(?:0|[1-9][0-9]{0,18})L? *"
_SHAPE = rb"\( *(?:(?:" + _EXTENT + rb", *)+(?:" + _EXTENT + rb")?)?\)"
_NUMBERS = r"[<>=|]?(?:b1|[iu][1248]|f[1248]|c8|c16|V[12])"
"""Plain numbers; ``V1``, ``V2`` and ``f1`` are types of ml_dtypes, such as bfloat16, written without their names."""
_EXPECTED_NPY = "expected an array of numbers that numpy.save has written"


def _read_npy_header(stream: BinaryIO, size_bytes: int) -> tuple[np.dtype[Any], Shape, Any, int]:
    """Read type, shape, order and position of the elements of an array, from the start of a file of ``size_bytes``.

    `numpy.load` evaluates a header as a Python literal, and allocates what it declares. Here it has to match a grammar,
    and the declared array the bytes that are there, before anything else is done. The format is described at
    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
    """
    start = stream.read(len(_NPY_MAGIC) + 2)
    if start.startswith(b"PK"):
        raise DataError("it is an archive of several arrays; expected one array, written with numpy.save")
    if len(start) < len(_NPY_MAGIC) + 2 or not start.startswith(_NPY_MAGIC):
        raise DataError(f"it does not start like a .npy file; {_EXPECTED_NPY}")
    version = (start[-2], start[-1])
    if version not in _NPY_LENGTHS:
        raise DataError(f"it has version {version[0]}.{version[1]} of the .npy format, expected 1.0, 2.0 or 3.0")
    layout = struct.Struct(_NPY_LENGTHS[version])
    prefix = stream.read(layout.size)
    length = layout.unpack(prefix)[0] if len(prefix) == layout.size else -1
    if not 0 <= length <= _MAX_HEADER_BYTES:
        raise DataError(f"its header has a length of {length:,} bytes, expected at most {_MAX_HEADER_BYTES:,}")
    text = stream.read(length)
    if len(text) < length:
        raise DataError("it ends within its header")
    entries = dict(re.findall(_ENTRY, text)) if re.fullmatch(_HEADER, text) else {}
    descr, fortran_order, extents = (entries.get(name, b"") for name in (b"descr", b"fortran_order", b"shape"))
    is_order = fortran_order in (b"True", b"False")
    if not (descr.startswith(b"'") and is_order and re.fullmatch(_SHAPE, extents)):
        raise DataError(f"its header is malformed; {_EXPECTED_NPY}")
    name = descr[1:-1].decode("ascii", errors="replace")
    if re.fullmatch(_NUMBERS, name) is None:
        raise DataError(f"its elements are of type {name!r:.60}; {_EXPECTED_NPY}")
    dtype, shape = np.dtype(name.replace("f1", "V1")), tuple(map(int, re.findall(rb"[0-9]+", extents)))
    if len(shape) > _MAX_AXES or math.prod(max(extent, 1) for extent in shape) * dtype.itemsize > _MAX_ARRAY_BYTES:
        raise DataError(f"it declares an array of {len(shape)} axes, which is too large; {_EXPECTED_NPY}")
    offset = len(start) + len(prefix) + length
    declared = offset + math.prod(shape) * dtype.itemsize
    if declared != size_bytes:
        raise DataError(f"it has {size_bytes:,} bytes, expected {declared:,} for {dtype} {shape}")
    return dtype, shape, "F" if fortran_order == b"True" else "C", offset


def parse_npy(data: bytes) -> Array:
    """Return the array of a whole ``.npy`` file, read-only.

    Raise `DataError` if the header is malformed, or of another type than numbers, or the file has another size than it
    declares.
    """
    dtype, shape, order, offset = _read_npy_header(io.BytesIO(data), len(data))
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, offset).reshape(shape, order=order)


def map_npy(path: Path) -> Array:
    """Map the array of a ``.npy`` file to memory, read-only.

    Raise `DataError` as `parse_npy` does, or if the file cannot be opened or is not a regular file.
    """
    try:
        with open_regular(path) as stream:
            dtype, shape, order, offset = _read_npy_header(stream, os.fstat(stream.fileno()).st_size)
            if not math.prod(shape):
                return np.empty(shape, dtype)
            return np.memmap(stream, dtype, "r", offset, shape, order)
    except DataError:
        raise
    except (OSError, ValueError) as error:  # of a value: a path with a null character
        raise DataError(getattr(error, "strerror", None) or str(error)) from None


def load_npy(path: Path) -> Array:
    """Return a copy of the array of a ``.npy`` file; errors as for `map_npy`."""
    return np.array(map_npy(path))
