"""Write a file whole or not at all: a full disk or a killed process leaves what was there before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of a file when the block ends well.

    What is no ordinary file, such as ``/dev/stdout``, is written to as it is.

    Raises
    ------
    OSError
        It cannot be written; the file is as it was.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
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
