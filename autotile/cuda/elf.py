"""The parameters of functions in a cubin, which is an ELF file.

The sections and their entries are those that ``cuobjdump -elf`` prints. A file that is not as expected has no known
parameters: it is a compiler's output, and a future version may change it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = b"\x7fELF\x02\x01"
"""An ELF file of 64 bits, little-endian."""
_SECTION_TABLE = struct.Struct("<Q")
_SECTION_TABLE_AT = 0x28
_SECTION_COUNTS = struct.Struct("<HHH")
_SECTION_COUNTS_AT = 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAX_SECTIONS = 1 << 14
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4
"""Format of an attribute that is followed by as many bytes as its last field says."""
_PARAMETER = 0x17
"""EIATTR_KPARAM_INFO: ordinal, offset and size of a parameter."""
_PARAMETER_INFO = struct.Struct("<IHHI")
_SIZE_SHIFT = 18
"""The size is in the upper bits of the last word."""


def parameter_bytes(cubin: bytes, symbol: str) -> tuple[int, ...] | None:
    """Return the size in bytes of each parameter of a function, in order; None if the cubin does not tell.

    Parameters
    ----------
    cubin
        Content of the cubin.
    symbol
        Name of the function in it.
    """
    try:
        attributes = _section(cubin, f".nv.info.{symbol}".encode())
        if attributes is None:
            return None
        sizes = dict(_parameters(attributes))
    except (struct.error, ValueError, OverflowError):  # an offset may be any number of 64 bits
        return None
    return tuple(sizes[ordinal] for ordinal in sorted(sizes)) if sorted(sizes) == list(range(len(sizes))) else None


def _section(data: bytes, name: bytes) -> bytes | None:
    """Return the content of a section."""
    if not data.startswith(_MAGIC):
        return None
    (table,) = _SECTION_TABLE.unpack_from(data, _SECTION_TABLE_AT)
    entry_bytes, count, names_index = _SECTION_COUNTS.unpack_from(data, _SECTION_COUNTS_AT)
    if count > _MAX_SECTIONS or names_index >= count:
        return None
    headers = [_SECTION.unpack_from(data, table + number * entry_bytes) for number in range(count)]
    names_at = headers[names_index][4]
    for header in headers:
        start = names_at + header[0]
        if data[start : start + len(name) + 1] == name + b"\0":
            return data[header[4] : header[4] + header[5]]
    return None


def _parameters(attributes: bytes) -> Iterator[tuple[int, int]]:
    """Yield the ordinal and size of each parameter."""
    position = 0
    while position < len(attributes):
        kind, attribute, value = _ATTRIBUTE.unpack_from(attributes, position)
        position += _ATTRIBUTE.size
        if kind != _SIZED:
            continue
        if attribute == _PARAMETER:
            _, ordinal, _, word = _PARAMETER_INFO.unpack_from(attributes, position)
            yield ordinal, word >> _SIZE_SHIFT
        position += value
