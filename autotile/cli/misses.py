"""``autotile misses``: problems that programs were served by a fallback."""

from __future__ import annotations

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument
from autotile.cli.output import examples, show


def misses(
    kernel: OptionalKernelArgument = None,
    *,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List problems that could not be served exactly.

    Lists those of one kernel if it is named, else of all: the number of calls and, if enough is tuned to estimate it,
    the time that they may have cost. `autotile tune-misses` tunes them, the costliest first.
    """
    from autotile.api import results

    show(results.misses(kernel, database=database), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile misses", "autotile misses sgemm_2d --json"))(misses)
