"""``autotile tune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from autotile.cli.arguments import (
    DtypeOption,
    JsonOption,
    OptionalKernelArgument,
    ReplayCommand,
    SearchArguments,
    SizesArgument,
    with_search_options,
)
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, examples, notice, show
from autotile.core.model import Problem
from autotile.core.text import (
    energy_text,
    plural,
    time_text,
)
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.cli.progress import TuneProgress
    from autotile.tuning.options import TuneOptions

MAX_POINTS = 1000
"""Each point of a family takes a session of seconds at least."""
MAX_CONFIGS = 64
"""A rule over more configurations could not be read."""

_MIN_GAIN_SHOWN = 0.001
"""Smallest expected gain that is stated, in percent."""
_MAX_TIES_SHOWN = 5
_MAX_FRONT_SHOWN = 10
_MIN_DRIFT_SHOWN = 0.02
"""A single reading of the reference kernel varies by 1.5 % on an H200."""
_MIN_FOREIGN_LOAD_DRIFT = 0.1
"""Clocks alone moved the reference kernel by 2.3 % at most on an H200; matrix products of another process by 22 to
230 %."""


@with_search_options()
def tune(
    kernel: OptionalKernelArgument = None,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    search: SearchArguments,
    family: Annotated[bool, typer.Option("--family", hidden=True, help="Same as `autotile tune-family`.")] = False,
    points: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_POINTS, hidden=True, help="Option of `autotile tune-family`."),
    ] = None,
    max_configs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_CONFIGS, hidden=True, help="Option of `autotile tune-family`."),
    ] = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", hidden=True, help="Same as `autotile tune-misses`.")
    ] = False,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="PARAM=VALUE[,...]",
            help="A configuration to try first and race in the finals; parameters left out have their defaults. May be "
            "given again.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Tune all problems of a plan, see `autotile plan`; those that are tuned already are left out.",
        ),
    ] = None,
    ask_tell: Annotated[
        bool,
        typer.Option(
            "--ask-tell", help="Let another program search, by JSON lines on standard input and output; see the guide."
        ),
    ] = False,
    captured: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Tune on the arguments of a captured call (AUTOTILE_CAPTURE, autotile.capture); measures again.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write a timeline of the session, for ui.perfetto.dev."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest configuration, verify it, and keep it.

    The space is searched for valid configurations only; each one tried is compiled, verified against a float64
    reference, measured and stored. The best of them are measured again side by side with the default. The same command
    goes on where an interrupted one stopped.

    The kernels of an operation, such as matmul, share --budget or --trials; the best of them are raced with the
    libraries that compute it.
    """
    options = replace(search.options(), trace=trace)
    for name, is_given in (
        ("--trace", trace is not None),
        ("--try", bool(tries)),
        ("--ask-tell", ask_tell),
        ("--captured", captured is not None),
    ):
        if is_given and (family or from_misses or plan is not None):
            raise InputError(f"{name} is of one session; use it with one problem")
    if not family and (points is not None or max_configs is not None):
        raise InputError("--points and --max-configs are options of `autotile tune-family`, for families of sizes")
    if family and from_misses:
        raise InputError(
            "--family and --from-misses exclude each other; use `autotile tune-family` or `autotile tune-misses`"
        )
    if plan is not None:
        from autotile.cli.plan import run_plan

        _check_only_plan(kernel is not None, sizes, dtype, family, from_misses)
        run_plan(plan, options, as_json=as_json)
    elif family:
        from autotile.cli.tune_family import run_family

        run_family(kernel, sizes, dtype, options, points=points, max_configs=max_configs, as_json=as_json)
    elif from_misses:
        from autotile.cli.tune_misses import run_misses

        if sizes:
            raise InputError("--from-misses takes its sizes from the database; leave them out")
        run_misses(kernel, options, as_json=as_json)
    elif captured is not None:
        kernel, sizes, dtype, options = _from_call(captured, kernel, sizes, dtype, options)
        _run(kernel, sizes, dtype, options, tries=tries or [], ask_tell=ask_tell, as_json=as_json)
    elif kernel is not None and is_operation(kernel):
        from autotile.cli.tune_operation import run_operation

        _check_no_session_options(kernel, tries, ask_tell, trace)
        run_operation(kernel, sizes or [], dtype, options, as_json=as_json)
    elif kernel is not None:
        _run(kernel, sizes or [], dtype, options, tries=tries or [], ask_tell=ask_tell, as_json=as_json)
    else:
        raise InputError("no kernel is named; expected `autotile tune KERNEL SIZE=N ...`, or `autotile tune-misses`")


def _check_only_plan(*given: object) -> None:
    if any(given):
        raise InputError("--plan states its kernels, sizes and dtypes; leave them out")


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


def _run(
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
        from autotile.cli.plan import run_plan
        from autotile.tuning.plan import PlannedProblem, TuningPlan

        _check_no_session_options(asked_as, tries, ask_tell)
        run_plan(TuningPlan(kernel.name, (PlannedProblem(asked_as, kernel, problem),)), options, as_json=as_json)
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


_OBJECTIVE_TEXTS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "time": time_text,
        "registers": lambda count: f"{count:.0f}",
        "energy": energy_text,
        "error": lambda share: f"{share:.2g}",
    }
)
"""Text of a value of each of `autotile.core.objectives`."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=ReplayCommand,
        epilog=examples(
            "autotile tune sgemm_2d M=4096 N=4096 K=4096",
            "autotile tune sgemm_2d M=512 N=512 K=512 --budget 90s --sampler random --seed 7",
            "autotile tune matmul M=2047 N=4096 K=4096 --dtype bfloat16 --budget 60s",
            "autotile tune path/to/mine.toml N=1048576 --trials 1000",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --until 1%",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --replay --json",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --sanitize --verify-problem M=1,N=1 --verify-problem K=7",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --objective registers,energy",
        ),
    )(tune)
