"""``autotile db``: check and path of the tuning database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from autotile.cli.arguments import DatabaseOption, JsonOption
from autotile.cli.output import NOTHING_FOUND, examples, help_without_command, show
from autotile.cli.tables import facts, lines
from autotile.core.text import plural

if TYPE_CHECKING:
    from autotile.api.databases import CheckResult
    from autotile.database.rows import BadRow


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
    show(found, check_table, check_document, as_json=as_json)
    if not found.whole:
        raise typer.Exit(NOTHING_FOUND)


def check_table(result: CheckResult) -> RenderableType:
    """Render the numbers of rows and the state, one fact per line."""
    check = result.check
    rows: list[tuple[str, RenderableType]] = [("database", result.location)]
    if check is None:
        return facts([*rows, ("state", "not there yet; the first `autotile tune` makes it")])
    rows.append(("schema", check.revision))
    rows.append(("rows", ", ".join(f"{name} {count:,}" for name, count in check.counts.items()) or "unknown"))
    if check.unfinished_runs:
        rows.append(("unfinished", f"{plural(check.unfinished_runs, 'run')}: still going, or killed"))
    faults = [*check.problems, *map(str, check.bad_rows)]
    rows.append(("state", lines(faults or ["whole"])))
    if check.bad_rows:
        rows.append(("cure", f"`autotile merge NEW.db {result.location}` copies the other rows to a new database"))
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
        "bad_rows": [_bad_row_document(row) for row in check.bad_rows] if check is not None else [],
    }


def _bad_row_document(row: BadRow) -> dict[str, Any]:
    return {"table": row.table, "id": row.row_id, "field": row.field, "reason": row.fault}


def path(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show where the database is."""
    from autotile.api import databases

    show(databases.db_path(database), str, path_document, as_json=as_json)


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
