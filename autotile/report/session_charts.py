"""Charts of a session over its time: the best so far, and drift, clocks, power and temperature of the GPU."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Outcome, config_text
from autotile.core.text import duration_text, plural
from autotile.report.study_data import StudyData
from autotile.report.theme import (
    ACCENT,
    FAINT,
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
    measured_text,
)

_MAX_POINTS = 3000
"""Trials that a chart draws one by one; of more, an even selection, with all that improved on the best."""
_LOG_RATIO = 5.0
"""Ratio of the slowest to the fastest time above which an axis is logarithmic."""


_TIMED = (
    (Outcome.OK, "measured", "circle", SOFT),
    (Outcome.PRUNED, "dropped as slow", "circle-open", FAINT),
)
"""Outcomes of trials with a time, each with its label, symbol and colour."""


def best_so_far_chart(study: StudyData, axis: Literal["trials", "seconds"] = "trials") -> Chart:
    """Return the best result so far over trials or seconds, with the outcome of each trial and what was expected."""
    title = f"Best so far over {axis}"
    name = f"best_over_{axis}"
    scores = _scores(study)
    timed = np.isfinite(scores) & (scores > 0)
    if not timed.any():
        return Chart(name, title, None, "No trial has a time yet.")
    xs = np.arange(1, len(scores) + 1, dtype=np.float64) if axis == "trials" else np.array(study.elapsed_s)
    best = _best_so_far(np.where(timed, scores, np.nan), study.settings.maximize)
    drawn = _selection(best)
    go, quantity = load_plotly(), score_axis(study)
    spread = scores[timed].max() / scores[timed].min()
    traces = [
        *(
            _points(study, xs, scores, drawn & timed & _has(study, outcome), name=text, symbol=symbol, color=color)
            for outcome, text, symbol, color in _TIMED
        ),
        _failed_points(study, xs, scores, drawn & ~timed),
        go.Scatter(
            x=xs,
            y=best,
            mode="lines",
            line={"color": ACCENT, "width": 2.5, "shape": "hv"},
            name="best so far",
            hoverinfo="skip",
        ),
        *_expectation(go, study, xs, best),
    ]
    unit = "trials" if axis == "trials" else "seconds of tuning"
    made = figure(
        [trace for trace in traces if trace is not None],
        height=360,
        x={"title": {"text": unit}, "rangemode": "tozero"},
        y={
            "title": {"text": quantity},
            **(log_axis(scores[timed].min(), scores[timed].max()) if spread > _LOG_RATIO else {}),
        },
        showlegend=True,
        margin={"t": 40},
    )
    last = np.flatnonzero(timed & (scores == best[-1]))[0]
    when = f"trial {last + 1:,}" if axis == "trials" else f"{duration_text(float(xs[last]))} of tuning"
    summary = f"The best of {plural(len(scores), 'trial')} was found after {when}. {expectation_text(study)}".strip()
    note = f"{int(drawn.sum()):,} of {len(scores):,} trials are drawn." if not drawn.all() else ""
    return Chart(name, title, made, summary, _improvements(study, scores, best), note)


def _scores(study: StudyData) -> NDArray[np.float64]:
    found = (study.score(one.trial) for one in study.trials)
    return np.array([math.nan if score is None else score for score in found], np.float64)


def expectation_text(study: StudyData) -> str:
    """Return the gain that the search expected of further trials, in one sentence; empty if it is not known."""
    stopped = study.summary.stopped
    if stopped is None or stopped.expected_gain is None or not stopped.more_trials:
        return ""
    gain = 100 * stopped.expected_gain
    text = f"{gain:.2g} %" if gain >= 0.01 else "less than 0.01 %"
    return f"At the end, {stopped.more_trials:,} more trials were expected to gain {text}."


def score_axis(study: StudyData) -> str:
    """Return the title of the axis of what the search improved."""
    return label(study.settings.objective) if study.has_own_objective else TIME_AXIS


def _best_so_far(scores: NDArray[np.float64], maximize: bool) -> NDArray[np.float64]:
    filled = np.where(np.isnan(scores), -np.inf if maximize else np.inf, scores)
    best = np.maximum.accumulate(filled) if maximize else np.minimum.accumulate(filled)
    return np.where(np.isinf(best), np.nan, best)


def _selection(best: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which trials are drawn: all that improved, and an even selection of the others."""
    count = len(best)
    if count <= _MAX_POINTS:
        return np.ones(count, np.bool_)
    drawn = np.zeros(count, np.bool_)
    drawn[np.linspace(0, count - 1, _MAX_POINTS).astype(np.int64)] = True
    drawn[1:] |= best[1:] != best[:-1]
    return drawn


