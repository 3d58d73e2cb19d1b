"""Draw the timelines of tuning sessions, as written by `autotile tune --trace` or `benchmarks/load.py --traces`.

    python benchmarks/plot_traces.py TRACE.json ... --output FILE.svg [--start 5] [--seconds 1.5]

Each panel is a section of one session: what the session itself, each compiler and the GPU worker do. The section begins
``--start`` seconds after the search does.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLORS = {
    "propose": "#4c78a8",
    "choose": "#72b7b2",
    "tell": "#9d755d",
    "store": "#b279a2",
    "compile": "#e0a040",
    "cached": "#eeca3b",
    "load": "#bab0ac",
    "verify": "#54a24b",
    "measure": "#e45756",
}
"""Colour of each span that is drawn; the waits of the session stay white."""


def main() -> None:
    """Draw one panel per file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--start", type=float, default=5.0, help="start of the section, in seconds of the search")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of the section")
    arguments = parser.parse_args()
    figure, panels = plt.subplots(
        len(arguments.traces), 1, figsize=(11, 3.1 * len(arguments.traces)), squeeze=False, layout="constrained"
    )
    for path, panel in zip(arguments.traces, panels[:, 0], strict=True):
        draw(panel, path.name.partition(".")[0], read(path), arguments.start, arguments.seconds)
    panels[-1, 0].set_xlabel("seconds of the search")
    legend = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(COLORS), frameon=False, fontsize=9)
    figure.savefig(arguments.output, metadata={"Date": None})


def read(path: Path) -> list[dict[str, Any]]:
    """Read the events of a timeline, which may be compressed."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return events


def draw(panel: Axes, title: str, events: list[dict[str, Any]], start_s: float, length_s: float) -> None:
    """Draw the spans of a section, one row for each track, the compilers in the order of their numbers."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    search_us = next(event["ts"] for event in spans if event["name"] == "search")
    rows = sorted(names.values(), key=lambda name: (name.startswith("compiler"), len(name), name))
    for event in spans:
        begin_s = 1e-6 * (event["ts"] - search_us) - start_s
        end_s = begin_s + 1e-6 * event["dur"]
        if event["name"] in COLORS and end_s > 0 and begin_s < length_s:
            left, right = max(begin_s, 0.0), min(end_s, length_s)
            row = rows.index(names[event["tid"]])
            panel.barh(row, right - left, left=start_s + left, height=0.8, color=COLORS[event["name"]], linewidth=0)
    panel.set_yticks(range(len(rows)), rows, fontsize=7)
    panel.invert_yaxis()
    panel.set_xlim(start_s, start_s + length_s)
    panel.set_title(title, loc="left", fontsize=10)


if __name__ == "__main__":
    main()
