"""``autotile record``, ``export`` and ``import``: results as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from autotile.cli.application import CommandInterruptedError, examples
from autotile.cli.arguments import (
    LARGEST_SEED,
    ArchitectureOption,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SizesArgument,
)
from autotile.cli.completion import complete_device
from autotile.cli.output import console, show_report
from autotile.core.text import plural
from autotile.errors import InputError


def record(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.npz",
            help="File or folder to write to.",
            show_default="the current folder, under a name that says what it holds",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Record so many configurations at random.", show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Seed of the random sample.")] = 0,
    dtype: DtypeOption = None,
    l2: Annotated[
        Literal["cold", "hot"], typer.Option(help="Whether inputs start in memory or in the L2 cache.")
    ] = "cold",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compile processes.", show_default="one a core")
    ] = None,
    device: Annotated[int, typer.Option(metavar="INDEX", min=0, help="CUDA device to measure on.")] = 0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a whole search space on a GPU, for replay without one.

    The same command goes on where an interrupted one stopped.
    """
    from autotile.api.targets import open_problem
    from autotile.cli.assignments import read_sizes
    from autotile.kernel.workrate import Workrate
    from autotile.ops.tuning import record_problem
    from autotile.report.progress import TuneProgress
    from autotile.report.transfer import TransferReport
    from autotile.tuning.options import TuneOptions

    options = TuneOptions(seed=seed, l2=l2, workers=workers, device_index=device, database=database)
    loaded, problem = open_problem(kernel, read_sizes(sizes or []), dtype)
    with TuneProgress(console(sys.stderr), problem, Workrate.of(loaded.spec, problem)) as progress:
        recorded = record_problem(loaded, problem, options, sample=sample, output=output, observe=progress)
    if recorded.path is None:
        measured = plural(recorded.configurations, "configuration")
        raise CommandInterruptedError(f"interrupted: {measured} measured; the same command goes on from there")
    gpu = recorded.header.key.gpu_name
    more = {"valid": recorded.header.valid_configs, "seconds": round(recorded.seconds, 3)}
    report = TransferReport("recorded", str(recorded.path), "recording", problem, gpu, recorded.configurations, more)
    show_report(report, as_json=as_json)


def export_results(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.", show_default=False)],
    file_format: Annotated[
        Literal["t4", "kernel-tuner", "optuna", "recording", "c-header"],
        typer.Option(
            "--format",
            help="t4: the auto-tuning community's JSON; kernel-tuner: a cache file of Kernel Tuner; "
            "optuna: an SQLite file for optuna-dashboard; recording: an .npz file for --replay; "
            "c-header: a C++ header that chooses and launches, with cubins beside it.",
        ),
    ] = "t4",
    architectures: ArchitectureOption = None,
    dtype: DtypeOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only results of this GPU.",
            show_default="the newest of any GPU",
            autocompletion=complete_device,
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a problem's trials to a file, or a kernel for C++.

    A C++ header holds all problems that are tuned of the kernel where no sizes are given.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.ops.exchange import export_study

    given = read_sizes(sizes or [])
    if file_format == "c-header":
        from autotile.ops.cpp_export import export_header

        targets = architectures or ()
        header = export_header(kernel, given, output, architectures=targets, dtype=dtype, database=database)
        show_report(header, as_json=as_json)
        return
    if architectures:
        raise InputError("--arch is for --format c-header; the other formats hold no compiled code")
    report = export_study(kernel, given, output, file_format, dtype=dtype, device=device, database=database)
    show_report(report, as_json=as_json)


def import_results(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Cache file of Kernel Tuner.", show_default=False)],
    sizes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SIZE=N", help="Problem sizes by name.", show_default="those of the file, named x, y, z"
        ),
    ] = None,
    *,
    file_format: Annotated[
        Literal["kernel-tuner"], typer.Option("--format", help="What wrote the file.")
    ] = "kernel-tuner",
    dtype: DtypeOption = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE.npz", help="Write a recording for --replay.", show_default="the database"
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read results of another tool.

    They go into the database, or into a recording. They can be listed and compared, but are never served: the file does
    not say which source they are of.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.ops.exchange import import_kernel_tuner

    given = read_sizes(sizes or [])
    report = import_kernel_tuner(file, given, dtype=dtype or "float32", recording=recording, database=database)
    show_report(report, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "autotile record matmul_tiled M=4096 N=4096 K=4096",
            "autotile record sgemm_2d M=4096 N=4096 K=4096 --sample 4000 -o sgemm_2d.npz",
        )
    )(record)
    app.command(
        "export",
        epilog=examples(
            "autotile export sgemm_2d M=4096 N=4096 K=4096 -o results.json",
            "autotile export sgemm_2d M=4096 N=4096 K=4096 --format optuna -o study.db",
            "autotile export sgemm_2d --format c-header -o include/sgemm_2d.hpp --arch sm_90",
        ),
    )(export_results)
    app.command(
        "import",
        epilog=examples(
            "autotile import cache.json M=4096 N=4096 K=4096",
            "autotile import cache.json N=1048576 -o vector_add.npz",
        ),
    )(import_results)
