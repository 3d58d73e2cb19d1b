"""``autotile tune`` of an operation: its table and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, notice, show

if TYPE_CHECKING:
    from autotile.tuning.options import TuneOptions


def run_operation(asked_as: str, words: list[str], dtype: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune the kernels of an operation, show the result, and exit as ``autotile tune`` does."""
    from autotile.api.operation_tuning import tune_loaded_operation
    from autotile.api.targets import sizes_notice
    from autotile.api.tuning import serving_call
    from autotile.cli.assignments import read_sizes
    from autotile.cli.progress import TuneProgress
    from autotile.kernel.operation import load_operation

    operation = load_operation(asked_as)
    given = read_sizes(words)
    problem = operation.resolve(given, dtype, defaults=True)
    notice(sizes_notice(operation, problem.sizes, given))
    named = {name: size for name, size in problem.sizes.items() if name not in operation.conditions or name in given}
    asked = replace(problem, sizes=named)  # conditions are stated only if they were given
    call = serving_call(asked_as, asked, dtype=dtype, database=options.database)
    with TuneProgress(error_console()) as progress:
        result = replace(tune_loaded_operation(operation, problem, options, progress), call=call)
    show(result, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if result.winner is None:
        raise typer.Exit(NOTHING_FOUND)


def run_operation_family(
    asked_as: str, words: Sequence[str], dtype: str | None, options: TuneOptions, *, as_json: bool
) -> None:
    """Tune a family of an operation, show how well its model chooses, and exit with 130 if the user interrupted."""
    from autotile.api.operation_tuning import tune_operation_family
    from autotile.api.targets import sizes_notice
    from autotile.cli.progress import TuneProgress
    from autotile.kernel.operation import load_operation

    operation = load_operation(asked_as)
    if words:
        notice(sizes_notice(operation, operation.sizes, [word.partition("=")[0] for word in words]))
    with TuneProgress(error_console()) as progress:
        result = tune_operation_family(operation, words, dtype, options, progress)
    show(result, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
