"""Page of a survey: ranges, occupancy and what limits it, resources by parameter, failures, every configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from autotile.core.model import config_text
from autotile.core.text import NOTHING, device_text, duration_text, percent_text, plural
from autotile.report.charts import failure_groups_chart
from autotile.report.page import Column, DataTable, Markup, Page, static_table, tag
from autotile.report.survey import Survey
from autotile.report.theme import INK, SOFT, Chart, ChartTable, figure, hover_text, label, load_plotly

_MAX_ROWS = 20_000
"""Configurations in the table of the page: more take a browser long to open."""
_SIZES_PX = (7, 22)
"""Least and greatest diameter of a point, which grows with the number of configurations."""
_TABLE = "survey"


def survey_page(survey: Survey) -> str:
    """Return the page of a survey as HTML.

    Raises
    ------
    ToolchainError
        Plotly is not installed.
    """
    page = Page(f"Survey of {survey.problem}", f"On {device_text(survey.device)}, as compiled; nothing was run.")
    end = ", interrupted" if survey.interrupted else ""
    facts = [*survey.facts(), ("took", f"{duration_text(survey.seconds)}{end}")]
    page.body.append(
        page.section(
            "summary",
            "What compiles",
            static_table(("", ""), facts, caption="The survey in numbers"),
            _ranges_table(survey),
            [tag("p", notice, class_="note") for notice in survey.notices],
            link="Summary",
        )
    )
    if survey.is_compiled.any():
        charts = [
            page.chart(chart) for chart in (registers_chart(survey), occupancy_chart(survey), limits_chart(survey))
        ]
        page.body.append(page.section("occupancy", "Registers and occupancy", *charts, link="Occupancy"))
        by_value = page.data_table(parameter_table(survey))
        about = "Medians are of the configurations that compiled with this value, whatever the others are."
        page.body.append(
            page.section("parameters", "Resources by parameter", tag("p", about), by_value, link="Parameters")
        )
    failures = page.chart(failure_groups_chart(survey.failures))
    page.body.append(page.section("failures", "What fails", failures, link="Failures"))
    page.body.append(_configurations(page, survey))
    return page.html()


def _ranges_table(survey: Survey) -> Markup | None:
    rows = [
        (one.name, one.unit or NOTHING, *(f"{value:,.5g}" for value in (one.least, one.median, one.greatest)))
        for one in survey.ranges()
    ]
    headings = ("quantity", "unit", "least", "median", "greatest")
    return static_table(headings, rows, caption="Configurations that compiled") if rows else None


def registers_chart(survey: Survey) -> Chart:
    """Return the occupancy over the registers of a thread; a point is of all configurations with the same of both."""
    compiled = np.flatnonzero(survey.is_compiled)
    registers = survey.columns["registers"][compiled]
    percent = np.round(100 * survey.occupancy[compiled], 1)
    spills = survey.spill_bytes[compiled] > 0
    counts = Counter(zip(registers.tolist(), percent.tolist(), spills.tolist(), strict=True))
    example = {key: int(index) for key, index in zip(counts, _firsts(registers, percent, spills), strict=True)}
    go, most = load_plotly(), max(counts.values())
    traces = []
    for spilling, name, symbol, color in ((False, "no spills", "circle", SOFT), (True, "spills", "diamond", INK)):
        points = [(key, count) for key, count in counts.items() if key[2] == spilling]
        if not points:
            continue
        traces.append(
            go.Scatter(
                x=[key[0] for key, _ in points],
                y=[key[1] for key, _ in points],
                mode="markers",
                name=name,
                marker={
                    "symbol": symbol,
                    "color": color,
                    "opacity": 0.8,
                    "size": [_diameter(count, most) for _, count in points],
                    "line": {"width": 0},
                },
                hovertext=[
                    hover_text(
                        f"{key[0]} registers a thread, occupancy {key[1]:g} %, {name}",
                        plural(count, "configuration"),
                        f"such as {config_text(survey.config(int(compiled[example[key]])))}",
                    )
                    for key, count in points
                ],
                hoverinfo="text",
            )
        )
    made = figure(
        traces,
        height=380,
        x={"title": {"text": "registers a thread"}, "rangemode": "tozero"},
        y={"title": {"text": "occupancy, %"}, "range": [0, 108]},
        showlegend=True,
    )
    spilled = int(spills.sum())
    summary = (
        f"{spilled:,} of {plural(len(compiled), 'configuration')} that compiled spill registers "
        f"({percent_text(spilled / len(compiled))})."
    )
    rows = tuple(
        (f"{key[0]}", f"{key[1]:g}", "yes" if key[2] else "no", f"{count:,}") for key, count in sorted(counts.items())
    )
    headings = ("registers a thread", "occupancy, %", "spills", "configurations")
    return Chart("registers", "Occupancy by registers", made, summary, ChartTable(headings, rows))


def _firsts(*columns: Sequence[object] | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> list[int]:
    """Return the index of the first row of each combination of values, in the order of the combinations."""
    seen: dict[tuple[object, ...], int] = {}
    for index, key in enumerate(zip(*columns, strict=True)):
        seen.setdefault(key, index)
    return list(seen.values())


def _diameter(count: int, most: int) -> float:
    least_px, most_px = _SIZES_PX
    return round(least_px + (most_px - least_px) * (count / most) ** 0.5 if most > 1 else least_px, 1)


def occupancy_chart(survey: Survey) -> Chart:
    """Return the number of configurations by the number of blocks on an SM."""
    blocks = survey.columns["blocks_per_sm"][survey.is_compiled]
    counts = sorted(Counter(blocks.tolist()).items())
    named = [(f"{number:,}", count) for number, count in counts]
    summary = f"Between {named[0][0]} and {named[-1][0]} blocks of a configuration are resident on an SM at a time."
    return _bars("blocks", "Blocks on an SM", "blocks on an SM", named, summary)


def limits_chart(survey: Survey) -> Chart:
    """Return how many configurations each resource keeps from a higher occupancy."""
    named = [(name.replace("_", " "), count) for name, count in survey.limit_counts()]
    first = f"{named[0][0].capitalize()} limit the most" if named else "Nothing limits any"
    summary = f"{first}. Several resources may limit a configuration alike."
    return _bars("limits", "What limits the occupancy", "limited by", named, summary)


def _bars(name: str, title: str, quantity: str, named: Sequence[tuple[str, int]], summary: str) -> Chart:
    go, counts = load_plotly(), [count for _, count in named]
    bars = go.Bar(
        x=counts,
        y=[label(each) for each, _ in named],
        orientation="h",
        marker={"color": SOFT},
        text=[f"{count:,}" for count in counts],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    made = figure(
        [bars],
        height=80 + 28 * len(counts),
        x={"title": {"text": "configurations"}, "range": [0, 1.15 * max(counts, default=1)]},
        y={"autorange": "reversed", "showgrid": False, "type": "category", "title": {"text": quantity}},
        bargap=0.35,
    )
    rows = tuple((each, f"{count:,}") for each, count in named)
    return Chart(name, title, made, summary, ChartTable((quantity, "configurations"), rows))


def parameter_table(survey: Survey) -> DataTable:
    """Return a row for each value of each parameter: how many can be launched, and their median resources."""
    usable, compiled, spills = survey.is_usable, survey.is_compiled, survey.spill_bytes
    codes = survey.space.codes[survey.rows]
    rows: list[list[str | float | int | None]] = []
    for number, parameter in enumerate(survey.space.parameters):
        for code, value in enumerate(parameter.values):
            here = codes[:, number] == code
            if not here.any():
                continue
            there = here & compiled
            figures = (survey.columns["registers"], 100 * survey.occupancy, survey.waves)
            medians = [round(float(np.median(each[there])), 2) if there.any() else None for each in figures]
            spilled = round(100 * float((spills[there] > 0).mean()), 1) if there.any() else None
            share = round(100 * float(usable[here].mean()), 1)
            rows.append([parameter.name, str(value), int(here.sum()), share, medians[0], spilled, *medians[1:]])
    columns = (
        Column("parameter"),
        Column("value"),
        Column("configurations", is_number=True),
        Column("usable", "%", is_number=True),
        Column("median registers", "a thread", is_number=True),
        Column("spilling", "%", is_number=True),
        Column("median occupancy", "%", is_number=True),
        Column("median waves", is_number=True),
    )
    return DataTable("survey-parameters", columns, rows)


def _configurations(page: Page, survey: Survey) -> Markup:
    """Return the section of all configurations, of very many an even selection."""
    chosen = np.unique(np.linspace(0, len(survey) - 1, min(len(survey), _MAX_ROWS)).round().astype(np.int64))
    table = survey.table()
    columns = [
        Column(column.name.removeprefix("param."), is_number=column.kind in ("whole", "real"))
        for column in table.columns
    ]
    values = [column.values for column in table.columns]
    rows = [[_cell(each[index]) for each in values] for index in chosen.tolist()] if len(survey) else []
    note = f"{len(rows):,} of {len(survey):,} configurations; --csv writes all." if len(rows) < len(survey) else None
    return page.section(
        "configurations",
        "Configurations",
        tag("p", note, class_="note") if note else None,
        page.data_table(DataTable(_TABLE, tuple(columns), rows)),
        link="Configurations",
    )


def _cell(value: object) -> str | float | int | None:
    if isinstance(value, float):
        return round(value, 6)
    return value if value is None or (isinstance(value, int) and not isinstance(value, bool)) else str(value)
