"""Plot the stated and true results of ten tuning runs of one space, from the record of ``repeatability.py``.

python benchmarks/plot_repeatability.py benchmarks/results/h200/repeatability.json docs/images/repeatability.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_CALM, _DISTURBED, _MEAN = "#1b6ca8", "#d1603d", "#8a8a8a"


def main() -> None:
    """Read the record, plot it and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text())
    plt.rcParams["svg.hashsalt"] = "autotile"  # the same record gives the same file
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_speedups(left, record["runs"])
    draw_losses(right, record["runs"])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, metadata={"Date": None})


def draw_speedups(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Plot the stated speed-up of each run with its interval, and the true ratio of its winner."""
    for disturbed, colour, label in ((False, _CALM, "undisturbed"), (True, _DISTURBED, "disturbed")):
        chosen = [run for run in runs if run["disturbed"] is disturbed]
        middle = [run["speedup"][1] for run in chosen]
        errors = [
            [value - run["speedup"][0] for value, run in zip(middle, chosen, strict=True)],
            [run["speedup"][2] - value for value, run in zip(middle, chosen, strict=True)],
        ]
        axes.errorbar([run["seed"] for run in chosen], middle, errors, fmt="o", color=colour, capsize=3, label=label)
    axes.plot([run["seed"] for run in runs], [run["true_speedup"][1] for run in runs], "kx", label="true")
    axes.set(xlabel="run", ylabel="speed-up over the default", title="Stated and true speed-up")
    axes.legend(frameon=False, fontsize="small")


def draw_losses(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Plot the loss of each winner against the fastest configuration, and that of the mean of seven runs."""
    width = 0.4
    seeds = [run["seed"] for run in runs]
    colours = [_DISTURBED if run["disturbed"] else _CALM for run in runs]
    axes.bar([s - width / 2 for s in seeds], [100 * r["winner_loss"] for r in runs], width, color=colours)
    mean = [100 * run["mean_of_7_winner_loss"] for run in runs]
    axes.bar([s + width / 2 for s in seeds], mean, width, color=_MEAN, label="mean of seven runs")
    axes.axhline(1.0, color="k", linewidth=0.8, linestyle=":")
    axes.set(xlabel="run", ylabel="slower than the fastest, %", title="Loss of the winner", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")


if __name__ == "__main__":
    main()
