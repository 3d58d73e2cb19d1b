"""JSON files of winners and of rules, such as those that ship with autotile in ``tuned/``.

A file of winners holds those of one GPU: its properties once, then one line for each tuned problem with the
configuration, its time and its resources. The files that ship let a user of such a GPU be served a good configuration
before tuning anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.reading import read_regular
from autotile.database.keys import TuningKey
from autotile.database.paths import atomic_write
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.settings import data_folder

_WINNERS_FORMAT = 1
_RULES_FORMAT = 1

_MAX_BYTES = 64 * 2**20
"""Maximum size of a file; those that ship have some ten kilobytes."""

_DEVICE_FIELDS = {
    "gpu_name": "name",
    "compute_capability": "compute_capability",
    "sm_count": "sm_count",
    "smem_per_block_optin_bytes": "smem_per_block_optin_bytes",
}
"""Fields of a key that are stated once a file, each with the property of the device that gives it."""

_Content = TypeVar("_Content")


def shipped_winners(kernel: str, dtype: str) -> list[Winner]:
    """Return the winners of a kernel that ship with autotile, of all GPUs.

    Raises
    ------
    InputError
        A file is damaged.
    """
    files = sorted(data_folder("tuned").glob("*.json"))
    return [winner for path in files for winner in _shipped_in(path, kernel, dtype)]


def shipped_rules(kernel: str, dtype: str) -> list[StoredRule]:
    """Return the rules of a kernel's families that ship with autotile, of all GPUs.

    Raises
    ------
    InputError
        A file is damaged.
    """
    files = sorted((data_folder("tuned") / "families").glob(f"*.{escape(kernel)}.json"))
    found = (rule for path in files for rule in read_rules(path))
    return [replace(rule, shipped=True) for rule in found if (rule.key.kernel, rule.key.dtype) == (kernel, dtype)]


def read_winners(path: Path) -> list[Winner]:
    """Read a file of winners.

    Raises
    ------
    InputError
        The file cannot be read, is damaged, or was written by a newer autotile.
    """
    return _decode(path, "winners", _read(path, "winners", _WINNERS_FORMAT), _winners)


def write_winners(path: Path, winners: Iterable[Winner]) -> int:
    """Write winners of one GPU, sorted by kernel, dtype and sizes, and return their number.

    Raises
    ------
    InputError
        The winners are of several GPUs or of an unknown one, or the file cannot be written.
    """
    ordered = sorted(winners, key=lambda w: (w.key.kernel, w.key.dtype, *w.key.sizes.values()))
    devices = {winner.device for winner in ordered}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        raise InputError(f"a file of winners holds those of one known GPU; got {len(devices)} GPUs")
    lines = ",\n".join(json.dumps(_entry(winner)) for winner in ordered)
    head = json.dumps({"format": _WINNERS_FORMAT, "device": device.to_json()}, indent=1)[:-2]
    text = f'{head},\n "winners": [\n{lines}\n ]\n}}\n'
    _write(path, "winners", text)
    return len(ordered)


@lru_cache
def read_rules(path: Path) -> tuple[StoredRule, ...]:
    """Read a file of rules, once a process.

    Raises
    ------
    InputError
        The file cannot be read, is damaged, or was written by a newer autotile.
    """

    def rules(document: Mapping[str, Any]) -> tuple[StoredRule, ...]:
        return tuple(StoredRule.from_json(entry) for entry in document["rules"])

    return _decode(path, "rules", _read(path, "rules", _RULES_FORMAT), rules)


def write_rules(path: Path, rules: Iterable[StoredRule]) -> int:
    """Write a file of rules, and return their number.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    entries = [rule.to_json() for rule in rules]
    _write(path, "rules", json.dumps({"format": _RULES_FORMAT, "rules": entries}, indent=1) + "\n")
    return len(entries)


def _shipped_in(path: Path, kernel: str, dtype: str) -> list[Winner]:
    """Return the winners of a kernel in a shipped file; entries of other kernels are not decoded."""

    def winners(document: Mapping[str, Any]) -> list[Winner]:
        return _winners(document, lambda entry: (entry["kernel"], entry["dtype"]) == (kernel, dtype), shipped=True)

    return _decode(path, "winners", _cached_winners_document(path), winners)


@lru_cache
def _cached_winners_document(path: Path) -> Mapping[str, Any]:
    return _read(path, "winners", _WINNERS_FORMAT)


def _winners(
    document: Mapping[str, Any], selects: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, shipped: bool = False
) -> list[Winner]:
    device = DeviceProperties.from_json(document["device"])
    common = {name: getattr(device, attribute) for name, attribute in _DEVICE_FIELDS.items()} | {"source": "cuda"}
    return [
        Winner.from_result_json(entry, TuningKey.from_json({**entry, **common}), device, shipped=shipped)
        for entry in document["winners"]
        if selects(entry)
    ]


def _entry(winner: Winner) -> dict[str, Any]:
    omitted = {*_DEVICE_FIELDS, "source"}
    key = {name: value for name, value in winner.key.to_json().items() if name not in omitted}
    return key | winner.result_to_json()


def _read(path: Path, content: str, expected_format: int) -> Mapping[str, Any]:
    """Read a JSON object and check its ``format``; ``content`` names what the file holds, for messages."""
    try:
        document: dict[str, Any] = json.loads(read_regular(path, _MAX_BYTES))
        found = document["format"]
    except OSError as error:
        raise InputError(f"cannot read the {content} in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, content, error) from None
    if found != expected_format:
        raise InputError(
            f"{path} has format {found!r}, this version of autotile reads {expected_format}: upgrade autotile"
        )
    return document


def _decode(
    path: Path, content: str, document: Mapping[str, Any], decode: Callable[[Mapping[str, Any]], _Content]
) -> _Content:
    """Apply ``decode`` to the document of a file; raise InputError if the file is damaged."""
    try:
        return decode(document)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, content, error) from None


def _write(path: Path, content: str, text: str) -> None:
    try:
        with atomic_write(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write the {content} to {path}: {error.strerror}; name another file") from None


def _damaged(path: Path, content: str, error: Exception) -> InputError:
    fault = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{path} is not a file of {content}: {fault}; fetch it again or delete it")
