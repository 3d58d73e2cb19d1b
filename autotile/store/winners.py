"""Winners: what a tuning run has found to be best, as dispatch needs it, from a database or from a file.

A file of winners is JSON that a person can read and compare: one GPU, and for each tuned problem the configuration,
its time and what it was compiled to. Files of this kind come with autotile, so that a user of such a GPU is served
well before tuning anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from autotile.files.settings import data_folder
from autotile.ground.errors import InputError
from autotile.ground.frozen import dataclass
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, Measurement, Resources
from autotile.store.keys import TuningKey
from autotile.store.shipped_file import read_document, understood
from autotile.store.whole_file import whole_file

_FORMAT = 1
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
    return read_document(path, "winners", _FORMAT, _winners)


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
    head = json.dumps({"format": _FORMAT, "device": device.to_json()}, indent=1)[:-2]
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
    return read_document(path, "winners", _FORMAT, dict)


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
