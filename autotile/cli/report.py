"""``autotile report``: pages and comparisons of stored results."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import JsonOption
from autotile.cli.comparing import FailIfSlowerOption, are_databases, report_comparison
from autotile.cli.output import examples
from autotile.errors import InputError


def report(
    words: Annotated[
        list[str], typer.Argument(metavar="A.db B.db", help="Two databases: paths or URLs.", show_default=False)
    ],
    *,
    fail_if_slower: FailIfSlowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two databases: what got slower from the first to the second, and by how much.

    They are of two machines, two versions of a kernel or two compilers. The intervals hold at 95 % for all problems
    together.
    """
    if not are_databases(words):
        raise InputError("expected two databases, such as before.db after.db")
    report_comparison(words[0], words[1], fail_if_slower=fail_if_slower, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile report before.db after.db", "autotile report before.db after.db --fail-if-slower 5% --json"
        )
    )(report)
