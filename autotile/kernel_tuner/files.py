"""Files of Kernel Tuner's interface: arguments and answers for the GPU's process, and caches of earlier calls."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.documents import decode_json, read_regular
from autotile.core.dtypes import DTYPES, dtype_name
from autotile.errors import DataError, InputError
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.util import (
    CompilationFailedConfig,
    ErrorConfig,
    InvalidConfig,
    NpEncoder,
    RuntimeFailedConfig,
)

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


def is_on_gpu(value: Any) -> bool:
    """Return whether a value is an array of CuPy, or a CUDA tensor of PyTorch, on which a kernel works in place."""
    library = type(value).__module__.partition(".")[0]
    return (library == "cupy" and hasattr(value, "get")) or (library == "torch" and bool(value.is_cuda))


def write_to_gpu(target: Any, content: NDArray[Any]) -> None:
    """Copy a content to an array for which `is_on_gpu` is true, of the same shape and type."""
    if type(target).__module__.partition(".")[0] == "torch":
        import torch

        target.copy_(torch.from_numpy(content))
        return
    import cupy

    with target.device:
        target[...] = cupy.asarray(content)
        cupy.cuda.get_current_stream().synchronize()  # whatever stream reads it


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


_MAX_BYTES = 2**30
_MARKS = {each.__name__: each for each in (ErrorConfig, InvalidConfig, CompilationFailedConfig, RuntimeFailedConfig)}
_END = "}\n}"
_EXPECTED = "expected a cache of Kernel Tuner; name another file, or remove this one"


class CacheFile:
    """A cache file.

    Parameters
    ----------
    path
        Path, to which ``.json`` is appended if it is missing.
    header
        What the file must state: ``device_name`` (unless it is None), ``kernel_name``, ``problem_size``.
    codec
        The parameters.

    Attributes
    ----------
    entries
        Results by the key of their configuration.
    device_name
        Name of the device of the results; "" if there is no file.

    Raises
    ------
    InputError
        The file cannot be read, or belongs to another device, kernel, problem or parameters.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], codec: ParameterCodec) -> None:
        name = str(path)
        self.path = Path(name if name.endswith(".json") else f"{name}.json").absolute()
        self._codec = codec
        self._header = {
            **header,
            "tune_params_keys": list(codec.values),
            "tune_params": codec.values,
        }
        self.entries: dict[str, dict[str, Any]] = {}
        self.device_name = ""
        self._is_open = False
        if self.path.exists():
            self._read()

    def append(self, params: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write the result of a configuration, unless the file holds one.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        key = self._codec.key(params)
        if key in self.entries:
            return
        self.entries[key] = dict(result)
        shown = {name: str(value) if isinstance(value, ErrorConfig) else value for name, value in result.items()}
        try:
            self._open()
            with self.path.open("a") as file:
                file.write("\n" + json.dumps({key: shown}, cls=NpEncoder)[1:-1] + ",")
        except OSError as error:
            raise InputError(f"cannot write the cache {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Complete the file, so that it is JSON."""
        if self._is_open:
            self._is_open = False
            text = self.path.read_text()
            self.path.write_text(text.removesuffix(",") + _END)

    def _open(self) -> None:
        """Make the file, or remove its end, so that entries can be appended."""
        if self._is_open:
            return
        self._is_open = True
        if self.path.exists():
            text = self.path.read_text().rstrip()
            is_complete = text.endswith(("}}}", _END))
            kept = text[: -len(_END)].rstrip() if is_complete else text
            self.path.write_text(kept.removesuffix(",") + ("" if kept.endswith("{") else ","))
        else:
            self.path.write_text(json.dumps({**self._header, "cache": {}}, cls=NpEncoder, indent="")[: -len(_END)])

    def _read(self) -> None:
        document = _document(self.path)
        for name in ("device_name", "kernel_name", "problem_size", "tune_params_keys"):
            expected, found = self._header.get(name), document.get(name)
            if expected is not None and found is not None and not _same(expected, found):
                raise InputError(
                    f"the cache {self.path} has the {name} {found!r}, but this call {expected!r}; name another file"
                )
        self.device_name = str(document.get("device_name", ""))
        cache = document.get("cache")
        if not isinstance(cache, dict) or not all(isinstance(entry, dict) for entry in cache.values()):
            raise InputError(f"the cache {self.path} has no table of results; {_EXPECTED}")
        self.entries = {key: _restored(entry) for key, entry in cache.items()}


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the document of a cache file, with the names that a search in it needs.

    Raises
    ------
    InputError
        The file cannot be read, or is no cache of Kernel Tuner.
    """
    name = str(path)
    document = _document(Path(name if name.endswith(".json") else f"{name}.json"))
    if not isinstance(document.get("kernel_name"), str) or not isinstance(document.get("tune_params"), dict):
        raise InputError(f"{path} does not state its kernel and its parameters; {_EXPECTED}")
    return document


def _document(path: Path) -> dict[str, Any]:
    """Parse a file, of which an interrupted call may have left the end away."""
    try:
        text = read_regular(path, _MAX_BYTES).decode().replace("\r\n", "\n").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the cache {path}: {error}; {_EXPECTED}") from None
    for candidate in (text, text.removesuffix(",") + _END, text.rpartition("\n")[0].removesuffix(",") + _END):
        try:
            return decode_json(candidate, dict[str, Any])
        except DataError:
            continue
    raise InputError(f"the cache {path} is not JSON; {_EXPECTED}")


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return isinstance(found, list) and [str(each) for each in expected] == [str(each) for each in found]
    return str(expected) == str(found) or found == [expected]


def _restored(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its mark as such; old files have it in place of a value."""
    marks = [_MARKS[value] for value in entry.values() if isinstance(value, str) and value in _MARKS]
    plain = {name: value for name, value in entry.items() if not (isinstance(value, str) and value in _MARKS)}
    return {**plain, "__error__": marks[0]()} if marks else plain
