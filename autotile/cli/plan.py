"""``autotile plan``, which writes plans, and ``autotile tune --plan``, which tunes by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotile.cli.arguments import DatabaseOption, GpuOption, OptionalKernelArgument
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, examples, notice, print_json, show
from autotile.core.text import plural
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.api.plans import PlanResult
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.plan import TuningPlan

_MAX_SHOWN = 200
"""Problems in the table of a plan, at most; --json lists all."""


def plan(
    kernel: OptionalKernelArgument = None,
    *,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Plan what programs asked for and could not be served exactly.")
    ] = False,
    captured: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Plan captured calls (AUTOTILE_CAPTURE). May be given again."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.toml", help="File to write.", show_default="stdout")
    ] = None,
    device: GpuOption = None,
    database: DatabaseOption = None,
) -> None:
    """Write a plan: a list of problems that `autotile tune --plan` tunes.

    Edit it to add sizes, budgets and priorities; docs/file-format.md describes the file.
    """
    from autotile.api import plans
    from autotile.tuning.plan import plan_text

    if from_misses == bool(captured):
        raise InputError("a plan is made from misses or from captured calls: give --from-misses, or --captured FOLDER")
    found = plans.plan(kernel, captured=captured or (), output=output, device=device, database=database)
    if output is None:
        typer.echo(plan_text(found.problems), nl=False)
        return
    notice(f"{plural(len(found.problems), 'problem')} in {output}; tune them with `autotile tune --plan {output}`")


def run_plan(
    planned: Path | TuningPlan,
    options: TuneOptions,
    document: Callable[[PlanResult], Any] | None = None,
    *,
    as_json: bool,
) -> None:
    """Tune a plan, show what became of it, and exit with 0 only if all is tuned; ``document`` returns other JSON."""
    from autotile.api.plans import tune_plan
    from autotile.cli.progress import TuneProgress
    from autotile.settings import absolute_path

    chosen = absolute_path(planned, "a plan") if isinstance(planned, Path) else planned
    with TuneProgress(error_console(), "reading the plan") as progress:
        result = tune_plan(chosen, options, progress)
    if as_json and document is not None:
        print_json(document(result))
    else:
        show(result, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if not result.is_complete:
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "plan",
        epilog=examples("autotile plan --from-misses -o misses.toml", "autotile tune --plan misses.toml --devices all"),
    )(plan)
