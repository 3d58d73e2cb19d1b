"""``autotile new``: a small kernel to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show
from autotile.cli.tables import facts

if TYPE_CHECKING:
    from autotile.api.new_kernel import NewKernel


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the kernel.", show_default=False)],
    folder: Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Folder of the files.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a small kernel, its search-space file and a test, which tune as they are.

    The files are NAME.cu, NAME.toml and test_NAME.py. Nothing is overwritten.
    """
    from autotile.api import new_kernel

    show(new_kernel.new(name, folder), new_table, new_document, as_json=as_json)


def new_table(made: NewKernel) -> RenderableType:
    """Render the files, and the commands to go on with."""
    return facts(
        [
            ("source", str(made.source)),
            ("search space", str(made.space)),
            ("test", f"{made.test}, for pytest"),
            ("tune it", f"autotile tune {made.space} N=16777216"),
        ]
    )


def new_document(made: NewKernel) -> dict[str, Any]:
    """Return the paths for JSON."""
    return {"name": made.name, "source": str(made.source), "space": str(made.space), "test": str(made.test)}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile new saxpy", "autotile new saxpy --in kernels"))(new)
