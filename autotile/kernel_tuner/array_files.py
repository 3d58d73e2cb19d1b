"""Arguments and answers as files, by which they reach the process that owns the GPU."""

from __future__ import annotations

import hashlib
import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.dtypes import DTYPES, dtype_name
from autotile.errors import InputError

_HASHED_BYTES = 1 << 26


@cache
def _private() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="autotile-kernel-tuner-")


def session_folder() -> Path:
    """Return a folder of this process, which is removed when it ends."""
    return Path(_private().name)


def host_array(value: Any) -> NDArray[Any] | None:
    """Return an array of NumPy, CuPy or PyTorch as one of NumPy; None if the value is no array."""
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        return np.asarray(value.detach().cpu())
    if type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "get"):
        return np.asarray(value.get())
    return None


def element_type(array: NDArray[Any]) -> str:
    """Return the name of the element type that a buffer of an array has; bytes for types that autotile lacks."""
    name = dtype_name(array.dtype)
    return name if name in DTYPES else "uint8"


def stored_form(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as the elements of its buffer, of one axis; one zero for an empty array."""
    flat = np.ascontiguousarray(array).reshape(-1) if array.size else np.zeros(1, array.dtype)
    name = element_type(flat)
    return flat.view(np.dtype(DTYPES[name].storage)) if flat.dtype != DTYPES[name].storage else flat


def restored_form(stored: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return the content of a buffer in the type and the shape of the argument that it was made from."""
    return stored.reshape(-1).view(like.dtype)[: like.size].reshape(like.shape)


def save_array(array: NDArray[Any]) -> str:
    """Write an array of one axis to the folder of this process, and return the file's name.

    The name is that of the content, so that equal arrays share a file.

    Raises
    ------
    InputError
        There is no room.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    digest = hashlib.sha256(header.getvalue())
    data = array.view(np.uint8).data if array.size else memoryview(b"")
    for start in range(0, len(data), _HASHED_BYTES):
        digest.update(data[start : start + _HASHED_BYTES])
    path = session_folder() / f"{digest.hexdigest()[:40]}.npy"
    if not path.exists():
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InputError(f"cannot write an argument to {path.parent}: {error.strerror}; set TMPDIR") from None
    return path.name
