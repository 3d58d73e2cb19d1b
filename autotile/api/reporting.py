"""Reports: self-contained pages of what a database or a recording holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotile.api.targets import merge_sizes, named_operation, output_file
from autotile.core.argument_types import checked
from autotile.core.text import Part, Result, bytes_text, plural
from autotile.database.database import location_text, open_for_reading
from autotile.errors import InputError
from autotile.exchange.recording import read_recording
from autotile.kernel.library import KernelName, is_path, load_kernel
from autotile.report.page import write_page
from autotile.report.report_data import ReportData, read_operation_report, read_report, report_of_study
from autotile.report.sections import report_page
from autotile.report.study import study_of_recording
from autotile.settings import user_path


@dataclass(frozen=True, slots=True, repr=False)
class WrittenReport(Result):
    """A report that was written.

    Attributes
    ----------
    path
        File.
    title
        Its heading.
    studies, trials
        Number of tuned problems and of trials in it.
    size_bytes
        Size of the file.
    """

    path: Path
    title: str
    studies: int
    trials: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``autotile report --json`` prints."""
        counts = {"studies": self.studies, "trials": self.trials, "size_bytes": self.size_bytes}
        return {"path": str(self.path), "title": self.title, **counts}

    def _headline(self) -> str:
        return f"{self.path}: {self.summary}"

    @property
    def summary(self) -> str:
        """Content of the page, and its size."""
        studies = plural(self.studies, "tuned problem")
        return f"{studies}, {plural(self.trials, 'trial')}, {bytes_text(self.size_bytes)}"

    def _parts(self) -> Iterator[Part]:
        yield [("page", str(self.path)), ("title", self.title), ("shows", self.summary)]


@checked
def report(
    kernel: KernelName | None = None,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path = "report.html",
    dtype: str | None = None,
    device: str | None = None,
    database: str | Path | None = None,
    **named_sizes: int,
) -> WrittenReport:
    """Write a page of what is stored of a kernel, an operation, or of all kernels: one file that opens offline.

    Plotly draws its charts (``pip install 'autotile[report]'``).

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; name of an operation; path of
        a recording (``.npz``); None for all kernels.
    sizes, **named_sizes
        Problem sizes of the studies to show; sizes that are not given are not compared.
    output
        File to write, or folder to write ``report.html`` into.
    dtype
        Element type of the studies to show; None for all.
    device
        Name of the GPU of the studies to show; None for all.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        There is no such kernel, size or recording, nothing is stored of it, the database cannot be read, or the file
        cannot be written.
    ToolchainError
        Plotly is not installed.

    Examples
    --------
    >>> report("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    <WrittenReport: report.html: 1 tuned problem, 200 trials, 5.14 MiB>
    """
    given = merge_sizes(sizes, named_sizes)
    path = report_file(output)
    data = _recorded(kernel) if is_recording(kernel) else _stored(kernel, given, dtype, device, database)
    text = report_page(data)
    write_page(text, path)
    trials = sum(len(study.newest) for study in data.studies)
    return WrittenReport(path, data.title, len(data.studies), trials, path.stat().st_size)


def report_file(output: str | Path) -> Path:
    """Return the file that a report is written to: in a folder it is ``report.html``."""
    path = user_path(output, "a report")
    return path / "report.html" if path.is_dir() else output_file(output)


def is_recording(kernel: KernelName | None) -> bool:
    """Return whether a report is of a recording, named by its path."""
    return isinstance(kernel, str | Path) and str(kernel).endswith(".npz")


def _recorded(kernel: KernelName | None) -> ReportData:
    path = user_path(str(kernel), "a recording")
    if not path.is_file():
        raise InputError(f"there is no recording {path}; see `autotile list --recordings`")
    return report_of_study(study_of_recording(read_recording(path), str(path)))


def _stored(
    kernel: KernelName | None,
    sizes: Mapping[str, int],
    dtype: str | None,
    device: str | None,
    database: str | Path | None,
) -> ReportData:
    operation = named_operation(kernel) if kernel is not None else None
    opened = open_for_reading(database)
    if opened is None:
        if kernel is not None and operation is None:
            load_kernel(kernel)  # a misspelt name is an error of its own
        asked = f"autotile tune {kernel or 'KERNEL'}"
        raise InputError(f"there is no database {location_text(database)} yet; run `{asked}` first")
    with opened:
        if operation is not None:
            found = read_operation_report(opened, operation, sizes, dtype=dtype, gpu_name=device)
        else:
            found = read_report(opened, kernel, sizes, dtype=dtype, gpu_name=device)
    return replace(found, path=str(kernel)) if isinstance(kernel, str | Path) and is_path(str(kernel)) else found
