"""Inputs and expected outputs in ``.npy`` files, which are mapped to memory and never unpickled."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotile.core.documents import canonical_json
from autotile.core.dtypes import Array, Dtype
from autotile.errors import DataError, InputError

MAX_FILE_BYTES = 256 << 30
"""Maximum size of a file, larger than the memory of any GPU."""
_HASH_CHUNK = 1 << 22

_hashes: dict[tuple[str, int, int, int], str] = {}
"""Hash of each file that was read, by path, inode, size and time of its last change."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """Content of a buffer in a ``.npy`` file.

    Attributes
    ----------
    path
        Absolute path.
    sha256
        Hash that the content must have; "" if any is accepted.
    is_whole
        Whether the content is used as a whole only, as with indices into it; otherwise a problem of smaller sizes takes
        its leading part.
    """

    path: str
    sha256: str = ""
    is_whole: bool = False

    @property
    def content_hash(self) -> str:
        """SHA-256 of the file: the declared one, or that of its content.

        Raises
        ------
        InputError
            The file cannot be read.
        """
        return self.sha256 or self._hash()

    def check(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        """Raise if the file does not hold the content of a buffer.

        Parameters
        ----------
        name, shape, dtype
            Name of the buffer, shape of its array and its element type.

        Raises
        ------
        InputError
            The file cannot be read, is no ``.npy`` file, or holds another type or too few elements.
        """
        self._mapped(name, shape, dtype)

    def read(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Array:
        """Return the content of a buffer; parameters and errors as for `check`.

        Raises
        ------
        InputError
            Or the file has not the declared hash.
        """
        if self.sha256 and self._hash() != self.sha256:
            raise InputError(f"{self.path}: the SHA-256 is {self._hash()}, but sha256 of {name} is {self.sha256}")
        array = self._mapped(name, shape, dtype)
        return np.ascontiguousarray(array[tuple(slice(extent) for extent in shape)])

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> Array:
        from autotile.core.dtypes import map_npy

        self._status()
        try:
            array = map_npy(Path(self.path))
        except DataError as error:
            raise InputError(f"{self.path}: cannot be read as a .npy file: {error}") from None
        if array.dtype.kind == "V" and array.dtype.itemsize == np.dtype(dtype.storage).itemsize:
            array = array.view(dtype.storage)  # a type of ml_dtypes, which numpy.save writes without its name
        if array.dtype != np.dtype(dtype.storage):
            hint = f"expected {dtype.storage} for {name} ({dtype.name}); convert it with astype"
            raise InputError(f"{self.path}: the array has the dtype {array.dtype}, {hint}")
        self._check_shape(name, array.shape, shape)
        return array

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        fits = len(found) == len(shape) and all(f >= s for f, s in zip(found, shape, strict=True))
        if found == shape or (fits and not self.is_whole):
            return
        expected = f"{shape}" if self.is_whole else f"{shape} or more along each axis"
        raise InputError(f"{self.path}: the array has the shape {found}, expected {expected} for {name}")

    def _hash(self) -> str:
        status = self._status()
        key = (self.path, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _hashes:
            digest = hashlib.sha256()
            try:
                with Path(self.path).open("rb") as file:
                    while chunk := file.read(_HASH_CHUNK):
                        digest.update(chunk)
            except OSError as error:
                raise InputError(f"{self.path}: {error.strerror}") from None
            _hashes[key] = digest.hexdigest()
        return _hashes[key]

    def _status(self) -> os.stat_result:
        try:
            status = Path(self.path).stat()
        except OSError as error:
            hint = "the path of an input is relative to the search-space file"
            raise InputError(f"{self.path}: {error.strerror}; {hint}") from None
        except ValueError as error:
            raise InputError(f"{self.path!r:.200} is not a path: {error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{self.path}: not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise InputError(f"{self.path}: {status.st_size} bytes, expected at most {MAX_FILE_BYTES}")
        return status


def expected_file(folder: Path, name: str, sizes: Mapping[str, int], seed: int, *, check: bool) -> Path:
    """Return the path of the expected values of an output.

    Parameters
    ----------
    folder
        Folder of all files of a session.
    name
        Name of the output.
    sizes, seed, check
        What the inputs are made from: sizes and flags, the seed, and whether scalars have their check values.
    """
    inputs = canonical_json([dict(sorted(sizes.items())), seed, check])
    return folder / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.npy"
