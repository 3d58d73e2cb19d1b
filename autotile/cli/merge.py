"""``autotile merge``: several databases copied into one."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show


def merge(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DATABASE...", help="SQLite files or postgresql:// URLs.", show_default=False),
    ],
    *,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH|URL",
            help="Database to merge into; created if it does not exist, and what it holds is kept.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy everything that some databases hold into one.

    No trial is lost or duplicated. Where databases name different winners, the faster is served from then on if the
    intervals of their times tell them apart; otherwise that of the newest session is.
    """
    from autotile.api import databases

    show(databases.merge(sources, output), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile merge node1.db node2.db -o team.db"))(merge)