def _has(study: StudyData, outcome: Outcome) -> NDArray[np.bool_]:
    return np.fromiter((one.trial.outcome is outcome for one in study.trials), np.bool_, len(study.trials))


def _points(
    study: StudyData, xs: Any, ys: Any, chosen: NDArray[np.bool_], *, name: str, symbol: str, color: str
) -> Any:
    if not chosen.any():
        return None
    return load_plotly().Scatter(
        x=xs[chosen],
        y=ys[chosen],
        mode="markers",
        marker={"symbol": symbol, "color": color, "size": 6},
        name=name,
        hovertext=[_trial_hover(study, int(index)) for index in np.flatnonzero(chosen)],
        hoverinfo="text",
    )


def _failed_points(study: StudyData, xs: Any, scores: Any, chosen: NDArray[np.bool_]) -> Any:
    """Return the failed trials in a row above the others."""
    height = float(np.nanmax(scores)) * 1.08
    return _points(study, xs, np.full(len(xs), height), chosen, name="failed", symbol="x-thin-open", color=MUTED)


def _trial_hover(study: StudyData, index: int) -> str:
    trial = study.trials[index].trial
    failed = f"{str(trial.outcome).replace('_', ' ')}: {trial.reason}" if not trial.outcome.has_time else ""
    return hover_text(f"trial {index + 1:,}", measured_text(trial), failed, config_text(trial.config))


def _expectation(go: Any, study: StudyData, xs: Any, best: Any) -> list[Any]:
    stopped = study.summary.stopped
    if stopped is None or stopped.expected_gain is None or not stopped.more_trials or study.has_own_objective:
        return []
    pace = float(xs[-1]) / len(xs)
    ends = [float(xs[-1]), float(xs[-1]) + pace * min(stopped.more_trials, 0.15 * len(xs))]
    values = [float(best[-1]), float(best[-1]) / (1 + max(stopped.expected_gain, 0.0))]
    line = {"color": ACCENT, "width": 2, "dash": "dot"}
    text = hover_text(expectation_text(study))
    return [
        go.Scatter(x=ends, y=values, mode="lines", line=line, name="expected of more", hovertext=text, hoverinfo="text")
    ]


def _improvements(study: StudyData, scores: Any, best: Any) -> ChartTable:
    changed = np.flatnonzero(np.append(True, best[1:] != best[:-1]) & np.isfinite(scores) & (scores == best))
    rows = tuple(
        (
            f"{i + 1:,}",
            duration_text(study.elapsed_s[i]),
            f"{scores[i]:,.6g}",
            config_text(study.trials[i].trial.config),
        )
        for i in changed
    )
    return ChartTable(("trial", "after", score_axis(study), "configuration that became the best"), rows)


