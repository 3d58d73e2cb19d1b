"""Reading of ``.npy`` files and of members of ``.npz`` files, whose headers come from outside.

`numpy.load` evaluates a header as a Python literal, and allocates what it declares. Here it has to match a grammar, and
the declared array the bytes that are there, before anything else is done. The format is described at
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from autotile.core.documents import open_regular
from autotile.core.dtypes import Array
from autotile.errors import DataError

_MAGIC = b"\x93NUMPY"
_LENGTH_FORMATS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
"""Format of the header's length by version of the file."""
_MAX_HEADER_BYTES = 10_000
_MAX_AXES = 32
_MAX_BYTES = 2**62

_ENTRY = rb"'(descr|fortran_order|shape)' *: *('[^']*'|True|False|\([0-9L, ]*\))"
_HEADER = re.compile(rb" *\{ *(?:" + _ENTRY + rb" *(?:, *|(?=\}))){3}\} *\n?")
_ENTRIES = re.compile(_ENTRY)
_EXTENT = rb"(?:0|[1-9][0-9]{0,18})L? *"
_SHAPE = re.compile(rb"\( *(?:(?:" + _EXTENT + rb", *)+(?:" + _EXTENT + rb")?)?\)")
_NUMBER = re.compile(rb"[0-9]+")
_DTYPE = re.compile(r"[<>=|]?(?:b1|[iu][1248]|f[1248]|c8|c16|V[12])")
"""Plain numbers; ``V1``, ``V2`` and ``f1`` are types of ml_dtypes, such as bfloat16, written without their names."""
_EXPECTED = "expected an array of numbers that numpy.save has written"


class NpyHeader(NamedTuple):
    """Header of an array.

    Attributes
    ----------
    dtype, shape
        Type and shape of the array.
    fortran_order
        Whether the first axis varies fastest.
    offset
        Position of the first element, in bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int

    @property
    def order(self) -> Any:
        """Order of the elements, as NumPy names it."""
        return "F" if self.fortran_order else "C"


def read_npy_header(stream: BinaryIO, size_bytes: int) -> NpyHeader:
    """Read the header of an array.

    Parameters
    ----------
    stream
        Stream at the start of the file.
    size_bytes
        Size of the file.

    Raises
    ------
    DataError
        The header is malformed, or of another type than numbers, or the file has another size than it declares.
    """
    start = stream.read(len(_MAGIC) + 2)
    if start.startswith(b"PK"):
        raise DataError("it is an archive of several arrays; expected one array, written with numpy.save")
    if len(start) < len(_MAGIC) + 2 or not start.startswith(_MAGIC):
        raise DataError(f"it does not start like a .npy file; {_EXPECTED}")
    version = (start[-2], start[-1])
    if version not in _LENGTH_FORMATS:
        raise DataError(f"it has version {version[0]}.{version[1]} of the .npy format, expected 1.0, 2.0 or 3.0")
    length_format = _LENGTH_FORMATS[version]
    prefix = stream.read(struct.calcsize(length_format))
    length = struct.unpack(length_format, prefix)[0] if len(prefix) == struct.calcsize(length_format) else -1
    if not 0 <= length <= _MAX_HEADER_BYTES:
        raise DataError(f"its header has a length of {length:,} bytes, expected at most {_MAX_HEADER_BYTES:,}")
    text = stream.read(length)
    if len(text) < length:
        raise DataError("it ends within its header")
    dtype, shape, fortran_order = _parse(text)
    header = NpyHeader(dtype, shape, fortran_order, len(start) + len(prefix) + length)
    declared = header.offset + math.prod(shape) * dtype.itemsize
    if declared != size_bytes:
        raise DataError(f"it has {size_bytes:,} bytes, expected {declared:,} for {dtype} {shape}")
    return header


def _parse(text: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    entries = dict(_ENTRIES.findall(text)) if _HEADER.fullmatch(text) else {}
    descr, order, shape = (entries.get(name, b"") for name in (b"descr", b"fortran_order", b"shape"))
    if not descr.startswith(b"'") or order not in (b"True", b"False") or not _SHAPE.fullmatch(shape):
        raise DataError(f"its header is malformed; {_EXPECTED}")
    extents = tuple(map(int, _NUMBER.findall(shape)))
    name = descr[1:-1].decode("ascii", errors="replace")
    if _DTYPE.fullmatch(name) is None:
        raise DataError(f"its elements are of type {name!r:.60}; {_EXPECTED}")
    dtype = np.dtype(name.replace("f1", "V1"))
    if len(extents) > _MAX_AXES or math.prod(max(extent, 1) for extent in extents) * dtype.itemsize > _MAX_BYTES:
        raise DataError(f"it declares an array of {len(extents)} axes, which is too large; {_EXPECTED}")
    return dtype, extents, order == b"True"


def parse_npy(data: bytes) -> Array:
    """Return the array of a whole file, read-only.

    Raises
    ------
    DataError
        As for `read_npy_header`.
    """
    header = read_npy_header(io.BytesIO(data), len(data))
    count = math.prod(header.shape)
    if not count:
        return np.empty(header.shape, header.dtype)
    return np.frombuffer(data, header.dtype, count, header.offset).reshape(header.shape, order=header.order)


def map_npy(path: Path) -> Array:
    """Map the array of a file to memory, read-only.

    Raises
    ------
    DataError
        As for `read_npy_header`; or the file cannot be opened, or is not a regular file.
    """
    try:
        with open_regular(path) as stream:
            header = read_npy_header(stream, os.fstat(stream.fileno()).st_size)
            if not math.prod(header.shape):
                return np.empty(header.shape, header.dtype)
            return np.memmap(stream, header.dtype, "r", header.offset, header.shape, header.order)
    except DataError:
        raise
    except OSError as error:
        raise DataError(error.strerror or str(error)) from None
    except ValueError as error:  # a path with a null character
        raise DataError(str(error)) from None


def load_npy(path: Path) -> Array:
    """Return a copy of the array of a file; errors as for `map_npy`."""
    return np.array(map_npy(path))
