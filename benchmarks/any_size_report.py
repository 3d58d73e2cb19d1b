"""Results of any_size.py: summary, targets, tables, and the file."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from any_size_draw import text_of
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
"""Results of one problem in one class; docs of the keys in `ROW_KEYS`."""

ROW_KEYS = {
    "class": "name of the class",
    "dtype": "element type",
    "sizes": "sizes and flags of the problem",
    "ratio": "time of the library over the time served: above 1 if what is served is faster; null if it failed",
    "ratio_interval": "95 % interval of the ratio",
    "served_us": "median time of what is served, in microseconds",
    "library_us": "median time of the library",
    "library": "the library, and the package that it was called through",
    "tuned_us": "median time of what tuning the problem by itself found; null if it was not tuned",
    "tuned_ratio": "time of the library over that time",
    "tuned": "kernel, config, tier, grid and waves of what tuning found",
    "loss": "time served over that time, minus 1",
    "kernel": "kernel or library that computes what is served",
    "config": "its configuration",
    "tier": "how it was found",
    "grid": "blocks in x, y and z of its main launch; null for a library",
    "waves": "blocks over those that are resident at once; null for a library",
    "error": "largest error over the larger of the element and the RMS, by float64, where the result differs most from "
    "the library's and at random positions; of a user's operation the largest difference from it; null if NaN",
    "library_error": "that of the library at the same positions; null if unknown",
    "tolerance": "what is allowed of it",
    "rounds": "interleaved rounds",
    "fault": "why there is no time; empty if there is",
}

MAX_LOSS = {"mean": 0.04, "worst": 0.15}
"""Targets of the loss against tuning the problem by itself."""
MAX_LOOK_UP_US = {"new": 100.0, "known": 1.0}
"""Targets of the look-up of a size, in microseconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """Lowest acceptable ratios of a class; None where there is no target."""

    geometric_mean: float | None = None
    percentile_1: float | None = None
    worst: float | None = None


