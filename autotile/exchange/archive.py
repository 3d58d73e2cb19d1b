"""Bounded reading of zip archives: the sizes that an archive declares are checked, and no member exceeds its own."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotile.core.reading import open_regular

ARCHIVE_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # an unsupported compression
    RuntimeError,  # an encrypted member
    ValueError,
    OSError,
)
"""Exceptions of `zipfile` for a file that cannot be read or is damaged."""

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compressions that autotile writes; `zipfile` decompresses the others without a bound."""


@contextmanager
def open_archive(path: Path, max_bytes: int) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, after a check of its directory.

    Parameters
    ----------
    max_bytes
        Maximum decompressed size of all members together.

    Raises
    ------
    OSError
        The file cannot be opened or is not a regular file.
    zipfile.BadZipFile
        It is not a zip archive, declares too large a size, or has a compression other than deflate.
    """
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if any(member.compress_type not in _COMPRESSIONS for member in members):
            raise zipfile.BadZipFile("it has a compression other than deflate")
        declared = sum(member.file_size for member in members)
        if declared > max_bytes:
            raise zipfile.BadZipFile(f"it declares {declared:,} bytes, but at most {max_bytes:,} are allowed")
        yield archive


def read_member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return the content of a member of an archive from `open_archive`.

    Raises
    ------
    KeyError
        There is no such member.
    zipfile.BadZipFile
        It is damaged, or has more than ``max_bytes``.
    """
    size = archive.getinfo(name).file_size
    if size > max_bytes:
        raise zipfile.BadZipFile(f"{name} is longer than expected: it declares {size:,} bytes, not {max_bytes:,}")
    with archive.open(name) as stream:
        return stream.read(size)  # read() would first decompress everything, however small a size is declared
