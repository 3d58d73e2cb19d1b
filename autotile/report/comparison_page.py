"""Page of a comparison of two databases: the changes as intervals, what differs, and every problem in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotile.core.model import config_text
from autotile.core.text import NOTHING, percent_text, plural, source_text, time_text
from autotile.database.keys import key_text
from autotile.report.comparison import (
    ComparedProblem,
    Comparison,
    UnmatchedStudy,
    best_time,
    change_text,
    device_pair,
)
from autotile.report.page import Column, DataTable, Markup, Page, static_table, tag
from autotile.report.theme import (
    ACCENT,
    FAINT,
    INK,
    MUTED,
    Chart,
    ChartTable,
    figure,
    hover_text,
    label,
    load_plotly,
    with_units,
)

_MAX_DRAWN = 60
"""Problems that the chart draws: those that changed most in either direction."""
_ROW_PX = 26
_VERDICTS = {
    "slower": ("slower in B", "circle", INK),
    "faster": ("faster in B", "diamond", ACCENT),
    "unresolved": ("not told apart", "circle-open", MUTED),
}
"""Label, symbol and colour of each verdict."""


def comparison_page(found: Comparison, limit: float | None) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    limit
        Relative change from which a problem counts as a regression, 0.05 for 5 %; None for none.

    Raises
    ------
    ToolchainError
        Plotly is not installed.
    """
    page = Page("B against A", found.counts_text())
    page.body.append(page.section("answer", "Result", static_table(("", ""), _answer(found, limit)), link="Result"))
    if found.problems:
        changes = page.chart(changes_chart(found, limit))
        problems = page.data_table(_problem_table(found, limit))
        page.body.append(page.section("changes", "Changes", changes, link="Changes"))
        page.body.append(page.section("problems", "Problems", problems, link="Problems"))
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            heading = f"Only in {name}"
            page.body.append(page.section(f"only-{name.lower()}", heading, _only_table(only), link=heading))
    return page.html()


def changes_chart(found: Comparison, limit: float | None) -> Chart:
    """Return the change of each problem's time with its interval, those that got slower most at the top."""
    title = "Time of B against A, with intervals that hold at 95 % for all problems together"
    known = [one for one in found.problems if one.ratio is not None]
    if not known:
        return Chart("changes", title, None, "No problem has times whose uncertainty is known in both.")
    half = _MAX_DRAWN // 2
    drawn = known if len(known) <= _MAX_DRAWN else [*known[:half], *known[-half:]]
    go = load_plotly()
    labels = _labels(drawn)
    traces = []
    for verdict, (name, symbol, color) in _VERDICTS.items():
        chosen = [(text, one) for text, one in zip(labels, drawn, strict=True) if one.verdict == verdict]
        ratios = [one.ratio for _, one in chosen if one.ratio is not None]
        if not ratios:
            continue
        traces.append(
            go.Scatter(
                x=[100 * (ratio.value - 1) for ratio in ratios],
                y=[text for text, _ in chosen],
                error_x={
                    "type": "data",
                    "array": [100 * (ratio.high - ratio.value) for ratio in ratios],
                    "arrayminus": [100 * (ratio.value - ratio.low) for ratio in ratios],
                    "color": color,
                    "thickness": 2,
                    "width": 5,
                },
                mode="markers",
                marker={"symbol": symbol, "color": color, "size": 9, "line": {"color": color, "width": 1.5}},
                name=name,
                hovertext=[_hover(one) for _, one in chosen],
                hoverinfo="text",
            )
        )
    lines = [(0.0, FAINT, "solid"), *([(100 * limit, INK, "dash")] if limit is not None else [])]
    made = figure(
        traces,
        height=110 + _ROW_PX * len(drawn),
        x={"title": {"text": "change of the time, %"}, "ticksuffix": ""},
        y={"categoryorder": "array", "categoryarray": labels[::-1], "showgrid": False},
        shapes=[
            {
                "type": "line",
                "x0": x,
                "x1": x,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": color, "dash": dash},
            }
            for x, color, dash in lines
        ],
        showlegend=True,
    )
    summary = f"{found.counts_text()}." + (f" The dashed line is the limit of {percent_text(limit)}." if limit else "")
    rows = tuple(
        (text, device_pair(one), change_text(one.ratio)) for text, one in zip(_labels(known), known, strict=True)
    )
    table = ChartTable(("problem", "device", "B against A"), rows)
    note = (
        f"{len(drawn)} of {len(known):,} problems are drawn, those that changed most."
        if len(drawn) < len(known)
        else ""
    )
    return Chart("changes", title, made, summary, table, note)


