"""``autotile doctor``: diagnosis of the installation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import NOTHING_FOUND, examples, show
from autotile.cli.tables import below, table

if TYPE_CHECKING:
    from autotile.api.doctor import HealthReport

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Check everything that tuning needs.

    Suggests a remedy for what is missing. Exits with 0 if tuning works, on a GPU or by replay.
    """
    from autotile.api.doctor import doctor as diagnose

    report = diagnose(database)
    show(report, health_table, health_document, as_json=as_json)
    if not report.works:
        raise typer.Exit(NOTHING_FOUND)


def health_table(report: HealthReport) -> RenderableType:
    """Render one row for each check, with the remedy below the result, then the verdict."""
    checks = table("", "looked at", "found")
    for check in report.checks:
        checks.add_row(check.status, check.name, check.text, style=_STYLES[check.status])
    return Group(checks, below(report.verdict))


def health_document(report: HealthReport) -> dict[str, Any]:
    """Return the checks and the verdict for JSON."""
    checks = [
        {"name": check.name, "status": check.status, "detail": check.detail, "cure": check.remedy}
        for check in report.checks
    ]
    return {"ok": report.works, "verdict": report.verdict, "checks": checks}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile doctor", "autotile doctor --json"))(doctor)
