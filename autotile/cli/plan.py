"""``autotile plan``, which writes plans, and ``autotile tune --plan``, which tunes by them."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, GpuOption, OptionalKernelArgument
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, error_console, examples, notice, show
from autotile.cli.tables import RIGHT, Listing, below, facts, title
from autotile.core.text import NOTHING, duration_text, plural, shown_text, sizes_text, source_text, time_text
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.api.plans import PlanEntry, PlanResult, PlanStep
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.plan import TuningPlan

_BAR_WIDTH = 32
_PLAIN_INTERVAL_S = 30.0
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


def run_plan(planned: Path | TuningPlan, options: TuneOptions, *, as_json: bool) -> None:
    """Tune a plan, show what became of it, and exit with 0 only if all is tuned."""
    from autotile.api.plans import PlanResult, tune_plan
    from autotile.settings import absolute_path

    chosen = absolute_path(planned, "a plan") if isinstance(planned, Path) else planned
    with PlanProgress(error_console()) as progress:
        result = tune_plan(chosen, options, progress)
    show(result, plan_table, PlanResult.to_json, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if not result.is_complete:
        raise typer.Exit(NOTHING_FOUND)


def plan_table(result: PlanResult) -> RenderableType:
    """Render what became of each problem, then facts about the plan."""
    figures = (f"{RIGHT}time", f"{RIGHT}speed-up", f"{RIGHT}took")
    headings = ("kernel", "state", *figures, "dtype", "GPU", "problem", "reason")
    shown = Listing(headings, [_row(entry) for entry in result.entries[:_MAX_SHOWN]], ("reason", "problem", "GPU"))
    rows = [("problems", result.summary), ("saved in", result.database)]
    if len(result.entries) > _MAX_SHOWN:
        rows.insert(1, ("shown", f"the first {_MAX_SHOWN}; --json lists all"))
    return Group(title(f"plan {result.name}"), shown, below(facts(rows)))


def _row(entry: PlanEntry) -> tuple[str, ...]:
    problem = entry.planned.problem
    speedup = getattr(entry.result, "speedup", None)
    return (
        problem.kernel,
        entry.state,
        entry.time_text,
        f"{speedup.value:.3f}x" if speedup is not None else NOTHING,
        duration_text(entry.seconds) if entry.seconds else NOTHING,
        problem.dtype,
        entry.device_label,
        sizes_text(problem.sizes),
        entry.reason,
    )


class PlanProgress:
    """Observer of a plan; a context manager, which shows a bar for all problems, and a line for each that is tuned.

    Parameters
    ----------
    console
        Console of standard error; on one that is no terminal, a line is printed as a problem ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[int, PlanStep] = {}
        self._last: PlanStep | None = None
        self._waiting = ""
        self._begun = time.monotonic()
        self._printed_s = self._begun
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, step: PlanStep) -> None:
        """Show a state of the plan."""
        self._last = step
        if step.entry is None:
            self._running[step.number] = step
        else:
            self._running.pop(step.number, None)
            if step.entry.state != "done":
                self._print(step)
            return
        waiting = step.progress.waiting if step.progress is not None else ""
        is_news, self._waiting = waiting not in {"", self._waiting}, waiting
        is_due = time.monotonic() - self._printed_s > _PLAIN_INTERVAL_S
        if not self._console.is_terminal and (is_due or is_news):
            self._printed_s = time.monotonic()
            for one in list(self._running.values()):
                self._console.print(shown_text(_line(one)), soft_wrap=True)

    def _print(self, step: PlanStep) -> None:
        self._printed_s = time.monotonic()
        entry = step.entry
        assert entry is not None
        text = {"tuned": entry.time_text, "failed": f"failed: {entry.reason}"}.get(entry.state, "left")
        line = f"{step.ended} of {step.count}: {step.planned.problem}: {text}"
        self._console.print(shown_text(line), soft_wrap=not self._console.is_terminal)

    def _picture(self) -> RenderableType:
        step = self._last
        if step is None:
            return Text("reading the plan")
        head = Table.grid(padding=(0, 2, 0, 0))
        elapsed = duration_text(time.monotonic() - self._begun)
        bar = ProgressBar(total=step.count, completed=step.ended, width=_BAR_WIDTH)
        head.add_row(bar, f"{step.ended} of {plural(step.count, 'problem')}", f"{elapsed} elapsed")
        return Group(head, *(Text(shown_text(_line(one))) for one in list(self._running.values())))


def _line(step: PlanStep) -> str:
    """Return the state of a session on one line."""
    from autotile.api.progress import trial_count, trial_target

    progress = step.progress
    assert progress is not None
    tried, goal = trial_count(progress), trial_target(progress)
    target = f" of {goal}" if goal is not None else ""
    found = progress.best
    best = f", best {source_text(time_text(found.time_us), found.source)}" if found is not None else ""
    waiting = f"; {progress.waiting}" if progress.waiting else ""
    return f"{step.planned.problem}: {progress.phase}, {tried}{target} trials{best}{waiting}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "plan",
        epilog=examples("autotile plan --from-misses -o misses.toml", "autotile tune --plan misses.toml --devices all"),
    )(plan)
