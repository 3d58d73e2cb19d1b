"""``autotile diff``, ``merge`` and ``prune``: several databases, and what is no longer wanted of one."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.application import examples
from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument, read_moment
from autotile.cli.completion import complete_device
from autotile.cli.output import show_report

_PLACE = "Database: an SQLite file or a postgresql:// URL; or a file of winners (.json)."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_PLACE, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare what two databases hold to be best.

    Says which problems only one of them has, where their configurations differ, and whether the intervals of the times
    tell which is faster.
    """
    from autotile.ops.comparing import diff_results

    show_report(diff_results(a, b), as_json=as_json)


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
            help="Database to merge into; made where it is missing, and what it holds is kept.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Put everything that some databases hold into one.

    No trial is lost, and what two of them share is not doubled. Where they name different winners, the faster is served
    from then on if the intervals of their times tell them apart; otherwise that of the newest session stays.
    """
    from autotile.ops.comparing import merge_results

    show_report(merge_results(sources, output), as_json=as_json)


def prune(
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
        bool, typer.Option("--stale", help="Delete trials of other versions of a kernel than the present one.")
    ] = False,
    winners: Annotated[
        bool, typer.Option("--winners", help="Delete the best of each study, too; otherwise it is kept.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would be.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete trials that are no longer wanted.

    It does not ask. The best configuration of each study stays unless --winners is given, and so does what a session
    needs that is under way.
    """
    from autotile.ops.comparing import prune_results

    report = prune_results(
        kernel,
        before=read_moment(older_than) if older_than is not None else None,
        keep_gpus=keep_gpu or (),
        stale=stale,
        winners=winners,
        dry_run=dry_run,
        database=database,
    )
    show_report(report, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("autotile diff mine.db team.db", "autotile diff before.json after.json --json"))(diff)
    app.command(epilog=examples("autotile merge node1.db node2.db -o team.db"))(merge)
    app.command(
        epilog=examples(
            "autotile prune --older-than 90d --dry-run",
            "autotile prune sgemm_2d --stale --winners",
            "autotile prune --keep-gpu h200",
        )
    )(prune)
