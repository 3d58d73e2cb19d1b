"""Charts of the parameters: what matters, the time against each, two of them together, and all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Trial, Value
from autotile.core.text import NOTHING, percent_text, plural
from autotile.report.study_data import StudyData
from autotile.report.theme import (
    ACCENT,
    FAINT,
    FAST_TO_SLOW,
    INK,
    MUTED,
    SOFT,
    TIME_AXIS,
    Chart,
    ChartTable,
    figure,
    hover_text,
    label,
    load_plotly,
    log_axis,
)

_MAX_LINES = 4000
"""Trials that the parallel coordinates draw: the fastest, and an even selection of the others."""
_MAX_VALUES = 40
"""Values of a parameter that are shown one by one."""
_SLOWEST = 0.95
"""Quantile of the times at which the whiskers and the colour scale end, so that single slow trials squeeze nothing."""


@dataclass(frozen=True, slots=True)
class ParameterEffect:
    """Share of one parameter in the differences between the times, 0 to 1, and whether it is more than chance."""

    parameter: str
    share: float
    alone: float
    matters: bool


@dataclass(frozen=True, slots=True)
class StudyEffects:
    """The parameters that matter in a study.

    Attributes
    ----------
    effects
        All parameters that were varied, the most important first; empty where the trials do not support a statement.
    doubt
        Reason for empty ``effects``.
    insight
        Summary in one sentence.
    """

    effects: tuple[ParameterEffect, ...]
    doubt: str = ""
    insight: str = ""

    def order(self, parameters: Sequence[str]) -> list[str]:
        """Return parameters, the most important first."""
        ranked = [effect.parameter for effect in self.effects if effect.parameter in parameters]
        return [*ranked, *(name for name in parameters if name not in ranked)]


def study_effects(study: StudyData) -> StudyEffects:
    """Return the effects that a session found, else those that the trials show."""
    stored = study.summary.importance
    if stored is not None:
        known = {name for one in study.newest for name in one.trial.config}
        effects = tuple(
            ParameterEffect(one.parameter, min(max(one.share, 0.0), 1.0), one.alone, one.matters)
            for one in stored
            if one.parameter in known
        )
        insight = study.summary.insight or ""
        return StudyEffects(effects, "" if effects else insight, insight if effects else "")
    timed = timed_trials(study)
    if not timed:
        return StudyEffects((), "no trial has a time")
    from autotile.kernel.spec import Parameter
    from autotile.search.importance import importance_of  # imports SciPy
    from autotile.space.search_space import SearchSpace

    values = {name: values_of(timed, name) for name in timed[0].config}
    codes = {name: {_typed(value): code for code, value in enumerate(each)} for name, each in values.items()}
    rows = np.array([[codes[name][_typed(trial.config[name])] for name in values] for trial in timed], np.uint32)
    table = SearchSpace(
        parameters=tuple(Parameter(name, each) for name, each in values.items()),
        codes=rows,
        combinations=len(rows),
        rules=(),
        limits=(),
        seconds=0.0,
    )
    found, doubt = importance_of(table, np.arange(len(rows)), [trial.cost or math.nan for trial in timed])
    effects = tuple(ParameterEffect(one.parameter, one.share, one.alone, one.matters) for one in found)
    return StudyEffects(effects, doubt)


def timed_trials(study: StudyData) -> list[Trial]:
    """Return the newest trial of each configuration that has a time and all parameters, fastest first."""
    names = study.parameters
    timed = [one.trial for one in study.newest if one.trial.outcome.has_time and one.trial.cost]
    return sorted((trial for trial in timed if trial.config.keys() == set(names)), key=lambda trial: trial.cost or 0.0)


def values_of(trials: Sequence[Trial], name: str) -> tuple[Value, ...]:
    """Return the values that a parameter had, numbers in ascending order."""
    found = {_typed(trial.config[name]): trial.config[name] for trial in trials}
    return tuple(sorted(found.values(), key=_value_order))


def _typed(value: Value) -> tuple[type, Value]:
    return type(value), value  # True equals 1


def _value_order(value: Value) -> tuple[bool, float, str]:
    is_text = isinstance(value, str)
    return is_text, 0.0 if is_text else float(value), str(value)


def importance_chart(study: StudyData, effects: StudyEffects | None = None) -> Chart:
    """Return the share of each parameter in the differences between the times."""
    name, title = "importance", "What matters: shares of the differences in time"
    found = effects if effects is not None else study_effects(study)
    if not found.effects:
        return Chart(name, title, None, f"No statement on what matters: {found.doubt or 'there are too few trials'}.")
    shown = found.effects
    bars = load_plotly().Bar(
        y=[label(one.parameter, 24) for one in shown],
        x=[100 * one.share for one in shown],
        orientation="h",
        marker={"color": [ACCENT if one.matters else FAINT for one in shown]},
        text=[f"{100 * one.share:.0f} %" if one.matters else "no effect seen" for one in shown],
        textposition="outside",
        cliponaxis=False,
        hovertext=[
            hover_text(one.parameter, f"{percent_text(one.share)}, of which {percent_text(one.alone)} alone")
            for one in shown
        ],
        hoverinfo="text",
    )
    top = max(20.0, 100 * max(one.share for one in shown))
    made = figure(
        [bars],
        height=70 + 28 * len(shown),
        x={"title": {"text": "share of the variance of the logarithm of the time, %"}, "range": [0, 1.25 * top]},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.35,
    )
    rows = tuple(
        (one.parameter, percent_text(one.share), percent_text(one.alone), "yes" if one.matters else "not seen")
        for one in shown
    )
    summary = f"{found.insight[:1].upper()}{found.insight[1:]}." if found.insight else ""
    note = "" if study.summary.importance is not None else "Shares are of the configurations that were tried."
    table = ChartTable(("parameter", "share", "alone", "effect"), rows)
    return Chart(name, title, made, summary, table, note)


def time_by_parameter_chart(study: StudyData, name: str) -> Chart:
    """Return the distribution of the times at each value of a parameter."""
    timed = timed_trials(study)
    chart, title = f"time_by_{name}", f"Time against {name}"
    groups = _groups(timed, name)
    if not groups:
        return Chart(chart, title, None, f"No trial with a time states {name}.")
    best = min(times.min() for _, times in groups)
    names = [label(value, 14) for value, _ in groups]
    quantiles = [np.quantile(times, (0.0, 0.25, 0.5, 0.75, _SLOWEST)) for _, times in groups]
    columns = [[float(each[index]) for each in quantiles] for index in range(5)]
    boxes = load_plotly().Box(
        x=names,
        lowerfence=columns[0],
        q1=columns[1],
        median=columns[2],
        q3=columns[3],
        upperfence=columns[4],
        boxpoints=False,
        line={"color": MUTED, "width": 1.5},
        fillcolor=SOFT,
        whiskerwidth=0.4,
        hoverinfo="y",
    )
    fastest = load_plotly().Scatter(
        x=names,
        y=columns[0],
        mode="markers",
        marker={"color": [ACCENT if low == best else INK for low in columns[0]], "size": 8, "symbol": "line-ew-open"},
        hovertext=[
            hover_text(f"{name} = {value}", f"fastest {times.min():,.6g} \N{MICRO SIGN}s", plural(len(times), "trial"))
            for value, times in groups
        ],
        hoverinfo="text",
    )
    made = figure(
        [boxes, fastest],
        height=250,
        x={"title": {"text": label(name, 24)}, "type": "category", "showgrid": False},
        y={
            "title": {"text": TIME_AXIS},
            "nticks": 5,
            **(log_axis(best, max(columns[4])) if max(columns[4]) > 5 * best else {}),
        },
    )
    rows = tuple(
        (str(value), f"{len(times):,}", *(f"{figure_:,.6g}" for figure_ in each[:4]))
        for (value, times), each in zip(groups, quantiles, strict=True)
    )
    fastest_value = min(groups, key=lambda group: group[1].min())[0]
    micro = "\N{MICRO SIGN}s"
    headings = (name, "trials", f"fastest, {micro}", f"lower quartile, {micro}", f"median, {micro}", f"upper, {micro}")
    return Chart(chart, title, made, f"The fastest trial has {name} = {fastest_value}.", ChartTable(headings, rows))


def _groups(timed: Sequence[Trial], name: str) -> list[tuple[Value, NDArray[np.float64]]]:
    if not timed or name not in timed[0].config:
        return []
    found: dict[tuple[type, Value], list[float]] = {}
    for trial in timed:
        found.setdefault(_typed(trial.config[name]), []).append(trial.time_us or math.nan)
    values = values_of(timed, name)[:_MAX_VALUES]
    return [(value, np.array(found[_typed(value)])) for value in values]


def heat_map_chart(study: StudyData, x: str | None = None, y: str | None = None) -> Chart:
    """Return the best time at each pair of values of two parameters; None selects the two that matter most."""
    name, title = "heat_map", "Best time by the two parameters that matter most"
    timed = timed_trials(study)
    varied = [each for each in study.parameters if timed and len(values_of(timed, each)) > 1]
    order = [each for each in study_effects(study).order(varied) if each not in (x, y)] if not (x and y) else []
    chosen = [each if each is not None else order.pop(0) if order else None for each in (x, y)]
    if not timed or chosen[0] is None or chosen[1] is None or any(each not in study.parameters for each in chosen):
        return Chart(name, title, None, "Fewer than two parameters were varied.")
    across, down = str(chosen[0]), str(chosen[1])
    columns, lines = values_of(timed, across)[:_MAX_VALUES], values_of(timed, down)[:_MAX_VALUES]
    best: dict[tuple[Any, Any], float] = {}
    for trial in timed:  # fastest first
        best.setdefault((_typed(trial.config[across]), _typed(trial.config[down])), trial.time_us or math.nan)
    cells = [[best.get((_typed(column), _typed(line))) for column in columns] for line in lines]
    found = np.array([[math.nan if cell is None else cell for cell in line] for line in cells])
    few = len(columns) * len(lines) <= 120
    heat = load_plotly().Heatmap(
        x=[label(value, 14) for value in columns],
        y=[label(value, 14) for value in lines],
        z=found,
        colorscale=[list(stop) for stop in FAST_TO_SLOW],
        zmin=float(np.nanmin(found)),
        zmax=float(np.nanquantile(found, _SLOWEST)),
        colorbar={
            "title": {"text": "best, \N{MICRO SIGN}s", "font": {"color": MUTED, "size": 12}},
            "tickfont": {"color": MUTED},
            "outlinewidth": 0,
            "thickness": 12,
        },
        xgap=2,
        ygap=2,
        texttemplate="%{z:,.4~g}" if few else None,
        hovertemplate="%{z:,.6~g} \N{MICRO SIGN}s<extra></extra>",
        hoverongaps=False,
    )
    made = figure(
        [heat],
        height=110 + 34 * min(len(lines), 16),
        x={"title": {"text": label(across)}, "type": "category", "showgrid": False},
        y={"title": {"text": label(down)}, "type": "category", "showgrid": False},
    )
    title = f"Best time by {across} and {down}"
    rows = tuple(
        (str(line), *(f"{cell:,.6g}" if cell is not None else NOTHING for cell in row))
        for line, row in zip(lines, cells, strict=True)
    )
    table = ChartTable((f"{down} \\ {across}", *map(str, columns)), rows)
    return Chart(name, title, made, "The best time of each pair; an empty cell was not tried.", table)


def parallel_coordinates_chart(study: StudyData) -> Chart:
    """Return one line for each trial over all parameters and its time; ranges of the axes select lines."""
    name, title = "parallel", "All parameters at once"
    timed = timed_trials(study)
    varied = [each for each in study.parameters if timed and len(values_of(timed, each)) > 1]
    if not varied:
        return Chart(name, title, None, "No parameter was varied.")
    drawn = timed
    if len(timed) > _MAX_LINES:
        rest = np.linspace(_MAX_LINES // 4, len(timed) - 1, 3 * _MAX_LINES // 4).astype(np.int64)
        drawn = [*timed[: _MAX_LINES // 4], *(timed[index] for index in dict.fromkeys(rest.tolist()))]
    times = np.array([trial.time_us or math.nan for trial in drawn])
    dimensions = [_dimension(timed, drawn, each) for each in varied]
    slowest = float(np.quantile(times, _SLOWEST))
    dimensions.append({"label": "time, \N{MICRO SIGN}s", "values": times})
    lines = load_plotly().Parcoords(
        dimensions=dimensions,
        line={
            "color": times,
            "colorscale": [list(stop) for stop in FAST_TO_SLOW],
            "cmin": float(times.min()),
            "cmax": slowest,
        },
        labelfont={"color": INK, "size": 12},
        tickfont={"color": MUTED, "size": 11},
        rangefont={"color": MUTED, "size": 11},
    )
    axes = [
        *({"name": each, "values": [str(value) for value in values_of(timed, each)]} for each in varied),
        {"name": "time"},
    ]
    made = figure([lines], height=400, margin={"l": 48, "r": 48, "t": 56, "b": 24}, meta={"axes": axes})
    summary = f"Each of {len(drawn):,} lines is a configuration; the darkest are the fastest."
    left_out = f"{len(drawn):,} of {len(timed):,} configurations are drawn, the fastest among them."
    return Chart(name, title, made, summary, note=left_out if len(drawn) < len(timed) else "")


def _dimension(timed: Sequence[Trial], drawn: Sequence[Trial], name: str) -> dict[str, Any]:
    values = values_of(timed, name)
    codes = {_typed(value): code for code, value in enumerate(values)}
    every = max(1, math.ceil(len(values) / 16))
    return {
        "label": label(name, 16),
        "values": np.array([codes[_typed(trial.config[name])] for trial in drawn]),
        "range": [0, len(values) - 1],
        "tickvals": list(range(0, len(values), every)),
        "ticktext": [label(value, 12) for value in values[::every]],
    }
