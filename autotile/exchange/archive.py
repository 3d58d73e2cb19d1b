"""Bounded reading of zip archives and ``.npz`` files: declared sizes are checked, and nothing is unpickled."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.documents import NotRegularError, open_regular
from autotile.core.dtypes import parse_npy
from autotile.database.paths import atomic_write
from autotile.errors import RecordingError

ARCHIVE_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # an unsupported compression
    RuntimeError,  # an encrypted member
    ValueError,
    OverflowError,  # a position beyond those of a file
    MemoryError,
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


MAX_BYTES = 256 * 2**20
"""Maximum decompressed size of a file: ten times that of a recording of a million configurations."""


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], *, follow_link: bool = True) -> None:
    """Write compressed arrays atomically; ``follow_link`` is as for `atomic_write`.

    Raises
    ------
    RecordingError
        The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow_link=follow_link) as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
    except OSError as error:
        raise RecordingError(f"cannot write the recording {path}: {error.strerror}; name another path") from None


class NpzReader:
    """Reader of the arrays of an ``.npz`` file, as a context manager.

    Raises
    ------
    RecordingError
        The file cannot be read, is damaged, or is larger than any recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = ExitStack()
        try:
            self._archive = self._open.enter_context(open_archive(path, MAX_BYTES))
        except FileNotFoundError:
            raise RecordingError(
                f"there is no recording {path}; `autotile list --recordings` shows the installed ones"
            ) from None
        except IsADirectoryError:
            raise RecordingError(f"{path} is a folder; expected the path of a recording (.npz)") from None
        except NotRegularError as error:
            raise RecordingError(f"cannot read the recording {path}: {error.strerror}") from None
        except ARCHIVE_FAULTS as error:
            raise self.damaged(f"it cannot be read as a zip archive ({error})") from None

    def __enter__(self) -> NpzReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of the arrays."""
        return frozenset(name.removesuffix(".npy") for name in self._archive.namelist())

    def damaged(self, problem: str) -> RecordingError:
        """Return the error for a fault of the file, for the caller to raise."""
        return RecordingError(f"the recording {self.path} is damaged: {problem}; fetch or record it again")

    def read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return one array.

        Parameters
        ----------
        name
            Name of the array.
        dtype
            Expected dtype.
        shape
            Expected shape; None for one axis of any length.

        Raises
        ------
        RecordingError
            The array is missing, damaged or of another dtype or shape.
        """
        try:
            array = parse_npy(read_member(self._archive, f"{name}.npy", MAX_BYTES))
        except KeyError:
            raise self.damaged(f"it lacks {name!r}") from None
        except ARCHIVE_FAULTS as error:
            raise self.damaged(f"{name!r} cannot be read ({error})") from None
        fits = array.ndim == 1 if shape is None else array.shape == shape
        if array.dtype != dtype or not array.flags.c_contiguous or not fits:
            raise self.damaged(f"{name!r} is {array.dtype} {array.shape}, expected {dtype} {shape or '(n,)'}")
        return array
