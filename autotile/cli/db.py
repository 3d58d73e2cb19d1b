"""``autotile db``: check and path of the tuning database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import NOTHING_FOUND, examples, help_without_command, show
from autotile.cli.tables import facts
from autotile.core.text import plural

if TYPE_CHECKING:
    from autotile.api.results import CheckResult


def db(context: typer.Context) -> None:
    """Look after the tuning database."""
    help_without_command(context)


def check(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Check the database for damage and lost rows.

    Exits with 1 if a fault is found.
    """
    from autotile.api import results

    found = results.db_check(database)
    show(found, check_table, check_document, as_json=as_json)
    if not found.whole:
        raise typer.Exit(NOTHING_FOUND)


def check_table(result: CheckResult) -> RenderableType:
    """Render the numbers of rows and the state, one fact per line."""
    check = result.check
    rows = [("database", result.location)]
    if check is None:
        return facts([*rows, ("state", "not there yet; the first `autotile tune` makes it")])
    rows.append(("schema", check.revision))
    rows.append(("rows", ", ".join(f"{name} {count:,}" for name, count in check.counts.items()) or "unknown"))
    if check.unfinished_runs:
        rows.append(("unfinished", f"{plural(check.unfinished_runs, 'run')}: still going, or killed"))
    rows.append(("state", "whole" if check.ok else "\n".join(check.problems)))
    return facts(rows)


def check_document(result: CheckResult) -> dict[str, Any]:
    """Return the numbers of rows and the faults for JSON."""
    check = result.check
    return {
        "database": result.location,
        "exists": check is not None,
        "ok": result.whole,
        "revision": check.revision if check is not None else None,
        "rows": dict(check.counts) if check is not None else {},
        "unfinished_runs": check.unfinished_runs if check is not None else 0,
        "problems": list(check.problems) if check is not None else [],
    }


def path(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show where the database is."""
    from autotile.api import results

    show(results.db_path(database), str, path_document, as_json=as_json)


def path_document(location: str) -> dict[str, Any]:
    """Return the path or URL for JSON."""
    return {"database": location}


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(db)
    group.command(epilog=examples("autotile db check", "autotile db check --db team.db --json"))(check)
    group.command(epilog=examples("autotile db path", "sqlite3 $(autotile db path) .tables"))(path)
    app.add_typer(group, name="db")
