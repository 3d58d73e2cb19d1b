"""Charts of a study, of a family's rule and of an operation: each answers one question, with the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import ENERGY, ERROR, REGISTERS, TIME, Effect, Outcome, Trial, Value, config_key, config_text
from autotile.core.text import (
    NOTHING,
    ResultTable,
    duration_text,
    interval_text,
    percent_text,
    plural,
    short_text,
    sizes_text,
    source_text,
)
from autotile.database.winners import StoredRule
from autotile.families.family import Split, Tree
from autotile.report.report_data import OperationData
from autotile.report.study import FailureGroup, Finalist, StudyData
from autotile.report.theme import (
    ACCENT,
    FAINT,
    FAINT_ACCENT,
    FAST_TO_SLOW,
    INK,
    MICRO_S,
    MUTED,
    PAPER,
    SOFT,
    TIME_AXIS,
    Chart,
    bare_time,
    bars,
    error_bars,
    figure,
    hover_text,
    label,
    load_plotly,
    log_axis,
    measured_text,
    panels,
    points,
    with_units,
)

_BEST_COUNT = 12
"""Number of configurations whose limits are shown, and of reasons of failures that are drawn."""
_MAX_POINTS = 3000
"""Trials that a chart draws one by one; of more, an even selection, with all that improved on the best."""
_MAX_LINES = 4000
"""Trials that the parallel coordinates draw: the fastest, and an even selection of the others."""
_MAX_VALUES = 40
"""Values of a parameter that are shown one by one."""
_SLOWEST = 0.95
"""Quantile of the times at which the whiskers and the colour scale end, so that single slow trials squeeze nothing."""
_LOG_RATIO = 5.0
"""Ratio of the slowest to the fastest time above which an axis is logarithmic."""
_ROW_PX = 26


def study_charts(study: StudyData, parameters: int) -> Iterator[Chart]:
    """Yield the charts of a study, first those that change most as it runs; times against the first ``parameters``."""
    yield best_so_far_chart(study)
    yield finals_chart(study)
    yield limits_chart(study)
    effects = study_effects(study)
    yield importance_chart(study, effects)
    names = ordered(study.parameters, effects)
    for name in names[:parameters]:
        yield time_by_parameter_chart(study, name)
    yield heat_map_chart(study, *names[:2])
    yield parallel_coordinates_chart(study)
    yield best_so_far_chart(study, "seconds")
    yield funnel_chart(study)
    yield failures_chart(study)
    yield roofline_chart(study)
    yield front_chart(study)
    yield drift_chart(study)


_FAR = 1.5
"""Excess of the default over the winner, relative to that of the slowest other finalist, above which it is left out."""


def finals_chart(study: StudyData) -> Chart:
    """Return the finalists' times with their intervals, beside the winner's."""
    ranked, title = study.finals, "Times with 95 % intervals"
    if not ranked:
        return Chart("finals", title, None, "No finals were held, so that times are those of the search.")
    _, low, high = ranked[0].times_us
    default = next((one for one in ranked if one.is_default), None)
    others = [one.times_us for one in ranked if not one.is_default]
    x: dict[str, Any] = {"title": TIME_AXIS}
    notes = []
    if default is not None and len(others) > 1:
        least, most = min(low_us for _, low_us, _ in others), max(high_us for _, _, high_us in others)
        if default.times_us[0] - low > _FAR * (most - low):  # the others' intervals could not be told apart
            x["range"] = [least - 0.06 * (most - least), most + 0.2 * (most - least)]
            text = f"{with_units(label(measured_text(default.trial)))} \N{RIGHTWARDS ARROW}"
            place = {"x": 1, "xref": "paper", "xanchor": "right", "y": finalist_label(default), "yref": "y"}
            notes.append({**place, "text": text, "showarrow": False, "font": {"color": INK, "size": 12}})
    traces, behind = [], "behind the winner by the objective" if study.has_own_objective else "the winner's time"
    for name, symbol, color, chosen in (
        ("winner", "circle", ACCENT, [one for one in ranked if one.rank == 1]),
        ("ties with the winner", "circle-open", ACCENT, [one for one in ranked if one.is_tie and not one.is_default]),
        ("default", "diamond", INK, [one for one in ranked if one.is_default and one.rank > 1]),
        ("slower", "circle", MUTED, [one for one in ranked if not one.is_tie and not one.is_default and one.rank > 1]),
    ):
        marks = []
        for one in chosen:
            ratio = f"{one.ratio.value:.4f} x {behind}" if one.ratio is not None and one.rank > 1 else ""
            hover = hover_text(finalist_label(one), measured_text(one.trial), ratio, config_text(one.trial.config))
            marks.append((one.times_us, finalist_label(one), hover))
        traces += points(marks, name=name, symbol=symbol, color=color, size=8, width=2)
    band = {"x0": low, "x1": high, "y0": 0, "y1": 1, "xref": "x", "yref": "paper", "layer": "below"}
    made = figure(
        traces,
        height=96 + _ROW_PX * len(ranked),
        x=x,
        y={
            "categoryorder": "array",
            "categoryarray": [finalist_label(one) for one in reversed(ranked)],
            "showgrid": False,
        },
        shapes=[{"type": "rect", **band, "fillcolor": FAINT_ACCENT, "line": {"width": 0}}],
        annotations=notes,
        showlegend=True,
    )
    ties = sum(one.is_tie for one in ranked)
    summary = (
        f"{plural(len(ranked), 'finalist was', 'finalists were')} timed in turn; "
        f"{plural(ties, 'configuration ties', 'configurations tie')} with the winner."
    )
    relative = "the winner is better, times" if study.has_own_objective else "time / winner's"
    headings = ("place", f"time, {MICRO_S}", f"95 % interval, {MICRO_S}", relative, "configuration")
    rows = [
        (
            finalist_label(one),
            bare_time(one.trial),
            interval_text(one.trial.measurement),
            f"{one.ratio.value:.4f} ({one.ratio.low:.4f} to {one.ratio.high:.4f})" if one.ratio else NOTHING,
            config_text(one.trial.config),
        )
        for one in ranked
    ]
    return Chart("finals", title, made, summary, ResultTable(headings, rows))


def finalist_label(one: Finalist) -> str:
    """Return the place of a finalist with what marks it: ``#2 tie``."""
    marks = {"winner": one.rank == 1, "tie": one.is_tie, "default": one.is_default}
    return " ".join([f"#{one.rank}", *(name for name, holds in marks.items() if holds)])


