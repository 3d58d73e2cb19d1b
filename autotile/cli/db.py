"""``autotile db``: check and path of the tuning database."""

from __future__ import annotations

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import NOTHING_FOUND, examples, help_without_command, print_json, print_line, show


def db(context: typer.Context) -> None:
    """Look after the tuning database."""
    help_without_command(context)


def check(
    *,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the database for damage, lost rows and rows that cannot be used.

    Exits with 1 if a fault is found.
    """
    from autotile.api import databases

    found = databases.db_check(database)
    show(found, as_json=as_json)
    if not found.whole:
        raise typer.Exit(NOTHING_FOUND)


def path(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show where the database is."""
    from autotile.api import databases

    location = databases.db_path(database)
    if as_json:
        print_json({"database": location})
    else:
        print_line(location)


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(db)
    group.command(epilog=examples("autotile db check", "autotile db check --db team.db --json"))(check)
    group.command(epilog=examples("autotile db path", "sqlite3 $(autotile db path) .tables"))(path)
    app.add_typer(group, name="db")
