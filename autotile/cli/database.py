"""``autotile db``: look after the tuning database."""

from __future__ import annotations

import typer

from autotile.cli.application import NOTHING_FOUND, examples, help_without_command
from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import show_report


def database_commands(context: typer.Context) -> None:
    """Look after the tuning database."""
    help_without_command(context)


def check(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Look for damage and lost rows.

    Exits with 1 where something is wrong.
    """
    from autotile.ops.results import check_database

    report = check_database(database)
    show_report(report, as_json=as_json)
    if not report.whole:
        raise typer.Exit(NOTHING_FOUND)


def path(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Say where the database lies."""
    from autotile.ops.results import database_location

    show_report(database_location(database), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(database_commands)
    group.command(epilog=examples("autotile db check", "autotile db check --db team.db --json"))(check)
    group.command(epilog=examples("autotile db path", "sqlite3 $(autotile db path) .tables"))(path)
    app.add_typer(group, name="db")
