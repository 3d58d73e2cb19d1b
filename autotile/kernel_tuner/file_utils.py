"""Files of results: metadata and results in the T4 format, as Kernel Tuner's scripts write them, and its caches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotile.core.documents import convert
from autotile.database.paths import check_output, write_output
from autotile.errors import DataError, InputError
from autotile.exchange.kernel_tuner import CACHE_END, MeasuredEntry, read_open_json, t4_metadata
from autotile.exchange.kernel_tuner import t4_results as get_t4_results
from autotile.kernel_tuner.parameters import ParameterCodec, Params
from autotile.kernel_tuner.util import ErrorConfig, NpEncoder


def _json_path(name: str | Path) -> Path:
    return Path(f"{str(name).removesuffix('.json')}.json")


def store_output_file(
    output_filename: str | Path, results: Iterable[Params], tune_params: Mapping[str, Any], objective: str = "time"
) -> None:
    """Write the results of `tune_kernel` to a T4 file; ``.json`` is appended if it is missing."""
    _write(output_filename, get_t4_results(results, tune_params, objective))


def get_t4_metadata(target: str = "nvidia") -> dict[str, Any]:
    """Return the machine, its first GPU and its software as the T4 format states them."""
    from autotile.cuda.driver import device_count, live_device

    return t4_metadata(live_device(0) if device_count() else None)


def store_metadata_file(metadata_filename: str | Path, target: str = "nvidia") -> None:
    """Write the metadata of the machine to a T4 file; ``.json`` is appended if it is missing."""
    _write(metadata_filename, get_t4_metadata(target))


def _write(filename: str | Path, document: Mapping[str, Any]) -> None:
    path = _json_path(filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, json.dumps(document, cls=NpEncoder, indent=1) + "\n")


_KINDS: list[type[ErrorConfig]] = [ErrorConfig, *ErrorConfig.__subclasses__()]
_MARKS = {each.__name__: each for each in _KINDS}
_OLD_FAILURE = 1e20
"""Time of a configuration that failed, in old files of Kernel Tuner."""
_EXPECTED = "expected a cache of Kernel Tuner; name another file, or remove this one"


class CacheFile:
    """A cache file, to whose path ``.json`` is appended if it is missing, with its entries by their keys.

    The header is what the file must state: ``device_name`` (unless it is None), ``kernel_name``, ``problem_size``. A
    file of another device, kernel, problem or parameters is an `InputError`, as is one that cannot be read. The device
    name is that of the results, "" if there is no file.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], codec: ParameterCodec) -> None:
        self.path = _json_path(path).absolute()
        self._codec = codec
        self._header = {**header, "tune_params_keys": list(codec.values), "tune_params": codec.values}
        self.entries: dict[str, dict[str, Any]] = {}
        self.device_name = ""
        self._is_open = False
        if not self.path.exists():
            check_output(self.path)
            return
        document = _read(self.path)
        for name in ("device_name", "kernel_name", "problem_size", "tune_params_keys"):
            expected, found = self._header.get(name), document.get(name)
            is_known = expected not in (None, "callable") and found is not None  # a function is not compared with sizes
            if is_known and not _same(expected, found):
                raise InputError(
                    f"the cache {self.path} has the {name} {found!r}, but this call {expected!r}; name another file"
                )
        self.device_name = str(document.get("device_name", ""))
        cache = document.get("cache")
        if not isinstance(cache, dict) or not all(isinstance(entry, dict) for entry in cache.values()):
            raise InputError(f"the cache {self.path} has no table of results; {_EXPECTED}")
        for key, entry in cache.items():  # old files have the mark of a failure in place of a value
            marks = {name: value for name, value in entry.items() if isinstance(value, str) and value in _MARKS}
            self.entries[key] = {name: value for name, value in entry.items() if name not in marks}
            if marks:
                self.entries[key]["__error__"] = _MARKS[next(iter(marks.values()))]()
            try:
                if not marks and entry.get("time") != _OLD_FAILURE:
                    convert(entry, MeasuredEntry)
            except DataError as error:
                raise InputError(f"the cache {self.path}: the entry {key!r:.80}: {error}; {_EXPECTED}") from None

    def append(self, params: Params, result: Mapping[str, Any]) -> None:
        """Write the result of a configuration, unless the file holds one; an `InputError` if it cannot be written."""
        key = self._codec.key(params)
        if key in self.entries:
            return
        self.entries[key] = dict(result)
        try:
            if not self._is_open:  # in a layout to which entries can be appended, without a line that was cut short
                self._is_open = True
                document = _read(self.path) if self.path.exists() else self._header
                held = document.pop("cache", {})
                head = json.dumps({**document, "cache": {}}, cls=NpEncoder, indent="")
                write_output(self.path, head[: -len(CACHE_END)] + "".join(map(_line, held.items())))
            with self.path.open("a") as file:
                file.write(_line((key, result)))
        except OSError as error:
            raise InputError(f"cannot write the cache {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Complete the file, so that it is JSON."""
        if self._is_open:
            self._is_open = False
            write_output(self.path, self.path.read_text().removesuffix(",") + CACHE_END)


def _line(entry: tuple[str, Any]) -> str:
    return "\n" + json.dumps(dict([entry]), cls=NpEncoder)[1:-1] + ","


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the document of a cache file, with the names that a search in it needs; an `InputError` for any other."""
    document = _read(_json_path(path))
    if not isinstance(document.get("kernel_name"), str) or not isinstance(document.get("tune_params"), dict):
        raise InputError(f"{path} does not state its kernel and its parameters; {_EXPECTED}")
    return document


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_open_json(path)  # metrics may be NaN or infinite
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise InputError(f"cannot read the cache {path}: {error}; {_EXPECTED}") from None


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return isinstance(found, list) and [str(each) for each in expected] == [str(each) for each in found]
    return str(expected) == str(found) or found == [expected]
