"""``autotile import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotile.cli.arguments import DatabaseOption, DtypeOption, JsonOption
from autotile.cli.output import examples, show


def import_(
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
    output: Annotated[
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
    from autotile.api import exchange
    from autotile.cli.assignments import read_sizes

    given = read_sizes(sizes or [])
    result = exchange.import_(
        file, given, output=output, format=file_format, dtype=dtype or "float32", database=database
    )
    show(result, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "import",
        epilog=examples(
            "autotile import cache.json M=4096 N=4096 K=4096",
            "autotile import cache.json N=1048576 -o vector_add.npz",
        ),
    )(import_)
