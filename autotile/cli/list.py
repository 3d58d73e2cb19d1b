"""``autotile list``: studies, families or recordings."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument
from autotile.cli.output import examples, show
from autotile.errors import InputError

_IN_FORCE = {True: "yes", False: "no: the kernel has changed since", None: "not known: no kernel of that name is found"}


def list_results(
    kernel: OptionalKernelArgument = None,
    *,
    recordings: Annotated[
        bool, typer.Option("--recordings", help="List the recordings that can be replayed instead.")
    ] = False,
    families: Annotated[
        bool, typer.Option("--families", help="List the families that were tuned, each with its rule, instead.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tuned problems, each with its best configuration.

    Lists those of one kernel if it is named, else of all.
    """
    from autotile.api import results

    if recordings and families:
        raise InputError("--recordings and --families are two lists; give one of them")
    if families:
        show(results.families(kernel, database=database), as_json=as_json)
    elif recordings:
        show(results.recordings(kernel), as_json=as_json)
    else:
        show(results.list(kernel, database=database), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "list",
        epilog=examples(
            "autotile list",
            "autotile list sgemm_2d --json",
            "autotile list --families",
            "autotile list --recordings",
        ),
    )(list_results)
