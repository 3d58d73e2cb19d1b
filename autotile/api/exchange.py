"""Exchange of results: trials in the files of other tools, headers for C++, and bundles."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from autotile.api.targets import merge_sizes, open_problem, output_file, resolve_device
from autotile.core.argument_types import checked, checked_except
from autotile.core.model import Problem
from autotile.core.text import RIGHT, Facts, Part, Result, ResultTable, bytes_text, plural, sizes_text, source_text
from autotile.database.database import Database, StoredTrial, StudySummary, open_for_reading
from autotile.errors import InputError
from autotile.exchange.bundle import BundledKernel, Shipment, prepare_shipments, write_bundle
from autotile.exchange.cpp_header import namespace_of, write_shipped_header
from autotile.exchange.kernel_tuner import (
    import_into_database,
    import_into_recording,
    read_cache,
    write_cache,
    write_t4,
)
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.kernel.library import Kernel, KernelHolder, KernelName, held_kernel
from autotile.settings import read_settings, user_path
from autotile.version import __version__

TrialFormat = Literal["t4", "kernel-tuner", "optuna", "recording"]
ExportFormat = Literal["t4", "kernel-tuner", "optuna", "recording", "c-header"]
ImportFormat = Literal["kernel-tuner"]
KernelSelection = str | Path | KernelHolder | tuple[str | Path | KernelHolder, Mapping[str, int] | None]
"""Kernel by name or path; or with the sizes of one problem, where None stands for all problems."""

_OPTUNA_TABLE = "version_info"
"""Table of every Optuna storage."""


@dataclass(frozen=True, slots=True, repr=False)
class Transfer(Result):
    """Trials written to or read from a file.

    Attributes
    ----------
    action
        ``exported``, ``imported`` or ``recorded``.
    file
        Path of the file.
    file_format
        Format of the file.
    problem
        Problem that the trials belong to.
    device
        Name of their GPU, with ``(replayed)`` if the times are replayed.
    configurations
        Number of configurations.
    details
        Further facts by name: the number of the ``study`` in the database, the ``database`` or the ``recording``
        that an import went to.
    """

    action: str
    file: Path
    file_format: str
    problem: Problem
    device: str
    configurations: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def _headline(self) -> str:
        transferred = plural(self.configurations, "configuration")
        return f"{self.problem} on {self.device}: {transferred} {self.action}, {self.file} ({self.file_format})"

    def _parts(self) -> Iterator[Part]:
        transferred = f"{self.configurations:,} configurations of {self.problem} on {self.device}"
        facts: Facts = [(self.action, transferred), ("file", f"{self.file} ({self.file_format})")]
        yield [*facts, *((label.replace("_", " "), str(value)) for label, value in self.details.items())]

    def to_json(self) -> dict[str, Any]:
        """Return what was transferred, with the details."""
        return {
            "action": self.action,
            "file": str(self.file),
            "format": self.file_format,
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device,
            "configurations": self.configurations,
            **self.details,
        }


@dataclass(frozen=True, slots=True, repr=False)
class ExportedHeader(Result):
    """A kernel that was exported for C++.

    Attributes
    ----------
    header
        Path of the header.
    namespace
        Namespace of its functions.
    cubins
        Names of the cubin files beside the header.
    problems
        Number of tuned problems in the header.
    notices
        Architectures and configurations that were left out and why, one line each.
    """

    header: Path
    namespace: str
    cubins: tuple[str, ...]
    problems: int
    notices: tuple[str, ...] = ()

    def _headline(self) -> str:
        held = f"{plural(self.problems, 'tuned problem')}, {plural(len(self.cubins), 'cubin')}"
        return f"{self.namespace}: {held}, {self.header}"

    def _parts(self) -> Iterator[Part]:
        held = f"{plural(self.problems, 'tuned problem')}, {plural(len(self.cubins), 'cubin')} beside the header"
        yield [("exported", held), ("header", str(self.header)), ("namespace", self.namespace)]
        yield from self.notices

    def to_json(self) -> dict[str, Any]:
        """Return the header and what it holds."""
        return {
            "action": "exported",
            "format": "c-header",
            "file": str(self.header),
            "namespace": self.namespace,
            "cubins": list(self.cubins),
            "problems": self.problems,
            "notices": list(self.notices),
        }


class BundleEntry(NamedTuple):
    """Content of a bundle for one kernel.

    Attributes
    ----------
    kernel
        Name of the kernel.
    problems
        Number of tuned problems.
    cubins
        Number of compiled configurations; one that is compiled for two architectures counts twice.
    architectures
        Architectures that they are compiled for.
    """

    kernel: str
    problems: int
    cubins: int
    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class WrittenBundle(Result):
    """A bundle that was written.

    Attributes
    ----------
    file
        Path of the bundle.
    digest
        SHA-256 of its content.
    size_bytes
        Size of the file, in bytes.
    kernels
        Kernels in the bundle.
    notices
        Architectures and configurations that were left out and why, one line each.
    """

    file: Path
    digest: str
    size_bytes: int
    kernels: tuple[BundleEntry, ...]
    notices: tuple[str, ...] = ()

    def _headline(self) -> str:
        return f"{self.file} ({bytes_text(self.size_bytes)}): {', '.join(entry.kernel for entry in self.kernels)}"

    def _parts(self) -> Iterator[Part]:
        """Yield the file, then one line for each kernel."""
        yield [("bundle", f"{self.file} ({bytes_text(self.size_bytes)})"), ("digest", self.digest)]
        rows = [
            (entry.kernel, f"{entry.problems:,}", f"{entry.cubins:,}", " ".join(entry.architectures))
            for entry in self.kernels
        ]
        headings = ("kernel", f"{RIGHT}problems", f"{RIGHT}cubins", "architectures")
        yield ResultTable(headings, rows, is_wrapped=True)
        yield from self.notices

    def to_json(self) -> dict[str, Any]:
        """Return the file and what it holds."""
        return {
            "file": str(self.file),
            "digest": self.digest,
            "bytes": self.size_bytes,
            "kernels": [{**entry._asdict(), "architectures": list(entry.architectures)} for entry in self.kernels],
            "notices": list(self.notices),
        }


@checked
def export(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path,
    format: ExportFormat = "t4",
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    **named_sizes: int,
) -> Transfer | ExportedHeader:
    """Write the trials of a tuned problem to a file, or a tuned kernel for C++.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file.
    sizes, **named_sizes
        Problem sizes and flags. A C++ header holds all tuned problems of the kernel if none are given.
    output
        File to write.
    format
        ``"t4"``, the JSON of the auto-tuning community; ``"kernel-tuner"``, a cache file of Kernel Tuner; ``"optuna"``,
        an SQLite file for optuna-dashboard; ``"recording"``, an npz file for replay; or ``"c-header"``, a C++ header
        that chooses a configuration from the sizes and launches it, with its cubins beside it.
    architectures
        Architectures to compile for, such as ``sm_90``; only for ``"c-header"``. Empty for those of the GPUs that the
        kernel is tuned on.
    dtype
        Element type; None for the kernel's first.
    device
        CUDA index or name of the GPU whose results are exported; None for the newest results of any GPU. A C++ header
        holds the results of all GPUs.
    database
        Path or URL of the tuning database; None for the user's own.

    Raises
    ------
    InputError
        The problem is not tuned, an argument does not apply to the format, or a file cannot be written.
    ToolchainError
        A header needs NVRTC, which is missing.
    """
    given = merge_sizes(sizes, named_sizes)
    if format not in get_args(ExportFormat):
        raise InputError(f"there is no format {format!r}; expected one of {', '.join(get_args(ExportFormat))}")
    path = output_file(output)
    if format == "c-header":
        if device is not None:
            raise InputError("--device is not for --format c-header: a header holds the results of all GPUs")
        return _export_header((_name(kernel), given or None), path, architectures, dtype, database)
    if architectures:
        raise InputError("--arch is for --format c-header; the other formats hold no compiled code")
    loaded, problem = open_problem(kernel, given, dtype)
    found = _read_trials(loaded, problem, path, device, database)
    _WRITERS[format](found)
    gpu = source_text(found.study.key.gpu_name, found.study.key.source)
    return Transfer("exported", found.path, format, problem, gpu, len(found.trials), {"study": found.study.study_id})


@checked
def import_(
    file: str | Path,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path | None = None,
    format: ImportFormat = "kernel-tuner",
    dtype: str = "float32",
    database: str | Path | None = None,
    **named_sizes: int,
) -> Transfer:
    """Read the results of another tool into the database, or into a recording.

    They can be listed and compared, but are never served: the file does not identify the source code that they belong
    to.

    Parameters
    ----------
    file
        Cache file of Kernel Tuner.
    sizes, **named_sizes
        Problem sizes by name; without any, the sizes in the file are named x, y and z.
    output
        Recording to write; None to add the results to the database.
    format
        Tool that wrote the file.
    dtype
        Element type of the problem.
    database
        Path or URL of the tuning database; None for the user's own.

    Raises
    ------
    InputError
        The file cannot be read, or the database or the recording cannot be written.
    """
    if format not in get_args(ImportFormat):
        raise InputError(f"there is no format {format!r}; expected {', '.join(get_args(ImportFormat))}")
    path = user_path(file, "a cache file")
    cache = read_cache(path)
    key = cache.key(merge_sizes(sizes, named_sizes) or None, dtype)
    details: dict[str, object]
    if output is not None:
        import_into_recording(output_file(output), cache, key)
        details = {"recording": str(output)}
    else:
        with Database.open(database if database is not None else read_settings().database) as opened:
            details = {"study": import_into_database(opened, cache, key), "database": opened.location}
            details |= {"note": "; ".join(opened.notices)} if opened.notices else {}
    return Transfer("imported", path, format, key.problem, key.gpu_name, len(cache.trials), details)


@checked_except("kernels")
def bundle(
    kernels: str | Path | KernelHolder | Sequence[KernelSelection],
    *,
    output: str | Path,
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    database: str | Path | None = None,
) -> WrittenBundle:
    """Pack tuned kernels into one file that serves them without a compiler and without a database.

    The file holds the search-space files, the results, and cubins of the winners and of the defaults.

    Parameters
    ----------
    kernels
        A kernel or several, each by name, by the path of its search-space file, or as a pair of that and the sizes of
        one tuned problem.
    output
        File to write.
    architectures
        Architectures to compile for, such as ``sm_90``; empty for those of the GPUs that a kernel is tuned on.
    dtype
        Element type of the results to pack; None for all.
    database
        Path or URL of the tuning database; None for the user's own.

    Raises
    ------
    InputError
        A kernel, size or architecture is unknown, a problem is not tuned, no configuration compiles, two kernels have
        the same name, or the file cannot be written.
    ToolchainError
        NVRTC is missing.

    Examples
    --------
    >>> bundle(["sgemm_2d", ("matmul_tiled", {"M": 64, "N": 64, "K": 64})], output="app.autotile")  # doctest: +SKIP
    <WrittenBundle: app.autotile (1.2 MiB): sgemm_2d, matmul_tiled>
    """
    file = output_file(output)
    entries: Sequence[Any] = kernels if isinstance(kernels, Sequence) and not isinstance(kernels, str) else [kernels]
    shipments = _prepare([_selection(entry) for entry in entries], architectures, dtype, database)
    packed = [shipment.bundled for shipment in shipments]
    images = {member: image for shipment in shipments for member, image in shipment.images.items()}
    names = [entry.kernel.name for entry in packed]
    if len(set(names)) < len(names):
        raise InputError(f"a bundle holds a kernel once, and two of {', '.join(names)} have the same name; make two")
    digest = write_bundle(file, packed, images, __version__)
    notices = tuple(notice for shipment in shipments for notice in shipment.notices)
    return WrittenBundle(file, digest, file.stat().st_size, tuple(map(_entry, packed)), notices)


def _name(kernel: KernelName) -> KernelName:
    return kernel if held_kernel(kernel) else str(kernel)


def _selection(entry: KernelSelection) -> tuple[KernelName, Mapping[str, int] | None]:
    match entry:
        case str() | Path() | KernelHolder():
            return _name(entry), None
        case (str() | Path() | KernelHolder() as kernel, sizes):
            return _name(kernel), dict(sizes) if sizes else None
    raise InputError(f"{entry!r} is no kernel; expected a name, a path, or a pair of that and sizes")


def _prepare(
    selections: Sequence[tuple[KernelName, Mapping[str, int] | None]],
    architectures: Sequence[str],
    dtype: str | None,
    database: str | Path | None,
) -> list[Shipment]:
    if not selections:
        raise InputError("no kernel is named; expected at least one")
    opened = open_for_reading(str(database) if database is not None else None)
    with opened if opened is not None else nullcontext():
        return prepare_shipments(selections, architectures, opened, dtype=dtype)


def _entry(packed: BundledKernel) -> BundleEntry:
    targets = tuple(dict.fromkeys(cubin.target for cubin in packed.cubins))
    return BundleEntry(packed.kernel.name, len(packed.winners), len(packed.cubins), targets)


def _export_header(
    selection: tuple[KernelName, Mapping[str, int] | None],
    output: Path,
    architectures: Sequence[str],
    dtype: str | None,
    database: str | Path | None,
) -> ExportedHeader:
    (shipment,) = _prepare([selection], architectures, dtype, database)
    spec = shipment.bundled.kernel.spec
    element_type = dtype or spec.dtypes[0]
    cubins = write_shipped_header(shipment, element_type, output)
    problems = sum(winner.key.dtype == element_type for winner in shipment.bundled.winners)
    namespace = f"autotile::{namespace_of(spec, element_type)}"
    return ExportedHeader(output, namespace, cubins, problems, shipment.notices)


@dataclass(frozen=True, slots=True)
class _Export:
    """Arguments of a writer of trials."""

    path: Path
    kernel: Kernel
    study: StudySummary
    trials: Sequence[StoredTrial]


def _read_trials(
    kernel: Kernel, problem: Problem, path: Path, device: int | str | None, database: str | Path | None
) -> _Export:
    opened = open_for_reading(str(database) if database is not None else None)
    if opened is None:
        raise InputError("nothing is tuned yet, so nothing can be exported; run `autotile tune` first")
    with opened:
        gpu_name = resolve_device(device).device.name if device is not None else None
        study = _newest_study(opened.studies(problem.kernel), problem, gpu_name)
        names = {parameter.name for parameter in kernel.spec.parameters}
        trials = [one for one in opened.standing_trials(study.study_id) if one.trial.config.keys() == names]
        return _Export(path, kernel, study, trials)


def _newest_study(studies: Sequence[StudySummary], problem: Problem, gpu_name: str | None) -> StudySummary:
    matching = [
        study
        for study in studies
        if study.trials
        and dict(study.key.sizes) == dict(problem.sizes)
        and study.key.dtype == problem.dtype
        and gpu_name in (None, study.key.gpu_name)
    ]
    if matching:
        return max(matching, key=lambda study: (study.last_at is not None, study.last_at, study.study_id))
    tuned = dict.fromkeys(f"{sizes_text(study.key.sizes)} on {study.key.gpu_name}" for study in studies)
    known = f"tuned are: {'; '.join(tuned)}" if tuned else f"nothing is tuned of {problem.kernel}"
    raise InputError(f"{problem} was not tuned{f' on {gpu_name}' if gpu_name else ''}; {known}")


def _write_optuna(export: _Export) -> None:
    from autotile.search.search import study_of_trials, study_to_storage

    _check_optuna_file(export.path)
    trials = [stored.trial for stored in export.trials]
    name = f"{export.study.key.problem} on {export.study.key.gpu_name}"
    study_to_storage(study_of_trials(export.kernel.spec.parameters, trials, name), export.path)


def _check_optuna_file(path: Path) -> None:
    """Raise if a file is the SQLite database of another program, to which Optuna would add its tables."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return  # no database, which Optuna reports
    if tables and _OPTUNA_TABLE not in tables:
        raise InputError(f"{path} is a database of something else than Optuna's studies; name another file")


def _write_recording(export: _Export) -> None:
    if export.study.key.source == "replayed":
        raise InputError("these results were replayed from a recording already; expected ones that a GPU measured")
    trials = [stored.trial for stored in export.trials if stored.trial.outcome.is_finding]
    header = RecordingHeader(
        key=export.study.key,
        parameters=export.kernel.spec.parameters,
        device=export.study.device,
        settings={"exported_from": "the tuning database"},
        chosen="those that a search tried",
    )
    write_recording(export.path, header, trials)


_WRITERS: Mapping[TrialFormat, Callable[[_Export], object]] = {
    "t4": lambda e: write_t4(e.path, e.trials, e.study.device),
    "kernel-tuner": lambda e: write_cache(e.path, e.study.key, e.kernel.spec.parameters, e.trials),
    "optuna": _write_optuna,
    "recording": _write_recording,
}