def best_trials(study: StudyData) -> list[Trial]:
    """Return a dozen trials: the finalists, followed by the best others of the search."""
    refused = {config_key(trial.config) for trial in study.refused}
    found: dict[str, Trial] = {}
    for trial in [*(one.trial for one in study.finals), *(trial for _, trial in study.ranked(Outcome.OK))]:
        found.setdefault(config_key(trial.config), trial)
    return [trial for key, trial in found.items() if key not in refused][:_BEST_COUNT]


_MEASURES = {
    "registers": "registers / thread",
    "smem": "shared memory, KiB / block",
    "occupancy": "occupancy, %",
    "waves": "waves of blocks",
    "spills": "spills, B / thread",
    "share": "of the binding limit, %",
}


def limits_chart(study: StudyData) -> Chart:
    """Return the limits of the best configurations: registers, shared memory, occupancy, waves, spills, roofline."""
    found = []  # place, trial, its measures, what limits its occupancy, and its bound
    for place, trial in enumerate(best_trials(study), start=1):
        limited = ", ".join(trial.occupancy.limited_by).replace("_", " ") if trial.occupancy is not None else ""
        found.append((f"#{place}", trial, _measures(study, trial), limited, study.bound(trial)))
    title = f"Resources of the best {len(found)}, and how near they are to the limit"
    known = [name for name in _MEASURES if any(values[name] for _, _, values, _, _ in found)]
    if not known:
        return Chart("limits", title, None, "No resources of the best configurations are stored.")
    columns, parts = min(3, len(known)), []
    hover = [
        hover_text(
            f"{place}  {measured_text(trial)}",
            f"occupancy limited by {by}" if by else "",
            with_units(bound.text) if bound is not None else "",
            config_text(trial.config),
        )
        for place, trial, _, by, bound in found
    ]
    for index, name in enumerate(known):
        trace = load_plotly().Bar(
            y=[place for place, *_ in found],
            x=[values[name] for _, _, values, _, _ in found],
            orientation="h",
            marker={"color": [ACCENT, *[SOFT] * (len(found) - 1)]},
            hovertext=hover,
            hoverinfo="text",
        )
        x = {"rangemode": "tozero", "nticks": 4, "range": [0, 105] if name in ("occupancy", "share") else None}
        y = {"autorange": "reversed", "showgrid": False, "type": "category", "showticklabels": index % columns == 0}
        parts.append((_MEASURES[name], trace, x, y))
    height = 60 + math.ceil(len(known) / columns) * (60 + 17 * len(found))
    made = panels(parts, columns=columns, height=height, bargap=0.25)
    *_, limited, first = found[0]
    by = f"; its occupancy is limited by {limited}" if limited else ""
    summary = f"The best reaches {with_units(first.text)}{by}." if first is not None else f"Places are by time{by}."
    if all(trial.resources is not None and not trial.resources.spill_bytes for _, trial, *_ in found):
        summary += " None of them spills registers."
    rows = [
        (
            place,
            bare_time(trial),
            *(f"{value:,.4g}" if value is not None else NOTHING for value in values.values()),
            by,
            config_text(trial.config),
        )
        for place, trial, values, by, _ in found
    ]
    headings = ("place", f"time, {MICRO_S}", *_MEASURES.values(), "occupancy limited by", "configuration")
    return Chart("limits", title, made, summary, ResultTable(headings, rows))


def _measures(study: StudyData, trial: Trial) -> dict[str, float | None]:
    used, geometry, occupancy = trial.resources, trial.geometry, trial.occupancy
    found: dict[str, float | None] = dict.fromkeys(_MEASURES)
    if used is not None:
        dynamic = geometry.dynamic_smem_bytes if geometry is not None else 0
        found |= {"registers": used.registers, "smem": (used.static_smem_bytes + dynamic) / 1024}
        found |= {"spills": used.spill_bytes}
    if occupancy is not None:
        found["occupancy"] = 100 * occupancy.occupancy
        resident = occupancy.blocks_per_sm * study.device.sm_count if study.device else 0
        if geometry is not None and resident:
            found["waves"] = geometry.blocks / resident
    if (bound := study.bound(trial)) is not None:
        found["share"] = 100 * bound.share
    return found


