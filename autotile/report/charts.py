"""Charts of the results of a study: finals, limits, progress, gates, failures, roofline and Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from autotile.core.model import ENERGY, ERROR, REGISTERS, TIME, Outcome, Trial, config_key, config_text
from autotile.core.text import NOTHING, interval_text, plural, source_text
from autotile.report.failures import FailureGroup
from autotile.report.roofline import Roof, Roofline
from autotile.report.study_data import Finalist, StudyData
from autotile.report.theme import (
    ACCENT,
    FAINT,
    FAINT_ACCENT,
    INK,
    MUTED,
    SOFT,
    TIME_AXIS,
    Chart,
    ChartTable,
    bare_time,
    figure,
    hover_text,
    label,
    load_plotly,
    log_axis,
    measured_text,
    with_units,
)

BEST_COUNT = 12
"""Number of configurations of which the limits are shown."""
_MAX_POINTS = 3000
"""Dominated configurations that the chart of the front draws."""
_ROW_PX = 26


def finals_chart(study: StudyData) -> Chart:
    """Return the finalists' times with their intervals, beside the winner's."""
    finals, title = study.finals, "Times with 95 % intervals"
    if finals is None:
        return Chart("finals", title, None, "No finals were held, so that times are those of the search.")
    ranked = finals.ranked
    low, high = _bounds(ranked[0].trial)
    go = load_plotly()
    traces = []
    for name, chosen, marker in _finalist_groups(ranked):
        times = [(*_bounds(one.trial), one.trial.time_us or 0.0) for one in chosen]
        traces.append(
            go.Scatter(
                x=[time for _, _, time in times],
                y=[finalist_label(one) for one in chosen],
                error_x={
                    "type": "data",
                    "array": [high_us - time for _, high_us, time in times],
                    "arrayminus": [time - low_us for low_us, _, time in times],
                    "color": marker["line"]["color"],
                    "thickness": 3,
                    "width": 7,
                },
                mode="markers",
                marker=marker,
                name=name,
                hovertext=[_finalist_hover(one) for one in chosen],
                hoverinfo="text",
            )
        )
    order = [finalist_label(one) for one in ranked]
    made = figure(
        traces,
        height=96 + _ROW_PX * len(ranked),
        x={"title": {"text": TIME_AXIS}, **_near(ranked)},
        y={"categoryorder": "array", "categoryarray": order[::-1], "showgrid": False},
        shapes=[_band(low, high)],
        annotations=list(_far(ranked)),
        showlegend=True,
    )
    ties = sum(one.is_tie for one in ranked)
    summary = (
        f"{plural(len(ranked), 'finalist')} were timed in turn; "
        f"{plural(ties, 'configuration ties', 'configurations tie')} with the winner."
    )
    return Chart("finals", title, made, summary, _finals_table(ranked))


_FAR = 1.5
"""Excess of the default over the winner, relative to that of the slowest other finalist, above which it is left out."""


def _is_far(ranked: Sequence[Finalist]) -> bool:
    """Return whether the default is so slow that the intervals of the others could not be told apart."""
    others = [_bounds(one.trial)[1] for one in ranked if not one.is_default]
    default = next((one.trial.time_us for one in ranked if one.is_default), None)
    low = _bounds(ranked[0].trial)[0]
    return default is not None and len(others) > 1 and default - low > _FAR * (max(others) - low)


def _near(ranked: Sequence[Finalist]) -> dict[str, Any]:
    if not _is_far(ranked):
        return {}
    others = [one.trial for one in ranked if not one.is_default]
    low, high = min(_bounds(trial)[0] for trial in others), max(_bounds(trial)[1] for trial in others)
    return {"range": [low - 0.06 * (high - low), high + 0.2 * (high - low)]}


def _far(ranked: Sequence[Finalist]) -> Iterable[dict[str, Any]]:
    for one in ranked:
        if one.is_default and _is_far(ranked):
            text = f"{with_units(label(measured_text(one.trial)))} \N{RIGHTWARDS ARROW}"
            place = {"x": 1, "xref": "paper", "xanchor": "right", "y": finalist_label(one), "yref": "y"}
            yield {**place, "text": text, "showarrow": False, "font": {"color": INK, "size": 12}}


def _finalist_groups(ranked: Sequence[Finalist]) -> Iterable[tuple[str, list[Finalist], dict[str, Any]]]:
    kinds: tuple[tuple[str, str, str, str, Callable[[Finalist], bool]], ...] = (
        ("winner", "circle", ACCENT, ACCENT, lambda one: one.rank == 1),
        ("ties with the winner", "circle-open", ACCENT, ACCENT, lambda one: one.is_tie and not one.is_default),
        ("default", "diamond", INK, INK, lambda one: one.is_default and one.rank > 1),
        ("slower", "circle", MUTED, MUTED, lambda one: not one.is_tie and not one.is_default and one.rank > 1),
    )
    for name, symbol, color, line, belongs in kinds:
        if chosen := [one for one in ranked if belongs(one)]:
            yield name, chosen, {"symbol": symbol, "color": color, "size": 8, "line": {"color": line, "width": 2}}


def finalist_label(one: Finalist) -> str:
    """Return the place of a finalist with what marks it: ``#2 tie``."""
    marks = ("winner" if one.rank == 1 else "", "tie" if one.is_tie else "", "default" if one.is_default else "")
    return " ".join(filter(None, [f"#{one.rank}", *marks]))


