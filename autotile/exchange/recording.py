"""A measured space in one small file, for replay where there is no GPU.

A recording says of each configuration how it ended, why, what it used and how long it took. It is a compressed
``.npz`` with a JSON header; nothing in it is executed, and a damaged one is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from autotile import __version__
from autotile.core.device import DeviceProperties, Source
from autotile.core.model import Config, L2Mode, Measurement, Outcome, Problem, Resources, Trial, Value, config_text
from autotile.database.keys import ResultSource, TuningKey
from autotile.errors import RecordingError
from autotile.exchange.npz import NpzReader, write_npz
from autotile.kernel.spec import Parameter

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


_COLUMNS: Mapping[str, np.dtype[Any]] = {
    "outcome": np.dtype("u1"),
    "stage": np.dtype("u1"),
    "reason": np.dtype("<u4"),
    "time_us": np.dtype("<f4"),
    "low_us": np.dtype("<f4"),
    "high_us": np.dtype("<f4"),
    "samples": np.dtype("<u4"),
    "registers": np.dtype("<u2"),
    "spill_store_bytes": np.dtype("<u4"),
    "spill_load_bytes": np.dtype("<u4"),
    "stack_bytes": np.dtype("<u4"),
    "static_smem_bytes": np.dtype("<u4"),
    "dynamic_smem_bytes": np.dtype("<u4"),
    "blocks_per_sm": np.dtype("<u2"),
    "occupancy": np.dtype("<f4"),
    "seconds": np.dtype("<f4"),
}
"""One value a configuration. Outcome, stage and reason are positions in the header's lists. NaN microseconds: not
measured; 0 registers: not compiled. Single precision is far finer than the noise of any timing."""

_LABELS = ("outcome", "stage", "reason")
_RESOURCES = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes")

_Positions = Mapping[str, Mapping[tuple[type, Value], int]]
"""For each parameter, where each of its values stands; the type is part of the key because True equals 1."""

_Labels = tuple[tuple[Outcome, ...], tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """What a recording says of one configuration."""

    outcome: Outcome
    reason: str
    stage: str
    resources: Resources | None
    dynamic_smem_bytes: int
    blocks_per_sm: int
    occupancy: float
    measurement: Measurement | None
    """Without its samples, which are not kept."""
    samples: int
    """How many times it was measured."""
    seconds: float
    """Wall time of all stages, from compiling to the last sample."""


@dataclass(frozen=True)
class Recording:
    """A recorded space; its length is the number of configurations.

    Attributes
    ----------
    header
        What was measured, where and how.
    codes
        Shape (configurations, parameters), unsigned: positions in each parameter's values.
    columns
        Arrays of shape (configurations,): ``outcome``, ``time_us``, ``registers`` and so on.
    outcomes, stages, reasons
        What the numbers in the columns ``outcome``, ``stage`` and ``reason`` stand for.
    """

    header: RecordingHeader
    codes: np.ndarray
    columns: Mapping[str, np.ndarray]
    outcomes: tuple[Outcome, ...]
    stages: tuple[str, ...]
    reasons: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def ok(self) -> np.ndarray:
        """Shape (configurations,), bool: which ones were verified and measured."""
        ok_codes = [code for code, outcome in enumerate(self.outcomes) if outcome is Outcome.OK]
        return np.isin(self.columns["outcome"], ok_codes)

    def config(self, row: int) -> dict[str, Value]:
        """Configuration of a row."""
        pairs = zip(self.header.parameters, self.codes[row].tolist(), strict=True)
        return {parameter.name: parameter.values[code] for parameter, code in pairs}

    def row_of(self, config: Config) -> int | None:
        """Row of a configuration; None where it was not recorded."""
        codes = _codes_of(config, self._positions)
        return None if codes is None else self.rows.get(bytes(np.array(codes, self.codes.dtype)))

    def lookup(self, config: Config) -> RecordedResult | None:
        """Find what was recorded of a configuration; None where it was not recorded."""
        row = self.row_of(config)
        return None if row is None else self.result(row)

    def result(self, row: int) -> RecordedResult:
        """What was recorded in a row."""
        values = {name: column[row].item() for name, column in self.columns.items()}
        measured = not np.isnan(values["time_us"])
        times = (values["time_us"], values["low_us"], values["high_us"])
        return RecordedResult(
            outcome=self.outcomes[values["outcome"]],
            reason=self.reasons[values["reason"]],
            stage=self.stages[values["stage"]],
            resources=Resources(**{name: values[name] for name in _RESOURCES}) if values["registers"] else None,
            dynamic_smem_bytes=values["dynamic_smem_bytes"],
            blocks_per_sm=values["blocks_per_sm"],
            occupancy=values["occupancy"],
            measurement=Measurement(*times, l2=self.header.key.l2_mode) if measured else None,
            samples=values["samples"],
            seconds=values["seconds"],
        )

    @cached_property
    def _positions(self) -> _Positions:
        return _positions_of(self.header.parameters)

    @cached_property
    def rows(self) -> Mapping[bytes, int]:
        """Row of each configuration, by the bytes of its codes."""
        return {code.tobytes(): row for row, code in enumerate(self.codes)}


def write_recording(path: Path, header: RecordingHeader, trials: Sequence[Trial]) -> None:
    """Write trials as a recording; of several trials of a configuration the last one counts.

    Raises
    ------
    RecordingError
        A configuration is not one of the header's parameters and values, or the file cannot be written.
    """
    positions = _positions_of(header.parameters)
    newest: dict[tuple[int, ...], Trial] = {}
    for trial in trials:
        codes = _codes_of(trial.config, positions)
        if codes is None:
            raise RecordingError(
                f"{config_text(trial.config)} is not a configuration of the recorded space; expected one value of each "
                f"of {', '.join(parameter.name for parameter in header.parameters)}"
            )
        newest[codes] = trial
    rows = [_row(newest[codes]) for codes in sorted(newest)]
    labels = {name: sorted({row[name] for row in rows}) for name in _LABELS}
    for name, texts in labels.items():
        numbers = {text: number for number, text in enumerate(texts)}
        for row in rows:
            row[name] = numbers[row[name]]
    text = json.dumps({**header.to_json(), "labels": labels}).encode()
    code_table = np.array(sorted(newest), _code_dtype(header.parameters)).reshape(len(rows), len(header.parameters))
    columns = {name: np.array([row[name] for row in rows], dtype) for name, dtype in _COLUMNS.items()}
    write_npz(path, {"header": np.frombuffer(text, np.uint8), "codes": code_table, **columns})


def read_recording(path: Path, *, kernel: str | None = None) -> Recording:
    """Read and check a whole recording.

    Parameters
    ----------
    kernel
        The kernel that it is expected to be of.

    Raises
    ------
    RecordingError
        It is missing, damaged, of another format version or of another kernel.
    """
    with NpzReader(path) as reader:
        header, (outcomes, stages, reasons) = _read_header(reader)
        if kernel is not None and header.key.kernel != kernel:
            raise RecordingError(f"{path} is a recording of {header.key.kernel!r}, expected one of {kernel!r}")
        if reader.names != {"header", "codes", *_COLUMNS}:
            raise reader.damaged("it holds other arrays than a recording does")
        outcome = reader.read("outcome", _COLUMNS["outcome"])
        shape = (len(outcome), len(header.parameters))
        recording = Recording(
            header=header,
            codes=reader.read("codes", _code_dtype(header.parameters), shape),
            columns={name: reader.read(name, dtype, outcome.shape) for name, dtype in _COLUMNS.items()},
            outcomes=outcomes,
            stages=stages,
            reasons=reasons,
        )
        if problem := _inconsistency(recording):
            raise reader.damaged(problem)
    return recording


def read_recording_header(path: Path) -> RecordingHeader:
    """Read only what a recording says of itself.

    Raises
    ------
    RecordingError
        It is missing, damaged or of another format version.
    """
    with NpzReader(path) as reader:
        return _read_header(reader)[0]


def _positions_of(parameters: Sequence[Parameter]) -> _Positions:
    return {p.name: {(type(value), value): code for code, value in enumerate(p.values)} for p in parameters}


def _codes_of(config: Config, positions: _Positions) -> tuple[int, ...] | None:
    """Positions of a configuration's values, in the parameters' order; None where it is not of the space."""
    if config.keys() != positions.keys():
        return None
    codes = tuple(codes.get((type(config[name]), config[name]), -1) for name, codes in positions.items())
    return None if -1 in codes else codes


def _code_dtype(parameters: Sequence[Parameter]) -> np.dtype[Any]:
    return np.min_scalar_type(max((len(parameter.values) - 1 for parameter in parameters), default=0)).newbyteorder("<")


def _row(trial: Trial) -> dict[str, Any]:
    measurement, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    return {
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": trial.reason,
        "time_us": measurement.time_us if measurement else np.nan,
        "low_us": measurement.low_us if measurement else np.nan,
        "high_us": measurement.high_us if measurement else np.nan,
        "samples": len(measurement.samples_us) if measurement else 0,
        **{name: getattr(resources, name) if resources else 0 for name in _RESOURCES},
        "dynamic_smem_bytes": trial.geometry.dynamic_smem_bytes if trial.geometry else 0,
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else 0,
        "occupancy": occupancy.occupancy if occupancy else 0.0,
        "seconds": sum(trial.seconds.values()),
    }


def _read_header(reader: NpzReader) -> tuple[RecordingHeader, _Labels]:
    try:
        data = json.loads(reader.read("header", np.dtype("u1")).tobytes())
        return RecordingHeader.from_json(data, reader.path), _labels(data["labels"])
    except RecordingError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise reader.damaged(f"its header cannot be used ({error})") from None


def _labels(data: Any) -> _Labels:
    outcomes, stages, reasons = (data[name] for name in _LABELS)
    if not all(isinstance(text, str) for text in (*stages, *reasons)):
        raise ValueError("a stage or reason is no text")
    return tuple(Outcome(text) for text in outcomes), tuple(stages), tuple(reasons)


def _inconsistency(recording: Recording) -> str:
    """First contradiction between a recording's parts; empty where there is none."""
    columns = recording.columns
    counts = [len(parameter.values) for parameter in recording.header.parameters]
    if (recording.codes >= np.array(counts)).any():
        return "a configuration has a value that its parameter lacks"
    if len(recording.rows) != len(recording):
        return "a configuration occurs twice"
    for name, labels in zip(_LABELS, (recording.outcomes, recording.stages, recording.reasons), strict=True):
        if (columns[name] >= len(labels)).any():
            return f"a configuration has an unknown {name}"
    if not (columns["time_us"][recording.ok] > 0).all() or np.isinf(columns["time_us"]).any():
        return "a configuration that is ok has no time"
    return ""


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """A recording of which only the header was read."""

    path: Path
    header: RecordingHeader | None
    problem: str = ""
    """Why the header could not be read; empty when it could."""


