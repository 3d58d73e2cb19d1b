"""``autotile doctor``: diagnosis of the installation."""

from __future__ import annotations

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import NOTHING_FOUND, examples, show

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Check everything that tuning needs.

    Suggests a remedy for what is missing. Exits with 0 if tuning works, on a GPU or by replay.
    """
    from autotile.api.doctor import doctor as diagnose

    report = diagnose(database)
    show(report, as_json=as_json)
    if not report.works:
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile doctor", "autotile doctor --json"))(doctor)
