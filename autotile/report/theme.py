"""Charts: their colours and layout, one accent colour and greys, in a light and a dark theme; their parts.

The charts at the end need no study: what rules and limits leave of a search space, and what limits an occupancy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy, Trial
from autotile.core.text import ResultTable, interval_text, percent_text, plural, source_text, time_text
from autotile.errors import InputError, ToolchainError

if TYPE_CHECKING:
    import plotly.graph_objects as go

LIGHT: Mapping[str, str] = {
    "accent": "#0b62c4",
    "accent_soft": "#9cc3ee",
    "accent_faint": "#e3eefa",
    "ink": "#1b1f24",
    "muted": "#656d76",
    "faint": "#b3bac3",
    "grid": "#e4e7eb",
    "paper": "#fefefe",
}
DARK: Mapping[str, str] = {
    "accent": "#6cb2ff",
    "accent_soft": "#35689e",
    "accent_faint": "#1c3148",
    "ink": "#e8eaed",
    "muted": "#9ba4ae",
    "faint": "#59626d",
    "grid": "#2c333b",
    "paper": "#14181d",
}
"""Colours by role. A figure is built with those of the light theme; `themed` and the page exchange them one by one."""

ACCENT, SOFT, FAINT_ACCENT = LIGHT["accent"], LIGHT["accent_soft"], LIGHT["accent_faint"]
INK, MUTED, FAINT, GRID, PAPER = (LIGHT[name] for name in ("ink", "muted", "faint", "grid", "paper"))

MICRO_S = "\N{MICRO SIGN}s"
TIME_AXIS = f"time of a run, {MICRO_S}"
"""Title of an axis of times."""

FAST_TO_SLOW = [[0.0, ACCENT], [0.5, SOFT], [1.0, FAINT_ACCENT]]
"""Colour scale of times: the fastest has the accent colour."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"
_MAX_LABEL = 60


class Chart(NamedTuple):
    """A chart, in the light theme, with all that stands in for it where it cannot be seen.

    The name is unique within a study. Without a figure the summary says why there is none.
    """

    name: str
    title: str
    figure: go.Figure | None
    summary: str
    table: ResultTable = ResultTable((), ())
    """The numbers behind it."""
    note: str = ""
    """Remark on what the figure leaves out."""


def load_plotly() -> Any:
    """Import and return ``plotly.graph_objects``; a `ToolchainError` where it is not installed."""
    try:
        from plotly import graph_objects
    except ImportError:
        raise ToolchainError("charts need Plotly; install it with `pip install 'autotile[report]'`") from None
    return graph_objects


def figure(
    traces: Sequence[Any],
    *,
    height: int,
    x: Mapping[str, Any] | None = None,
    y: Mapping[str, Any] | None = None,
    **layout: Any,
) -> go.Figure:
    """Return a figure in the light theme, as wide as the page.

    ``x`` and ``y`` are properties of the axes, whose title is a text; ``layout`` are further ones of the layout.
    """
    common = {
        "template": "none",
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 34, "b": 8},
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": FAINT, "font": {"color": INK, "family": FONT}, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"color": INK}},
        "dragmode": "zoom",
        "hovermode": "closest",
        "barcornerradius": 2,
        "showlegend": False,
        "xaxis": {**_AXIS, "tickangle": 0},
        "yaxis": _AXIS,
    }
    axes = {
        name: {**given, "title": {"text": given["title"]}} if "title" in given else given
        for name, given in (("xaxis", x or {}), ("yaxis", y or {}))
    }
    # at once: each update of a figure takes Plotly as long as its construction
    return load_plotly().Figure(list(traces), merged(merged(common, axes), layout))


