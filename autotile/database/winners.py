"""Winners and family rules as dispatch needs them, and the JSON files that ship them.

A file of winners is JSON that a person can read and compare: one GPU, and for each tuned problem the configuration,
its time and what it was compiled to. Files of this kind come with autotile, so that a user of such a GPU is served
well before tuning anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Measurement, Resources
from autotile.database.keys import TuningKey
from autotile.database.paths import whole_file
from autotile.errors import InputError
from autotile.families.rule import FamilyRule
from autotile.settings import data_folder

Content = TypeVar("Content")


def rule_files(kernel: str) -> list[Path]:
    """Files with rules of a kernel's families, ``GPU.KERNEL.json``; none is read to tell which they are."""
    return sorted((data_folder("tuned") / "families").glob(f"*.{escape(kernel)}.json"))


def read_document(path: Path, what: str, written: int, content: Callable[[Any], Content]) -> Content:
    """Read a document.

    Parameters
    ----------
    path
        Of the file.
    what
        What it holds, for the error: ``winners``.
    written
        The ``format`` that this autotile writes.
    content
        Makes the document's content of its JSON values; raises KeyError, TypeError or ValueError where it is damaged.

    Raises
    ------
    InputError
        It cannot be read, is damaged, or was written by a newer autotile.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["format"]
    except OSError as error:
        raise InputError(f"cannot read the {what} in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, what, error) from None
    if found != written:
        raise InputError(f"{path} has format {found!r}, this autotile reads {written}; upgrade it")
    return understood(path, what, document, content)


def understood(path: Path, what: str, document: Any, content: Callable[[Any], Content]) -> Content:
    """What a document that was read holds, or a part of that; parameters and errors as for `read_document`."""
    try:
        return content(document)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, what, error) from None


def _damaged(path: Path, what: str, error: Exception) -> InputError:
    fault = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{path} is no file of {what}: {fault}; fetch it again or delete it")


_WINNERS_FORMAT = 1
_OF_THE_DEVICE = ("gpu_name", "compute_capability", "sm_count", "smem_per_block_optin_bytes", "source")
"""Fields of a key that are stated once a file."""


@dataclass(frozen=True, slots=True)
class Winner:
    """The best configuration of one tuned problem.

    Attributes
    ----------
    key
        What it was tuned for.
    device
        Properties of the GPU that it was tuned on; None where an imported result does not say.
    resources
        What it was compiled to; None where that is unknown.
    tuned_at
        When it was measured (UTC).
    shipped
        Whether it came with autotile and was not tuned by the user.
    """

    key: TuningKey
    device: DeviceProperties | None
    config: Config
    resources: Resources | None
    measurement: Measurement | None
    tuned_at: datetime
    shipped: bool = False


def shipped_winners(kernel: str, dtype: str) -> list[Winner]:
    """Winners of a kernel that come with autotile, of every GPU.

    Raises
    ------
    InputError
        One of the files is damaged.
    """
    files = sorted(data_folder("tuned").glob("*.json"))
    return [winner for path in files for winner in _shipped(path, kernel, dtype)]


def read_winners(path: Path) -> list[Winner]:
    """Read a file of winners.

    Raises
    ------
    InputError
        It cannot be read, is damaged, or was written by a newer autotile.
    """
    return read_document(path, "winners", _WINNERS_FORMAT, _winners)


def winner_to_json(winner: Winner) -> dict[str, Any]:
    """Plain dictionary of a winner by itself."""
    return {
        "key": winner.key.to_json(),
        "device": winner.device.to_json() if winner.device else None,
        "config": dict(winner.config),
        "resources": asdict(winner.resources) if winner.resources else None,
        "measurement": winner.measurement.to_json() if winner.measurement else None,
        "tuned_at": winner.tuned_at.isoformat(timespec="seconds"),
        "shipped": winner.shipped,
    }


def winner_from_json(entry: Mapping[str, Any]) -> Winner:
    """Inverse of `winner_to_json`.

    Raises
    ------
    KeyError, TypeError, ValueError
        The entry is none.
    """
    resources, measurement = entry["resources"], entry["measurement"]
    return Winner(
        key=TuningKey.from_json(entry["key"]),
        device=DeviceProperties.from_json(entry["device"]) if entry["device"] else None,
        config=entry["config"],
        resources=Resources(**resources) if resources else None,
        measurement=_measurement(measurement) if measurement else None,
        tuned_at=datetime.fromisoformat(entry["tuned_at"]),
        shipped=bool(entry["shipped"]),
    )


def write_winners(path: Path, winners: Iterable[Winner]) -> int:
    """Write winners of one GPU, sorted by kernel, dtype and sizes; return how many.

    Raises
    ------
    InputError
        They are of several GPUs or of none that is known, or the file cannot be written.
    """
    ordered = sorted(winners, key=lambda w: (w.key.kernel, w.key.dtype, *w.key.sizes.values()))
    devices = {winner.device for winner in ordered}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        raise InputError(f"a file of winners holds those of one known GPU; got {len(devices)} GPUs")
    lines = ",\n".join(json.dumps(_entry(winner)) for winner in ordered)
    head = json.dumps({"format": _WINNERS_FORMAT, "device": device.to_json()}, indent=1)[:-2]
    text = f'{head},\n "winners": [\n{lines}\n ]\n}}\n'
    try:
        with whole_file(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write the winners to {path}: {error.strerror}; name another file") from None
    return len(ordered)


def _shipped(path: Path, kernel: str, dtype: str) -> list[Winner]:
    """Winners of a kernel in a file that comes with autotile; the others of the file are not looked at."""

    def winners(document: Mapping[str, Any]) -> list[Winner]:
        return _winners(document, lambda entry: (entry["kernel"], entry["dtype"]) == (kernel, dtype), shipped=True)

    return understood(path, "winners", _document(path), winners)


@lru_cache
def _document(path: Path) -> Mapping[str, Any]:
    """A file's content, read once a process."""
    return read_document(path, "winners", _WINNERS_FORMAT, dict)