def best_so_far_chart(study: StudyData, axis: Literal["trials", "seconds"] = "trials") -> Chart:
    """Return the best result so far over trials or seconds, with the outcome of each trial and what was expected."""
    name, title = f"best_over_{axis}", f"Best so far over {axis}"
    scores = np.array([study.score(one) for one in study.trials], np.float64)  # None becomes NaN
    timed = np.isfinite(scores) & (scores > 0)
    if not timed.any():
        return Chart(name, title, None, "No trial has a time yet.")
    xs = np.arange(1, len(scores) + 1, dtype=np.float64) if axis == "trials" else np.array(study.elapsed_s)
    worst, accumulated = (-np.inf, np.maximum) if study.settings.maximize else (np.inf, np.minimum)
    best = accumulated.accumulate(np.where(timed, scores, worst))
    best = np.where(np.isinf(best), np.nan, best)
    improved = np.append(True, best[1:] != best[:-1])
    drawn = improved.copy()
    drawn[np.linspace(0, len(best) - 1, min(len(best), _MAX_POINTS)).astype(np.int64)] = True
    quantity = label(study.settings.objective) if study.settings.objective else TIME_AXIS
    outcomes = np.array([str(one.trial.outcome) for one in study.trials])
    above = np.full(len(xs), float(np.nanmax(scores)) * 1.08)  # where the failed trials are drawn
    traces, go = [], load_plotly()
    for chosen, text, symbol, color, ys in (
        (drawn & timed & (outcomes == str(Outcome.OK)), "measured", "circle", SOFT, scores),
        (drawn & timed & (outcomes == str(Outcome.PRUNED)), "dropped as slow", "circle-open", FAINT, scores),
        (drawn & ~timed, "failed", "x-thin-open", MUTED, above),
    ):
        marks = []
        for index in np.flatnonzero(chosen).tolist():
            trial = study.trials[index].trial
            failed = f"{str(trial.outcome).replace('_', ' ')}: {trial.reason}" if not trial.outcome.has_time else ""
            lines = (f"trial {index + 1:,}", measured_text(trial), failed, config_text(trial.config))
            marks.append((xs[index], ys[index], hover_text(*lines)))
        traces += points(marks, name=text, symbol=symbol, color=color, size=6)
    line = {"color": ACCENT, "width": 2.5, "shape": "hv"}
    traces.append(go.Scatter(x=xs, y=best, mode="lines", line=line, name="best so far", hoverinfo="skip"))
    expected, stopped = "", study.summary.stopped
    if stopped is not None and stopped.expected_gain is not None and stopped.more_trials:
        gain = 100 * stopped.expected_gain
        shown = f"{gain:.2g} %" if gain >= 0.01 else "less than 0.01 %"
        expected = f"At the end, {stopped.more_trials:,} more trials were expected to gain {shown}."
        if not study.settings.objective:
            last_x, last_y = float(xs[-1]), float(best[-1])
            end = last_x + last_x / len(xs) * min(stopped.more_trials, 0.15 * len(xs))
            traces.append(
                go.Scatter(
                    x=[last_x, end],
                    y=[last_y, last_y / (1 + max(stopped.expected_gain, 0.0))],
                    mode="lines",
                    line={"color": ACCENT, "width": 2, "dash": "dot"},
                    name="expected of more",
                    hovertext=hover_text(expected),
                    hoverinfo="text",
                )
            )
    least, most = scores[timed].min(), scores[timed].max()
    made = figure(
        traces,
        height=360,
        x={"title": "trials" if axis == "trials" else "seconds of tuning", "rangemode": "tozero"},
        y={"title": quantity, **(log_axis(least, most) if most / least > _LOG_RATIO else {})},
        showlegend=True,
        margin={"t": 40},
    )
    last = np.flatnonzero(timed & (scores == best[-1]))[0]
    when = f"trial {last + 1:,}" if axis == "trials" else f"{duration_text(float(xs[last]))} of tuning"
    summary = f"The best of {plural(len(scores), 'trial')} was found after {when}. {expected}".strip()
    note = f"{int(drawn.sum()):,} of {len(scores):,} trials are drawn." if not drawn.all() else ""
    rows = [
        (
            f"{i + 1:,}",
            duration_text(study.elapsed_s[i]),
            f"{scores[i]:,.6g}",
            config_text(study.trials[i].trial.config),
        )
        for i in np.flatnonzero(improved & np.isfinite(scores) & (scores == best))
    ]
    table = ResultTable(("trial", "after", quantity, "configuration that became the best"), rows)
    return Chart(name, title, made, summary, table, note)


Effects = tuple[tuple[Effect, ...], str]
"""The parameters that were varied, the most important first, and a summary in one sentence; where the trials do not
support a statement, none and the reason."""


def ordered(parameters: Sequence[str], effects: Effects) -> list[str]:
    """Return parameters, the most important first."""
    ranked = [effect.parameter for effect in effects[0] if effect.parameter in parameters]
    return [*ranked, *(name for name in parameters if name not in ranked)]


def study_effects(study: StudyData) -> Effects:
    """Return the effects that a session found, else those that the trials show."""
    stored = study.summary.importance
    if stored is not None:
        known = {name for one in study.newest for name in one.trial.config}
        effects = tuple(replace(one, share=min(max(one.share, 0.0), 1.0)) for one in stored if one.parameter in known)
        return effects, study.summary.insight or ""
    timed = timed_trials(study)
    if not timed:
        return (), "no trial has a time"
    costs = {trial.config_key: cost for cost, trial in study.ranked(Outcome.OK, Outcome.PRUNED)}
    from autotile.kernel.spec import Parameter
    from autotile.search.importance import importance_of  # imports SciPy
    from autotile.space.search_space import SearchSpace

    found_values = {name: coded(timed, name) for name in timed[0].config}
    rows = np.column_stack([codes for _, codes in found_values.values()]).astype(np.uint32)
    parameters = tuple(Parameter(name, values) for name, (values, _) in found_values.items())
    space = SearchSpace(parameters, rows, combinations=len(rows), rules=(), limits=(), seconds=0.0)
    effects, doubt = importance_of(space, np.arange(len(rows)), [costs[trial.config_key] for trial in timed])
    return effects, "" if effects else doubt