def panels(
    parts: Sequence[tuple[str, Any, Mapping[str, Any], Mapping[str, Any]]], *, columns: int, height: int, **layout: Any
) -> go.Figure:
    """Return a figure of panels in rows, each with a title, a trace, and the properties of its two axes."""
    axes, notes = dict[str, Any](), []
    for number, (title, trace, *own) in enumerate(parts, start=1):
        suffix = str(number) if number > 1 else ""
        for name, other, given in zip("xy", "yx", own, strict=True):
            trace[f"{name}axis"] = name + suffix
            axes[f"{name}axis{suffix}"] = merged(_AXIS, {**given, "anchor": other + suffix})
        place = {"x": 0.5, "y": 1, "xref": f"x{suffix} domain", "yref": f"y{suffix} domain", "yanchor": "bottom"}
        notes.append({**place, "text": title, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    rows = math.ceil(len(parts) / columns)
    layout |= {"grid": {"rows": rows, "columns": columns, "pattern": "independent", "ygap": 0.3}, "margin": {"t": 30}}
    return figure([trace for _, trace, *_ in parts], height=height, annotations=notes, **axes, **layout)


def merged(properties: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested properties with others in their place."""
    return {**properties} | {
        name: merged(properties[name], value) if isinstance(properties.get(name), Mapping) else value
        for name, value in more.items()
    }


def points(
    marks: Iterable[tuple[Any, Any, str]],
    *,
    name: str,
    symbol: str,
    color: Any,
    size: Any,
    width: float = 0,
    **more: Any,
) -> list[go.Scatter]:
    """Return a trace of markers, each at x and y with a text that is shown beside it; none without markers.

    An x may be a value with the bounds of its interval: value, low, high. The ``width`` is that of their outline; where
    it is 0 they have none of their own. ``more`` are properties of the trace.
    """
    columns = [list(column) for column in zip(*marks, strict=True)]
    if not columns:
        return []
    x, y, hover = columns
    if isinstance(x[0], tuple):
        more["error_x"] = error_bars(x, color)
        x = [value for value, _, _ in x]
    marker = {"symbol": symbol, "color": color, "size": size, **more.pop("marker", {})}
    if width:
        marker["line"] = {"color": color, "width": width}
    more = {"mode": "markers", **more}
    return [load_plotly().Scatter(x=x, y=y, name=name, marker=marker, hovertext=hover, hoverinfo="text", **more)]


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    x: Mapping[str, Any],
    y: Mapping[str, Any] | None = None,
    color: Any = SOFT,
    text: Sequence[str] | None = None,
    inside: bool = False,
    hover: Sequence[str] | None = None,
    **more: Any,
) -> go.Figure:
    """Return a figure of horizontal bars from the top.

    ``x`` and ``y`` are properties of the axes, as for `figure`; ``color`` may be a list, with one for each. The text
    stands at the end of a bar, or ``inside`` where there is room. ``more`` are properties of the trace.
    """
    trace = load_plotly().Bar(
        y=labels,
        x=values,
        orientation="h",
        marker={"color": color},
        text=text,
        textposition="auto" if inside else "outside",
        cliponaxis=False,
        hovertext=hover,
        hoverinfo="text" if hover is not None else "skip",
        **more,
    )
    down = {"autorange": "reversed", "showgrid": False, "type": "category", **(y or {})}
    return figure([trace], height=110 + 27 * len(labels), x=x, y=down, bargap=0.35)


def error_bars(values: Sequence[tuple[float, float, float]], color: str) -> dict[str, Any]:
    """Return the error bars of values with the bounds of their intervals: each is value, low, high."""
    above = [high - value for value, _, high in values]
    below = [value - low for value, low, _ in values]
    return {"type": "data", "array": above, "arrayminus": below, "color": color, "thickness": 2, "width": 5}


_AXIS: Mapping[str, Any] = {
    "automargin": True,
    "gridcolor": GRID,
    "linecolor": FAINT,
    "tickcolor": FAINT,
    "zeroline": False,
    "exponentformat": "none",
    "separatethousands": True,
    "tickfont": {"color": MUTED, "size": 12},
    "title": {"font": {"color": MUTED, "size": 12}, "standoff": 8},
}


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Return the properties of a logarithmic axis with ticks at 1, 2 and 5 of each power of ten that it shows."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    shown = [tick for tick in ticks if 0.5 * low <= tick <= 2 * high]
    return {"type": "log", "tickvals": shown, "ticktext": [f"{tick:,.12g}" for tick in shown]}


def label(text: object, limit: int = _MAX_LABEL) -> str:
    """Return text for Plotly, which reads tags: escaped, in one line, and not longer than a label may be."""
    line = " ".join(str(text).split())
    return escape(line if len(line) <= limit else f"{line[: limit - 1]}\N{HORIZONTAL ELLIPSIS}", quote=False)


def hover_text(*lines: str) -> str:
    """Return lines of text for Plotly's hover labels, each escaped and wrapped."""
    more = " \N{HORIZONTAL ELLIPSIS}"
    wrapped = [part for line in lines if line for part in wrap(line, 56, max_lines=8, placeholder=more) or [""]]
    return "<br>".join(escape(part, quote=False) for part in wrapped)


def with_units(text: str) -> str:
    """Return a time of `autotile.core.text` with the sign for micro, as on all pages."""
    return text.replace(" us", " \N{MICRO SIGN}s")


def bare_time(trial: Trial) -> str:
    """Return the time of a trial in microseconds, without the unit."""
    return time_text(trial.time_us).removesuffix(" us")


def measured_text(trial: Trial) -> str:
    """Return the time of a trial with its interval and unit; empty if it was not measured."""
    measured = trial.measurement
    if measured is None:
        return ""
    text = with_units(f"{time_text(trial.time_us)} ({interval_text(measured)} us)")
    return source_text(text, trial.source)


def themed(made: go.Figure) -> go.Figure:
    """Return a figure in the dark theme: every colour is one of `LIGHT`, and is replaced by that of the same role."""
    colours = {LIGHT[role]: DARK[role] for role in LIGHT}

    def exchanged(value: Any) -> Any:
        if isinstance(value, str):
            return colours.get(value, value)
        if isinstance(value, dict):
            return {name: exchanged(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [exchanged(part) for part in value]
        return value

    return load_plotly().Figure(exchanged(made.to_dict()))


def figure_of(chart: Chart, *, dark: bool | None = None) -> go.Figure:
    """Return the figure of a chart, with its title, for a notebook.

    The theme is that of Plotly's default template if ``dark`` is None. Without a figure it is an `InputError`.
    """
    if chart.figure is None:
        raise InputError(chart.summary.rstrip("."))
    if dark is None:
        import plotly.io

        dark = "dark" in str(plotly.io.templates.default or "")
    made = themed(chart.figure) if dark else chart.figure
    margin = (made.layout.margin.t or 0) + _TITLE_PX
    height = made.layout.height + _TITLE_PX if made.layout.height else None
    title = {"text": label(chart.title, 200), "x": 0, "xanchor": "left", "xref": "container", "pad": {"l": 12}}
    made.update_layout(title=title, margin={"t": margin}, height=height)
    return made


_TITLE_PX = 40
"""Height of the title, which a page writes as a heading above the figure."""


_STAGE_CHARACTERS = 48
_MAX_POINTS = 1024


def space_chart(stages: Sequence[tuple[str, int]]) -> Chart:
    """Return the number of configurations that each stage leaves, of which the first has all combinations."""
    (_, combinations), (_, valid) = stages[0], stages[-1]
    is_wide = valid and combinations > 100 * valid
    made = bars(
        [label(f"{number + 1}. {name}", _STAGE_CHARACTERS) for number, (name, _) in enumerate(stages)],
        [max(count, 0) for _, count in stages],
        x={"title": "configurations", "type": "log" if is_wide else "linear"},
        color=[SOFT] * (len(stages) - 1) + [ACCENT],
        text=[f"{count:,}" for _, count in stages],
        inside=True,
        hover=[hover_text(name, f"{plural(count, 'configuration')} left") for name, count in stages],
    )
    table = ResultTable(("after", "configurations left"), [(name, f"{count:,}") for name, count in stages])
    summary = f"Valid: {valid:,} of {plural(combinations, 'combination')}."
    return Chart("space", "What the rules and limits leave", made, summary, table)


def block_limits_chart(device: DeviceProperties, occupancy: Occupancy) -> Chart:
    """Return how many blocks each resource of an SM allows; the binding ones have the accent colour."""
    title = f"Blocks that an SM of {device.name} holds"
    known = {name: count for name, count in occupancy.limits.items() if count <= device.max_threads_per_sm}
    if not known:
        return Chart("block_limits", title, None, "The limits of this occupancy are not known.")
    names = {name: name.replace("_", " ") for name in (*known, *occupancy.limited_by)} | {"blocks": "block slots"}
    made = bars(
        [label(names[name]) for name in known],
        list(known.values()),
        x={"title": "blocks per SM that the resource allows", "rangemode": "tozero"},
        color=[ACCENT if name in occupancy.limited_by else FAINT for name in known],
        text=[f"{count:,}" for count in known.values()],
        inside=True,
    )
    limits = " and ".join(names[name] for name in occupancy.limited_by)
    share = percent_text(occupancy.occupancy)
    summary = f"{occupancy.blocks_per_sm} per SM, {share} of its warps: limited by {limits}."
    table = ResultTable(("limit", "blocks allowed"), [(names[name], f"{count:,}") for name, count in known.items()])
    return Chart("block_limits", title, made, summary, table)


def occupancy_chart(
    axis: tuple[str, str], amounts: Sequence[int], present: int, *, warps_at: Callable[[int], int], max_warps: int
) -> Chart:
    """Return the resident warps of an SM over one resource of a block, with the others as they are.

    The axis is the resource and its unit, of which at most 1,024 amounts are drawn, ascending, and the present one is
    marked; ``warps_at`` returns the resident warps at an amount.
    """
    resource, unit = axis
    drawn, graph = list(amounts[:_MAX_POINTS]), load_plotly()
    counts, here = [warps_at(amount) for amount in drawn], warps_at(present)
    traces = [
        graph.Scatter(
            x=drawn,
            y=counts,
            mode="lines",
            line={"shape": "hv", "color": SOFT, "width": 2},
            hovertemplate=f"%{{x}} {unit}: %{{y}} warps<extra></extra>",
        ),
        graph.Scatter(
            x=[present],
            y=[here],
            mode="markers+text",
            marker={"color": ACCENT, "size": 10},
            text=[f"{present:,}: {plural(here, 'warp')}"],
            textposition="top right" if present <= (drawn[0] + drawn[-1]) / 2 else "top left",
            textfont={"color": MUTED},
            hoverinfo="skip",
        ),
    ]
    made = figure(
        traces,
        height=300,
        x={"title": resource if unit in resource else f"{resource}, {unit}"},
        y={"title": "resident warps per SM", "range": [0, 1.15 * max_warps]},
    )
    changes = [0, *(i for i in range(1, len(counts)) if counts[i] != counts[i - 1])]
    rows = [(f"{drawn[i]:,}", str(counts[i]), percent_text(counts[i] / max_warps)) for i in changes]
    summary = f"At {present:,} {unit} an SM holds {here} of {max_warps} warps."
    table = ResultTable((f"from {unit}", "warps", "occupancy"), rows)
    return Chart("occupancy", f"Occupancy over {resource}", made, summary, table)
