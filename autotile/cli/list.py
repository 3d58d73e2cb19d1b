"""``autotile list``: studies, families, recordings, or what could not be served exactly."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument
from autotile.cli.output import examples, show
from autotile.core.text import Result
from autotile.errors import InputError


def list_results(
    kernel: OptionalKernelArgument = None,
    *,
    misses: Annotated[
        bool, typer.Option("--misses", help="List what programs asked for and could not be served exactly instead.")
    ] = False,
    families: Annotated[
        bool, typer.Option("--families", help="List the families that were tuned, each with its rule, instead.")
    ] = False,
    recordings: Annotated[
        bool, typer.Option("--recordings", help="List the recordings that can be replayed instead.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tuned problems, each with its best configuration.

    Lists those of one kernel if it is named, else of all. Of misses: the number of calls and, if enough is tuned to
    estimate it, the time that they may have cost; `autotile tune --misses` tunes them, the costliest first.
    """
    from autotile.api import results

    if misses + families + recordings > 1:
        raise InputError("--misses, --families and --recordings are lists of their own; give one of them")
    found: Result
    if misses:
        found = results.misses(kernel, database=database)
    elif families:
        found = results.families(kernel, database=database)
    else:
        found = results.recordings(kernel) if recordings else results.list(kernel, database=database)
    show(found, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "list",
        epilog=examples(
            "autotile list",
            "autotile list sgemm_2d --json",
            "autotile list --misses",
            "autotile list --families",
            "autotile list --recordings",
        ),
    )(list_results)
