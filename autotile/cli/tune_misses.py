"""``autotile tune-misses``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.arguments import (
    JsonOption,
    OptionalKernelArgument,
    ReplayCommand,
    SearchArguments,
    with_search_options,
)
from autotile.cli.output import NOTHING_FOUND, examples, notice, show
from autotile.cli.tables import below
from autotile.cli.tune import exit_after, live_progress, tune_document, tune_table
from autotile.core.text import duration_text, plural
from autotile.errors import AutotileError

if TYPE_CHECKING:
    from autotile.cli.progress import TuneProgress
    from autotile.tuning.missed_problems import MissedProblem
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.result import TuneResult

TunedMiss = tuple["TuneResult", str]
"""A result, and the line of Python that serves its winner."""


@with_search_options()
def tune_misses(kernel: OptionalKernelArgument = None, *, search: SearchArguments, as_json: JsonOption = False) -> None:
    """Tune what programs asked for and could not be served exactly.

    The costliest problem comes first; `autotile misses` lists them. --trials and --budget are for each problem. One
    that cannot be tuned does not stop the others.
    """
    run_misses(kernel, search.options(), as_json=as_json)


def run_misses(kernel: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune missed problems, show the results, and exit with 1 if one of them could not be tuned."""
    from autotile.api.tuning import serving_call, tune_missed_problems

    if len(options.devices) > 1 or options.scheduler:
        from autotile.api.plans import plan_of_misses
        from autotile.cli.plan import run_plan

        run_plan(plan_of_misses(kernel, options), options, as_json=as_json)
        return
    tuned: list[TunedMiss] = []
    failed = False
    for missed, outcome in tune_missed_problems(kernel, options, _announced_progress):
        if isinstance(outcome, AutotileError):
            failed = True
            notice(f"{missed.problem} is left out: {outcome}")
        else:
            dtype = missed.problem.dtype
            call = serving_call(missed.asked_as, missed.problem, dtype=dtype, database=options.database)
            tuned.append((outcome, call))
    if not tuned and not failed:
        notice("no missed problem is left to tune; `autotile misses` lists what was counted")
    show(tuned, misses_table, misses_document, as_json=as_json)
    exit_after(result for result, _ in tuned)
    if failed:
        raise typer.Exit(NOTHING_FOUND)


def _announced_progress(missed: MissedProblem) -> TuneProgress:
    cost = "" if missed.lost_s is None else f", which may have cost {duration_text(missed.lost_s)}"
    notice(f"{missed.problem}: {plural(missed.count, 'call')} not served exactly{cost}")
    return live_progress(missed.problem)


def misses_document(tuned: Sequence[TunedMiss]) -> list[dict[str, Any]]:
    """Return the results for JSON, as `autotile tune` does each."""
    return [tune_document(result, call) for result, call in tuned]


def misses_table(tuned: Sequence[TunedMiss]) -> RenderableType:
    """Render the results below one another, as `autotile tune` does each."""
    if not tuned:
        return Text("nothing was tuned")
    first, *others = (tune_table(result, call) for result, call in tuned)
    return Group(first, *map(below, others))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "tune-misses",
        cls=ReplayCommand,
        epilog=examples("autotile tune-misses --budget 5m", "autotile tune-misses sgemm_2d --trials 100"),
    )(tune_misses)
