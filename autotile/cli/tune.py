"""``autotile tune``: a problem, a family of sizes, an operation, what programs missed, or a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotile.cli.arguments import (
    DtypeOption,
    JsonOption,
    OptionalKernelArgument,
    ReplayCommand,
    SearchArguments,
    with_search_options,
)
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, examples, notice, print_json, show
from autotile.core.model import Problem
from autotile.core.text import duration_text, plural
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.api.plans import PlanResult
    from autotile.cli.progress import TuneProgress
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.plan import TuningPlan

MAX_POINTS = 1000
"""Each point of a family takes a session of seconds at least."""
MAX_CONFIGS = 64
"""A rule over more configurations could not be read."""


@with_search_options
def tune(
    kernel: OptionalKernelArgument = None,
    sizes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SIZE=N|A..B",
            help="Problem sizes and flags, such as M=4096 TRANS_A=1. Ranges (M=1..8192) and lists (K=4096,7168) are a "
            "family of problems.",
            show_default="as in the search-space file",
        ),
    ] = None,
    *,
    dtype: DtypeOption = None,
    search: SearchArguments,
    misses: Annotated[
        bool, typer.Option("--misses", help="Tune what programs asked for and could not be served exactly.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Tune all problems of a plan, of `autotile export --format plan`; those that are tuned are left out.",
        ),
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="PARAM=VALUE[,...]",
            help="A configuration to try first and race in the finals; parameters left out have their defaults. May be "
            "given again.",
        ),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_POINTS, help="Problems of a family to tune.", hidden=True),
    ] = None,
    max_configs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_CONFIGS, help="Configurations of a family's rule.", hidden=True),
    ] = None,
    ask_tell: Annotated[
        bool, typer.Option("--ask-tell", help="Let another program search, by JSON lines.", hidden=True)
    ] = False,
    captured: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Tune on the arguments of a captured call.", hidden=True),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write a timeline of the session, for ui.perfetto.dev.", hidden=True),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest configuration, verify it, and keep it.

    The space is searched for valid configurations only; each one tried is compiled, verified against a float64
    reference, measured and stored. The best of them are measured again side by side with the default. The same command
    goes on where an interrupted one stopped.

    Of a family (M=1..8192), a few problems are tuned, and what to serve for all is learned from them; --trials is for
    each of them. The kernels of an operation, such as matmul, share --budget or --trials; the best of them are raced
    with the libraries that compute it.
    """
    options, words = replace(search.options(), trace=trace), sizes or []
    is_family = any(".." in word or "," in word for word in words)
    for name, is_given in (
        ("--trace", trace is not None),
        ("--try", bool(tries)),
        ("--ask-tell", ask_tell),
        ("--captured", captured is not None),
        ("--objective", is_family and bool(search.objective)),
        ("--verify-problem", is_family and bool(search.verify_problem)),
    ):
        if is_given and (is_family or misses or plan is not None):
            raise InputError(f"{name} is of one session; use it with one problem")
    if not is_family and (points is not None or max_configs is not None):
        raise InputError("--points and --max-configs are of families of sizes; give a range such as M=1..8192")
    if plan is not None:
        if kernel is not None or words or dtype is not None or misses:
            raise InputError("--plan states its kernels, sizes and dtypes; leave them out")
        _run_plan(plan, options, as_json=as_json)
    elif misses:
        if words:
            raise InputError("--misses takes its sizes from the database; leave them out")
        _run_misses(kernel, options, as_json=as_json)
    elif captured is not None:
        kernel, words, dtype, options = _from_call(captured, kernel, sizes, dtype, options)
        _run_kernel(kernel, words, dtype, options, tries=tries or [], ask_tell=ask_tell, as_json=as_json)
    elif kernel is None:
        raise InputError("no kernel is named; expected `autotile tune KERNEL SIZE=N ...`, or `autotile tune --misses`")
    elif is_family:
        _run_family(kernel, words, dtype, options, points=points, max_configs=max_configs, as_json=as_json)
    elif is_operation(kernel):
        _check_no_session_options(kernel, tries, ask_tell, trace)
        _run_operation(kernel, words, dtype, options, as_json=as_json)
    else:
        _run_kernel(kernel, words, dtype, options, tries=tries or [], ask_tell=ask_tell, as_json=as_json)


def _check_no_session_options(operation: str, *given: object) -> None:
    if any(given):
        raise InputError(f"--try, --ask-tell and --trace are of one kernel's session, and {operation} is an operation")


def is_operation(name: str) -> bool:
    """Return whether a name or path denotes an operation rather than a kernel."""
    from autotile.kernel.operation import find_operation

    return find_operation(name) is not None


def _from_call(
    folder: Path, kernel: str | None, words: list[str] | None, dtype: str | None, options: TuneOptions
) -> tuple[str, list[str], str, TuneOptions]:
    """Return the kernel, the sizes, the dtype and the options for a captured call."""
    from autotile.kernel.inputs import call_folder, kernel_of_call, read_captured_call
    from autotile.settings import absolute_path, user_path

    if words or dtype is not None:
        raise InputError("--captured takes the sizes and the dtype from the call; leave them out")
    path = call_folder(absolute_path(user_path(folder, "a captured call"), "a captured call"))
    call = read_captured_call(path)
    named = kernel or kernel_of_call(call)
    sizes = [f"{name}={size}" for name, size in call.sizes.items()]
    return named, sizes, call.dtype, replace(options, captured=str(path), fresh=True)


