"""``autotile tune`` of an operation: its table and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, notice, show
from autotile.cli.tables import RIGHT, Listing, below, facts, title
from autotile.core.text import device_text, duration_text

if TYPE_CHECKING:
    from autotile.tuning.operation_result import OperationFamilyResult, OperationResult
    from autotile.tuning.options import TuneOptions


def run_operation(asked_as: str, words: list[str], dtype: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune the kernels of an operation, show the result, and exit as ``autotile tune`` does."""
    from autotile.api.operation_tuning import tune_loaded_operation
    from autotile.api.targets import sizes_notice
    from autotile.api.tuning import serving_call
    from autotile.cli.assignments import read_sizes
    from autotile.cli.progress import OperationProgress
    from autotile.kernel.operation import load_operation

    operation = load_operation(asked_as)
    given = read_sizes(words)
    problem = operation.resolve(given, dtype, defaults=True)
    notice(sizes_notice(operation, problem.sizes, given))
    named = {name: size for name, size in problem.sizes.items() if name not in operation.conditions or name in given}
    asked = replace(problem, sizes=named)  # conditions are stated only if they were given
    call = serving_call(asked_as, asked, dtype=dtype, database=options.database)
    with OperationProgress(error_console(), operation) as progress:
        result = tune_loaded_operation(operation, problem, options, progress)
    show(result, partial(operation_table, call=call), partial(operation_document, call=call), as_json=as_json)
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
    from autotile.cli.progress import SweepProgress
    from autotile.kernel.operation import load_operation
    from autotile.tuning.operation_result import OperationFamilyResult

    operation = load_operation(asked_as)
    if words:
        notice(sizes_notice(operation, operation.sizes, [word.partition("=")[0] for word in words]))
    result = tune_operation_family(operation, words, dtype, options, SweepProgress(error_console()))
    show(result, family_model_table, OperationFamilyResult.to_json, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)


def family_model_table(result: OperationFamilyResult) -> RenderableType:
    """Render how well the model of a family chooses."""
    head = title(f"{result.operation} {result.family} {result.dtype} on {device_text(result.device)}")
    return Group(head, facts(result.facts()))


def operation_document(result: OperationResult, call: str) -> dict[str, Any]:
    """Return a result for JSON; ``call`` is the line of Python that serves it."""
    return {**result.to_json(), "call": call}


def operation_table(result: OperationResult, call: str) -> RenderableType:
    """Render what each kernel and library reached, then facts about the session."""
    head = title(f"{result.problem} on {device_text(result.device)}")
    return Group(head, _contenders(result), below(facts(_facts(result, call))))


def _contenders(result: OperationResult) -> RenderableType:
    right = {"time", "over the winner", "tried", "of the time"}
    headings, rows = result._rows()
    shown = [f"{RIGHT}{name}" if name in right else name for name in headings]
    return Listing(shown, [tuple(row) for row in rows], ("remark", "of the time", "95 % interval, us"))


def _facts(result: OperationResult, call: str) -> Iterator[tuple[str, str]]:
    from autotile.tuning.operation_result import contender_text, ratio_text, tried_text

    best = result.best
    if result.interrupted:
        yield "interrupted", "the last race was not held; the same command goes on from there"
    if best is not None:
        yield ("winner" if best.state == "won" else "best so far"), contender_text(best)
        yield "rate", result.rate_text()
    for library in result.libraries:
        if library is not best:
            yield library.name, ratio_text(library)
    for text in result.notices:
        yield "note", text
    yield "tried", tried_text(result.contenders)
    yield "took", duration_text(result.seconds)
    yield "saved in", result.database
    if result.winner is not None:
        yield "serve it", call
