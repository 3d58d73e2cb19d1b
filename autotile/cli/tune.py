"""``autotile tune``."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from autotile.cli.application import INTERRUPTED, NOTHING_FOUND, examples
from autotile.cli.arguments import (
    LARGEST_SEED,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    OptionalKernelArgument,
    SizesArgument,
    read_duration,
    read_share,
)
from autotile.cli.completion import complete_sampler
from autotile.cli.family import MOST_CONFIGS, MOST_POINTS, tune_family
from autotile.cli.output import console, notice, show_report
from autotile.core.model import Problem
from autotile.core.text import plural
from autotile.errors import AutotileError, InputError

if TYPE_CHECKING:
    from autotile.kernel.library import Kernel
    from autotile.report.tuning import TuneReport
    from autotile.tuning.options import TuneOptions

_REPLAY = "--replay"
_BUILT_IN = "auto"
_RECORDING_SUFFIX = ".npz"
_SPACE_SUFFIX = ".toml"


class TuneCommand(TyperCommand):
    """Lets ``--replay`` stand alone: a word behind it is its value only if it looks like a recording's path."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a bare ``--replay`` its value."""
        return super().parse_args(ctx, _with_replay_value(args))


def _with_replay_value(words: list[str]) -> list[str]:
    full: list[str] = []
    for word, following in pairwise([*words, ""]):
        full.append(f"{_REPLAY}={_BUILT_IN}" if word == _REPLAY and not _is_recording(following) else word)
    return full


def _is_recording(word: str) -> bool:
    """Whether a word is a path that no search-space file has: kernels and sizes may follow ``--replay``, too."""
    if word.startswith("-"):
        return False
    return word.endswith(_RECORDING_SUFFIX) or ("/" in word and "=" not in word and not word.endswith(_SPACE_SUFFIX))


def tune(
    kernel: OptionalKernelArgument = None,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Trials that are to be stored in the end, those of earlier sessions included.",
            show_default="200, or as many as --budget or --until allows",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wall time of the search, such as 90s, 5m or 1h.", show_default="none"),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="GAIN",
            help="Stop when the next candidates are together expected to gain less than this, such as 1%.",
            show_default="none",
        ),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Search method: feasible, tpe, random, brute-force and others.",
            autocompletion=complete_sampler,
        ),
    ] = "auto",
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,...]",
            help="What to minimise beside time: registers, energy or error. May be given again.",
            show_default="time alone",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Seed of the search; equal seeds search alike."),
    ] = 0,
    l2: Annotated[
        Literal["cold", "hot"], typer.Option(help="Whether inputs start in memory or in the L2 cache.")
    ] = "cold",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is stored already.")] = False,
    finals: Annotated[
        int, typer.Option(metavar="N", min=0, help="Best candidates re-measured interleaved at the end; 0 for none.")
    ] = 12,
    verify_problem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N[,...]",
            help="One more problem that every configuration must be right on; sizes left out are the tuned ones. "
            "May be given again.",
            show_default="the tuned problem and a ragged one",
        ),
    ] = None,
    sanitize: Annotated[
        bool,
        typer.Option("--sanitize", help="Run the finalists under compute-sanitizer; none with a fault can win."),
    ] = False,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer/--no-transfer", help="Learn from the kernel's trials at other sizes and on other GPUs."
        ),
    ] = True,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compile processes.", show_default="one a core")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.npz]",
            help="Replay launches from a recording; without a file, from a built-in one.",
            show_default="only where there is no GPU",
        ),
    ] = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Tune what programs asked for and could not be served exactly.")
    ] = False,
    family: Annotated[
        bool,
        typer.Option(
            "--family",
            help="Tune a family: sizes may be ranges (M=1..8192) and lists (K=4096,7168). What is learned from a few "
            "of its problems is served for all; --budget is for all together.",
        ),
    ] = False,
    points: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MOST_POINTS, help="Problems of a family to tune.", show_default="24"),
    ] = None,
    max_configs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST_CONFIGS, help="Configurations a family's rule chooses from.", show_default="8"
        ),
    ] = None,
    device: Annotated[int, typer.Option(metavar="INDEX", min=0, help="CUDA device to tune on.")] = 0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest configuration, verify it, and keep it.

    The space is searched for valid configurations only; each one tried is compiled, verified against a float64
    reference, measured and stored. The best of them are measured again side by side with the default. The same command
    goes on where an interrupted one stopped.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.tuning.options import TuneOptions

    options = TuneOptions(
        sampler=sampler,
        trials=trials,
        budget_s=read_duration(budget) if budget is not None else None,
        until=read_share(until) if until is not None else None,
        objectives=tuple(name for text in objective or () for name in text.split(",")),
        seed=seed,
        l2=l2,
        fresh=fresh,
        finals=finals,
        verify_sizes=tuple(read_sizes(text.replace(",", " ").split()) for text in verify_problem or ()),
        sanitize=sanitize,
        transfer=transfer,
        workers=workers,
        device_index=device,
        replay=replay if replay in (None, _BUILT_IN) else Path(replay),
        database=database,
    )
    if not family and (points is not None or max_configs is not None):
        raise InputError("--points and --max-configs are for --family, which is missing")
    if family and from_misses:
        raise InputError("--family and --from-misses name two different sets of problems; name one of them")
    if family:
        tune_family(kernel, sizes, dtype, options, points=points, max_configs=max_configs, as_json=as_json)
    elif from_misses:
        _tune_missed(kernel, sizes, options, as_json=as_json)
    elif kernel is not None:
        _tune_one(kernel, sizes, dtype, options, as_json=as_json)
    else:
        raise InputError("no kernel is named; expected `autotile tune KERNEL SIZE=N ...`, or --from-misses")


