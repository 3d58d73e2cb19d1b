"""Recordings: a measured search space in one small file, for replay without a GPU.

A recording holds the outcome, reason, resources and time of each configuration. It is a compressed ``.npz`` file with a
JSON header; nothing in it is executed, and a damaged file is rejected.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.documents import (
    Moment,
    Name,
    NotRegularError,
    Text,
    Whole,
    convert,
    decode_json,
    encode_json,
    open_regular,
    to_document,
)
from autotile.core.dtypes import parse_npy
from autotile.core.forks import cached_property
from autotile.core.model import Config, Measurement, Occupancy, Outcome, Problem, Resources, Trial, Value, config_text
from autotile.core.text import file_name
from autotile.database.keys import TuningKey
from autotile.database.paths import atomic_write
from autotile.database.winners import RESOURCE_COLUMNS
from autotile.errors import DataError, RecordingError
from autotile.kernel.spec import Parameter
from autotile.version import __version__

ARCHIVE_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # an unsupported compression
    RuntimeError,  # an encrypted member
    ValueError,
    OverflowError,  # a position beyond those of a file
    MemoryError,
    OSError,
)
"""Exceptions of `zipfile` for a file that cannot be read or is damaged."""

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compressions that autotile writes; `zipfile` decompresses the others without a bound."""


@contextmanager
def open_archive(path: Path, max_bytes: int) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, after a check of its directory; raise one of `ARCHIVE_FAULTS` if it cannot be read.

    ``max_bytes`` is the maximum decompressed size of all members together.
    """
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if any(member.compress_type not in _COMPRESSIONS for member in members):
            raise zipfile.BadZipFile("it has a compression other than deflate")
        declared = sum(member.file_size for member in members)
        if declared > max_bytes:
            raise zipfile.BadZipFile(f"it declares {declared:,} bytes, but at most {max_bytes:,} are allowed")
        yield archive


def read_member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return the content of a member of an archive from `open_archive`, of at most ``max_bytes``."""
    size = archive.getinfo(name).file_size
    if size > max_bytes:
        raise zipfile.BadZipFile(f"{name} is longer than expected: it declares {size:,} bytes, not {max_bytes:,}")
    with archive.open(name) as stream:
        return stream.read(size)  # read() would first decompress everything, however small a size is declared


MAX_BYTES = 256 * 2**20
"""Maximum decompressed size of a file: ten times that of a recording of a million configurations."""


def _damaged(path: Path, problem: str) -> RecordingError:
    return RecordingError(f"the recording {path} is damaged: {problem}; fetch or record it again")


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(open_archive(path, MAX_BYTES))
        except FileNotFoundError:
            raise RecordingError(
                f"there is no recording {path}; `autotile list --recordings` shows the installed ones"
            ) from None
        except IsADirectoryError:
            raise RecordingError(f"{path} is a folder; expected the path of a recording (.npz)") from None
        except NotRegularError as error:
            raise RecordingError(f"cannot read the recording {path}: {error.strerror}") from None
        except ARCHIVE_FAULTS as error:
            raise _damaged(path, f"it cannot be read as a zip archive ({error})") from None
        yield archive


