"""Plots of a study as text, for a terminal or a pipe: the best so far, and the times by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Outcome, Value, config_text
from autotile.core.text import Displayed, duration_text, outcomes_text, percent_text, shown_text, source_text, time_text
from autotile.errors import ToolchainError
from autotile.report.parameter_charts import study_effects, timed_trials, values_of
from autotile.report.report_data import study_title
from autotile.report.study_data import StudyData

Floats = NDArray[np.float64]
Over = Literal["trials", "seconds"]

DEFAULT_WIDTH = 80
_MIN_WIDTH, _MAX_WIDTH = 50, 160
_HEIGHT = 14
_X_TICK_COLUMNS = 10
"""Columns between two ticks, as plotille draws them."""
_MARGIN = 25
"""Columns that plotille draws at the left and the right of a plot."""
_MAX_VALUES = 16
"""Values of a parameter that are drawn."""
_LABEL_WIDTH = 14
_LOG_RATIO = 2.0
"""Ratio of the greatest to the least value above which an axis is logarithmic."""
_NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_BLANK = "\u2800"
_LEGEND = "● best of a value  ┼ median  ─ to the slowest"


@dataclass(frozen=True, slots=True, repr=False)
class StudyPlot(Displayed):
    """Findings of a study, to be drawn as text.

    Attributes
    ----------
    study
        The study.
    parameters
        Parameters that are drawn, in this order.
    over
        Horizontal axis of the best so far.
    """

    study: StudyData
    parameters: tuple[str, ...]
    over: Over = "trials"

    @property
    def scores(self) -> Floats:
        """Value of each trial, oldest first, in microseconds unless the objective is another; NaN if it has none."""
        found = (self.study.score(one.trial) for one in self.study.trials)
        return np.array([math.nan if value is None else value for value in found], np.float64)

    @property
    def best_so_far(self) -> Floats:
        """Best value of all trials up to each, shape (trials,); NaN before the first."""
        scores = self.scores
        timed = [one.trial.outcome is Outcome.OK for one in self.study.trials]
        usable = np.where(timed, scores, np.nan)
        return (np.fmax if self.study.settings.maximize else np.fmin).accumulate(usable) if len(usable) else usable

    @property
    def positions(self) -> Floats:
        """Position of each trial on the horizontal axis: its number from 1, or seconds of tuning."""
        if self.over == "seconds":
            return np.array(self.study.elapsed_s, np.float64)
        return np.arange(1, len(self.study.trials) + 1, dtype=np.float64)

    @property
    def quantity(self) -> str:
        """The objective of the trials, with its unit."""
        return "objective" if self.study.has_own_objective else "time, us"

    def times_by_value(self, name: str) -> list[tuple[Value, Floats]]:
        """Return the times in microseconds of the configurations with each value of a parameter."""
        timed = [trial for trial in timed_trials(self.study) if trial.time_us is not None]
        return [
            (value, np.array([t.time_us for t in timed if _same(t.config[name], value)], np.float64))
            for value in values_of(timed, name)
        ]

    def text(self, width: int = DEFAULT_WIDTH, *, ascii_only: bool = False) -> str:
        """Return the plots as lines of text.

        Parameters
        ----------
        width
            Maximum number of columns.
        ascii_only
            Whether to draw with ASCII characters instead of Braille patterns and lines.
        """
        width = min(max(width, _MIN_WIDTH), _MAX_WIDTH)
        lines = [*(part for line in self._head() for part in _wrapped(line, width)), "", *self._progress_lines(width)]
        if timed_trials(self.study):
            shares = {effect.parameter: effect.share for effect in study_effects(self.study).effects}
            for name in self.parameters:
                lines += ["", *self._parameter_lines(name, width, shares.get(name))]
            lines += ["", _LEGEND] if self.parameters else []
        text = "\n".join(shown_text(line).rstrip() for line in lines)
        return text.translate(_ASCII) if ascii_only else text

    def to_json(self) -> dict[str, Any]:
        """Return the numbers behind the plots."""
        best = [None if math.isnan(value) else value for value in self.best_so_far.tolist()]
        return {
            "study": self.study.study_id,
            "kernel": self.study.key.kernel,
            "problem": dict(self.study.key.sizes),
            "dtype": self.study.key.dtype,
            "device": {"name": self.study.key.gpu_name, "source": self.study.key.source},
            "over": self.over,
            "positions": self.positions.tolist(),
            "best_so_far": best,
            "parameters": {
                name: [{"value": value, "times_us": times.tolist()} for value, times in self.times_by_value(name)]
                for name in self.parameters
            },
        }

    def _head(self) -> Iterator[str]:
        outcomes: dict[Outcome, int] = {}
        for one in self.study.newest:
            outcomes[one.trial.outcome] = outcomes.get(one.trial.outcome, 0) + 1
        running = ", running" if self.study.is_running else ""
        yield study_title(self.study)
        yield f"{len(self.study.newest):,} tried: {outcomes_text(outcomes)}{running}"
        if (winner := self.study.winner) is not None:
            yield f"best {source_text(time_text(winner.time_us), winner.source)}, {config_text(winner.config)}"

    def _progress_lines(self, width: int) -> list[str]:
        scores, best, positions = self.scores, self.best_so_far, self.positions
        drawn = np.isfinite(scores) & (scores > 0)
        if not np.isfinite(best).any():
            return ["no trial has a time yet"]
        last = int(np.flatnonzero(best == best[-1])[0])
        where = f"{duration_text(positions[last])}" if self.over == "seconds" else f"trial {last + 1:,}"
        unit = self.quantity
        heading = f"Best so far (line, reached at {where}) and each trial (dots): {unit}"
        return [*_wrapped(heading, width), *_canvas(self, drawn, width)]

    def _parameter_lines(self, name: str, width: int, share: float | None) -> list[str]:
        groups = self.times_by_value(name)
        every = np.concatenate([times for _, times in groups])
        explains = f", explains {percent_text(share)} of the differences" if share else ""
        axis = _Axis(float(every.min()), float(np.quantile(every, 0.95)), max(10, width - _LABEL_WIDTH - 24))
        lines = [
            *_wrapped(f"{name}{explains}", width),
            f"{'value':>{_LABEL_WIDTH}} {'n':>5} {'best, us':>10}  {axis.ends()}",
        ]
        for value, times in groups[:_MAX_VALUES]:
            label = shown_text(str(value))
            label = label if len(label) <= _LABEL_WIDTH else f"{label[: _LABEL_WIDTH - 3]}..."
            best = time_text(float(times.min())).removesuffix(" us")
            lines.append(f"{label:>{_LABEL_WIDTH}} {len(times):>5,} {best:>10}  {axis.strip(times)}")
        if len(groups) > _MAX_VALUES:
            lines.append(f"{'':>{_LABEL_WIDTH}} {len(groups) - _MAX_VALUES:,} further values; --json has all")
        return lines

    def _headline(self) -> str:
        return study_title(self.study)


_ASCII = {
    **dict.fromkeys(range(10241, 10496), "."),
    ord(_BLANK): " ",
    ord("─"): "-",
    ord("●"): "*",
    ord("┼"): "+",
}


def _wrapped(line: str, width: int) -> list[str]:
    """Return a line of words in as many lines as it takes, the further ones indented."""
    return wrap(shown_text(line), width, subsequent_indent="  ", break_on_hyphens=False)


def _same(a: Value, b: Value) -> bool:
    return a == b and type(a) is type(b)


def _canvas(plot: StudyPlot, drawn: NDArray[np.bool_], width: int) -> list[str]:
    """Return the lines of a plot of points, and of a line that falls in steps."""
    try:
        import plotille
    except ImportError:
        raise ToolchainError("plots need plotille; install it with `pip install plotille`") from None
    positions, scores, best = plot.positions, plot.scores, plot.best_so_far
    low, high = float(np.nanmin(scores[drawn])), float(np.quantile(scores[drawn], 0.98))
    log = high > _LOG_RATIO * low
    shown = np.log10 if log else np.asarray
    bottom, top = shown(low), max(shown(high), shown(low) + 1e-9)
    margin = 0.04 * (top - bottom)
    columns = width - _MARGIN
    step = _nice(float(positions[-1]) / (columns // _X_TICK_COLUMNS))
    ticks = max(1, math.ceil(float(positions[-1]) / step))

    figure = plotille.Figure()
    figure.width, figure.height = ticks * _X_TICK_COLUMNS, _HEIGHT
    figure.with_colors = False
    figure.origin = False
    figure.set_x_limits(0.0, ticks * step)
    figure.set_y_limits(float(bottom - margin), float(top + margin))
    figure.x_label, figure.y_label = ("trials" if plot.over == "trials" else "s"), ""
    figure.x_ticks_fkt = lambda at, _: f"{at:,.6g}"
    figure.y_ticks_fkt = lambda at, end: _tick_text(at, end, log=log)
    figure.scatter(positions[drawn].tolist(), shown(scores[drawn]).tolist())
    known = np.isfinite(best)
    xs, ys = positions[known], shown(best[known])
    figure.plot(np.repeat(xs, 2)[1:].tolist(), np.repeat(ys, 2)[:-1].tolist())
    lines = figure.show().replace(_BLANK, " ").splitlines()
    return [line.rstrip() for line in lines[1:] if line.strip(" |")]


def _tick_text(at: float, end: float, *, log: bool) -> str:
    """Return the label of a line of a plot: of the roundest number between two values; "" if none is round."""
    low, high = (10**at, 10**end) if log else (at, end)
    unit = 10.0 ** math.floor(math.log10(max(high - low, 1e-12)) + 1)
    for size in (unit, unit / 2, unit / 5, unit / 10):
        tick = math.ceil(low / size) * size
        if low <= tick < high:
            return f"{tick:,.6g}"
    return ""


def _nice(least: float) -> float:
    """Return the least round number that is not below another."""
    if least <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(least))
    return next((unit * factor for factor in _NICE if unit * factor >= least * (1 - 1e-9)), 10.0 * unit)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A horizontal axis of times, logarithmic over a wide range; what is above its end is drawn at it."""

    low_us: float
    high_us: float
    width: int

    def column(self, time_us: float) -> int:
        """Return the column of a time."""
        span = math.log(max(self.high_us / self.low_us, 1 + 1e-9))
        share = math.log(max(time_us, self.low_us) / self.low_us) / span
        return min(self.width - 1, max(0, round(share * (self.width - 1))))

    def ends(self) -> str:
        """Return the least and the greatest time of the axis, at its ends."""
        left, right = (time_text(time_us).removesuffix(" us") for time_us in (self.low_us, self.high_us))
        return f"{left}{right:>{max(1, self.width - len(left))}}"

    def strip(self, times_us: Floats) -> str:
        """Return a line from the best to the slowest time, with marks at the best and at the median."""
        cells = [" "] * self.width
        first, last = self.column(float(times_us.min())), self.column(float(times_us.max()))
        cells[first : last + 1] = "─" * (last + 1 - first)
        cells[self.column(float(np.median(times_us)))] = "┼"
        cells[first] = "●"
        return "".join(cells)


def plots_of(studies: Sequence[StudyData], names: Sequence[str], over: Over, most: int) -> list[StudyPlot]:
    """Return the plots of studies: of the parameters that are named, else of the ``most`` most important ones."""
    return [
        StudyPlot(
            study,
            tuple(names) or tuple(study_effects(study).order(study.parameters)[:most]),
            over,
        )
        for study in studies
    ]
