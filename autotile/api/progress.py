"""Progress of tuning as one line of plain text: on a terminal, in a notebook, or passed to a callable."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

from autotile.core.model import config_text
from autotile.core.text import duration_text, funnel_text, plural, shown_text, sizes_text, time_text
from autotile.tuning.progress_state import Observer, Progress

_MIN_INTERVAL_S = 0.25
_DEFAULT_WIDTH = 80


class TerminalDisplay:
    """Line on a terminal, rewritten in place with a carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = 0

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line, cut to the width of the terminal: a line that wraps could not be rewritten."""
        try:
            width = (os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_WIDTH) - 1
        except (OSError, ValueError):
            width = _DEFAULT_WIDTH - 1
        line = line if len(line) <= width else line[: max(0, width - 3)] + "..."
        self._write(f"\r{line.ljust(self._shown)}")
        self._shown = len(line)

    def notice(self, text: str) -> None:
        """Write a text on lines of its own, in place of the line of progress."""
        self._write(f"\r{' ' * self._shown}\r{text}\n" if self._shown else f"{text}\n")
        self._shown = 0

    def close(self) -> None:
        """End the line."""
        if self._shown:
            self._write("\n")
            self._shown = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NotebookDisplay:
    """Line in the output of a notebook's cell, with the notices above it, and with a bar if ipywidgets is there."""

    def __init__(self) -> None:
        self._notices: list[str] = []
        self._line = ""
        self._handle: Any = None
        try:
            widgets = import_module("ipywidgets")
            self._bar = widgets.FloatProgress(min=0.0, max=1.0, layout=widgets.Layout(width="16em"))
            self._texts = widgets.HTML(), widgets.HTML()
            self._box = widgets.VBox([self._texts[0], widgets.HBox([self._bar, self._texts[1]])])
        except Exception:  # not installed, or of another version than the notebook's front end
            self._bar = None

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line, and move the bar to the share of the whole that is done, if that is known."""
        from html import escape  # a program without a notebook does not need it

        self._line = line
        data = {"text/plain": "\n".join(filter(None, [*self._notices, line]))}
        if self._bar is not None:
            *notices, shown = (f"<span>{escape(shown_text(text))}</span>" for text in (*self._notices, line))
            self._texts[0].value, self._texts[1].value = "<br>".join(notices), shown
            if share is not None:
                self._bar.value = min(max(share, 0.0), 1.0)
            if self._handle is None:
                self._handle = self._box
                import_module("IPython.display").display(self._box)
        elif self._handle is None:
            self._handle = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def notice(self, text: str) -> None:
        """Show a text that stays above the line."""
        self._notices.append(text)
        self.show(self._line)

    def close(self) -> None:
        """Leave the line, and remove the bar, which would look as if something still ran."""
        if self._bar is not None:
            self._bar.layout.display = "none"


@contextmanager
def progress_line(display: TerminalDisplay | NotebookDisplay) -> Iterator[Observer]:
    """Provide an observer that shows in a line how far one session after another has come.

    A state is shown at once if a new stage begins, otherwise a few times a second, and the last one at the end. After
    the first error of writing to the display, such as that of a closed terminal, nothing is shown.
    """
    noticed, shown_stage, shown_s, is_broken = set[str](), ("", "", ""), float("-inf"), False
    pending: tuple[str, float | None] | None = None

    def write(draw: Callable[..., None], *given: Any) -> None:
        nonlocal is_broken
        if not is_broken:
            try:
                draw(*given)
            except (OSError, ValueError):
                is_broken = True

    def flush() -> None:
        nonlocal pending
        if pending is not None:
            line, pending = pending, None
            write(display.show, *line)

    def show(progress: Progress) -> None:
        nonlocal shown_stage, shown_s, pending
        for notice in progress.notices:
            if notice not in noticed:
                noticed.add(notice)
                write(display.notice, notice)
        head, problem = "", progress.problem
        if problem is not None and progress.gates:  # the kernel, and the place of its session with its sizes
            places = "".join(f" {place.of} {place.number}/{place.count}," for place in progress.path)
            head = f"{problem.kernel}{places} {sizes_text(problem.sizes)}: " if places else f"{problem.kernel}: "
        target, shares = trial_target(progress), list[float]()
        if target:
            shares.append(trial_count(progress) / target)
        if progress.budget_s:
            shares.append(progress.elapsed_s / progress.budget_s)
        pending = f"{head}{short_line(progress)}", max(shares, default=None)
        now_s, stage = time.monotonic(), (head, progress.phase, progress.waiting)
        if stage != shown_stage or now_s - shown_s >= _MIN_INTERVAL_S:
            shown_stage, shown_s = stage, now_s
            flush()

    try:
        yield show
    finally:
        flush()
        write(display.close)


def default_display() -> TerminalDisplay | NotebookDisplay | None:
    """Return the notebook's cell, or standard error if it is a terminal; None otherwise."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is not None:  # which the shell of a terminal lacks
        return NotebookDisplay()
    stream = sys.stderr
    if stream is None or stream.closed:
        return None
    return TerminalDisplay(stream) if stream.isatty() else None


