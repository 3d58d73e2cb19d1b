"""``autotile tune-misses``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from autotile.cli.arguments import (
    JsonOption,
    OptionalKernelArgument,
    ReplayCommand,
    SearchArguments,
    with_search_options,
)
from autotile.cli.output import examples, notice
from autotile.core.text import duration_text, plural

if TYPE_CHECKING:
    from autotile.api.plans import PlanResult
    from autotile.tuning.options import TuneOptions


@with_search_options()
def tune_misses(kernel: OptionalKernelArgument = None, *, search: SearchArguments, as_json: JsonOption = False) -> None:
    """Tune what programs asked for and could not be served exactly.

    The costliest problem comes first; `autotile misses` lists them. --trials and --budget are for each problem. One
    that cannot be tuned does not stop the others.
    """
    run_misses(kernel, search.options(), as_json=as_json)


def run_misses(kernel: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune missed problems as a plan, show what became of them, and exit with 0 only if all are tuned."""
    from autotile.api.plans import plan_of_misses
    from autotile.cli.plan import run_plan
    from autotile.tuning.missed_problems import missed_problems

    missed = missed_problems(kernel, options)
    for one in missed:
        cost = "" if one.lost_s is None else f", which may have cost {duration_text(one.lost_s)}"
        notice(f"{one.problem}: {plural(one.count, 'call')} not served exactly{cost}")
    if not missed:
        notice("no missed problem is left to tune; `autotile misses` lists what was counted")
    document = partial(misses_document, database=options.database)
    run_plan(plan_of_misses(missed), options, document, as_json=as_json)


def misses_document(result: PlanResult, *, database: str | None) -> list[dict[str, Any]]:
    """Return the results for JSON, as `autotile tune` does each; parameters are those of `serving_call`."""
    from autotile.api.tuning import serving_call
    from autotile.tuning.result import TuneResult

    documents = []
    for entry in result.entries:
        problem = entry.planned.problem
        if isinstance(entry.result, TuneResult):
            call = serving_call(entry.planned.asked_as, problem, dtype=problem.dtype, database=database)
            documents.append(replace(entry.result, call=call).to_json())
        elif entry.state == "failed":
            notice(f"{problem} is left out: {entry.reason}")
    return documents


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "tune-misses",
        cls=ReplayCommand,
        epilog=examples("autotile tune-misses --budget 5m", "autotile tune-misses sgemm_2d --trials 100"),
    )(tune_misses)