def timed_trials(study: StudyData) -> list[Trial]:
    """Return the newest trial of each configuration that has a time and all parameters, the best first."""
    names = set(study.parameters)
    return [trial for _, trial in study.ranked(Outcome.OK, Outcome.PRUNED) if trial.config.keys() == names]


def times_of(trials: Sequence[Trial]) -> NDArray[np.float64]:
    """Return times in microseconds, NaN for none; shape (trials,)."""
    return np.array([trial.time_us for trial in trials], np.float64)


def coded(trials: Sequence[Trial], name: str) -> tuple[tuple[Value, ...], NDArray[np.int64]]:
    """Return the values that a parameter had, numbers in ascending order, and the place of that of each trial."""
    typed = [(type(value), value) for value in (trial.config[name] for trial in trials)]  # True equals 1
    found = sorted(
        set(typed), key=lambda one: (1, 0.0, one[1]) if isinstance(one[1], str) else (0, float(one[1]), str(one[1]))
    )
    places = {each: place for place, each in enumerate(found)}
    return tuple(value for _, value in found), np.array([places[each] for each in typed], np.int64)


def importance_chart(study: StudyData, effects: Effects | None = None) -> Chart:
    """Return the share of each parameter in the differences between the times."""
    name, title = "importance", "What matters: shares of the differences in time"
    shown, said = effects or study_effects(study)
    if not shown:
        return Chart(name, title, None, f"No statement on what matters: {said or 'there are too few trials'}.")
    top = max(20.0, 100 * max(one.share for one in shown))
    made = bars(
        [label(one.parameter, 24) for one in shown],
        [100 * one.share for one in shown],
        x={"title": "share of the variance of log(time), %", "range": [0, 1.25 * top]},
        color=[ACCENT if one.matters else FAINT for one in shown],
        text=[percent_text(one.share, 0) if one.matters else "no effect seen" for one in shown],
        hover=[
            hover_text(one.parameter, f"{percent_text(one.share)}, of which {percent_text(one.alone)} alone")
            for one in shown
        ],
    )
    rows = [
        (one.parameter, percent_text(one.share), percent_text(one.alone), "yes" if one.matters else "not seen")
        for one in shown
    ]
    summary = f"{said[0].upper()}{said[1:]}." if said else ""
    note = "" if study.summary.importance is not None else "Shares are of the configurations that were tried."
    return Chart(name, title, made, summary, ResultTable(("parameter", "share", "alone", "effect"), rows), note)


def time_by_parameter_chart(study: StudyData, name: str) -> Chart:
    """Return the distribution of the times at each value of a parameter."""
    chart, title = f"time_by_{name}", f"Time against {name}"
    timed = [trial for trial in timed_trials(study) if name in trial.config]
    if not timed:
        return Chart(chart, title, None, f"No trial with a time states {name}.")
    values, codes = coded(timed, name)
    values = values[:_MAX_VALUES]
    times_us = times_of(timed)
    times = [times_us[codes == place] for place in range(len(values))]
    quantiles = [np.quantile(each, (0.0, 0.25, 0.5, 0.75, _SLOWEST)).tolist() for each in times]
    fastest, lower, median, upper, slowest = (list(column) for column in zip(*quantiles, strict=True))
    best, names = min(fastest), [label(value, 14) for value in values]
    boxes = load_plotly().Box(
        x=names,
        lowerfence=fastest,
        q1=lower,
        median=median,
        q3=upper,
        upperfence=slowest,
        boxpoints=False,
        line={"color": MUTED, "width": 1.5},
        fillcolor=SOFT,
        whiskerwidth=0.4,
        hoverinfo="y",
    )
    hover = [
        hover_text(f"{name} = {value}", f"fastest {low:,.6g} {MICRO_S}", plural(len(each), "trial"))
        for value, low, each in zip(values, fastest, times, strict=True)
    ]
    colors = [ACCENT if low == best else INK for low in fastest]
    marks = zip(names, fastest, hover, strict=True)
    made = figure(
        [boxes, *points(marks, name="", symbol="line-ew-open", color=colors, size=8)],
        height=250,
        x={"title": label(name, 24), "type": "category", "showgrid": False},
        y={
            "title": TIME_AXIS,
            "nticks": 5,
            **(log_axis(best, max(slowest)) if max(slowest) > _LOG_RATIO * best else {}),
        },
    )
    rows = [
        (str(value), f"{len(each):,}", *(f"{time_us:,.6g}" for time_us in found[:4]))
        for value, each, found in zip(values, times, quantiles, strict=True)
    ]
    figures = (f"{text}, {MICRO_S}" for text in ("fastest", "lower quartile", "median", "upper"))
    summary = f"The fastest trial has {name} = {values[fastest.index(best)]}."
    return Chart(chart, title, made, summary, ResultTable((name, "trials", *figures), rows))