def _read_array(
    path: Path, archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return one array, of an expected dtype and shape; None for one axis of any length."""
    try:
        array = parse_npy(read_member(archive, f"{name}.npy", MAX_BYTES))
    except KeyError:
        raise _damaged(path, f"it lacks {name!r}") from None
    except ARCHIVE_FAULTS as error:
        raise _damaged(path, f"{name!r} cannot be read ({error})") from None
    fits = array.ndim == 1 if shape is None else array.shape == shape
    if array.dtype != dtype or not array.flags.c_contiguous or not fits:
        raise _damaged(path, f"{name!r} is {array.dtype} {array.shape}, expected {dtype} {shape or '(n,)'}")
    return array


FORMAT_VERSION = 1
_FORMAT = "autotile recording"

_COLUMNS: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for kind, names in (
        ("u1", "outcome stage"),
        ("<u2", "registers blocks_per_sm"),
        ("<u4", "reason samples spill_store_bytes spill_load_bytes stack_bytes static_smem_bytes dynamic_smem_bytes"),
        ("<f4", "time_us low_us high_us occupancy seconds"),
    )
    for name in names.split()
}
"""Arrays with one value for each configuration. Outcome, stage and reason are indices into the header's lists. A time
of NaN means not measured, 0 registers not compiled. Single precision is far finer than the noise of any timing."""

_LABELS = ("outcome", "stage", "reason")


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """Metadata of a recording."""

    key: TuningKey
    """Key of the measurements, with the source ``"cuda"``."""
    parameters: tuple[Parameter, ...]
    """Parameters of the search space with their values, in its order."""
    device: DeviceProperties | None
    """None if an imported result names an unknown GPU."""
    driver: Name = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    valid_configs: Whole = 0
    """Number of valid configurations in the whole space; 0 if unknown."""
    chosen: Text = "all"
    """How the recorded configurations were chosen among the valid ones: ``"all"``, or a description."""
    created_at: Moment = field(default_factory=lambda: datetime.now(UTC))
    autotile_version: Name = __version__

    @property
    def problem(self) -> Problem:
        """Kernel, sizes and dtype."""
        return self.key.problem

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object, with the name and version of the format."""
        return {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            **{each.name: to_document(getattr(self, each.name)) for each in fields(self)},
            "parameters": [[parameter.name, list(parameter.values)] for parameter in self.parameters],
        }


class RecordingLabels(msgspec.Struct):
    """Values that the columns are indices into, by column."""

    outcome: tuple[Outcome, ...]
    stage: tuple[Name, ...]
    reason: tuple[Text, ...]


@dataclass(frozen=True)
class Recording:
    """A recorded search space; its length is the number of configurations."""

    header: RecordingHeader
    codes: np.ndarray
    """Indices into each parameter's values, shape (configurations, parameters), unsigned."""
    columns: Mapping[str, np.ndarray]
    """Arrays of shape (configurations,) by name: ``outcome``, ``time_us``, ``samples`` (their number) and so on."""
    labels: RecordingLabels

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def ok(self) -> np.ndarray:
        """Mask of the configurations that were verified and measured, shape (configurations,), bool."""
        ok_codes = [code for code, outcome in enumerate(self.labels.outcome) if outcome is Outcome.OK]
        return np.isin(self.columns["outcome"], ok_codes)

    def config(self, row: int) -> dict[str, Value]:
        """Return the configuration of a row."""
        pairs = zip(self.header.parameters, self.codes[row].tolist(), strict=True)
        return {parameter.name: parameter.values[code] for parameter, code in pairs}

    def row_of(self, config: Config) -> int | None:
        """Return the row of a configuration; None if it was not recorded."""
        codes = _codes_of(config, self._positions)
        return None if codes is None else self.rows.get(bytes(np.array(codes, self.codes.dtype)))

    def lookup(self, config: Config) -> Trial | None:
        """Return the trial of a configuration; None if it was not recorded."""
        row = self.row_of(config)
        return None if row is None else self.trial(row)

    def trial(self, row: int) -> Trial:
        """Return the trial in a row, as far as it is recorded: without its geometry, its samples and telemetry.

        Its ``seconds`` are those of all stages together, from compilation to the last sample, under ``all``.
        """
        values = {name: column[row].item() for name, column in self.columns.items()}
        measured, device = not np.isnan(values["time_us"]), self.header.device
        times = (values["time_us"], values["low_us"], values["high_us"])
        resources = Resources(**{name: values[name] for name in RESOURCE_COLUMNS}) if values["registers"] else None
        occupancy = None
        if device is not None and resources is not None:
            warps = round(values["occupancy"] * device.max_warps_per_sm)
            occupancy = Occupancy(values["blocks_per_sm"], warps, values["occupancy"], (), {})
        return Trial(
            config=self.config(row),
            outcome=self.labels.outcome[values["outcome"]],
            reason=self.labels.reason[values["reason"]],
            stage=self.labels.stage[values["stage"]],
            resources=resources,
            occupancy=occupancy,
            measurement=Measurement(*times, l2=self.header.key.l2_mode) if measured else None,
            seconds={"all": values["seconds"]},
        )

    _positions = cached_property(lambda self: _positions_of(self.header.parameters))
    rows = cached_property(lambda self: {code.tobytes(): row for row, code in enumerate(self.codes)})
    """Rows by the bytes of the configuration's codes."""


_Positions = Mapping[str, Mapping[tuple[type, Value], int]]
"""Index of each value, by parameter; the type is part of the key because True equals 1."""


def _positions_of(parameters: Sequence[Parameter]) -> _Positions:
    return {p.name: {(type(value), value): code for code, value in enumerate(p.values)} for p in parameters}


def _codes_of(config: Config, positions: _Positions) -> tuple[int, ...] | None:
    """Return the indices of a configuration's values in the parameters' order; None if it is not in the space."""
    if config.keys() != positions.keys():
        return None
    codes = tuple(codes.get((type(config[name]), config[name]), -1) for name, codes in positions.items())
    return None if -1 in codes else codes


def _code_dtype(parameters: Sequence[Parameter]) -> np.dtype[Any]:
    return np.min_scalar_type(max((len(parameter.values) - 1 for parameter in parameters), default=0)).newbyteorder("<")


def write_recording(path: Path, header: RecordingHeader, trials: Sequence[Trial], *, follow_link: bool = True) -> None:
    """Write trials as a recording, with `atomic_write`; only the last trial of each configuration is recorded.

    It is a `RecordingError` if a configuration is not in the header's search space, or the file cannot be written.
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
    text = encode_json({**header.to_json(), "labels": labels}).encode()
    code_table = np.array(sorted(newest), _code_dtype(header.parameters)).reshape(len(rows), len(header.parameters))
    columns = {name: np.array([row[name] for row in rows], dtype) for name, dtype in _COLUMNS.items()}
    arrays = {"header": np.frombuffer(text, np.uint8), "codes": code_table, **columns}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow_link=follow_link) as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
    except OSError as error:
        raise RecordingError(f"cannot write the recording {path}: {error.strerror}; name another path") from None


def read_recording(path: Path, *, kernel: str | None = None) -> Recording:
    """Read and validate a recording.

    It is a `RecordingError` if it is missing, damaged, of another format version, or not of the kernel that is named.
    """
    with _opened(path) as archive:
        header, labels = _read_header(path, archive)
        if kernel is not None and header.key.kernel != kernel:
            raise RecordingError(f"{path} is a recording of {header.key.kernel!r}, expected one of {kernel!r}")
        if {name.removesuffix(".npy") for name in archive.namelist()} != {"header", "codes", *_COLUMNS}:
            raise _damaged(path, "it contains other arrays than a recording")
        outcome = _read_array(path, archive, "outcome", _COLUMNS["outcome"])
        shape = (len(outcome), len(header.parameters))
        recording = Recording(
            header=header,
            codes=_read_array(path, archive, "codes", _code_dtype(header.parameters), shape),
            columns={name: _read_array(path, archive, name, dtype, outcome.shape) for name, dtype in _COLUMNS.items()},
            labels=labels,
        )
        if problem := _inconsistency(recording):
            raise _damaged(path, problem)
    return recording


def read_recording_header(path: Path) -> RecordingHeader:
    """Read the header of a recording only; errors as of `read_recording`."""
    with _opened(path) as archive:
        return _read_header(path, archive)[0]


def _row(trial: Trial) -> dict[str, Any]:
    measurement, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    times = ("time_us", "low_us", "high_us")
    return {
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": trial.reason,
        **{name: getattr(measurement, name) if measurement else np.nan for name in times},
        "samples": len(measurement.samples_us) if measurement else 0,
        **{name: getattr(resources, name) if resources else 0 for name in RESOURCE_COLUMNS},
        "dynamic_smem_bytes": trial.geometry.dynamic_smem_bytes if trial.geometry else 0,
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else 0,
        "occupancy": occupancy.occupancy if occupancy else 0.0,
        "seconds": sum(trial.seconds.values()),
    }


def _read_header(path: Path, archive: zipfile.ZipFile) -> tuple[RecordingHeader, RecordingLabels]:
    text = _read_array(path, archive, "header", np.dtype("u1")).tobytes()
    try:
        document = decode_json(text, dict[str, Any])
        if document.get("format") != _FORMAT:
            raise DataError(f"it is not the header of an {_FORMAT}")
        version = document.get("format_version")
        if version == FORMAT_VERSION:
            header = decode_json(text, RecordingHeader)
            for parameter in header.parameters:
                if len({(type(value), value) for value in parameter.values}) < max(1, len(parameter.values)):
                    raise DataError(f"{parameter.name!r:.80} has no values, or one twice", field="parameters")
            return header, convert(document.get("labels"), RecordingLabels)
    except DataError as error:
        raise _damaged(path, f"its header cannot be used ({error})") from None
    is_newer = isinstance(version, int) and version > FORMAT_VERSION
    cure = "pip install --upgrade autotile" if is_newer else "record it again"
    raise RecordingError(f"the recording {path} has format version {version!r:.40}, expected {FORMAT_VERSION}: {cure}")


def _inconsistency(recording: Recording) -> str:
    columns = recording.columns
    counts = [len(parameter.values) for parameter in recording.header.parameters]
    if (recording.codes >= np.array(counts)).any():
        return "a configuration has a value that its parameter lacks"
    if len(recording.rows) != len(recording):
        return "a configuration occurs twice"
    for name in _LABELS:
        if (columns[name] >= len(getattr(recording.labels, name))).any():
            return f"a configuration has an unknown {name}"
    measured = ~np.isnan(columns["time_us"])
    if not measured[recording.ok].all():
        return "a configuration that is ok has no time"
    for name, least in (("time_us", 1e-6), ("low_us", 0.0), ("high_us", 0.0), ("occupancy", 0.0), ("seconds", 0.0)):
        figures = columns[name][measured] if name.endswith("_us") else columns[name]
        if not ((figures >= np.float32(least)) & np.isfinite(figures)).all():
            return f"a configuration has a value of {name} that is negative or not finite"
    return ""


RecordingFile = tuple[Path, RecordingHeader | str]
"""Path of a recording, with its header, or why that cannot be read."""


def list_recordings(folders: Sequence[Path]) -> list[RecordingFile]:
    """Return the recordings in folders, ordered by folder and name; damaged ones are listed with their problem."""
    found: list[RecordingFile] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.npz"))):
        try:
            found.append((path, read_recording_header(path)))
        except RecordingError as error:
            found.append((path, str(error)))
    return found


def find_recording(folders: Sequence[Path], kernel: str, sizes: Mapping[str, int], dtype: str) -> Path | None:
    """Return the path of the newest recording of a problem; None if there is none."""
    wanted = Problem(kernel, dict(sizes), dtype)
    matching = [
        (header.created_at, number, path)
        for number, (path, header) in enumerate(list_recordings(folders))
        if not isinstance(header, str) and header.problem == wanted
    ]
    return max(matching)[-1] if matching else None


def recording_name(header: RecordingHeader) -> str:
    """Return the file name of a recording: ``sgemm-nvidia-h200-4096x4096x4096-float32.npz``."""
    words = [header.key.kernel, header.key.gpu_name, "x".join(map(str, header.key.sizes.values())), header.key.dtype]
    return file_name(*(word.lower() for word in words if word), suffix=".npz")