TARGETS = {
    "bfloat16": Target(1.02, 0.95, 0.90),
    "float16": Target(1.02, 0.95, 0.90),
    "float32": Target(1.40, 0.98, 0.95),
    "float32_cuda_cores": Target(1.04, 0.95, 0.90),
    "bfloat16_no_library": Target(0.97, None, 0.60),
}
_FIGURES = ("geometric_mean", "percentile_1", "worst")


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a time, and a result within tolerance."""
    return row["ratio"] is not None and row["error"] is not None and row["error"] <= row["tolerance"]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class, in the order of the rows.

    Returns
    -------
    dict
        Of each class: geometric mean, 1st percentile (interpolated linearly) and minimum of the ratios, which are null
        if there is none; the number of rows, of those that failed and of those out of tolerance; the loss against
        tuning the problem by itself, if any was tuned.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["class"] for row in rows):
        mine = [row for row in rows if row["class"] == name]
        ratios = [row["ratio"] for row in mine if row["ratio"] is not None]
        losses = [row["loss"] for row in mine if row["loss"] is not None]
        found[name] = {
            "geometric_mean": float(np.exp(np.mean(np.log(ratios)))) if ratios else None,
            "percentile_1": float(np.percentile(ratios, 1)) if ratios else None,
            "worst": min(ratios, default=None),
            "count": len(mine),
            "failed": len(mine) - len(ratios),
            "out_of_tolerance": sum(row["ratio"] is not None and not is_right(row) for row in mine),
            "library_served": sum(row["ratio"] is not None and row["grid"] is None for row in mine),
        }
        if losses:
            found[name]["loss_against_tuning"] = {
                "mean": statistics.fmean(losses),
                "worst": max(losses),
                "count": len(losses),
            }
    return found


def meets(name: str, figures: Mapping[str, Any]) -> bool | None:
    """Return whether the figures of a class reach its targets; None if it has none."""
    if name not in TARGETS:
        return None
    if figures["failed"] or figures["out_of_tolerance"]:
        return False
    wanted = ((figures[figure], getattr(TARGETS[name], figure)) for figure in _FIGURES)
    return all(target is None or (value is not None and value >= target) for value, target in wanted)


def document(head: Mapping[str, Any], rows: Sequence[Row], look_up_us: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole record: the head (provenance, options), the summary and the rows."""
    return {**head, "summary": summary(rows), "look_up_us": dict(look_up_us), "keys": ROW_KEYS, "rows": list(rows)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record with one line per row, at once: a reader finds the former record or this one."""
    rows = ",\n  ".join(json.dumps(row) for row in record["rows"])
    head = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')
    os.replace(partial, path)  # noqa: PTH105 - Path.replace is the same, and reads like str.replace


def read(path: Path) -> dict[str, Any]:
    """Read a record."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise SystemExit(f"{path} is no record of any_size.py")
    return found


def folder_name(gpu_name: str) -> str:
    """Return the folder of a GPU's results: ``h200`` for ``NVIDIA H200``, ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    words = re.findall(r"[a-z0-9]+", gpu_name.lower())
    models = [word for word in words if re.fullmatch(r"[a-z]+\d+[a-z]*", word) and not word.startswith("hbm")]
    return models[0] if models else "_".join(words)


def show(record: Mapping[str, Any], *, worst: int = 0, every: bool = False) -> None:
    """Print the figures beside their targets, the look-ups, and if asked for the worst rows of each class, or all."""
    console = Console(width=200)
    rows = record["rows"]
    if every:
        console.print(_table("all, as measured", rows))
    for name in record["summary"] if worst else ():
        mine = [row for row in rows if row["class"] == name]
        console.print(_table(f"{name}: the worst", sorted(mine, key=lambda row: row["ratio"] or 0.0)[:worst]))
        slower = [row for row in mine if row["tuned_ratio"] is not None and row["tuned_ratio"] < 1.0]
        if slower:
            ranked = sorted(slower, key=lambda row: row["tuned_ratio"])[:worst]
            beaten = [{**row, **row["tuned"], "served_us": row["tuned_us"]} for row in ranked]
            console.print(_table(f"{name}: slower than the library after tuning; what tuning found", beaten))
    console.print(f"{record.get('device')}, cold L2, ratio = time of the library / time served")
    console.print(_figures(record["summary"]))
    for line in _lines(record):
        console.print(line)


def _figures(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("class", "products", "by library", *("geometric mean", "1st percentile", "worst"), "wrong", "met")
    for name, figures in found.items():
        target = TARGETS.get(name, Target())
        cells = (_beside(figures[figure], getattr(target, figure)) for figure in _FIGURES)
        wrong = figures["failed"] + figures["out_of_tolerance"]
        counts = (str(figures["count"]), str(figures["library_served"]))
        table.add_row(name, *counts, *cells, str(wrong), _verdict(meets(name, figures)))
    return table


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    for name, figures in record["summary"].items():
        if lost := figures.get("loss_against_tuning"):
            met = all(lost[figure] <= most for figure, most in MAX_LOSS.items())
            yield (
                f"{name}: loss against tuning by itself: mean {100 * lost['mean']:.1f} % (at most 4 %), "
                f"worst {100 * lost['worst']:.1f} % (at most 15 %), {lost['count']} sizes; met: {_verdict(met)}"
            )
    for what, time_us in record["look_up_us"].items():
        most = MAX_LOOK_UP_US[what]
        yield f"look-up of a {what} size: {time_us:.3g} us (at most {most:g} us); met: {_verdict(time_us <= most)}"


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a table."""
    times = ("served, us", "tuned, us", "library, us")
    table = Table("", "class", "ratio", "tuned", *times, "waves", "grid", "tier", "kernel, configuration")
    table.title, table.title_justify = title, "left"
    for row in rows:
        config = " ".join(f"{key}={value}" for key, value in (row["config"] or {}).items())
        table.add_row(
            text_of(row["sizes"]),
            row["class"],
            "failed" if row["ratio"] is None else _digits(row["ratio"]) + ("" if is_right(row) else " WRONG"),
            _digits(row["tuned_ratio"]),
            *(_digits(row[name]) for name in ("served_us", "tuned_us", "library_us", "waves")),
            " x ".join(str(blocks) for blocks in row["grid"] or ()),
            row["tier"] or "",
            row["fault"] or f"{row['kernel']}: {config}",
        )
    return table


def _beside(value: float | None, target: float | None) -> str:
    return ("" if value is None else f"{value:.3f}") + (f" (>= {target:.2f})" if target is not None else "")


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"