def heat_map_chart(study: StudyData, x: str | None = None, y: str | None = None) -> Chart:
    """Return the best time at each pair of values of two parameters; None selects the two that matter most."""
    name, title = "heat_map", "Best time by the two parameters that matter most"
    timed = timed_trials(study)
    if x is None or y is None:
        varied = [each for each in study.parameters if timed and len(coded(timed, each)[0]) > 1]
        others = (each for each in ordered(varied, study_effects(study)) if each not in (x, y))
        x, y = (given if given is not None else next(others, None) for given in (x, y))
    if not timed or x is None or y is None or not {x, y} <= set(study.parameters):
        return Chart(name, title, None, "Fewer than two parameters were varied.")
    (columns, across), (lines, down) = coded(timed, x), coded(timed, y)
    found = np.full((len(lines), len(columns)), np.nan)
    np.fmin.at(found, (down, across), times_of(timed))
    found, columns, lines = found[:_MAX_VALUES, :_MAX_VALUES], columns[:_MAX_VALUES], lines[:_MAX_VALUES]
    heat = load_plotly().Heatmap(
        x=[label(value, 14) for value in columns],
        y=[label(value, 14) for value in lines],
        z=found,
        colorscale=FAST_TO_SLOW,
        zmin=float(np.nanmin(found)),
        zmax=float(np.nanquantile(found, _SLOWEST)),
        colorbar={
            "title": {"text": f"best, {MICRO_S}", "font": {"color": MUTED, "size": 12}},
            "tickfont": {"color": MUTED},
            "separatethousands": True,
            "outlinewidth": 0,
            "thickness": 12,
        },
        xgap=2,
        ygap=2,
        texttemplate="%{z:,.4~g}" if found.size <= 120 else None,
        hovertemplate=f"%{{z:,.6~g}} {MICRO_S}<extra></extra>",
        hoverongaps=False,
    )
    made = figure(
        [heat],
        height=110 + 34 * min(len(lines), 16),
        x={"title": label(x), "type": "category", "showgrid": False},
        y={"title": label(y), "type": "category", "showgrid": False},
    )
    rows = [
        (str(line), *(f"{cell:,.6g}" if np.isfinite(cell) else NOTHING for cell in row))
        for line, row in zip(lines, found, strict=True)
    ]
    table = ResultTable((f"{y} \\ {x}", *map(str, columns)), rows)
    summary = "The best time of each pair; an empty cell was not tried."
    return Chart(name, f"Best time by {x} and {y}", made, summary, table)