def _winners(
    document: Mapping[str, Any], wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True, *, shipped: bool = False
) -> list[Winner]:
    device = DeviceProperties.from_json(document["device"])
    return [_winner(entry, device, shipped=shipped) for entry in document["winners"] if wanted(entry)]


def _entry(winner: Winner) -> dict[str, Any]:
    key = {name: value for name, value in winner.key.to_json().items() if name not in _OF_THE_DEVICE}
    return key | {
        "config": dict(winner.config),
        "resources": asdict(winner.resources) if winner.resources else None,
        "measurement": winner.measurement.to_json() if winner.measurement else None,
        "tuned_at": winner.tuned_at.isoformat(timespec="seconds"),
    }


def _winner(entry: Mapping[str, Any], device: DeviceProperties, *, shipped: bool) -> Winner:
    of_device = {
        "gpu_name": device.name,
        "compute_capability": device.compute_capability,
        "sm_count": device.sm_count,
        "smem_per_block_optin_bytes": device.smem_per_block_optin_bytes,
        "source": "cuda",
    }
    resources, measurement = entry["resources"], entry["measurement"]
    return Winner(
        key=TuningKey.from_json({**entry, **of_device}),
        device=device,
        config=entry["config"],
        resources=Resources(**resources) if resources else None,
        measurement=_measurement(measurement) if measurement else None,
        tuned_at=datetime.fromisoformat(entry["tuned_at"]),
        shipped=shipped,
    )


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    low_us, high_us = entry["interval_us"]
    return Measurement(entry["time_us"], low_us, high_us, l2=entry["l2"])


_RULES_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule that was learned.

    Attributes
    ----------
    key
        What it was learned for; its ``sizes`` are empty, the rule's family stands for them.
    device
        Properties of the GPU that it was learned on.
    learned_at
        When (UTC).
    shipped
        Whether it came with autotile and was not learned by the user.
    """

    key: TuningKey
    device: DeviceProperties
    rule: FamilyRule
    learned_at: datetime
    shipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of everything."""
        return {
            "key": self.key.to_json(),
            "device": self.device.to_json(),
            "rule": self.rule.to_json(),
            "learned_at": self.learned_at.isoformat(),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredRule:
        """Inverse of `to_json`; other entries are passed over.

        Raises
        ------
        KeyError, TypeError, ValueError
            The entry is none.
        """
        return cls(
            TuningKey.from_json(entry["key"]),
            DeviceProperties.from_json(entry["device"]),
            FamilyRule.from_json(entry["rule"]),
            datetime.fromisoformat(entry["learned_at"]),
        )


def shipped_rules(files: Iterable[Path], kernel: str, dtype: str) -> list[StoredRule]:
    """Rules of a kernel that come with autotile, of every GPU.

    Parameters
    ----------
    files
        As `autotile.database.winners.rule_files` finds them.

    Raises
    ------
    InputError
        One of the files is damaged.
    """
    found = (rule for path in files for rule in read_rules_file(path))
    return [replace(rule, shipped=True) for rule in found if (rule.key.kernel, rule.key.dtype) == (kernel, dtype)]


@lru_cache
def read_rules_file(path: Path) -> tuple[StoredRule, ...]:
    """Read a file of rules, once a process.

    Raises
    ------
    InputError
        It cannot be read, is damaged, or was written by a newer autotile.
    """

    def rules(document: Any) -> tuple[StoredRule, ...]:
        return tuple(StoredRule.from_json(entry) for entry in document["rules"])

    return read_document(path, "rules", _RULES_FORMAT, rules)


def write_rules_file(path: Path, rules: Iterable[StoredRule]) -> int:
    """Write a file of rules, and return how many.

    Raises
    ------
    InputError
        It cannot be written.
    """
    entries = [rule.to_json() for rule in rules]
    try:
        with whole_file(path) as stream:
            stream.write((json.dumps({"format": _RULES_FORMAT, "rules": entries}, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write the rules to {path}: {error.strerror}") from None
    return len(entries)
