"""``autotile export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotile.cli.arguments import (
    ArchitectureOption,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SizesArgument,
    complete_device,
)
from autotile.cli.output import examples, notice, print_json, print_line, show
from autotile.errors import InputError


def export(
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
            metavar="NAME|INDEX",
            help="Only results of this GPU: a profile of `autotile devices`, or the index of a GPU of this machine.",
            show_default="the newest of any GPU",
            autocompletion=complete_device,
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a problem's trials to a file, or a kernel for C++.

    A C++ header holds all problems that are tuned of the kernel where no sizes are given. Of an operation, such as
    matmul, the models of time that `autotile tune matmul --family` has learned are written, to a folder.
    """
    from autotile.cli.tune import is_operation

    if is_operation(kernel):
        if sizes or architectures or device is not None or file_format != "t4":
            raise InputError(f"{kernel} is an operation, of which models are exported: give no sizes, format or device")
        _export_models(kernel, output, dtype, database, as_json=as_json)
        return
    from autotile.api import exchange
    from autotile.api.targets import open_problem, sizes_notice
    from autotile.cli.assignments import read_sizes

    given = read_sizes(sizes or [])
    if file_format != "c-header" or given:
        loaded, problem = open_problem(kernel, given, dtype)
        notice(sizes_notice(loaded.spec, problem.sizes, given))
    result = exchange.export(
        kernel,
        given,
        output=output,
        format=file_format,
        architectures=architectures or (),
        dtype=dtype,
        device=device,
        database=database,
    )
    if isinstance(result, exchange.ExportedHeader):
        show(result, as_json=as_json)
    else:
        show(result, as_json=as_json)


def _export_models(operation: str, folder: Path, dtype: str | None, database: str | None, *, as_json: bool) -> None:
    from autotile.api.operation_tuning import export_models
    from autotile.kernel.operation import load_operation

    files = export_models(load_operation(operation), folder, dtype=dtype, database=database)
    if as_json:
        print_json({"action": "exported", "format": "model", "files": [str(file) for file in files]})
    else:
        print_line("\n".join(f"exported {file}" for file in files))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile export sgemm_2d M=4096 N=4096 K=4096 -o results.json",
            "autotile export sgemm_2d M=4096 N=4096 K=4096 --format optuna -o study.db",
            "autotile export matmul -o tuned/models",
            "autotile export sgemm_2d --format c-header -o include/sgemm_2d.hpp --arch sm_90",
        ),
    )(export)