def _tune_one(kernel: str, sizes: list[str] | None, dtype: str | None, options: TuneOptions, *, as_json: bool) -> None:
    from autotile.api.targets import open_problem
    from autotile.cli.assignments import read_sizes
    from autotile.ops.tuning import serving_call

    loaded, problem = open_problem(kernel, read_sizes(sizes or []), dtype)
    call = serving_call(kernel, problem, dtype=dtype, database=options.database)
    report = _run(loaded, problem, options, call)
    show_report(report, as_json=as_json)
    _exit([report])


def _tune_missed(kernel: str | None, sizes: list[str] | None, options: TuneOptions, *, as_json: bool) -> None:
    """Tune one problem after the other; one that cannot be tuned does not stop the others."""
    from autotile.ops.tuning import serving_call
    from autotile.report.misses import TunedReport
    from autotile.tuning.missed_problems import missed_problems

    if sizes:
        raise InputError("--from-misses takes its sizes from the database; leave them out")
    reports: list[TuneReport] = []
    failed = False
    for missed in missed_problems(kernel, options):
        notice(f"{missed.problem}: {plural(missed.count, 'call')} not served exactly{_cost_text(missed.lost_s)}")
        call = serving_call(missed.asked_as, missed.problem, dtype=missed.problem.dtype, database=options.database)
        try:
            reports.append(_run(missed.kernel, missed.problem, options, call))
        except AutotileError as error:
            failed = True
            notice(f"{missed.problem} is left out: {error}")
        if reports and reports[-1].result.interrupted:
            break
    if not reports and not failed:
        notice("no missed problem is left to tune; `autotile misses` lists what was counted")
    show_report(TunedReport(reports), as_json=as_json)
    _exit(reports)
    if failed:
        raise typer.Exit(NOTHING_FOUND)


def _cost_text(lost_s: float | None) -> str:
    from autotile.core.text import duration_text

    return "" if lost_s is None else f", which may have cost {duration_text(lost_s)}"


def _run(kernel: Kernel, problem: Problem, options: TuneOptions, call: str) -> TuneReport:
    from autotile.kernel.workrate import Workrate
    from autotile.ops.tuning import tune_problem
    from autotile.report.progress import TuneProgress
    from autotile.report.tuning import TuneReport

    with TuneProgress(console(sys.stderr), problem, Workrate.of(kernel.spec, problem)) as progress:
        result = tune_problem(kernel, problem, options, progress)
    return TuneReport(result, call)


def _exit(reports: list[TuneReport]) -> None:
    """Leave with the code that the sessions' ends call for; go on where all found a winner."""
    for result in (report.result for report in reports):
        if result.interrupted:
            stored = plural(sum(result.outcomes.values()), "trial")
            notice(f"interrupted: {stored} saved in {result.database}; the same command goes on from there")
            raise typer.Exit(INTERRUPTED)
    if any(report.result.winner is None for report in reports):
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    options: dict[str, Any] = {"cls": TuneCommand}
    app.command(
        epilog=examples(
            "autotile tune sgemm_2d M=4096 N=4096 K=4096",
            "autotile tune sgemm_2d M=512 N=512 K=512 --budget 90s --sampler random --seed 7",
            "autotile tune path/to/mine.toml N=1048576 --trials 1000",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --until 1%",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --replay --json",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --sanitize --verify-problem M=1,N=1 --verify-problem K=7",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --objective registers,energy",
            "autotile tune --from-misses --budget 5m",
            "autotile tune sgemm_2d --family M=1..8192 N=4096 K=4096,7168 --budget 30m",
        ),
        **options,
    )(tune)