def list_recordings(folders: Sequence[Path]) -> list[RecordingFile]:
    """Recordings in folders, in order of folder and name; a damaged one is listed with its problem."""
    return [_open(path) for folder in folders for path in sorted(folder.glob("*.npz"))]


def find_recording(
    folders: Sequence[Path], kernel: str, sizes: Mapping[str, int], dtype: str, gpu_name: str | None = None
) -> RecordingFile | None:
    """Newest recording of a problem, on one GPU where it is named; None where there is none."""
    fits = [
        (found.header.created_at, number, found)
        for number, found in enumerate(list_recordings(folders))
        if found.header is not None and _fits(found.header, kernel, sizes, dtype, gpu_name)
    ]
    return max(fits)[-1] if fits else None


def recording_name(header: RecordingHeader) -> str:
    """File name that says what a recording holds: ``sgemm-nvidia-h200-4096x4096x4096-float32.npz``."""
    words = [header.key.kernel, header.key.gpu_name, "x".join(map(str, header.key.sizes.values())), header.key.dtype]
    return "-".join(re.sub(r"[^a-z0-9_.]+", "-", word.lower()).strip("-") for word in words) + ".npz"


def _open(path: Path) -> RecordingFile:
    try:
        return RecordingFile(path, read_recording_header(path))
    except RecordingError as error:
        return RecordingFile(path, None, str(error))


def _fits(header: RecordingHeader, kernel: str, sizes: Mapping[str, int], dtype: str, gpu_name: str | None) -> bool:
    key = header.key
    same_problem = key.kernel == kernel and key.dtype == dtype and dict(key.sizes) == dict(sizes)
    return same_problem and gpu_name in (None, key.gpu_name)
