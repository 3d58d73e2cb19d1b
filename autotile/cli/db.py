"""``autotile db``: check, path, comparison, merging and cleaning of tuning databases."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument, complete_device, read_moment
from autotile.cli.output import NOTHING_FOUND, examples, help_without_command, print_json, print_line, show
from autotile.errors import InputError

_PLACE = "Database: an SQLite file or a postgresql:// URL; or a file of winners (.json)."


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

    show(databases.db_diff(a, b), as_json=as_json)


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

    show(databases.db_merge(sources, output), as_json=as_json)


def clean(
    kernel: OptionalKernelArgument = None,
    *,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Delete trials older than 90d, or than 2026-01-31.", show_default="no"),
    ] = None,
    keep_gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Delete trials of all other GPUs. May be given again.",
            autocompletion=complete_device,
            show_default="no",
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Delete trials of other versions of a kernel than the current one.")
    ] = False,
    winners: Annotated[
        bool, typer.Option("--winners", help="Delete the best of each study, too; otherwise it is kept.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; show what would be deleted.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete trials that are no longer wanted.

    It does not ask for confirmation. The best configuration of each study, and the verdicts on wrong ones, are kept
    unless --winners is given; the trials of a session that may still be running are kept in any case.
    """
    from autotile.api import databases

    if older_than is None and not keep_gpu and not stale:
        raise InputError("nothing selects the trials to delete; give --older-than, --keep-gpu or --stale")
    result = databases.db_clean(
        kernel,
        before=read_moment(older_than) if older_than is not None else None,
        keep_gpus=keep_gpu or (),
        stale=stale,
        winners=winners,
        dry_run=dry_run,
        database=database,
    )
    show(result, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(db)
    group.command(epilog=examples("autotile db check", "autotile db check --db team.db --json"))(check)
    group.command(epilog=examples("autotile db path", "sqlite3 $(autotile db path) .tables"))(path)
    group.command(epilog=examples("autotile db merge node1.db node2.db -o team.db"))(merge)
    group.command(epilog=examples("autotile db diff mine.db team.db", "autotile db diff before.json after.json"))(diff)
    group.command(
        epilog=examples(
            "autotile db clean --older-than 90d --dry-run",
            "autotile db clean sgemm_2d --stale --winners",
            "autotile db clean --keep-gpu h200",
        )
    )(clean)
    app.add_typer(group, name="db")