def _run_kernel(
    asked_as: str,
    words: list[str],
    dtype: str | None,
    options: TuneOptions,
    *,
    tries: list[str],
    ask_tell: bool,
    as_json: bool,
) -> None:
    from autotile.api.plans import has_several_models
    from autotile.api.targets import open_problem, sizes_notice
    from autotile.api.tuning import serving_call, tune_problem
    from autotile.cli.assignments import read_sizes, read_values

    kernel, problem = open_problem(asked_as, given := read_sizes(words), dtype)
    notice(sizes_notice(kernel.spec, problem.sizes, given))
    if has_several_models(options):
        from autotile.tuning.plan import PlannedProblem, TuningPlan

        _check_no_session_options(asked_as, tries, ask_tell)
        _run_plan(TuningPlan(kernel.name, (PlannedProblem(asked_as, kernel, problem),)), options, as_json=as_json)
        return
    options = replace(options, tries=tuple(read_values(kernel.spec, text.split(",")) for text in tries))
    call = serving_call(asked_as, problem, dtype=dtype, database=options.database)
    if ask_tell:
        from autotile.api.stepping import session
        from autotile.cli.ask_tell import serve

        serve(session(kernel, problem.sizes, dtype=problem.dtype, options=options), call)
        return
    with live_progress(problem) as progress:
        result = replace(tune_problem(kernel, problem, options, progress), call=call)
    show(result, as_json=as_json)
    if result.interrupted:
        stored = plural(sum(result.outcomes.values()), "trial")
        notice(f"interrupted: {stored} saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if result.winner is None:
        raise typer.Exit(NOTHING_FOUND)


def live_progress(problem: Problem) -> TuneProgress:
    """Return an observer of a session that shows its progress on standard error."""
    from autotile.cli.progress import TuneProgress

    return TuneProgress(error_console(), f"{problem}: enumerating the search space")


def _run_family(
    kernel: str,
    words: list[str],
    dtype: str | None,
    options: TuneOptions,
    *,
    points: int | None,
    max_configs: int | None,
    as_json: bool,
) -> None:
    """Tune a family, show its rule, and exit with 130 if the user interrupted."""
    from autotile.api.targets import sizes_notice
    from autotile.api.tuning import family_serving_call, open_family, tune_loaded_family
    from autotile.cli.progress import TuneProgress
    from autotile.tuning.options import FamilyPlan

    if is_operation(kernel):
        if points is not None or max_configs is not None:
            raise InputError(f"--points and --max-configs are of a kernel's family, and {kernel} is an operation")
        _run_operation_family(kernel, words, dtype, options, as_json=as_json)
        return
    loaded, family = open_family(kernel, words)
    notice(sizes_notice(loaded.spec, family.largest, [word.partition("=")[0] for word in words]))
    call = family_serving_call(kernel, loaded, family, dtype=dtype, database=options.database)
    given = {"points": points, "max_configs": max_configs}
    plan = FamilyPlan(**{name: value for name, value in given.items() if value is not None})
    with TuneProgress(error_console()) as progress:
        result = replace(tune_loaded_family(loaded, family, dtype, options, plan=plan, observe=progress), call=call)
    show(result, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)


def _run_operation(asked_as: str, words: list[str], dtype: str | None, options: TuneOptions, *, as_json: bool) -> None:
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


def _run_operation_family(
    asked_as: str, words: list[str], dtype: str | None, options: TuneOptions, *, as_json: bool
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


def _run_misses(kernel: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune missed problems as a plan, show what became of them, and exit with 0 only if all are tuned."""
    from autotile.api.plans import plan_of_misses
    from autotile.tuning.plan import missed_problems

    missed = missed_problems(kernel, options)
    for one in missed:
        cost = "" if one.lost_s is None else f", which may have cost {duration_text(one.lost_s)}"
        notice(f"{one.problem}: {plural(one.count, 'call')} not served exactly{cost}")
    if not missed:
        notice("no missed problem is left to tune; `autotile list --misses` lists what was counted")
    document = partial(_misses_document, database=options.database)
    _run_plan(plan_of_misses(missed), options, document, as_json=as_json)


def _misses_document(result: PlanResult, *, database: str | None) -> list[dict[str, Any]]:
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


def _run_plan(
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
        cls=ReplayCommand,
        epilog=examples(
            "autotile tune sgemm_2d M=4096 N=4096 K=4096",
            "autotile tune matmul M=2047 N=4096 K=4096 --dtype bfloat16 --budget 60s",
            "autotile tune path/to/mine.toml N=1048576 --trials 1000 --until 1%",
            "autotile tune sgemm_2d M=1..8192 N=4096 K=4096,7168 --budget 30m",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --objective registers,energy",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --replay --json",
            "autotile tune --misses --budget 5m",
        ),
    )(tune)
