"""``autotile diff``: comparison of the winners of two databases."""

from __future__ import annotations

from collections.abc import Sequence
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
    versioned_document,
)
from autotile.core.model import Measurement, config_text
from autotile.core.text import NOTHING, interval_text, plural, time_text

if TYPE_CHECKING:
    from autotile.api.databases import ComparedWinners, DatabaseDiff, UnmatchedWinner
    from autotile.database.winners import Winner

_PLACE = "Database: an SQLite file or a postgresql:// URL; or a file of winners (.json)."


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

    show(databases.diff(a, b), diff_table, diff_document, as_json=as_json)


def diff_table(found: DatabaseDiff) -> RenderableType:
    """Render the numbers of problems, then one row per difference."""
    same = [pair for pair in found.both if pair.same_config]
    other = [pair for pair in found.both if not pair.same_config]
    counts = [
        ("A", found.a),
        ("B", found.b),
        ("same configuration", plural(len(same), "problem")),
        ("another configuration", plural(len(other), "problem")),
        ("only in A", plural(len(found.only_a), "problem")),
        ("only in B", plural(len(found.only_b), "problem")),
    ]
    parts: list[RenderableType] = [facts(counts)]
    shown = [*other, *(pair for pair in same if pair.verdict.endswith("faster"))]
    if shown:
        headings = (*STUDY_HEADINGS, "A", "B", f"{RIGHT}B / A", "difference")
        parts.append(below(Listing(headings, [_pair_row(pair) for pair in shown], ("device", "A", "B"))))
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            parts.append(below(_only_listing(f"only in {name}", only)))
    return Group(*parts)


def _pair_row(pair: ComparedWinners) -> tuple[str, ...]:
    time_b = _measured_text(pair.b.measurement)
    return (
        *study_columns(pair.a.key),
        f"{config_text(pair.a.config)}, {_measured_text(pair.a.measurement)}",
        f"the same, {time_b}" if pair.same_config else f"{config_text(pair.b.config)}, {time_b}",
        f"{pair.ratio.value:.3f}" if pair.ratio is not None else NOTHING,
        pair.verdict,
    )


def _measured_text(measurement: Measurement | None) -> str:
    if measurement is None:
        return "not measured"
    return f"{time_text(measurement.time_us)} ({interval_text(measurement.low_us, measurement.high_us)})"


def _only_listing(heading: str, only: Sequence[UnmatchedWinner]) -> Listing:
    headings = (heading, "problem", "device", "configuration", f"{RIGHT}time", "differs in")
    return Listing(headings, [_only_row(one) for one in only], ("configuration", "device"))


def _only_row(one: UnmatchedWinner) -> tuple[str, ...]:
    time = time_text(one.winner.measurement.time_us if one.winner.measurement else None)
    return (*study_columns(one.winner.key), config_text(one.winner.config), time, ", ".join(one.differs) or NOTHING)


def diff_document(found: DatabaseDiff) -> dict[str, Any]:
    """Return every problem for JSON, including those with the same winner."""
    return {
        "a": found.a,
        "b": found.b,
        "only_a": [_only_document(one) for one in found.only_a],
        "only_b": [_only_document(one) for one in found.only_b],
        "both": [
            {
                **versioned_document(pair.a.key),
                "same_config": pair.same_config,
                "a": _winner_document(pair.a),
                "b": _winner_document(pair.b),
                "ratio": ratio_document(pair.ratio),
                "verdict": pair.verdict,
            }
            for pair in found.both
        ],
    }


def _only_document(one: UnmatchedWinner) -> dict[str, Any]:
    return {**versioned_document(one.winner.key), **_winner_document(one.winner), "differs": list(one.differs)}


def _winner_document(winner: Winner) -> dict[str, Any]:
    measured: dict[str, Any] = winner.measurement.to_json() if winner.measurement else {}
    return {"config": dict(winner.config), "time_us": None, "interval_us": None, **measured}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile diff mine.db team.db", "autotile diff before.json after.json --json"))(diff)
