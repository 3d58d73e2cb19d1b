"""``autotile devices`` and ``doctor``: what this machine has and what works on it."""

from __future__ import annotations

import typer

from autotile.cli.application import NOTHING_FOUND, examples
from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import show_report


def devices(*, as_json: JsonOption = False) -> None:
    """Show the GPUs of this machine and the known ones."""
    from autotile.ops.targets import known_devices

    show_report(known_devices(), as_json=as_json)


def doctor(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Look at everything that tuning needs.

    Says what to do about what is missing. Exits with 0 when tuning works, on a GPU or by replay.
    """
    from autotile.ops.doctor import examine

    report = examine(database)
    show_report(report, as_json=as_json)
    if not report.works:
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("autotile devices", "autotile devices --json"))(devices)
    app.command(epilog=examples("autotile doctor", "autotile doctor --json"))(doctor)
