"""A measured space in one small file, for replay where there is no GPU.

A recording says of each configuration how it ended, why, what it used and how long it took. It is a compressed
``.npz`` with a JSON header; nothing in it is executed, and a damaged one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autotile.ground.errors import RecordingError
from autotile.ground.model import Config, Measurement, Outcome, Resources, Trial, Value, config_text
from autotile.ground.spec import Parameter
from autotile.store.npz import NpzReader, write_npz
from autotile.store.recording_header import RecordingHeader

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