def _finalist_hover(one: Finalist) -> str:
    ratio = f"{one.ratio.value:.4f} x the winner's time" if one.ratio is not None and one.rank > 1 else ""
    return hover_text(finalist_label(one), measured_text(one.trial), ratio, config_text(one.trial.config))


def _finals_table(ranked: Sequence[Finalist]) -> ChartTable:
    headings = ("place", "time, \N{MICRO SIGN}s", "95 % interval, \N{MICRO SIGN}s", "time / winner's", "configuration")
    rows = tuple(
        (
            finalist_label(one),
            bare_time(one.trial),
            interval_text(*_bounds(one.trial)),
            f"{one.ratio.value:.4f} ({one.ratio.low:.4f} to {one.ratio.high:.4f})" if one.ratio else NOTHING,
            config_text(one.trial.config),
        )
        for one in ranked
    )
    return ChartTable(headings, rows)


def best_trials(study: StudyData, count: int = BEST_COUNT) -> list[Trial]:
    """Return the finalists, followed by the best other trials of the search."""
    ranked = [one.trial for one in study.finals.ranked] if study.finals is not None else []
    timed = [one.trial for one in study.newest if one.trial.outcome is Outcome.OK and one.trial.cost is not None]
    others = sorted(timed, key=lambda trial: trial.cost or 0.0)
    refused = {config_key(trial.config) for trial in study.finals.refused} if study.finals is not None else set()
    found = {config_key(trial.config): trial for trial in reversed([*ranked, *others])}
    ordered = dict.fromkeys(config_key(trial.config) for trial in [*ranked, *others])
    return [found[key] for key in ordered if key not in refused][:count]


