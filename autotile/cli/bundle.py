"""``autotile bundle``: kernels for machines without compiler and database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.application import examples
from autotile.cli.arguments import ArchitectureOption, DatabaseOption, DtypeOption, JsonOption
from autotile.cli.completion import complete_kernel
from autotile.cli.output import show_report


def bundle(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL [SIZE=N]...",
            help="Kernels by name or path, each with the sizes of one problem or with all that are tuned.",
            autocompletion=complete_kernel,
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.autotile", help="File to write.", show_default=False)
    ],
    architectures: ArchitectureOption = None,
    dtype: DtypeOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pack tuned kernels into one file that serves them anywhere.

    It holds the search-space files, what was tuned, and cubins of the winners and the defaults, each with its SHA-256.
    `get_best_kernel(..., bundle=FILE)` serves from it with neither compiler nor database.
    """
    from autotile.ops.bundling import make_bundle, read_wanted

    wanted = read_wanted(kernels)
    report = make_bundle(wanted, output, architectures=architectures or (), dtype=dtype, database=database)
    show_report(report, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile bundle sgemm_2d matmul_tiled -o app.autotile",
            "autotile bundle sgemm_2d M=4096 N=4096 K=4096 -o app.autotile --arch sm_90 --arch sm_80",
        )
    )(bundle)
