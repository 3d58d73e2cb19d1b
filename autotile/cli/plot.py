"""``autotile plot``: the best so far and the times by parameter, in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, DtypeOption, JsonOption, KernelArgument, SelectedSizesArgument
from autotile.cli.output import console, examples, notice, show
from autotile.core.text import plural

if TYPE_CHECKING:
    from autotile.api.plotting import Plots

_PIPE_WIDTH = 80
"""Columns where standard output is no terminal."""


def plot(
    kernel: KernelArgument,
    sizes: SelectedSizesArgument = None,
    *,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Parameter to draw. May be given again.", show_default="the three that matter most"
        ),
    ] = None,
    over: Annotated[Literal["trials", "seconds"], typer.Option(help="Horizontal axis of the best so far.")] = "trials",
    dtype: DtypeOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the best so far and the times by parameter in the terminal.

    Works for everything that is stored: a session that runs, one that has ended, replayed or merged ones.
    """
    from autotile.api import plotting
    from autotile.cli.assignments import read_sizes

    found = plotting.plot(
        kernel,
        read_sizes(sizes or []),
        parameters=parameter or (),
        over=over,
        dtype=dtype,
        database=database,
    )
    show(found, plots_text, plots_document, as_json=as_json)
    if found.others:
        notice(f"{plural(found.others, 'further study', 'further studies')}; name sizes to see them")


def plots_text(found: Plots) -> RenderableType:
    """Render the plots in the width of the terminal, or in 80 columns."""
    width = console(sys.stdout).width if sys.stdout.isatty() else _PIPE_WIDTH
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    return Text(found.text(width, ascii_only=ascii_only), no_wrap=True)


def plots_document(found: Plots) -> list[dict[str, Any]]:
    """Return the numbers behind the plots for JSON."""
    return [plot.to_json() for plot in found.plots]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile plot sgemm_2d M=4096 N=4096 K=4096",
            "autotile plot sgemm_2d --over seconds --parameter BM --parameter BN",
        )
    )(plot)