def parallel_coordinates_chart(study: StudyData) -> Chart:
    """Return one line for each trial over all parameters and its time; ranges of the axes select lines."""
    name, title = "parallel", "All parameters at once"
    timed = timed_trials(study)
    values = {each: coded(timed, each) for each in study.parameters} if timed else {}
    varied = {each: found for each, found in values.items() if len(found[0]) > 1}
    if not varied:
        return Chart(name, title, None, "No parameter was varied.")
    drawn = np.arange(len(timed))
    if len(timed) > _MAX_LINES:
        rest = np.linspace(_MAX_LINES // 4, len(timed) - 1, 3 * _MAX_LINES // 4).astype(np.int64)
        drawn = np.concatenate([drawn[: _MAX_LINES // 4], np.unique(rest)])
    times = times_of(timed)[drawn]
    dimensions: list[dict[str, Any]] = []
    for parameter, (listed, codes) in varied.items():
        every = math.ceil(len(listed) / 16)
        dimensions.append(
            {
                "label": label(parameter, 16),
                "values": codes[drawn],
                "range": [0, len(listed) - 1],
                "tickvals": list(range(0, len(listed), every)),
                "ticktext": [label(value, 12) for value in listed[::every]],
            }
        )
    dimensions.append({"label": f"time, {MICRO_S}", "values": times})
    lines = load_plotly().Parcoords(
        dimensions=dimensions,
        line={
            "color": times,
            "colorscale": FAST_TO_SLOW,
            "cmin": float(times.min()),
            "cmax": float(np.quantile(times, _SLOWEST)),
        },
        labelfont={"color": INK, "size": 12},
        tickfont={"color": MUTED, "size": 11},
        rangefont={"color": MUTED, "size": 11},
    )
    axes = [*({"name": each, "values": list(map(str, listed))} for each, (listed, _) in varied.items())]
    meta = {"axes": [*axes, {"name": "time"}]}
    made = figure([lines], height=400, margin={"l": 48, "r": 48, "t": 56, "b": 24}, meta=meta)
    summary = f"Each of {len(drawn):,} lines is a configuration; the strongest are the fastest."
    left_out = f"{len(drawn):,} of {len(timed):,} configurations are drawn, the fastest among them."
    return Chart(name, title, made, summary, note=left_out if len(drawn) < len(timed) else "")


def funnel_chart(study: StudyData) -> Chart:
    """Return the number of configurations that each gate let through."""
    gates = study.gates
    counts = [max(count, 0) for _, count in gates]
    top = math.log10(max([*counts, 10])) * 1.3
    made = bars(
        [label(name) for name, _ in gates],
        [max(count, 0.5) for count in counts],
        x={"title": "configurations (logarithmic)", "type": "log", "range": [-0.3, top], "dtick": 2},
        color=[*[SOFT] * (len(counts) - 1), ACCENT],
        text=[f"{count:,}" for count in counts],
    )
    lost = [(name, before - left) for (_, before), (name, left) in pairwise(gates)]
    out = [NOTHING, *(f"{number:,}" for _, number in lost)]
    rows = [(name, f"{count:,}", left) for (name, count), left in zip(gates, out, strict=True)]
    summary = f"{counts[0]:,} {gates[0][0]}; {counts[-1]:,} {gates[-1][0]}."
    name, most = max(lost, key=lambda pair: pair[1], default=("", 0))
    if most > 0:
        summary += f" The most, {most:,}, were left out at '{name}'."
    table = ResultTable(("gate", "configurations left", "left out"), rows)
    return Chart("funnel", "From all combinations to the finals", made, summary, table)


def failures_chart(found: StudyData | Sequence[FailureGroup]) -> Chart:
    """Return failures by reason, the most frequent first, with the words of compiler, verification or sanitizer."""
    groups = found.failures if isinstance(found, StudyData) else found
    if not groups:
        return Chart("failures", "Failures by reason", None, "No configuration failed.")
    shown = groups[:_BEST_COUNT]
    names = [str(group.outcome).replace("_", " ") for group in groups]
    made = bars(
        [f"{place}. {name}" for place, name in enumerate(names[:_BEST_COUNT], start=1)],
        [group.count for group in shown],
        x={"title": "configurations", "rangemode": "tozero", "range": [0, 1.15 * shown[0].count]},
        text=[f"{group.count:,}" for group in shown],
        hover=[hover_text(group.reason or str(group.outcome)) for group in shown],
    )
    total = sum(group.count for group in groups)
    summary = f"{plural(total, 'configuration')} failed for {plural(len(groups), 'reason')}."
    rows = [
        (
            f"{place}",
            name,
            group.stage or NOTHING,
            f"{group.count:,}",
            group.reason or NOTHING,
            "\n".join(map(config_text, group.examples)),
        )
        for place, (name, group) in enumerate(zip(names, groups, strict=True), start=1)
    ]
    headings = ("", "outcome", "stage", "configurations", "reason", "for example")
    return Chart("failures", "Failures by reason", made, summary, ResultTable(headings, rows))


_OBJECTIVE_AXES = {
    TIME: TIME_AXIS,
    REGISTERS: "registers / thread",
    ENERGY: "energy of a run, mJ",
    ERROR: "maximum relative error",
}


def front_chart(study: StudyData) -> Chart:
    """Return the measured configurations by their objectives, and the Pareto front."""
    title, found = "Several objectives: the Pareto front", study.front
    if not found:
        is_alone = len(study.objectives) < 2
        fault = "There is one objective." if is_alone else "No configuration has a value for every objective."
        return Chart("front", title, None, fault)
    axes = [_OBJECTIVE_AXES.get(name, name) for name in study.objectives]
    axes[0] = "cost by the objective" if study.settings.objective else axes[0]
    best = sorted(((trial, values) for trial, values, is_on_front in found if is_on_front), key=lambda pair: pair[1])
    others = [(trial, values) for trial, values, is_on_front in found if not is_on_front][:_MAX_POINTS]
    traces = []
    for name, chosen, mode, color, size in (
        ("dominated", others, "markers", FAINT, 6),
        ("front", best, "lines+markers" if len(axes) == 2 else "markers", ACCENT, 9),
    ):
        marks = []
        for trial, values in chosen:
            lines = (f"{axis}: {value:.6g}" for axis, value in zip(axes, values, strict=True))
            marks.append((values[0], values[1], hover_text(*lines, config_text(trial.config))))
        line = {"color": color, "shape": "hv", "width": 2}
        traces += points(marks, name=name, symbol="circle", color=color, size=size, mode=mode, line=line)
    made = figure(traces, height=380, x={"title": axes[0]}, y={"title": axes[1]}, showlegend=True)
    rows = [(*(f"{value:.6g}" for value in values), config_text(trial.config)) for trial, values in best]
    more = f" The chart shows the first two of {len(axes)} objectives." if len(axes) > 2 else ""
    summary = f"{plural(len(best), 'configuration is', 'configurations are')} on the front, of {len(found):,}.{more}"
    return Chart("front", title, made, summary, ResultTable((*axes, "configuration"), rows))


def roofline_chart(studies: StudyData | Sequence[StudyData]) -> Chart:
    """Return the roofline with the default and the best dozen of a study, or with the winner of each of several.

    Several studies are on one device with one element type.
    """
    studies = [studies] if isinstance(studies, StudyData) else studies
    title, first = "Rates against the ceilings of the GPU", studies[0]
    alone, memory = len(studies) == 1, first.memory_roof
    found: list[tuple[str, Trial, float, float, str]] = []  # kind, trial, FLOP/B, TFLOP/s, configuration or problem
    for study in studies:
        others = [("others", trial) for trial in best_trials(study)[1:]] + [("default", study.default)]
        for kind, trial in [*(others if alone else ()), ("winner", study.winner)]:
            work = study.work_of(trial)
            if trial is not None and trial.time_us and work.flops and work.bytes:
                text = config_text(trial.config) if alone else source_text(str(study.key.problem), study.key.source)
                found.append((kind, trial, work.flops / work.bytes, work.flops / trial.time_us / 1e6, text))
    if not found or memory is None:
        missing = "the kernel does not state its operations and bytes ([work])" if not found else first.roofs_origin
        return Chart("roofline", title, None, f"There is no roofline: {missing}.")
    go, intensities = load_plotly(), [intensity for _, _, intensity, _, _ in found]
    bounding = (roof for study in studies for roof in study.roofs_of(study.winner) or ())
    roofs = sorted(dict.fromkeys(bounding), key=lambda roof: roof.rate)
    ridges = [roof.rate / memory.rate for roof in roofs]
    low, high = min([*intensities, *ridges]) / 4, max([*intensities, *ridges]) * 4
    dash = "solid" if first.ceilings is not None else "dash"
    lines = [(memory, [low, max(ridges, default=max(intensities))], INK)]
    for roof, ridge, color in zip(roofs, ridges, cycle((INK, MUTED, FAINT)), strict=False):
        lines.append((roof, [max(low, ridge), high], color))
    traces = [
        go.Scatter(
            x=ends,
            y=[end * roof.rate / 1e12 if roof.is_memory else roof.rate / 1e12 for end in ends],
            mode="lines",
            line={"color": color, "width": 1.5, "dash": dash},
            name=label(roof.text),
            hoverinfo="name",
        )
        for roof, ends, color in lines
    ]
    for name, symbol, color in (
        ("others", "circle-open", MUTED),
        ("default", "diamond", INK),
        ("winner", "circle", ACCENT),
    ):
        marks = [(x, y, hover_text(text, measured_text(trial))) for kind, trial, x, y, text in found if kind == name]
        traces += points(marks, name=name if alone else "winners", symbol=symbol, color=color, size=10)
    rates = [rate for trace in traces for rate in trace.y]
    made = figure(
        traces,
        height=420,
        x={"title": "operations per byte of minimum traffic, FLOP/B", **log_axis(low, high)},
        y={"title": "TFLOP/s", **log_axis(min(rates), max(rates))},
        showlegend=True,
        margin={"t": 40},
    )
    rows = [
        (kind, text, f"{intensity:,.4g}", f"{rate:,.4g}", bare_time(trial))
        for kind, trial, intensity, rate, text in found
    ]
    headings = ("", "configuration or problem", "FLOP/B", "TFLOP/s", f"time, {MICRO_S}")
    best = first.bound(first.winner)
    summary = f"The winner reaches {best.text}." if best is not None and alone else ""
    note = f"Ceilings: {first.roofs_origin.replace('`', chr(39))}."
    return Chart("roofline", title, made, summary, ResultTable(headings, rows), note)


_TELEMETRY = {
    "reference_us": "reference kernel, % above its fastest",
    "sm_clock_mhz": "SM clock, MHz",
    "power_w": "power, W",
    "temperature_c": "temperature, \N{DEGREE SIGN}C",
}


def drift_chart(study: StudyData) -> Chart:
    """Return the drift of the reference kernel and the clock, power and temperature of the GPU over the session."""
    name, title = "drift", "Drift, clocks, power and temperature"
    elapsed_s, known = np.array(study.elapsed_s), dict[str, NDArray[np.float64]]()
    for key, heading in _TELEMETRY.items():
        stated = (one.trial.telemetry.get(key) for one in study.trials)
        values = np.array([float(one) if isinstance(one, int | float) else math.nan for one in stated], np.float64)
        if key == "reference_us" and (values > 0).any():
            values = 100 * (values / float(np.nanmin(np.where(values > 0, values, np.nan))) - 1)
        if np.isfinite(values).any():
            known[heading] = values
    if not known:
        reason = "replayed from a recording" if study.key.source == "replayed" else "without telemetry"
        return Chart(name, title, None, f"The times are {reason}, so that no drift, clock or power is known.")
    parts = []
    for row, (heading, values) in enumerate(known.items(), start=1):
        drawn = np.flatnonzero(np.isfinite(values))
        drawn = drawn[np.linspace(0, len(drawn) - 1, min(len(drawn), _MAX_POINTS)).astype(np.int64)]
        trace = load_plotly().Scatter(
            x=elapsed_s[drawn],
            y=values[drawn],
            mode="lines",
            line={"color": ACCENT if row == 1 else MUTED, "width": 1.5},
            hovertext=[hover_text(f"trial {i + 1:,}", f"{heading}: {values[i]:.6g}") for i in drawn.tolist()],
            hoverinfo="text",
        )
        is_last = row == len(known)
        x = {"matches": "x" if row > 1 else None, "showticklabels": is_last}
        parts.append((heading, trace, {**x, "title": {"text": "seconds of tuning"}} if is_last else x, {"nticks": 4}))
    made = panels(parts, columns=1, height=80 + 120 * len(known))
    rows = [(heading, *map(short_text, np.nanquantile(values, (0.0, 0.5, 1.0)))) for heading, values in known.items()]
    reference = known.get(_TELEMETRY["reference_us"])
    summary = ""
    if reference is not None:
        summary = f"The reference kernel, timed beside each trial, varied by {np.nanmax(reference):.2g} %."
    limited = [limits for one in study.trials if (limits := one.trial.clock_limits)]
    names = " and ".join(dict.fromkeys(name for limits in limited for name in limits))
    note = f"During {plural(len(limited), 'trial')}, {names} lowered the clock." if limited else ""
    return Chart(name, title, made, summary, ResultTable(("", "minimum", "median", "maximum"), rows), note)


def family_loss_chart(stored: StoredRule) -> Chart:
    """Return the loss of a family's rule at the sizes that it was learned from, and where each was left out."""
    rule = stored.rule
    names = [name for name in rule.points[0].sizes if len({point.sizes[name] for point in rule.points}) > 1]
    placed = [(math.prod(point.sizes[name] for name in names), point) for point in rule.points]
    placed.sort(key=lambda pair: pair[0])
    traces = []
    for name, symbol, color, losses in (
        ("served by the rule", "circle", ACCENT, [point.loss for _, point in placed]),
        ("of a rule learned without the size", "circle-open", MUTED, [point.held_out for _, point in placed]),
    ):
        marks = [
            (x, 100 * loss, hover_text(sizes_text(point.sizes), f"loss {percent_text(loss)}"))
            for (x, point), loss in zip(placed, losses, strict=True)
            if loss is not None
        ]
        traces += points(marks, name=name, symbol=symbol, color=color, size=9, width=2)
    across = " \N{MULTIPLICATION SIGN} ".join(names) if names else "problem"
    xs = [x for x, _ in placed]
    made = figure(
        traces,
        height=340,
        x={"title": f"{label(across)} (logarithmic)", **log_axis(max(min(xs), 1), max(*xs, 10))},
        y={"title": "loss against the best known, %", "rangemode": "tozero"},
        showlegend=True,
        margin={"t": 40},
    )
    held = f", {percent_text(rule.mean_held_out)} at sizes left out" if rule.mean_held_out is not None else ""
    summary = (
        f"The mean loss at {plural(len(rule.points), 'size')} is {percent_text(rule.mean_loss)}{held}; the greatest is "
        f"{percent_text(rule.worst.loss)} at {sizes_text(rule.worst.sizes)}."
    )
    if rule.verdict:
        summary += f" The rule is {'' if rule.in_force else 'not '}in force: {rule.verdict}."
    rows = [
        (
            sizes_text(point.sizes),
            f"{point.best_us:,.6g}",
            *(
                percent_text(loss) if loss is not None else NOTHING
                for loss in (point.loss, point.held_out, point.without)
            ),
        )
        for _, point in placed
    ]
    headings = ("sizes", f"best known, {MICRO_S}", "loss", "loss if left out", "loss without the rule")
    return Chart("family_loss", "Loss by size", made, summary, ResultTable(headings, rows))


def tree_lines(tree: Tree, depth: int = 0, prefix: str = "") -> list[tuple[int, str]]:
    """Return a rule's tree in words: the depth and the text of each question and answer, in reading order."""
    if not isinstance(tree, Split):
        return [(depth, f"{prefix}configuration #{tree[0]}")]
    return [
        (depth, f"{prefix}{tree.feature} at most {tree.at_most:,.6g}?"),
        *tree_lines(tree.then, depth + 1, "yes: "),
        *tree_lines(tree.otherwise, depth + 1, "no: "),
    ]


_BEND = 0.12
"""Where the line from a question to its answers bends, in steps of the depth."""


def rule_tree_chart(stored: StoredRule) -> Chart:
    """Return a family's rule as a tree: each question with its two branches, and the configuration of each leaf."""
    rule, title = stored.rule, "The rule as a tree"
    if not isinstance(rule.tree, Split):
        return Chart("rule_tree", title, None, "One configuration is served for the whole family.")
    nodes: list[dict[str, Any]] = []
    lines: list[tuple[int, float, float]] = []
    leaves = 0

    def visit(node: Tree, depth: int, answer: str) -> float:
        nonlocal leaves
        config = ""
        if not isinstance(node, Split):
            row, leaves = float(leaves), leaves + 1
            text, config = f"#{node[0]}", config_text(rule.configs[node[0]].config)
        else:
            first, second = visit(node.then, depth + 1, "yes: "), visit(node.otherwise, depth + 1, "no: ")
            row = (first + second) / 2
            text = f"{node.feature} \N{LESS-THAN OR EQUAL TO} {node.at_most:,.4g}"
            lines.extend(((depth, row, first), (depth, row, second)))
        style = {"font": {"color": ACCENT if config else INK, "size": 12}, "bgcolor": PAPER, "borderpad": 2}
        place = {"x": depth, "y": row, "xanchor": "left", "showarrow": False, "text": label(answer + text, 40)}
        nodes.append({**place, **style, **({"hovertext": hover_text(config)} if config else {})})
        return row

    visit(rule.tree, 0, "")
    edges = load_plotly().Scatter(
        x=[x for above, _, _ in lines for x in (above + _BEND, above + _BEND, above + 1, None)],
        y=[y for _, start, end in lines for y in (start, end, end, None)],
        mode="lines",
        line={"color": FAINT, "width": 1.5},
        hoverinfo="skip",
    )
    made = figure(
        [edges],
        height=60 + 40 * leaves,
        x={"visible": False, "range": [-0.05, max(node["x"] for node in nodes) + 0.6]},
        y={"visible": False, "autorange": "reversed"},
        annotations=nodes,
    )
    rows = [(f"#{index}", config_text(one.config)) for index, one in enumerate(rule.configs)]
    summary = f"{plural(leaves, 'leaf', 'leaves')} choose among {plural(len(rule.configs), 'configuration')}."
    return Chart("rule_tree", title, made, summary, ResultTable(("number", "configuration"), rows))


def operation_chart(operation: OperationData) -> Chart:
    """Return the times of the kernels and libraries that compute a problem of an operation."""
    problem, device, contenders, _ = operation
    title = f"{problem} on {device}: kernels and libraries"
    timed = [(one, one.trial.measurement) for one in contenders if one.trial.measurement is not None]
    if not timed:
        return Chart("operation", title, None, "Nothing that computes the problem was timed.")
    times = [(one.time_us, one.low_us, one.high_us) for _, one in timed]
    made = bars(
        [label(one.name, 28) for one, _ in timed],
        [time_us for time_us, _, _ in times],
        x={"title": TIME_AXIS, "rangemode": "tozero"},
        color=[ACCENT, *[MUTED] * (len(timed) - 1)],
        hover=[hover_text(one.name, measured_text(one.trial), config_text(one.trial.config)) for one, _ in timed],
        error_x=error_bars(times, INK),
    )
    rows = [
        (
            one.name,
            "library" if one.is_library else "kernel",
            source_text(bare_time(one.trial), one.source),
            interval_text(measured),
            f"{measured.time_us / times[0][0]:.4f}",
            config_text(one.trial.config) or NOTHING,
        )
        for one, measured in timed
    ]
    headings = ("name", "", f"time, {MICRO_S}", f"95 % interval, {MICRO_S}", "time / fastest", "configuration")
    summary = f"{timed[0][0].name} is the fastest with {with_units(timed[0][0].time_text)}."
    return Chart("operation", title, made, summary, ResultTable(headings, rows))
