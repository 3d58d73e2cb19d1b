"""Charts that need no study: what rules and limits leave of a search space, and what limits an occupancy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy
from autotile.core.text import ResultTable, percent_text
from autotile.report.theme import ACCENT, FAINT, MUTED, SOFT, Chart, bars, figure, hover_text, label, load_plotly

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
        hover=[hover_text(name, f"{count:,} configurations are left") for name, count in stages],
    )
    table = ResultTable(("after", "configurations left"), [(name, f"{count:,}") for name, count in stages])
    summary = f"{valid:,} of {combinations:,} combinations are valid."
    return Chart("space", "What the rules and limits leave", made, summary, table)


def block_limits_chart(device: DeviceProperties, occupancy: Occupancy) -> Chart:
    """Return how many blocks each resource of an SM allows; the binding ones have the accent colour."""
    title = f"Blocks that an SM of {device.name} holds"
    known = {name: count for name, count in occupancy.limits.items() if count <= device.max_threads_per_sm}
    if not known:
        return Chart("block_limits", title, None, "The limits of this occupancy are not known.")

    def named(name: str) -> str:
        return "block slots" if name == "blocks" else name.replace("_", " ")

    made = bars(
        [label(named(name)) for name in known],
        list(known.values()),
        x={"title": "blocks per SM that the resource allows", "rangemode": "tozero"},
        color=[ACCENT if name in occupancy.limited_by else FAINT for name in known],
        text=[f"{count:,}" for count in known.values()],
        inside=True,
    )
    limits = " and ".join(map(named, occupancy.limited_by))
    share = percent_text(occupancy.occupancy)
    summary = f"{occupancy.blocks_per_sm} per SM, {share} of its warps: limited by {limits}."
    table = ResultTable(("limit", "blocks allowed"), [(named(name), f"{count:,}") for name, count in known.items()])
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
            text=[f"{present:,}: {here} warps"],
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
