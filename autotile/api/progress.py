"""Progress of tuning as one line of plain text: on a terminal, in a notebook, or passed to a callable."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import methodcaller
from typing import Any, Protocol, TextIO

from autotile.core.model import Problem, config_text
from autotile.core.text import duration_text, funnel_text, shown_text, sizes_text, time_text
from autotile.kernel.operation import Operation
from autotile.kernel.problem import Workrate
from autotile.kernel.spec import KernelSpec
from autotile.tuning.family_session import FamilyStep
from autotile.tuning.operation_result import OperationStep, SweepStep
from autotile.tuning.result import Progress

Observer = Callable[[Progress], None]
"""Callable that observes a tuning session."""
FamilyObserver = Callable[[FamilyStep], None]
"""Callable that observes the tuning of a family."""

OperationObserver = Callable[[OperationStep], None]
"""Callable that observes the tuning of an operation."""

_MIN_INTERVAL_S = 0.25
_DEFAULT_WIDTH = 80


class LineDisplay(Protocol):
    """Place where a line of progress is shown."""

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line that is shown; ``share`` is what is done of the whole, None if that is not known."""

    def notice(self, text: str) -> None:
        """Show a text that stays."""

    def close(self) -> None:
        """Leave the last line as it is."""


class TerminalDisplay:
    """Line on a terminal, rewritten in place with a carriage return.

    Parameters
    ----------
    stream
        Text stream of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = 0

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line, cut to the width of the terminal: a line that wraps could not be rewritten."""
        line = _cut(line, _width(self._stream) - 1)
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
    """Output of a notebook's cell, updated under a display id."""

    def __init__(self) -> None:
        self._notices: list[str] = []
        self._line = ""
        self._handle: Any = None

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line; the notices stay above it."""
        self._line = line
        data = {"text/plain": "\n".join(filter(None, [*self._notices, line]))}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def notice(self, text: str) -> None:
        """Show a text above the line."""
        self._notices.append(text)
        self.show(self._line)

    def close(self) -> None:
        """Leave the output as it is."""


class WidgetDisplay:
    """Bar and line of a notebook's cell, as widgets of ipywidgets.

    Raises
    ------
    ImportError
        ipywidgets is not installed.
    """

    def __init__(self) -> None:
        widgets = import_module("ipywidgets")
        self._bar = widgets.FloatProgress(min=0.0, max=1.0, layout=widgets.Layout(width="16em"))
        self._line = widgets.HTML()
        self._notices: list[str] = []
        self._shown_notices = widgets.HTML()
        rows = [self._shown_notices, widgets.HBox([self._bar, self._line])]
        self._box = widgets.VBox(rows)
        self._is_shown = False

    def show(self, line: str, share: float | None = None) -> None:
        """Replace the line, and move the bar."""
        self._line.value = _as_html(line)
        if share is not None:
            self._bar.value = min(max(share, 0.0), 1.0)
        self._show_once()

    def notice(self, text: str) -> None:
        """Show a text above the bar."""
        self._notices.append(text)
        self._shown_notices.value = "<br>".join(map(_as_html, self._notices))
        self._show_once()

    def close(self) -> None:
        """Leave the line, and remove the bar, which would look as if something still ran."""
        self._bar.layout.display = "none"

    def _show_once(self) -> None:
        if not self._is_shown:
            self._is_shown = True
            import_module("IPython.display").display(self._box)


def _as_html(text: str) -> str:
    from html import escape

    return f"<span>{escape(shown_text(text))}</span>"


class ProgressLine:
    """Line that shows how far one session after another has come.

    Parameters
    ----------
    display
        Where to show it. After the first error of writing there, such as that of a closed terminal, nothing is shown.
    spec
        Kernel, whose work turns times into rates.
    """

    def __init__(self, display: LineDisplay, spec: KernelSpec) -> None:
        self._display: LineDisplay | None = display
        self._spec = spec
        self._noticed: set[str] = set()
        self._stage = ("", "", "")
        self._shown_s = float("-inf")
        self._pending = ""
        self._share: float | None = None

    def show(self, head: str, problem: Problem, progress: Progress, spec: KernelSpec | None = None) -> None:
        """Show a state: at once if a new stage begins, otherwise a few times a second.

        ``spec`` is the kernel, if it is another one than the line was made for.
        """
        for notice in progress.notices:
            if notice not in self._noticed:
                self._noticed.add(notice)
                self._write(methodcaller("notice", notice))
        now_s, stage = time.monotonic(), (head, progress.phase, progress.waiting)
        self._pending = f"{head}: {short_line(progress, Workrate.of(spec or self._spec, problem))}"
        self._share = done_share(progress)
        if stage != self._stage or now_s - self._shown_s >= _MIN_INTERVAL_S:
            self._stage, self._shown_s = stage, now_s
            self._flush()

    def close(self) -> None:
        """Show the last state, and leave it."""
        self._flush()
        self._write(methodcaller("close"))

    def _flush(self) -> None:
        if self._pending:
            line, self._pending = self._pending, ""
            self._write(methodcaller("show", line, self._share))

    def _write(self, write: Callable[[LineDisplay], None]) -> None:
        if self._display is not None:
            try:
                write(self._display)
            except (OSError, ValueError):
                self._display = None


def default_display() -> LineDisplay | None:
    """Return the notebook's cell, or standard error if it is a terminal; None otherwise.

    In a notebook it is a widget if ipywidgets is installed, else text.
    """
    if _in_notebook():
        try:
            return WidgetDisplay()
        except Exception:  # not installed, or of another version than the notebook's front end
            return NotebookDisplay()
    stream = sys.stderr
    if stream is None or stream.closed:
        return None
    return TerminalDisplay(stream) if stream.isatty() else None


@contextmanager
def session_observer(progress: bool | Observer, spec: KernelSpec, problem: Problem) -> Iterator[Observer]:
    """Provide the observer of a session that the argument ``progress`` of a function of the API selects.

    Parameters
    ----------
    progress
        True for a line on a terminal or in a notebook, and nothing elsewhere; False for nothing; or a callable.
    spec, problem
        Kernel and problem that are tuned.
    """
    if callable(progress):
        yield progress
        return
    with _open_line(spec, enabled=progress) as line:

        def observe(observed: Progress) -> None:
            if line is not None:
                line.show(problem.kernel, problem, observed)

        yield observe


@contextmanager
def family_observer(progress: bool | FamilyObserver, spec: KernelSpec) -> Iterator[FamilyObserver]:
    """Provide the observer of a family; parameters as for `session_observer`."""
    if callable(progress):
        yield progress
        return
    with _open_line(spec, enabled=progress) as line:

        def observe(step: FamilyStep) -> None:
            if line is not None:
                line.show(_step_text(step), step.problem, step.progress)

        yield observe


@contextmanager
def operation_observer(progress: bool | Callable[[Any], None], operation: Operation) -> Iterator[OperationObserver]:
    """Provide the observer of an operation; ``progress`` is as for `session_observer`."""
    if callable(progress):
        yield progress
        return
    specs = {member.name: member.load().spec for member in operation.members}
    with _open_line(next(iter(specs.values())), enabled=progress) as line:

        def observe(step: OperationStep) -> None:
            if line is not None:
                head = f"{operation.name} round {step.number}/{step.count}, {step.problem.kernel}"
                line.show(head, step.problem, step.progress, specs[step.problem.kernel])

        yield observe


@contextmanager
def sweep_observer(progress: bool | Callable[[SweepStep], None]) -> Iterator[Callable[[SweepStep], None]]:
    """Provide the observer of a family of an operation; ``progress`` is as for `session_observer`."""
    display = default_display() if progress is True else None
    if callable(progress):
        yield progress
    elif display is None:
        yield lambda _: None
    else:
        try:
            yield lambda step: display.show(step.text)
        finally:
            display.close()


@contextmanager
def _open_line(spec: KernelSpec, *, enabled: bool) -> Iterator[ProgressLine | None]:
    display = default_display() if enabled else None
    line = ProgressLine(display, spec) if display is not None else None
    try:
        yield line
    finally:
        if line is not None:
            line.close()


def done_share(progress: Progress) -> float | None:
    """Return the share of a session that is done, by trials or time; None where it has no end that is known."""
    shares = []
    target = trial_target(progress)
    if target:
        shares.append(trial_count(progress) / target)
    if progress.budget_s:
        shares.append(progress.elapsed_s / progress.budget_s)
    return max(shares, default=None)


def plain_line(progress: Progress, rate: Workrate) -> str:
    """Return the whole state in one line, for a log."""
    parts = [
        f"{progress.phase}: {count_text(progress)}",
        best_text(progress, rate),
        funnel_text(progress.gates, progress.outcomes),
        f"{duration_text(progress.elapsed_s)} elapsed",
    ]
    return "; ".join(filter(None, [progress.waiting, *parts, left_text(progress)]))


def short_line(progress: Progress, rate: Workrate) -> str:
    """Return the state in one line that begins with what matters most, as a terminal may cut its end."""
    best, target = progress.best, trial_target(progress)
    count = f"{trial_count(progress):,}" if target is None else f"{trial_count(progress):,}/{target:,}"
    parts = [f"{progress.phase} {count}"]
    if best is not None:
        parts.append(f"best {time_text(best.time_us)}{' (replayed)' if best.source == 'replayed' else ''}")
    parts.append(f"{duration_text(progress.elapsed_s)} elapsed")
    line = ", ".join(filter(None, [*parts, left_text(progress).removeprefix("about ")]))
    line = f"{progress.waiting}; {line}" if progress.waiting else line
    return line if best is None else f"{line}; {rate.text(best.time_us, progress.device)}, {config_text(best.config)}"


def left_text(progress: Progress, since_s: float = 0.0) -> str:
    """Return the time that is left ``since_s`` seconds after a state: ``about 2 min 05 s left``; "" if not known."""
    if not progress.remaining_s or progress.remaining_s <= since_s:  # it takes longer than was expected
        return ""
    about = "at most" if progress.may_end_earlier and progress.phase == "searching" else "about"
    return f"{about} {duration_text(progress.remaining_s - since_s)} left"


def best_text(progress: Progress, rate: Workrate) -> str:
    """Return time, rate and configuration of the fastest trial so far."""
    best = progress.best
    if best is None:
        return "best: none yet"
    label = "best (replayed)" if best.source == "replayed" else "best"
    speed = rate.text(best.time_us, progress.device)
    return f"{label} {time_text(best.time_us)}, {speed}, {config_text(best.config)}"


def count_text(progress: Progress) -> str:
    """Return the number of trials, with their target if there is one: ``50/200 trials``."""
    target = trial_target(progress)
    return f"{trial_count(progress):,}/{target:,} trials" if target is not None else f"{trial_count(progress):,} trials"


def trial_count(progress: Progress) -> int:
    """Return the number of trials of the study, those of earlier sessions included."""
    return sum(progress.outcomes.values())


def trial_target(progress: Progress) -> int | None:
    """Return the number of trials to reach: at most the size of the space, at least the number of trials so far."""
    if progress.target is None:
        return None
    return max(trial_count(progress), min(progress.target, progress.gates["limits"]))


def _step_text(step: FamilyStep) -> str:
    return f"{step.problem.kernel} {step.phase} {step.number}/{step.count}, {sizes_text(step.problem.sizes)}"


def _in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter: its shell then has a ``kernel``, which a terminal's lacks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _width(stream: TextIO) -> int:
    """Return the width of a terminal in characters."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return _DEFAULT_WIDTH
    return columns or _DEFAULT_WIDTH


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
