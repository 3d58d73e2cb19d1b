"""``autotile tune``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
from autotile.cli.tables import RIGHT, Listing, below, facts, lines, table, title
from autotile.core.model import Config, Outcome, Problem, Trial, config_key, config_text
from autotile.core.text import (
    NOTHING,
    device_text,
    duration_text,
    energy_text,
    funnel_text,
    interval_text,
    plural,
    time_text,
)
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.cli.progress import TuneProgress
    from autotile.core.statistics import Interval
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.pipeline import Load
    from autotile.tuning.result import Drift, Front, TuneResult
    from autotile.tuning.stopping import Stopped

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
        result = tune_problem(kernel, problem, options, progress)
    show(result, partial(tune_table, call=call), partial(tune_document, call=call), as_json=as_json)
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


def tune_document(result: TuneResult, call: str) -> dict[str, Any]:
    """Return a result for JSON: every outcome is counted, and ``call`` is the line of Python that serves the winner."""
    counted = {str(outcome): result.outcomes.get(outcome, 0) for outcome in Outcome}
    return {**result.to_json(), "outcomes": counted, "call": call}


def tune_table(result: TuneResult, call: str) -> RenderableType:
    """Render winner and default side by side, then facts about the session and the line that serves the winner."""
    parts: list[RenderableType] = [title(f"{result.problem} on {device_text(result.device)}")]
    if result.winner is None:
        parts.append(facts([(_winner_label(result), "none: no configuration ran"), *_facts(result, call)]))
    else:
        front = [] if result.front is None else [below(front_table(result.front, result.winner.config))]
        parts += [_comparison(result), *front, below(facts(_facts(result, call)))]
    return Group(*parts)


def _winner_label(result: TuneResult) -> str:
    return "best so far" if result.interrupted else "winner"


def _comparison(result: TuneResult) -> Table:
    from autotile.kernel.problem import Workrate

    scores = list(result.winner.scores) if result.winner is not None else []
    shown = table("", f"{RIGHT}time", "95 % interval, us", "rate", *(f"{RIGHT}{name}" for name in scores))
    rate = Workrate(result.flops, result.bytes, result.problem.dtype, result.unit, result.passes)
    for label, trial in ((_winner_label(result), result.winner), ("default", result.default)):
        measured = trial.measurement if trial is not None else None
        if measured is not None:
            interval = interval_text(measured.low_us, measured.high_us)
            own = trial.scores if trial is not None else {}
            values = [f"{own[name]:.6g}" if name in own else NOTHING for name in scores]
            speed = rate.text(measured.time_us, result.device)
            shown.add_row(label, time_text(measured.time_us), interval, speed, *values)
        else:
            shown.add_row(label, NOTHING, NOTHING, str(trial.outcome) if trial is not None else "not run")
    return shown


def _facts(result: TuneResult, call: str) -> Iterator[tuple[str, RenderableType]]:
    from autotile.core.text import occupancy_text

    if result.interrupted:
        yield "interrupted", _interruption(result)
    if result.winner is not None:
        yield _winner_label(result), config_text(result.winner.config)
        if result.winner.occupancy is not None:
            yield "occupancy", occupancy_text(result.device, result.winner.occupancy)
    if result.default is not None:
        yield "default", config_text(result.default.config)
    if result.speedup is not None:
        yield "speed-up", _speedup(result, result.speedup)
    if result.ties:
        yield "ties", lines(_ties(result.ties))
    if result.tried:
        yield "tried", lines(_tried(result.tried))
    if result.refused:
        yield "refused", lines(_refused(result))
    yield from _search_facts(result)
    if result.winner is not None:
        yield "serve it", call


def _search_facts(result: TuneResult) -> Iterator[tuple[str, RenderableType]]:
    if result.insight is not None and result.winner is not None:
        yield "matters", result.insight.sentence
    if result.drift is not None and result.drift.spread > _MIN_DRIFT_SHOWN:
        yield "drift", _drift(result.drift)
    if result.learnt_from:
        yield "learnt", f"from {'; '.join(result.learnt_from)}"
    if result.not_learnt_from:
        yield "not learnt", f"from {'; '.join(map(str, result.not_learnt_from))}"
    if result.load is not None:
        yield "busy", _load(result.load)
    if result.gpus:
        yield "GPUs", lines(_gpus(result))
    yield "gates", funnel_text(result.gates, result.outcomes)
    if result.stopped is not None and result.stopped.rule in ("until", "settled"):
        yield "stopped", _stopped(result.stopped)
    resumed = f", {plural(result.resumed, 'trial')} resumed" if result.resumed else ""
    yield "took", duration_text(result.seconds) + resumed
    yield "saved in", result.database


def _gpus(result: TuneResult) -> list[str]:
    """Return a line for each GPU that took part, and one for the winner on a second one."""
    rows = [
        f"{use.uuid}: {plural(use.trials, 'trial')}"
        + (f", times x {use.scale:.4f}" if use.scale is not None else "")
        + (f", given up: {use.lost}" if use.lost else "")
        for use in result.gpus
    ]
    found = result.confirmation
    if found is not None:
        ratio = f", {found.speedup.value:.3f}x over the default" if found.speedup is not None else ""
        rows.append(f"the winner on {found.gpu}: {time_text(found.time_us)}, {100 * found.spread:+.1f} %{ratio}")
    return rows


def _interruption(result: TuneResult) -> str:
    tried = plural(sum(result.outcomes.values()), "configuration")
    compared = "" if result.speedup is not None else ", before the best were timed side by side"
    return f"the search was cut short after {tried}{compared}; the same command goes on from there"


def _speedup(result: TuneResult, ratio: Interval) -> str:
    from autotile.core.statistics import is_tie

    winner, default = result.winner, result.default
    if winner is not None and default is not None and config_key(winner.config) == config_key(default.config):
        return "none: the default configuration is the winner"
    known = f"{ratio.value:.3f}x over the default, 95 % interval {ratio.low:.3f}x to {ratio.high:.3f}x"
    return f"{known}: not told apart from the default" if is_tie(ratio) else known


def _tried(tried: Sequence[Trial]) -> list[str]:
    """Return a line for each configuration that the user named."""
    outcomes = [
        time_text(trial.time_us) if trial.outcome is Outcome.OK else f"{trial.outcome}, {trial.reason}"
        for trial in tried
    ]
    return [f"{config_text(trial.config)}: {text}" for trial, text in zip(tried, outcomes, strict=True)]


def _refused(result: TuneResult) -> Iterator[str]:
    for trial in result.refused:
        yield f"{config_text(trial.config)}: {trial.outcome} in stage {trial.stage}: {trial.reason}"


def _stopped(stopped: Stopped) -> str:
    gain = 100 * (stopped.expected_gain or 0.0)
    if stopped.rule == "settled":
        more = f"{gain:.1g} %" if gain >= _MIN_GAIN_SHOWN else f"less than {_MIN_GAIN_SHOWN:g} %"
        return f"nothing more is expected: {more} from {stopped.more_trials} more trials; --spend uses the budget up"
    return f"all the candidates that lay ready were expected to gain {gain:.2g} %, less than --until asks for"


def _drift(drift: Drift) -> str:
    times = f"a reference kernel took {drift.least_us:.4g} to {drift.greatest_us:.4g} us ({drift.spread:.1%})"
    if drift.spread > _MIN_FOREIGN_LOAD_DRIFT:
        return f"{times}: something else ran on the GPU; tune again where the winner matters"
    return f"{times} through the search; the finals are free of that"


def _load(load: Load) -> str:
    shares = f"the compilers {load.compilers_busy:.0%} of the search, the GPU {load.gpu_busy:.0%}"
    return f"{shares}: the search waits for the {'GPU' if load.binds == 'gpu' else 'compilers'}"


def _ties(ties: tuple[Config, ...]) -> Iterator[str]:
    yield f"{plural(len(ties), 'configuration')} cannot be told apart from the winner:"
    for config in ties[:_MAX_TIES_SHOWN]:
        yield f"  {config_text(config)}"
    if len(ties) > _MAX_TIES_SHOWN:
        yield f"  and {len(ties) - _MAX_TIES_SHOWN} more, listed by --json"


_OBJECTIVE_TEXTS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "time": time_text,
        "registers": lambda count: f"{count:.0f}",
        "energy": energy_text,
        "error": lambda share: f"{share:.2g}",
    }
)
"""Text of a value of each of `autotile.core.objectives`."""


def front_table(front: Front, winner: Config) -> RenderableType:
    """Render the Pareto front of several objectives: at most ten configurations, from the fastest to the slowest."""
    shown = _evenly_spaced(len(front.trials), _MAX_FRONT_SHOWN)
    rows = []
    for trial in (front.trials[index] for index in shown):
        values = zip(front.objectives, front.values(trial), strict=True)
        figures = (_OBJECTIVE_TEXTS[name](value) for name, value in values)
        label = "winner" if config_key(winner) == config_key(trial.config) else ""
        rows.append((label, *figures, config_text(trial.config)))
    headings = ("", *(f"{RIGHT}{name}" for name in front.objectives), "configuration")
    return Group(Text(_front_heading(front, len(rows))), Listing(headings, rows, ("configuration",)))


def _evenly_spaced(count: int, max_shown: int) -> list[int]:
    """Return at most so many indices below ``count``, the first and the last among them."""
    shown = min(count, max_shown)
    step = (count - 1) / max(1, shown - 1)
    return sorted({round(number * step) for number in range(shown)})


def _front_heading(front: Front, shown: int) -> str:
    objectives = f"{', '.join(front.objectives[:-1])} and {front.objectives[-1]}"
    heading = f"front of {objectives}: {plural(len(front.trials), 'configuration')}"
    return heading if shown == len(front.trials) else f"{heading}, {shown} shown; --json lists all"


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
