"""Charts that need no study: what rules and limits leave of a search space, and what limits an occupancy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy
from autotile.core.text import percent_text
from autotile.report.theme import (
    ACCENT,
    FAINT,
    MUTED,
    SOFT,
    Chart,
    ChartTable,
    figure,
    hover_text,
    label,
    load_plotly,
)

_LIMITS = {
    "threads": "threads",
    "registers": "registers",
    "shared_memory": "shared memory",
    "blocks": "block slots",
}
"""Names of `Occupancy.limits` for people."""
_STAGE_CHARACTERS = 48
_MAX_POINTS = 1024


def space_chart(stages: Sequence[tuple[str, int]]) -> Chart:
    """Return the number of configurations that each rule and limit of a search space leaves.

    Parameters
    ----------
    stages
        Name and remaining number of configurations of each stage, in order; the first one is that of all combinations.
    """
    title = "What the rules and limits leave"
    bars = load_plotly().Bar(
        y=[label(f"{number + 1}. {name}", _STAGE_CHARACTERS) for number, (name, _) in enumerate(stages)],
        x=[max(count, 0) for _, count in stages],
        orientation="h",
        marker={"color": [SOFT] * (len(stages) - 1) + [ACCENT]},
        text=[f"{count:,}" for _, count in stages],
        textposition="auto",
        cliponaxis=False,
        hovertext=[hover_text(name, f"{count:,} configurations are left") for name, count in stages],
        hoverinfo="text",
    )
    is_wide = stages[0][1] > 100 * max(stages[-1][1], 1)
    made = figure(
        [bars],
        height=70 + 28 * len(stages),
        x={"title": {"text": "configurations"}, "type": "log" if is_wide and stages[-1][1] else "linear"},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.3,
    )
    rows = tuple((name, f"{count:,}") for name, count in stages)
    summary = f"{stages[-1][1]:,} of {stages[0][1]:,} combinations are valid."
    return Chart("space", title, made, summary, ChartTable(("after", "configurations left"), rows))


def block_limits_chart(device: DeviceProperties, occupancy: Occupancy) -> Chart:
    """Return how many blocks each resource of an SM allows; the binding ones have the accent colour."""
    title = f"Blocks that an SM of {device.name} holds"
    known = {name: count for name, count in occupancy.limits.items() if count <= device.max_threads_per_sm}
    if not known:
        return Chart("block_limits", title, None, "The limits of this occupancy are not known.")
    bars = load_plotly().Bar(
        y=[_LIMITS.get(name, label(name)) for name in known],
        x=list(known.values()),
        orientation="h",
        marker={"color": [ACCENT if name in occupancy.limited_by else FAINT for name in known]},
        text=[f"{count:,}" for count in known.values()],
        textposition="auto",
        cliponaxis=False,
        hoverinfo="skip",
    )
    made = figure(
        [bars],
        height=90 + 32 * len(known),
        x={"title": {"text": "blocks per SM that the resource allows"}, "rangemode": "tozero"},
        y={"autorange": "reversed", "showgrid": False, "type": "category"},
        bargap=0.35,
    )
    limits = " and ".join(_LIMITS.get(name, name) for name in occupancy.limited_by)
    share = percent_text(occupancy.occupancy)
    summary = f"{occupancy.blocks_per_sm} per SM, {share} of its warps: limited by {limits}."
    rows = tuple((_LIMITS.get(name, name), f"{count:,}") for name, count in known.items())
    return Chart("block_limits", title, made, summary, ChartTable(("limit", "blocks allowed"), rows))


def occupancy_chart(
    axis: tuple[str, str], amounts: Sequence[int], present: int, *, warps_at: Callable[[int], int], max_warps: int
) -> Chart:
    """Return the resident warps of an SM over one resource of a block, with the others as they are.

    Parameters
    ----------
    axis
        What varies, and its unit.
    amounts
        Amounts to draw, ascending; at most 1,024.
    present
        Amount of the block in question, which is marked.
    warps_at
        Function that returns the resident warps at an amount.
    max_warps
        Maximum of the SM.
    """
    resource, unit = axis
    title = f"Occupancy over {resource}"
    drawn = list(amounts[:_MAX_POINTS])
    graph = load_plotly()
    counts = [warps_at(amount) for amount in drawn]
    here = warps_at(present)
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
            text=[f"{present:,}: {here} warps"],
            textposition="top right" if present <= (drawn[0] + drawn[-1]) / 2 else "top left",
            textfont={"color": MUTED},
            hoverinfo="skip",
        ),
    ]
    made = figure(
        traces,
        height=300,
        x={"title": {"text": resource if unit in resource else f"{resource}, {unit}"}},
        y={"title": {"text": "resident warps per SM"}, "range": [0, 1.15 * max_warps]},
    )
    changes = [0, *(i for i in range(1, len(counts)) if counts[i] != counts[i - 1])]
    rows = tuple((f"{drawn[i]:,}", str(counts[i]), percent_text(counts[i] / max_warps)) for i in changes)
    summary = f"At {present:,} {unit} an SM holds {here} of {max_warps} warps."
    return Chart("occupancy", title, made, summary, ChartTable((f"from {unit}", "warps", "occupancy"), rows))
