"""Progress of tuning on the command line: a live picture on a terminal, a line of text now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotile.api.progress import best_text, count_text, left_text, plain_line, trial_count, trial_target
from autotile.core.text import device_text, duration_text, funnel_text, plural, shown_text, time_text
from autotile.core.timeline import Pace
from autotile.tuning.progress_state import Place, Progress

if TYPE_CHECKING:
    from autotile.api.inspection import SurveyProgress

_PLAIN_INTERVAL_S = 15.0
_REFRESHES_PER_S = 4
_BAR_WIDTH = 24
_BEFORE = "enumerating the search space"
"""Picture before the first state."""


def _live(console: Console, picture: Callable[[], RenderableType]) -> Live | nullcontext[None]:
    """Return the context in which a picture is redrawn on a terminal; elsewhere nothing is drawn by itself."""
    if not console.is_terminal:
        return nullcontext()
    return Live(
        console=console,
        get_renderable=picture,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class TuneProgress:
    """Observer of sessions; a context manager, which shows them.

    A session in a schedule gets a heading. Of sessions on several GPUs at the same time, the picture is of the one that
    began last; those of a plan have a line each, below a bar for all its problems. If standard error is no terminal, a
    line is printed as a phase or a wait begins, as a problem of a plan ends, and every 15 seconds.
    """

    def __init__(self, console: Console, before: str = _BEFORE) -> None:
        self._console, self._before = console, before
        self._latest: Progress | None = None
        self._running: dict[int, Progress] = {}
        """States of the problems of a plan that are tuned, by their numbers."""
        self._session: object = None
        self._seen: set[object] = set()
        """Sessions that were shown; one that began before the latest is not shown again."""
        self._received_s = self._begun_s = time.monotonic()
        self._printed_s = float("-inf")
        self._phase = ("", "")
        self._live = _live(console, self._picture)  # which draws the first one

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def remark(self, text: str) -> None:
        """Print a remark above the picture, unless it is empty."""
        if text:
            shown = Text(shown_text(text, lines=True), style="dim")
            self._console.print(shown, soft_wrap=not self._console.is_terminal)

    def __call__(self, progress: Progress) -> None:
        """Show a state, of the first session with its notices."""
        if progress.path and progress.path[0].of == "problem":
            self._show_problem(progress.path[0], progress)
            return
        session = progress.path, str(progress.problem) if progress.gates else ""
        if session != self._session:
            if session in self._seen:
                return
            self._session, self._phase = session, ("", "")
            self._seen.add(session)
            for place in progress.path:
                self._print(f"{place.of} {place.number} of {place.count}: {progress.problem}")
            for notice in progress.notices if self._latest is None else ():
                self.remark(notice)
        self._latest, self._received_s = progress, time.monotonic()
        phase = progress.phase, progress.waiting
        is_due = phase != self._phase or self._received_s - self._printed_s >= _PLAIN_INTERVAL_S
        if is_due and not self._console.is_terminal:
            self._phase, self._printed_s = phase, self._received_s
            self._print(plain_line(progress))

    def _show_problem(self, place: Place, progress: Progress) -> None:
        waited = self._latest.waiting if self._latest is not None else ""
        self._latest, self._received_s = progress, time.monotonic()
        if progress.ending:
            self._running.pop(place.number, None)
            self._printed_s = self._received_s
            line = f"{place.ended} of {place.count}: {progress.problem}: {progress.ending}"
            self._console.print(shown_text(line), soft_wrap=not self._console.is_terminal)
            return
        self._running[place.number] = progress
        is_news = progress.waiting not in {"", waited}
        is_due = self._received_s - max(self._printed_s, self._begun_s) > _PLAIN_INTERVAL_S
        if (is_news or is_due) and not self._console.is_terminal:
            self._printed_s = self._received_s
            for one in list(self._running.values()):
                self._print(_problem_line(one))

    def _print(self, line: str) -> None:
        self._console.print(shown_text(line), soft_wrap=True)

    def _picture(self) -> RenderableType:
        progress, now_s = self._latest, time.monotonic()
        if progress is None:
            return Text(shown_text(self._before))
        if progress.path and progress.path[0].of == "problem":
            place = progress.path[0]
            elapsed = f"{duration_text(now_s - self._begun_s)} elapsed"
            head = _bar_line(place.ended, place.count, f"{place.ended} of {plural(place.count, 'problem')}", elapsed)
            return Group(head, *(Text(shown_text(_problem_line(one))) for one in list(self._running.values())))
        if not progress.gates or progress.device is None:
            return Text(shown_text(plain_line(progress)))
        since_s = now_s - self._received_s
        title = Text.assemble((str(progress.problem), "bold"), f" on {device_text(progress.device)}")
        elapsed, left = f"{duration_text(progress.elapsed_s + since_s)} elapsed", left_text(progress, since_s)
        if progress.phase == "searching":
            line = _bar_line(*completion(progress, since_s), count_text(progress), elapsed, left)
        else:
            line = _line(progress.phase, elapsed, left)
        return Group(
            title,
            *([Text(shown_text(progress.waiting), style="bold")] if progress.waiting else []),
            line,
            Text(shown_text(best_text(progress))),
            Text(funnel_text(progress.gates, progress.outcomes), style="dim"),
        )


def _line(*cells: RenderableType) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(*cells)
    return line


def _bar_line(done: float, total: float | None, *texts: str) -> Table:
    return _line(ProgressBar(total=total, completed=done, width=_BAR_WIDTH), *texts)


def _problem_line(progress: Progress) -> str:
    tried, goal = trial_count(progress), trial_target(progress)
    target = f" of {goal}" if goal is not None else ""
    found = progress.best
    best = f", best {time_text(found.time_us, found.source)}" if found is not None else ""
    waiting = f"; {progress.waiting}" if progress.waiting else ""
    return f"{progress.problem}: {progress.phase}, {tried}{target} trials{best}{waiting}"


@contextmanager
def count_progress(console: Console) -> Iterator[Callable[[SurveyProgress], None]]:
    """Provide an observer of compilations, and show their number with the time that is left meanwhile."""
    pace = Pace()
    latest: SurveyProgress | None = None
    received_s = printed_s = time.monotonic()

    def texts(state: SurveyProgress, since_s: float) -> list[str]:
        found = [f"compiling {state.done:,}/{state.planned:,}"]
        if state.failed:
            found.append(f"{state.failed:,} cannot be launched")
        found.append(f"{duration_text(state.elapsed_s + since_s)} elapsed")
        if (each_s := pace.mean_s) is not None and state.done < state.planned:
            found.append(f"about {duration_text(max(0.0, each_s * (state.planned - state.done) - since_s))} left")
        return found

    def show(state: SurveyProgress) -> None:
        nonlocal latest, received_s, printed_s
        pace.add(state.elapsed_s, state.done - (latest.done if latest is not None else 0))
        latest, received_s = state, time.monotonic()
        if not console.is_terminal and received_s - printed_s >= _PLAIN_INTERVAL_S:
            printed_s = received_s
            console.print(", ".join(texts(state, 0.0)), soft_wrap=True)

    def picture() -> RenderableType:
        if (state := latest) is None:
            return Text(_BEFORE)
        return _bar_line(state.done, max(1, state.planned), *texts(state, time.monotonic() - received_s))

    with _live(console, picture):
        yield show


def completion(progress: Progress, since_s: float) -> tuple[float, float | None]:
    """Return how much of the search is done, and the total: trials, or seconds if only a budget ends the search.

    The state was observed ``since_s`` seconds ago.
    """
    if progress.target is None and progress.budget_s is not None:
        return min(progress.elapsed_s + since_s, progress.budget_s), progress.budget_s
    return trial_count(progress), trial_target(progress)
