"""Progress of tuning on the command line: a live picture on a terminal, a line of text now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotile.api.progress import best_text, count_text, left_text, plain_line, trial_count, trial_target
from autotile.core.model import Problem
from autotile.core.pace import Pace
from autotile.core.text import device_text, duration_text, funnel_text, shown_text
from autotile.kernel.operation import Operation
from autotile.kernel.problem import Workrate
from autotile.kernel.spec import KernelSpec
from autotile.tuning.family_session import FamilyStep
from autotile.tuning.operation_result import OperationStep, SweepStep
from autotile.tuning.result import Progress

_PLAIN_INTERVAL_S = 15.0
_REFRESHES_PER_S = 4
_BAR_WIDTH = 24


class _LivePicture:
    """A picture that is redrawn on a terminal within its context; elsewhere nothing is drawn by itself."""

    _live: Live | None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


class TuneProgress(_LivePicture):
    """Observer of a session; a context manager, which shows it.

    Parameters
    ----------
    console
        Console of standard error.
    problem
        Problem that is tuned.
    rate
        Work of the problem, which turns times into rates.
    """

    def __init__(self, console: Console, problem: Problem, rate: Workrate) -> None:
        self._console = console
        self._problem = problem
        self._rate = rate
        self._latest: Progress | None = None
        self._received_s = 0.0
        self._printed_s = float("-inf")
        self._phase = ("", "")
        self._live = _live(console, self._picture)

    def __call__(self, progress: Progress) -> None:
        """Show a state of the session, at first with its notices."""
        if self._latest is None:
            for notice in progress.notices:
                text = Text(shown_text(notice, lines=True), style="dim")
                self._console.print(text, soft_wrap=not self._console.is_terminal)
        self._latest = progress
        self._received_s = time.monotonic()
        if self._live is None:
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        """Print a line if a new phase begins or the session begins or ends to wait, otherwise every 15 seconds."""
        phase = progress.phase, progress.waiting
        if phase == self._phase and self._received_s - self._printed_s < _PLAIN_INTERVAL_S:
            return
        self._phase = phase
        self._printed_s = self._received_s
        self._console.print(shown_text(plain_line(progress, self._rate)), soft_wrap=True)

    def _picture(self) -> RenderableType:
        progress = self._latest
        if progress is None:
            return Text(f"{shown_text(str(self._problem))}: enumerating the search space")
        since_s = time.monotonic() - self._received_s
        head = Text.assemble((str(self._problem), "bold"), f" on {device_text(progress.device)}")
        return Group(
            head,
            *([Text(shown_text(progress.waiting), style="bold")] if progress.waiting else []),
            _bar_line(progress, since_s),
            Text(shown_text(best_text(progress, self._rate))),
            Text(funnel_text(progress.gates, progress.outcomes), style="dim"),
        )


class SessionsProgress:
    """Observer of several sessions; a context manager, which shows a line of each and a picture of one.

    Of sessions on several GPUs at the same time, the picture is of the one that began last.

    Parameters
    ----------
    console
        Console of standard error.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._place: object = None
        self._seen: set[object] = set()
        self._session: TuneProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_session()

    def show(self, place: object, heading: str, spec: KernelSpec, problem: Problem, progress: Progress) -> None:
        """Show a state of a session; notices are shown with the first session only.

        Parameters
        ----------
        place
            What tells the session apart from the previous one.
        heading
            Line above it.
        spec, problem, progress
            Kernel, problem and state of the session.
        """
        is_first = self._place is None
        if self._place != place and place in self._seen:
            return
        self._seen.add(place)
        if self._place != place:
            self._close_session()
            self._place = place
            self._console.print(shown_text(heading), soft_wrap=True)
            self._session = TuneProgress(self._console, problem, Workrate.of(spec, problem))
            self._session.__enter__()
        if self._session is not None:
            self._session(progress if is_first else replace(progress, notices=()))

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.__exit__(None, None, None)
            self._session = None


class FamilyProgress(SessionsProgress):
    """Observer of the tuning of a family, with a line for each point."""

    def __init__(self, console: Console, spec: KernelSpec) -> None:
        super().__init__(console)
        self._spec = spec

    def __call__(self, step: FamilyStep) -> None:
        """Show a state of a point's session."""
        heading = f"{step.phase} point {step.number} of {step.count}: {step.problem}"
        self.show((step.phase, step.number), heading, self._spec, step.problem, step.progress)


