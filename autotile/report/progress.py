"""What is shown of a session while it runs: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotile.core.model import Problem, config_text
from autotile.core.text import device_text, duration_text, funnel_text, time_text
from autotile.kernel.workrate import Workrate
from autotile.tuning.result import Progress

_PLAIN_EVERY_S = 15.0
_REFRESHES_PER_S = 4
_BAR_WIDTH = 24


class TuneProgress:
    """Observer of a session; use it in a ``with`` block and hand it to the session.

    Parameters
    ----------
    console
        Where to show it: standard error.
    problem
        What is tuned.
    rate
        Turns the best time into a rate.
    """

    def __init__(self, console: Console, problem: Problem, rate: Workrate) -> None:
        self._console = console
        self._problem = problem
        self._rate = rate
        self._latest: Progress | None = None
        self._received_s = 0.0
        self._printed_s = float("-inf")
        self._phase = ""
        self._live = (
            Live(
                console=console,
                get_renderable=self._picture,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Take note of how far the session has come."""
        if self._latest is None:
            for notice in progress.notices:
                self._console.print(Text(notice, style="dim"), soft_wrap=not self._console.is_terminal)
        self._latest = progress
        self._received_s = time.monotonic()
        if self._live is None:
            self._print_rarely(progress)

    def _print_rarely(self, progress: Progress) -> None:
        if progress.phase == self._phase and self._received_s - self._printed_s < _PLAIN_EVERY_S:
            return
        self._phase = progress.phase
        self._printed_s = self._received_s
        self._console.print(plain_line(progress, self._rate), soft_wrap=True)

    def _picture(self) -> RenderableType:
        progress = self._latest
        if progress is None:
            return Text(f"{self._problem}: enumerating the search space")
        since_s = time.monotonic() - self._received_s
        head = Text.assemble((str(self._problem), "bold"), f" on {device_text(progress.device)}")
        return Group(
            head,
            _bar_line(progress, since_s),
            Text(best_text(progress, self._rate)),
            Text(funnel_text(progress.gates, progress.outcomes), style="dim"),
        )


def plain_line(progress: Progress, rate: Workrate) -> str:
    """Everything in one line, for a log."""
    left = progress.remaining_s
    parts = [
        f"{progress.phase}: {_count_text(progress)}",
        best_text(progress, rate),
        funnel_text(progress.gates, progress.outcomes),
        f"{duration_text(progress.elapsed_s)} elapsed",
        *([f"about {duration_text(left)} left"] if left is not None and progress.phase == "searching" else []),
    ]
    return "; ".join(parts)


def best_text(progress: Progress, rate: Workrate) -> str:
    """The fastest so far: time, rate and configuration."""
    best = progress.best
    if best is None:
        return "best: none yet"
    label = "best (replayed)" if best.source == "replayed" else "best"
    speed = rate.text(best.time_us, progress.device)
    return f"{label} {time_text(best.time_us)}, {speed}, {config_text(best.config)}"


def _bar_line(progress: Progress, since_s: float) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    elapsed = f"{duration_text(progress.elapsed_s + since_s)} elapsed"
    left = progress.remaining_s
    if progress.phase != "searching":
        line.add_row(progress.phase, elapsed)
        return line
    done, total = _share(progress, since_s)
    bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH)
    ahead = f"about {duration_text(max(0.0, left - since_s))} left" if left is not None else ""
    line.add_row(bar, _count_text(progress), elapsed, ahead)
    return line


def _share(progress: Progress, since_s: float) -> tuple[float, float | None]:
    """How much is done of how much: trials, or seconds where only a budget ends the search; None: unknown."""
    if progress.target is None and progress.budget_s is not None:
        return min(progress.elapsed_s + since_s, progress.budget_s), progress.budget_s
    return _tried(progress), _target(progress)


def _count_text(progress: Progress) -> str:
    target = _target(progress)
    return f"{_tried(progress):,}/{target:,} trials" if target is not None else f"{_tried(progress):,} trials"


def _tried(progress: Progress) -> int:
    return sum(progress.outcomes.values())


def _target(progress: Progress) -> int | None:
    """Trials to reach: never more than there are configurations, never fewer than there are trials."""
    if progress.target is None:
        return None
    return max(_tried(progress), min(progress.target, progress.gates["limits"]))
