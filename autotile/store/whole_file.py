"""Write a file whole or not at all: a full disk or a killed process leaves what was there before."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

DATABASE_MAGIC = b"SQLite format 3\0"
"""First bytes of every SQLite database: https://sqlite.org/fileformat.html, "The Database Header"."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of a file when the block ends well.

    What is no ordinary file, such as ``/dev/stdout``, is written to as it is. A database is never replaced: it may
    hold weeks of measurements, and a slip of the hand names it in place of an output.

    Raises
    ------
    OSError
        It cannot be written, or is a database; the file is as it was.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
    if path.exists() and _is_database(path):
        raise FileExistsError(errno.EEXIST, "it is a database, which is not overwritten", str(path))
    place = path.resolve()  # a link stays one
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # some file systems find out only now that they are full
        partial.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _is_database(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(DATABASE_MAGIC)) == DATABASE_MAGIC
