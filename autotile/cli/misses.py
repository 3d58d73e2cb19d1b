"""``autotile misses``: problems that programs were served by a fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, JsonOption, OptionalKernelArgument
from autotile.cli.output import examples, show
from autotile.cli.tables import RIGHT, Listing
from autotile.core.text import NOTHING, duration_text, moment_text, sizes_text, time_text

if TYPE_CHECKING:
    from autotile.api.listings import ListedMiss, MissList


def misses(
    kernel: OptionalKernelArgument = None,
    *,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List problems that could not be served exactly.

    Lists those of one kernel if it is named, else of all: the number of calls and, if enough is tuned to estimate it,
    the time that they may have cost. `autotile tune-misses` tunes them, the costliest first.
    """
    from autotile.api import results

    show(results.misses(kernel, database=database), misses_table, misses_document, as_json=as_json)


def misses_table(found: MissList) -> RenderableType:
    """Render one row per problem, GPU and tier."""
    if not found.misses:
        return Text("no misses are stored")
    figures = (f"{RIGHT}calls", f"{RIGHT}a call", f"{RIGHT}may have cost")
    headings = ("kernel", "problem", "device", "served", *figures, "since", "last")
    return Listing(headings, [_row(miss) for miss in found.misses], ("last", "device"))


def _row(miss: ListedMiss) -> tuple[str, ...]:
    about = "" if miss.measured or miss.call_us is None else "about "
    return (
        miss.problem.kernel,
        f"{sizes_text(miss.problem.sizes)} {miss.problem.dtype}",
        miss.gpu_name,
        miss.tier,
        f"{miss.count:,}",
        about + time_text(miss.call_us),
        NOTHING if miss.lost_s is None else about + duration_text(miss.lost_s),
        "tuned" if miss.tuned else NOTHING,
        moment_text(miss.last_at),
    )


def misses_document(found: MissList) -> list[dict[str, Any]]:
    """Return one entry per problem, GPU and tier for JSON."""
    return [
        {
            "kernel": miss.problem.kernel,
            "problem": dict(miss.problem.sizes),
            "dtype": miss.problem.dtype,
            "device": miss.gpu_name,
            "tier": miss.tier,
            "count": miss.count,
            "last_at": miss.last_at.isoformat(),
            "call_us": miss.call_us,
            "lost_s": miss.lost_s,
            "measured": miss.measured,
            "tuned": miss.tuned,
        }
        for miss in found.misses
    ]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile misses", "autotile misses sgemm_2d --json"))(misses)
