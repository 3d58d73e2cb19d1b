"""The head of a recording: what was measured, where, and how its configurations were chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from autotile import __version__
from autotile.ground.errors import RecordingError
from autotile.ground.hardware import DeviceProperties, Source
from autotile.ground.model import L2Mode, Problem
from autotile.ground.spec import Parameter
from autotile.store.keys import ResultSource, TuningKey

FORMAT_VERSION = 1
_FORMAT = "autotile recording"


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """What a recording says of itself."""

    key: TuningKey
    """What the measurements belong to, with the source ``"cuda"``."""
    parameters: tuple[Parameter, ...]
    """The space's parameters with their values, in the space's order."""
    device: DeviceProperties | None
    """None where an imported result names a GPU that is not known."""
    driver: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was measured."""
    valid_configs: int = 0
    """Valid configurations of the whole space; 0 where that is not known."""
    chosen: str = "all"
    """How the recorded configurations were chosen among the valid ones: ``"all"``, or a sentence."""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    autotile_version: str = __version__

    @property
    def problem(self) -> Problem:
        """Kernel, sizes and dtype."""
        return self.key.problem

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary, with the format's name and version."""
        return {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "key": self.key.to_json(),
            "parameters": [[parameter.name, list(parameter.values)] for parameter in self.parameters],
            "device": self.device.to_json() if self.device else None,
            "driver": self.driver,
            "settings": dict(self.settings),
            "valid_configs": self.valid_configs,
            "chosen": self.chosen,
            "created_at": self.created_at.isoformat(),
            "autotile_version": self.autotile_version,
        }

    @classmethod
    def from_json(cls, data: Any, path: Path) -> RecordingHeader:
        """Inverse of `to_json`; ``path`` is for messages.

        Raises
        ------
        RecordingError
            Another format version; the message says which one, and what to do.
        ValueError
            An entry is missing or of the wrong type.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"it is not the header of an {_FORMAT}")
        _refuse_other_version(data.get("format_version"), path)
        _check_fields(cls, data)
        _check_fields(TuningKey, data["key"])
        if data["device"] is not None:
            _check_fields(DeviceProperties, data["device"])
        return cls(
            key=TuningKey.from_json(data["key"]),
            parameters=tuple(Parameter(name, tuple(values)) for name, values in data["parameters"]),
            device=DeviceProperties.from_json(data["device"]) if data["device"] else None,
            driver=data["driver"],
            settings=data["settings"],
            valid_configs=data["valid_configs"],
            chosen=data["chosen"],
            created_at=datetime.fromisoformat(data["created_at"]),
            autotile_version=data["autotile_version"],
        )


def _refuse_other_version(version: object, path: Path) -> None:
    if version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    cure = "pip install --upgrade autotile" if newer else "record it again"
    raise RecordingError(f"the recording {path} has format version {version!r}, expected {FORMAT_VERSION}: {cure}")


def _check_fields(kind: type[Any], data: Mapping[str, Any]) -> None:
    """See that a dictionary read from JSON has every field of a dataclass, each of the declared type."""
    for entry in fields(kind):
        value = data.get(entry.name)
        if not _CHECKS[str(entry.type)](value):
            raise ValueError(f"{entry.name!r} is {value!r:.80}, expected {entry.type}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_parameter(entry: Any) -> bool:
    match entry:
        case [str(), [_, *_] as values]:
            distinct = {(type(value), value) for value in values if isinstance(value, int | str)}
            return len(distinct) == len(values)
        case _:
            return False


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "str": _is_text,
    "float": lambda value: isinstance(value, float) or _is_int(value),
    "datetime": _is_text,
    "L2Mode": lambda value: value in get_args(L2Mode),
    "Source": lambda value: value in get_args(Source),
    "ResultSource": lambda value: value in get_args(ResultSource),
    "TuningKey": lambda value: isinstance(value, dict),
    "DeviceProperties | None": lambda value: value is None or isinstance(value, dict),
    "Mapping[str, Any]": lambda value: isinstance(value, dict),
    "Mapping[str, int]": lambda value: isinstance(value, dict) and all(map(_is_int, value.values())),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "tuple[int, int, int]": lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_int, value)),
    "tuple[Parameter, ...]": lambda value: isinstance(value, list) and all(map(_is_parameter, value)),
}
"""How each declared type looks in JSON, by the type's text."""
