"""``autotile diff``: comparison of the winners of two databases."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show

_PLACE = "Database: an SQLite file or a postgresql:// URL; or a file of winners (.json)."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_PLACE, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare the best configurations in two databases.

    Shows the problems that only one of them has, those for which their configurations differ, and whether the intervals
    of the times tell which is faster.
    """
    from autotile.api import databases

    show(databases.diff(a, b), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile diff mine.db team.db", "autotile diff before.json after.json --json"))(diff)