def _labels(problems: Sequence[ComparedProblem]) -> list[str]:
    """Return a label for each problem; those of equal problems on several GPUs are numbered."""
    counts: dict[str, int] = {}
    found = []
    for one in problems:
        text = label(f"{one.key.kernel} {key_text(one.key)}")
        counts[text] = counts.get(text, 0) + 1
        found.append(text if counts[text] == 1 else f"{text} ({counts[text]})")
    return found


def _hover(one: ComparedProblem) -> str:
    times = f"{best_time(one.a)} -> {best_time(one.b)}: {change_text(one.ratio)}"
    return hover_text(f"{one.key.kernel} {key_text(one.key)}", device_pair(one), with_units(times), *_configs(one))


def _configs(one: ComparedProblem) -> tuple[str, ...]:
    a, b = (config_text(side.trial.config) or NOTHING for side in (one.a, one.b))
    return (a,) if one.same_config else (f"A: {a}", f"B: {b}")


def _answer(found: Comparison, limit: float | None) -> Iterable[tuple[str, Markup | str]]:
    yield "A", found.a
    yield "B", found.b
    if limit is not None:
        slower = found.slower_by(limit)
        text = f"{plural(len(slower), 'problem')} slower by more than {percent_text(limit)}, with 95 % confidence"
        yield "limit", tag("strong", text) if slower else text
    if found.broken:
        yield "failed in B", tag("strong", plural(len(found.broken), "problem"))
    for one, count in found.differences:
        of = "" if count == len(found.problems) else f" ({count} of {plural(len(found.problems), 'problem')})"
        yield one.name, f"{one.a} \N{RIGHTWARDS ARROW} {one.b}{of}"
    if (clock := found.clock_ratio) is not None:
        change = f"{percent_text(abs(clock - 1))} {'longer' if clock > 1 else 'less'}"
        yield "clock", f"the reference kernel, which follows it, took {change} in B"
    if found.superseded:
        yield "left out", f"{plural(found.superseded, 'study', 'studies')} of older versions"


def _problem_table(found: Comparison, limit: float | None) -> DataTable:
    columns = (
        *(Column(name) for name in ("kernel", "problem", "device")),
        *(Column(name, "\N{MICRO SIGN}s", is_number=True) for name in ("A", "B")),
        *(Column(name, "%", is_number=True) for name in ("change", "low", "high")),
        *(Column(name) for name in ("verdict", "configuration in A", "configuration in B")),
        Column("former winner in B", "%", is_number=True),
        Column("all that both measured", "%", is_number=True),
    )
    return DataTable("comparison", columns, [_problem_row(one, limit) for one in found.problems])


def _problem_row(one: ComparedProblem, limit: float | None) -> tuple[str | float | None, ...]:
    ratio = one.ratio
    change = [_percent(value) for value in (ratio.value, ratio.low, ratio.high)] if ratio is not None else [None] * 3
    beyond = f" by more than {percent_text(limit)}" if limit is not None and one.is_slower_by(limit) else ""
    return (
        one.key.kernel,
        key_text(one.key),
        device_pair(one),
        one.a.trial.time_us,
        one.b.trial.time_us,
        *change,
        _VERDICTS[one.verdict][0] + beyond if one.verdict in _VERDICTS else "too few samples",
        config_text(one.a.trial.config),
        config_text(one.b.trial.config),
        _percent(one.retimed.value) if one.retimed is not None else None,
        _percent(one.common.value) if one.common is not None else None,
    )


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def _only_table(only: Sequence[UnmatchedStudy]) -> Markup:
    rows = [
        (
            one.key.kernel,
            key_text(one.key),
            source_text(one.key.gpu_name, one.key.source),
            with_units(time_text(one.best.trial.time_us if one.best is not None else None)),
            "no configuration works in the other" if one.fails else "",
        )
        for one in only
    ]
    return static_table(("kernel", "problem", "device", "time", "remark"), rows)
