"""Kernel Tuner's cache files: results of earlier calls, which are read, and to which new ones are appended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotile.core.documents import decode_json
from autotile.core.reading import read_regular
from autotile.errors import DataError, InputError
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.util import (
    CompilationFailedConfig,
    ErrorConfig,
    InvalidConfig,
    NpEncoder,
    RuntimeFailedConfig,
)

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
