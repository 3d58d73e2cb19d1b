"""``autotile tune --family``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from autotile.cli.application import INTERRUPTED
from autotile.cli.output import console, notice, show_report
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.tuning.options import TuneOptions

MOST_POINTS = 1000
"""Each is a tuning session of seconds at least."""
MOST_CONFIGS = 64
"""More than a person would read a rule over."""


def tune_family(
    kernel: str | None,
    words: Sequence[str] | None,
    dtype: str | None,
    options: TuneOptions,
    *,
    points: int | None,
    max_configs: int | None,
    as_json: bool,
) -> None:
    """Tune a family, show its rule, and leave with the code that its end calls for."""
    from autotile.ops.families import family_call, open_family, tune_opened_family
    from autotile.report.family import FamilyReport
    from autotile.report.family_progress import FamilyProgress
    from autotile.tuning.family_session import FamilyPlan

    if kernel is None:
        raise InputError("no kernel is named; expected `autotile tune KERNEL --family SIZE=A..B ...`")
    loaded, family = open_family(kernel, words or [])
    call = family_call(kernel, family, dtype=dtype, database=options.database)
    given = {"points": points, "max_configs": max_configs}
    plan = FamilyPlan(**{name: value for name, value in given.items() if value is not None})
    with FamilyProgress(console(sys.stderr), loaded.spec) as progress:
        result = tune_opened_family(loaded, family, dtype, options, plan=plan, observe=progress)
    show_report(FamilyReport(result, call), as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
