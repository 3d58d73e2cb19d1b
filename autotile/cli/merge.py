"""``autotile merge``: several databases copied into one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show
from autotile.cli.tables import (
    RIGHT,
    STUDY_HEADINGS,
    Listing,
    below,
    facts,
    ratio_document,
    study_columns,
    timed_config_document,
    versioned_document,
)
from autotile.core.model import config_text
from autotile.core.text import plural, time_text

if TYPE_CHECKING:
    from autotile.api.databases import MergeResult
    from autotile.database.merging import MergedStudy


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

    show(databases.merge(sources, output), merge_table, merge_document, as_json=as_json)


def merge_table(result: MergeResult) -> RenderableType:
    """Render the rows copied from each source, then the decisions between different winners."""
    rows = [("merged into", result.output)]
    for name, new in result.copied:
        found = f"{plural(new.trials, 'new trial')} of {plural(new.runs, 'run')}"
        rows.append(("from", f"{name}: {found}, {plural(new.studies, 'new study', 'new studies')}"))
    if not result.studies:
        return facts(rows)
    headings = (*STUDY_HEADINGS, "served", f"{RIGHT}time", "other", f"{RIGHT}its time", "decision")
    listing = Listing(headings, [_row(study) for study in result.studies], ("device", "served", "other"))
    return Group(facts(rows), below(listing))


def _row(study: MergedStudy) -> tuple[str, ...]:
    return (
        *study_columns(study.key),
        config_text(study.served.config),
        time_text(study.served.time_us),
        config_text(study.other.config),
        time_text(study.other.time_us),
        study.decision,
    )


def merge_document(result: MergeResult) -> dict[str, Any]:
    """Return the rows copied and the decisions for JSON."""
    return {
        "output": result.output,
        "copied": [{"database": name, **asdict(rows)} for name, rows in result.copied],
        "studies": [
            {
                **versioned_document(study.key),
                "decision": study.decision,
                "served": timed_config_document(study.served.config, study.served.measurement),
                "other": timed_config_document(study.other.config, study.other.measurement),
                "ratio": ratio_document(study.ratio),
            }
            for study in result.studies
        ],
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile merge node1.db node2.db -o team.db"))(merge)