@contextmanager
def observing(progress: bool | Observer) -> Iterator[Observer]:
    """Provide the observer that the argument ``progress`` of a function of the API selects.

    True is a line on a terminal or in a notebook, and nothing elsewhere; False is nothing; a callable is itself.
    """
    if callable(progress):
        yield progress
        return
    display = default_display() if progress else None
    if display is None:
        yield lambda _: None
        return
    with progress_line(display) as show:
        yield show


def plain_line(progress: Progress) -> str:
    """Return the whole state in one line, for a log."""
    if not progress.gates:
        return _count_line(progress)
    parts = [
        f"{progress.phase}: {count_text(progress)}",
        best_text(progress),
        funnel_text(progress.gates, progress.outcomes),
        f"{duration_text(progress.elapsed_s)} elapsed",
    ]
    return "; ".join(filter(None, [progress.waiting, *parts, left_text(progress)]))


def short_line(progress: Progress) -> str:
    """Return the state in one line that begins with what matters most, as a terminal may cut its end."""
    if not progress.gates:
        return _count_line(progress)
    best = progress.best
    parts = [f"{progress.phase} {count_text(progress).removesuffix(' trials')}"]
    if best is not None:
        parts.append(f"best {time_text(best.time_us, best.source)}")
    parts.append(f"{duration_text(progress.elapsed_s)} elapsed")
    line = ", ".join(filter(None, [*parts, left_text(progress).removeprefix("about ")]))
    line = f"{progress.waiting}; {line}" if progress.waiting else line
    if best is None:
        return line
    return f"{line}; {best_text(progress).partition(', ')[2]}"


def _count_line(progress: Progress) -> str:
    """Return the state of a family of an operation, which is measured problem by problem."""
    limit = f" of {duration_text(progress.budget_s)}" if progress.budget_s is not None else ""
    at = f", {progress.problem}" if progress.problem is not None else ""
    done = f"{plural(progress.done, 'problem')}, {plural(trial_count(progress), 'time')}"
    return f"{progress.phase}: {done}; {duration_text(progress.elapsed_s)}{limit}{at}"


def left_text(progress: Progress, since_s: float = 0.0) -> str:
    """Return the time that is left ``since_s`` seconds after a state: ``about 2 min 05 s left``; "" if not known."""
    if not progress.remaining_s or progress.remaining_s <= since_s:  # it takes longer than was expected
        return ""
    about = "at most" if progress.may_end_earlier and progress.phase == "searching" else "about"
    return f"{about} {duration_text(progress.remaining_s - since_s)} left"


def best_text(progress: Progress) -> str:
    """Return time, rate and configuration of the fastest trial so far."""
    best = progress.best
    if best is None:
        return "best: none yet"
    label = "best (replayed)" if best.source == "replayed" else "best"
    details = f"{progress.rate.text(best.time_us, progress.device)}, {config_text(best.config)}"
    return f"{label} {time_text(best.time_us)}, {details.removeprefix('-, ')}"


def count_text(progress: Progress) -> str:
    """Return the number of trials, with their target if there is one: ``50/200 trials``."""
    target = trial_target(progress)
    return (
        f"{trial_count(progress):,}/{target:,} trials" if target is not None else plural(trial_count(progress), "trial")
    )


def trial_count(progress: Progress) -> int:
    """Return the number of trials of the study, those of earlier sessions included."""
    return sum(progress.outcomes.values())


def trial_target(progress: Progress) -> int | None:
    """Return the number of trials to reach: at most the size of the space, at least the number of trials so far."""
    if progress.target is None:
        return None
    return max(trial_count(progress), min(progress.target, progress.gates["limits"]))