def drift_chart(study: StudyData) -> Chart:
    """Return the drift of the reference kernel and the clock, power and temperature of the GPU over the session."""
    name, title = "drift", "Drift, clocks, power and temperature"
    elapsed_s = np.array(study.elapsed_s)
    series = [(heading, _telemetry(study, key)) for key, heading in _TELEMETRY.items()]
    known = [(heading, values) for heading, values in series if np.isfinite(values).any()]
    if not known:
        reason = "replayed from a recording" if study.key.source == "replayed" else "without telemetry"
        return Chart(name, title, None, f"The times are {reason}, so that no drift, clock or power is known.")
    go = load_plotly()
    from plotly.subplots import make_subplots

    grid = make_subplots(
        len(known), 1, shared_xaxes=True, subplot_titles=[heading for heading, _ in known], vertical_spacing=0.09
    )
    for row, (heading, values) in enumerate(known, start=1):
        drawn = np.flatnonzero(np.isfinite(values))
        drawn = drawn[np.linspace(0, len(drawn) - 1, min(len(drawn), _MAX_POINTS)).astype(np.int64)]
        line = {"color": ACCENT if row == 1 else MUTED, "width": 1.5}
        texts = [hover_text(f"trial {i + 1:,}", f"{heading}: {values[i]:.6g}") for i in drawn.tolist()]
        grid.add_trace(
            go.Scatter(x=elapsed_s[drawn], y=values[drawn], mode="lines", line=line, hovertext=texts, hoverinfo="text"),
            row=row,
            col=1,
        )
    made = figure([], height=80 + 120 * len(known))
    grid.update_layout(made.layout)
    grid.update_xaxes(made.layout.xaxis.to_plotly_json())
    grid.update_yaxes({**made.layout.yaxis.to_plotly_json(), "nticks": 4})
    grid.update_xaxes(title={**made.layout.xaxis.title.to_plotly_json(), "text": "seconds of tuning"}, row=len(known))
    grid.update_layout(margin={"t": 30})
    grid.update_annotations(font={"size": 12, "color": MUTED})
    return Chart(name, title, grid, _drift_text(known), _telemetry_table(known), _throttle_text(study))


_TELEMETRY = {
    "reference_us": "reference kernel, % above its fastest",
    "sm_clock_mhz": "SM clock, MHz",
    "power_w": "power, W",
    "temperature_c": "temperature, \N{DEGREE SIGN}C",
}
_REFERENCE = "reference_us"
_THROTTLE_REASONS = {
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "a thermal slowdown",
    0x40: "a thermal slowdown",
    0x80: "an external power brake",
}
"""Bits of NVML's clock event reasons that lower the clock, as in ``nvml.h``."""


def _telemetry(study: StudyData, key: str) -> NDArray[np.float64]:
    found = [one.trial.telemetry.get(key) for one in study.trials]
    values = np.array([float(one) if isinstance(one, int | float) else math.nan for one in found], np.float64)
    if key == _REFERENCE and (values > 0).any():
        fastest = float(np.nanmin(np.where(values > 0, values, np.nan)))
        values = 100 * (values / fastest - 1)
    return values


def _drift_text(known: list[tuple[str, NDArray[np.float64]]]) -> str:
    heading, values = known[0]
    if heading != _TELEMETRY[_REFERENCE]:
        return ""
    return f"The reference kernel, timed beside each trial, varied by {np.nanmax(values):.2g} %."


def _telemetry_table(known: list[tuple[str, NDArray[np.float64]]]) -> ChartTable:
    rows = tuple(
        (heading, *(f"{value:,.5g}" for value in (np.nanmin(values), np.nanmedian(values), np.nanmax(values))))
        for heading, values in known
    )
    return ChartTable(("", "minimum", "median", "maximum"), rows)


def _throttle_text(study: StudyData) -> str:
    found = [one.trial.telemetry.get("throttle_reasons") for one in study.trials]
    masks = [mask for mask in found if isinstance(mask, int)]
    limits = dict.fromkeys(text for bit, text in _THROTTLE_REASONS.items() if any(mask & bit for mask in masks))
    limited = sum(any(mask & bit for bit in _THROTTLE_REASONS) for mask in masks)
    return f"During {plural(limited, 'trial')}, {' and '.join(limits)} lowered the clock." if limits else ""