class OperationProgress(SessionsProgress):
    """Observer of the tuning of an operation, with a line for each round of each kernel."""

    def __init__(self, console: Console, operation: Operation) -> None:
        super().__init__(console)
        self._specs = {member.name: member.load().spec for member in operation.members}

    def __call__(self, step: OperationStep) -> None:
        """Show a state of a kernel's session."""
        name = step.problem.kernel
        heading = f"round {step.number} of {step.count}: {name}"
        self.show((step.number, name), heading, self._specs[name], step.problem, step.progress)


class SweepProgress:
    """Observer of a family of an operation, which prints a line at each new phase and every 15 seconds.

    Parameters
    ----------
    console
        Console of standard error.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._printed_s = float("-inf")

    def __call__(self, step: SweepStep) -> None:
        """Show a state."""
        now_s = time.monotonic()
        if step.phase != self._phase or now_s - self._printed_s >= _PLAIN_INTERVAL_S:
            self._phase, self._printed_s = step.phase, now_s
            self._console.print(shown_text(step.text), soft_wrap=True)


class Counted(Protocol):
    """State of something that is done one by one."""

    @property
    def done(self) -> int:
        """Number of those that were done."""

    @property
    def planned(self) -> int:
        """Number of those that will be."""

    @property
    def failed(self) -> int:
        """Number of those that were done in vain."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first began."""


class CountProgress(_LivePicture):
    """Observer of something that is done one by one; a context manager, which shows it with the time that is left.

    Parameters
    ----------
    console
        Console of standard error.
    phase
        What is done.
    failure
        What is the matter with the failed ones.
    """

    def __init__(self, console: Console, phase: str, failure: str) -> None:
        self._console = console
        self._phase = phase
        self._failure = failure
        self._pace = Pace()
        self._latest: Counted | None = None
        self._received_s = self._printed_s = time.monotonic()
        self._live = _live(console, self._picture)

    def __call__(self, state: Counted) -> None:
        """Show a state."""
        before = self._latest.done if self._latest is not None else 0
        self._pace.add(state.elapsed_s, state.done - before)
        self._latest, self._received_s = state, time.monotonic()
        if self._live is None and self._received_s - self._printed_s >= _PLAIN_INTERVAL_S:
            self._printed_s = self._received_s
            self._console.print(", ".join(self._texts(state, 0.0)), soft_wrap=True)

    def _texts(self, state: Counted, since_s: float) -> list[str]:
        texts = [f"{self._phase} {state.done:,}/{state.planned:,}"]
        if state.failed:
            texts.append(f"{state.failed:,} {self._failure}")
        texts.append(f"{duration_text(state.elapsed_s + since_s)} elapsed")
        if (each_s := self._pace.mean_s) is not None and state.done < state.planned:
            texts.append(f"about {duration_text(max(0.0, each_s * (state.planned - state.done) - since_s))} left")
        return texts

    def _picture(self) -> RenderableType:
        state = self._latest
        if state is None:
            return Text("enumerating the search space")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=max(1, state.planned), completed=state.done, width=_BAR_WIDTH)
        line.add_row(bar, *self._texts(state, time.monotonic() - self._received_s))
        return line


def _live(console: Console, picture: Callable[[], RenderableType]) -> Live | None:
    """Return what redraws a picture on a terminal; None if the console is none."""
    if not console.is_terminal:
        return None
    return Live(
        console=console,
        get_renderable=picture,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _bar_line(progress: Progress, since_s: float) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    elapsed = f"{duration_text(progress.elapsed_s + since_s)} elapsed"
    left = left_text(progress, since_s)
    if progress.phase != "searching":
        line.add_row(progress.phase, elapsed, left)
        return line
    done, total = completion(progress, since_s)
    bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH)
    line.add_row(bar, count_text(progress), elapsed, left)
    return line


def completion(progress: Progress, since_s: float) -> tuple[float, float | None]:
    """Return how much of the search is done, and the total: trials, or seconds if only a budget ends the search.

    Parameters
    ----------
    progress
        Last observed state.
    since_s
        Seconds since it was observed.
    """
    if progress.target is None and progress.budget_s is not None:
        return min(progress.elapsed_s + since_s, progress.budget_s), progress.budget_s
    return trial_count(progress), trial_target(progress)