def limits_chart(study: StudyData) -> Chart:
    """Return the limits of the best configurations: registers, shared memory, occupancy, waves, spills, roofline."""
    trials = best_trials(study)
    title = f"Resources of the best {len(trials)}, and how near they are to the limit"
    measures = [(name, [_measure(study, trial, name) for trial in trials]) for name in _MEASURES]
    known = [(name, values) for name, values in measures if any(values)]
    if not known:
        return Chart("limits", title, None, "No resources of the best configurations are stored.")
    go = load_plotly()
    from plotly.subplots import make_subplots

    columns = min(3, len(known))
    lines = math.ceil(len(known) / columns)
    headings = [_MEASURES[name] for name, _ in known]
    grid = make_subplots(lines, columns, subplot_titles=headings, shared_yaxes=True, vertical_spacing=0.2)
    places = [f"#{place}" for place in range(1, len(trials) + 1)]
    colors = [ACCENT, *[SOFT] * (len(trials) - 1)]
    for index, (name, values) in enumerate(known):
        bars = go.Bar(
            y=places,
            x=values,
            orientation="h",
            marker={"color": colors},
            hovertext=[_limits_hover(study, trial, place) for trial, place in zip(trials, places, strict=True)],
            hoverinfo="text",
        )
        grid.add_trace(bars, row=index // columns + 1, col=index % columns + 1)
        if name in ("occupancy", "share"):
            grid.update_xaxes(range=[0, 105], row=index // columns + 1, col=index % columns + 1)
    made = figure([], height=60 + lines * (70 + 17 * len(trials)))
    grid.update_layout(made.layout)
    grid.update_xaxes({**made.layout.xaxis.to_plotly_json(), "rangemode": "tozero", "nticks": 4})
    grid.update_yaxes(
        {**made.layout.yaxis.to_plotly_json(), "autorange": "reversed", "showgrid": False, "type": "category"}
    )
    grid.update_layout(margin={"t": 36}, bargap=0.25)
    grid.update_annotations(font={"size": 12, "color": MUTED})
    limiting = trials[0].occupancy.limited_by if trials and trials[0].occupancy is not None else ()
    by = f"; its occupancy is limited by {', '.join(limiting).replace('_', ' ')}" if limiting else ""
    bound = study.bound(trials[0]) if trials else None
    share = f"The best reaches {with_units(bound.text)}{by}." if bound else f"Places are by time{by}."
    if all(trial.resources is not None and not trial.resources.spill_bytes for trial in trials):
        share += " None of them spills registers."
    return Chart("limits", title, grid, share, _limits_table(study, trials))


_MEASURES = {
    "registers": "registers / thread",
    "smem": "shared memory, KiB / block",
    "occupancy": "occupancy, %",
    "waves": "waves of blocks",
    "spills": "spills, B / thread",
    "share": "of the binding limit, %",
}


def _measure(study: StudyData, trial: Trial, name: str) -> float | None:
    used, geometry, occupancy = trial.resources, trial.geometry, trial.occupancy
    match name:
        case "registers":
            return used.registers if used is not None else None
        case "smem":
            dynamic = geometry.dynamic_smem_bytes if geometry is not None else 0
            return (used.static_smem_bytes + dynamic) / 1024 if used is not None else None
        case "occupancy":
            return 100 * occupancy.occupancy if occupancy is not None else None
        case "waves":
            resident = occupancy.blocks_per_sm * study.device.sm_count if occupancy and study.device else 0
            return geometry.blocks / resident if geometry is not None and resident else None
        case "spills":
            return used.spill_bytes if used is not None else None
        case _:
            bound = study.bound(trial)
            return 100 * bound.share if bound is not None else None


def _limits_hover(study: StudyData, trial: Trial, place: str) -> str:
    limited = trial.occupancy.limited_by if trial.occupancy is not None else ()
    by = f"occupancy limited by {', '.join(limited).replace('_', ' ')}" if limited else ""
    bound = study.bound(trial)
    share = with_units(bound.text) if bound is not None else ""
    return hover_text(f"{place}  {measured_text(trial)}", by, share, config_text(trial.config))


def _limits_table(study: StudyData, trials: Sequence[Trial]) -> ChartTable:
    rows = []
    for place, trial in enumerate(trials, start=1):
        values = [_measure(study, trial, name) for name in _MEASURES]
        limited = trial.occupancy.limited_by if trial.occupancy is not None else ()
        numbers = [f"{value:,.4g}" if value is not None else NOTHING for value in values]
        rows.append((f"#{place}", bare_time(trial), *numbers, ", ".join(limited), config_text(trial.config)))
    headings = ("place", "time, \N{MICRO SIGN}s", *_MEASURES.values(), "occupancy limited by", "configuration")
    return ChartTable(headings, tuple(rows))


def funnel_chart(study: StudyData) -> Chart:
    """Return the number of configurations that each gate let through."""
    title, gates = "From all combinations to the finals", study.gates
    go = load_plotly()
    counts = [max(gate.count, 0) for gate in gates]
    names = [label(gate.label) for gate in gates]
    bars = go.Bar(
        y=names,
        x=[max(count, 0.5) for count in counts],
        orientation="h",
        marker={"color": [*[SOFT] * (len(counts) - 1), ACCENT]},
        text=[f"{count:,}" for count in counts],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    top = math.log10(max([*counts, 10])) * 1.3
    made = figure(
        [bars],
        height=70 + 30 * len(counts),
        x={"title": {"text": "configurations (logarithmic)"}, "type": "log", "range": [-0.3, top], "dtick": 2},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.3,
    )
    lost = [(b, a.count - b.count) for a, b in pairwise(gates) if a.count > b.count]
    rows = tuple(
        (gate.label, f"{gate.count:,}", f"{gates[i - 1].count - gate.count:,}" if i else NOTHING)
        for i, gate in enumerate(gates)
    )
    most = max(lost, key=lambda pair: pair[1], default=None)
    summary = f"{counts[0]:,} {gates[0].label}; {counts[-1]:,} {gates[-1].label}."
    if most is not None:
        summary += f" Most were left out before '{most[0].label}': {most[1]:,}."
    return Chart("funnel", title, made, summary, ChartTable(("gate", "configurations left", "left out"), rows))


def failures_chart(study: StudyData) -> Chart:
    """Return the failures by reason, with the words of the compiler, the verification or the sanitizer."""
    return failure_groups_chart(study.failures)


def failure_groups_chart(groups: Sequence[FailureGroup]) -> Chart:
    """Return groups of failures, the most frequent first, as bars."""
    if not groups:
        return Chart("failures", "Failures by reason", None, "No configuration failed.")
    go, shown = load_plotly(), groups[:BEST_COUNT]
    names = [f"{place}. {str(group.outcome).replace('_', ' ')}" for place, group in enumerate(shown, start=1)]
    bars = go.Bar(
        y=names,
        x=[group.count for group in shown],
        orientation="h",
        marker={"color": SOFT},
        text=[f"{group.count:,}" for group in shown],
        textposition="outside",
        cliponaxis=False,
        hovertext=[hover_text(group.reason or str(group.outcome)) for group in shown],
        hoverinfo="text",
    )
    made = figure(
        [bars],
        height=70 + 30 * len(shown),
        x={"title": {"text": "configurations"}, "rangemode": "tozero", "range": [0, 1.15 * shown[0].count]},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.35,
    )
    total = sum(group.count for group in groups)
    summary = f"{plural(total, 'configuration')} failed for {plural(len(groups), 'reason')}."
    rows = tuple(
        (
            f"{place}",
            str(group.outcome).replace("_", " "),
            group.stage or NOTHING,
            f"{group.count:,}",
            group.reason or NOTHING,
            "\n".join(config_text(config) for config in group.examples),
        )
        for place, group in enumerate(groups, start=1)
    )
    headings = ("", "outcome", "stage", "configurations", "reason", "for example")
    return Chart("failures", "Failures by reason", made, summary, ChartTable(headings, rows))


def front_chart(study: StudyData) -> Chart:
    """Return the measured configurations by their objectives, and the Pareto front."""
    title, points = "Several objectives: the Pareto front", study.front
    if not points:
        return Chart("front", title, None, "No configuration has a value for every objective.")
    go, names = load_plotly(), [_OBJECTIVE_AXES.get(name, name) for name in study.objectives]
    best = sorted((point for point in points if point.is_on_front), key=lambda point: point.values)
    others = [point for point in points if not point.is_on_front][:_MAX_POINTS]
    traces = [
        go.Scatter(
            x=[point.values[0] for point in chosen],
            y=[point.values[1] for point in chosen],
            mode=mode,
            name=name,
            marker={"color": color, "size": size},
            line={"color": color, "shape": "hv", "width": 2},
            hovertext=[
                hover_text(
                    *(f"{axis}: {value:.6g}" for axis, value in zip(names, point.values, strict=True)),
                    config_text(point.trial.config),
                )
                for point in chosen
            ],
            hoverinfo="text",
        )
        for name, chosen, mode, color, size in (
            ("dominated", others, "markers", FAINT, 6),
            ("front", best, "lines+markers" if len(names) == 2 else "markers", ACCENT, 9),
        )
    ]
    made = figure(traces, height=380, x={"title": {"text": names[0]}}, y={"title": {"text": names[1]}}, showlegend=True)
    rows = tuple((*(f"{value:.6g}" for value in point.values), config_text(point.trial.config)) for point in best)
    more = f" The chart shows the first two of {len(names)} objectives." if len(names) > 2 else ""
    summary = f"{plural(len(best), 'configuration is', 'configurations are')} on the front, of {len(points):,}.{more}"
    return Chart("front", title, made, summary, ChartTable((*names, "configuration"), rows))


_OBJECTIVE_AXES = {
    TIME: TIME_AXIS,
    REGISTERS: "registers / thread",
    ENERGY: "energy of a run, mJ",
    ERROR: "maximum relative error",
}


def roofline_chart(studies: Sequence[StudyData]) -> Chart:
    """Return the roofline of one device and element type, with the best trials of some studies.

    Parameters
    ----------
    studies
        Studies on one device with one element type, at least one. Of one study the default and the best dozen are
        shown; of several, the winner of each.
    """
    title, roofline = "Rates against the ceilings of the GPU", studies[0].roofline
    points = [point for study in studies for point in _roofline_points(study, alone=len(studies) == 1)]
    if not points or roofline.memory is None:
        missing = "the kernel does not state its operations and bytes ([work])" if not points else roofline.origin
        return Chart("roofline", title, None, f"There is no roofline: {missing}.")
    go = load_plotly()
    intensities = [flops / size for _, _, flops, size, _ in points]
    roofs = _arithmetic_roofs(studies)
    ridge = [roof.rate / roofline.memory.rate for roof in roofs]
    low, high = min([*intensities, *ridge]) / 4, max([*intensities, *ridge]) * 4
    traces = list(_roofs(go, roofline, roofs, low, high, top=max(ridge, default=max(intensities))))
    for name, symbol, color in (
        ("others", "circle-open", MUTED),
        ("default", "diamond", INK),
        ("winner", "circle", ACCENT),
    ):
        chosen = [point for point in points if point[0] == name]
        if chosen:
            traces.append(
                go.Scatter(
                    x=[flops / size for _, _, flops, size, _ in chosen],
                    y=[flops / (trial.time_us or 1.0) / 1e6 for _, trial, flops, _, _ in chosen],
                    mode="markers",
                    marker={"symbol": symbol, "color": color, "size": 10},
                    name=name if len(studies) == 1 else "winners",
                    hovertext=[hover_text(text, measured_text(trial)) for _, trial, _, _, text in chosen],
                    hoverinfo="text",
                )
            )
    rates = [rate for trace in traces for rate in trace.y]
    made = figure(
        traces,
        height=420,
        x={"title": {"text": "operations per byte of minimum traffic, FLOP/B"}, **log_axis(low, high)},
        y={"title": {"text": "TFLOP/s"}, **log_axis(min(rates), max(rates))},
        showlegend=True,
        margin={"t": 40},
    )
    rows = tuple(
        (name, text, f"{flops / size:,.4g}", f"{flops / (trial.time_us or 1.0) / 1e6:,.4g}", bare_time(trial))
        for name, trial, flops, size, text in points
    )
    headings = ("", "configuration or problem", "FLOP/B", "TFLOP/s", "time, \N{MICRO SIGN}s")
    best = studies[0].bound(studies[0].winner)
    summary = f"The winner reaches {best.text}." if best is not None and len(studies) == 1 else ""
    return Chart(
        "roofline",
        title,
        made,
        summary,
        ChartTable(headings, rows),
        f"Ceilings: {roofline.origin.replace(chr(96), chr(39))}.",
    )


def _roofline_points(study: StudyData, *, alone: bool) -> Iterable[tuple[str, Trial, int, int, str]]:
    winner, default = study.winner, study.default
    others = best_trials(study)[1:] if alone else []
    named = [("others", trial) for trial in others] + [("default", default)] * alone + [("winner", winner)]
    for name, trial in named:
        work = study.work_of(trial)
        if trial is not None and trial.time_us and work.flops and work.bytes:
            text = config_text(trial.config) if alone else source_text(str(study.problem), study.key.source)
            yield name, trial, work.flops, work.bytes, text


def _arithmetic_roofs(studies: Sequence[StudyData]) -> list[Roof]:
    """Return the rates that bound the kernels of some studies, slowest first."""
    found = (roof for study in studies for roof in study.roofline.of(study.work_of(study.winner)) or ())
    return sorted(dict.fromkeys(found), key=lambda roof: roof.rate)


def _roofs(
    go: Any, roofline: Roofline, compute: Sequence[Roof], low: float, high: float, *, top: float
) -> Iterable[Any]:
    """Yield the line of the memory, up to the operations per byte ``top``, and that of each arithmetic unit."""
    memory = roofline.memory
    assert memory is not None
    ends = [low, top]
    line = {"color": INK, "width": 1.5}
    if not roofline.is_measured:
        line["dash"] = "dash"
    flops = [end * memory.rate / 1e12 for end in ends]
    yield go.Scatter(x=ends, y=flops, mode="lines", line=line, name=label(memory.text), hoverinfo="name")
    for place, roof in enumerate(compute):
        start = max(low, roof.rate / memory.rate)
        dash = {"color": (INK, MUTED, FAINT)[place % 3], "width": 1.5, "dash": line.get("dash", "solid")}
        rates = [roof.rate / 1e12] * 2
        yield go.Scatter(x=[start, high], y=rates, mode="lines", line=dash, name=label(roof.text), hoverinfo="name")


def _band(low: float, high: float) -> dict[str, Any]:
    """Return the shape of an interval of times, across a chart."""
    sides = {"x0": low, "x1": high, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "rect", **sides, "fillcolor": FAINT_ACCENT, "line": {"width": 0}, "layer": "below"}


def _bounds(trial: Trial) -> tuple[float, float]:
    measured = trial.measurement
    return (measured.low_us, measured.high_us) if measured is not None else (math.nan, math.nan)
