"""``autotile new``: a small kernel to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the kernel.", show_default=False)],
    folder: Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Folder of the files.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a small kernel, its search-space file and a test, which tune as they are.

    The files are NAME.cu, NAME.toml and test_NAME.py. Nothing is overwritten.
    """
    from autotile.api import new_kernel

    show(new_kernel.new(name, folder), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile new saxpy", "autotile new saxpy --in kernels"))(new)
