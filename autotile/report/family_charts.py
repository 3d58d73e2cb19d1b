"""Charts of several problems: the loss of a family's rule by size, and what computes an operation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotile.core.model import config_text
from autotile.core.text import NOTHING, interval_text, percent_text, plural, sizes_text, source_text
from autotile.database.winners import StoredRule
from autotile.families.family import FamilyRule, Leaf, RulePoint, Tree
from autotile.report.report_data import OperationData
from autotile.report.theme import (
    ACCENT,
    FAINT,
    INK,
    MUTED,
    PAPER,
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


def family_loss_chart(stored: StoredRule) -> Chart:
    """Return the loss of a family's rule at the sizes that it was learned from, and where each was left out."""
    rule, title = stored.rule, "Loss by size"
    go = load_plotly()
    names = _varied(rule)
    xs = [math.prod(point.sizes[name] for name in names) for point in rule.points]
    ordered = sorted(zip(xs, rule.points, strict=True), key=lambda pair: pair[0])
    groups = [("served by the rule", "circle", ACCENT, [(x, point, point.loss) for x, point in ordered])]
    held_out = [(x, point, point.held_out) for x, point in ordered if point.held_out is not None]
    if held_out:
        groups.append(("of a rule learned without the size", "circle-open", MUTED, held_out))
    traces = [
        go.Scatter(
            x=[x for x, _, _ in chosen],
            y=[100 * loss for _, _, loss in chosen],
            mode="markers",
            marker={"symbol": symbol, "color": color, "size": 9, "line": {"color": color, "width": 2}},
            name=name,
            hovertext=[hover_text(sizes_text(point.sizes), f"loss {percent_text(loss)}") for _, point, loss in chosen],
            hoverinfo="text",
        )
        for name, symbol, color, chosen in groups
    ]
    across = " \N{MULTIPLICATION SIGN} ".join(names) if names else "problem"
    made = figure(
        traces,
        height=340,
        x={"title": {"text": f"{label(across)} (logarithmic)"}, **log_axis(max(min(xs), 1), max(*xs, 10))},
        y={"title": {"text": "loss against the best known, %"}, "rangemode": "tozero"},
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
    return Chart("family_loss", title, made, summary, _loss_table([point for _, point in ordered]))


def _varied(rule: FamilyRule) -> list[str]:
    names = list(rule.points[0].sizes)
    return [name for name in names if len({point.sizes[name] for point in rule.points}) > 1]


def _loss_table(points: Sequence[RulePoint]) -> ChartTable:
    rows = tuple(
        (
            sizes_text(point.sizes),
            f"{point.best_us:,.6g}",
            percent_text(point.loss),
            percent_text(point.held_out) if point.held_out is not None else NOTHING,
            percent_text(point.without) if point.without is not None else NOTHING,
        )
        for point in points
    )
    return ChartTable(
        ("sizes", "best known, \N{MICRO SIGN}s", "loss", "loss if left out", "loss without the rule"), rows
    )


def tree_lines(tree: Tree) -> list[tuple[int, str]]:
    """Return a rule's tree in words: the depth and the text of each question and answer, in reading order."""
    found: list[tuple[int, str]] = []

    def visit(node: Tree, depth: int, prefix: str) -> None:
        if isinstance(node, Leaf):
            found.append((depth, f"{prefix}configuration #{node.order[0]}"))
            return
        found.append((depth, f"{prefix}{node.feature} at most {node.at_most:,.6g}?"))
        visit(node.then, depth + 1, "yes: ")
        visit(node.otherwise, depth + 1, "no: ")

    visit(tree, 0, "")
    return found


def rule_tree_chart(stored: StoredRule) -> Chart:
    """Return a family's rule as a tree: each question with its two branches, and the configuration of each leaf."""
    rule, go = stored.rule, load_plotly()
    if isinstance(rule.tree, Leaf):
        return Chart("rule_tree", "The rule as a tree", None, "One configuration is served for the whole family.")
    places: list[tuple[float, int, str, str]] = []
    lines: list[tuple[int, float, float]] = []
    leaves = 0

    def visit(node: Tree, depth: int, answer: str) -> float:
        nonlocal leaves
        if isinstance(node, Leaf):
            leaves += 1
            row, number = leaves - 1.0, node.order[0]
            places.append((row, depth, f"{answer}#{number}", config_text(rule.configs[number].config)))
            return row
        first, second = visit(node.then, depth + 1, "yes: "), visit(node.otherwise, depth + 1, "no: ")
        row = (first + second) / 2
        places.append((row, depth, f"{answer}{node.feature} \N{LESS-THAN OR EQUAL TO} {node.at_most:,.4g}", ""))
        lines.extend(((depth, row, first), (depth, row, second)))
        return row

    visit(rule.tree, 0, "")
    depth = max(place[1] for place in places)
    edges = go.Scatter(
        x=[x for above, _, _ in lines for x in (above + _BEND, above + _BEND, above + 1, None)],
        y=[y for _, start, end in lines for y in (start, end, end, None)],
        mode="lines",
        line={"color": FAINT, "width": 1.5},
        hoverinfo="skip",
    )
    hidden = {"visible": False}
    made = figure(
        [edges],
        height=60 + 40 * leaves,
        x={**hidden, "range": [-0.05, depth + 0.6]},
        y={**hidden, "autorange": "reversed"},
        annotations=[_node(row, column, text, config) for row, column, text, config in places],
    )
    rows = tuple((f"#{index}", config_text(one.config)) for index, one in enumerate(rule.configs))
    summary = f"{plural(leaves, 'leaf', 'leaves')} choose among {plural(len(rule.configs), 'configuration')}."
    table = ChartTable(("number", "configuration"), rows)
    return Chart("rule_tree", "The rule as a tree", made, summary, table)


_BEND = 0.12
"""Where the line from a question to its answers bends, in steps of the depth."""


def _node(row: float, column: int, text: str, config: str) -> dict[str, object]:
    """Return the label of a question, or of the configuration that is served, which covers the lines behind it."""
    return {
        "x": column,
        "y": row,
        "xanchor": "left",
        "showarrow": False,
        "text": label(text, 40),
        "font": {"color": ACCENT if config else INK, "size": 12},
        "bgcolor": PAPER,
        "borderpad": 2,
        **({"hovertext": hover_text(config)} if config else {}),
    }


def operation_chart(operation: OperationData) -> Chart:
    """Return the times of the kernels and libraries that compute a problem of an operation."""
    title, found = f"{operation.title}: kernels and libraries", operation.contenders
    timed = [one for one in found if one.trial.measurement is not None]
    times = [one.trial.measurement for one in timed if one.trial.measurement is not None]
    if not timed:
        return Chart("operation", title, None, "Nothing that computes the problem was timed.")
    go, fastest = load_plotly(), times[0].time_us
    bars = go.Bar(
        y=[label(one.name, 28) for one in timed],
        x=[one.time_us for one in times],
        orientation="h",
        marker={"color": [ACCENT if index == 0 else MUTED for index in range(len(timed))]},
        error_x={
            "type": "data",
            "array": [one.high_us - one.time_us for one in times],
            "arrayminus": [one.time_us - one.low_us for one in times],
            "color": INK,
            "thickness": 1.5,
        },
        hovertext=[hover_text(one.name, measured_text(one.trial), config_text(one.trial.config)) for one in timed],
        hoverinfo="text",
    )
    made = figure(
        [bars],
        height=90 + 34 * len(timed),
        x={"title": {"text": TIME_AXIS}, "rangemode": "tozero"},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.35,
    )
    rows = tuple(
        (
            one.name,
            "library" if one.is_library else "kernel",
            source_text(bare_time(one.trial), one.source),
            interval_text(measured.low_us, measured.high_us),
            f"{measured.time_us / fastest:.4f}",
            config_text(one.trial.config) or NOTHING,
        )
        for one, measured in zip(timed, times, strict=True)
    )
    micro = "\N{MICRO SIGN}s"
    headings = ("name", "", f"time, {micro}", f"95 % interval, {micro}", "time / fastest", "configuration")
    summary = f"{timed[0].name} is the fastest with {with_units(timed[0].time_text)}."
    return Chart("operation", title, made, summary, ChartTable(headings, rows))
