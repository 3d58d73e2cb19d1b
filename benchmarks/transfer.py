"""Benefit of a recording of the same kernel on another GPU for the search.

    python benchmarks/transfer.py --data DIR [--seeds 5] [--budget 50] [--processes 2] [--output transfer.json]

DIR holds recorded spaces named KERNEL_GPU.npz, as for ``search.py``. For every pair of one kernel, the default sampler
searches one space with the complete other one as its source, and without. Figures are the mean ratio of best possible
to best found time.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table
from search_methods import RecordedSpace, as_trial

from autotile.search.search import Search
from autotile.search.transfer import Source

_MARKS = (1, 5, 10, 25, 50)
Job = tuple[Path, Path | None, int, int]


def main() -> None:
    """Search every space with every other one of its kernel as source, and without, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    files = sorted(arguments.data.glob("*.npz"))
    pairs = [(to, at) for to, at in permutations(files, 2) if to.stem.rpartition("_")[0] == at.stem.rpartition("_")[0]]
    alone = [(to, None) for to in dict.fromkeys(to for to, _ in pairs)]
    jobs: list[Job] = [
        (to, source, seed, arguments.budget) for to, source in [*pairs, *alone] for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        curves = list(pool.map(search, jobs))
    rows = [summary(jobs, curves, to, source) for to, source in [*pairs, *alone]]
    show(rows)
    if arguments.output:
        arguments.output.write_text(json.dumps({**provenance(), "marks": _MARKS, "rows": rows}, indent=1) + "\n")


def search(job: Job) -> list[float]:
    """Return the ratio of best possible to best found time after each measurement."""
    path, source, seed, budget = job
    recorded = RecordedSpace.read(path)
    sources = [] if source is None else [as_source(RecordedSpace.read(source))]
    searching = Search(recorded.space, "feasible", seed, sources=sources)
    rows = []
    for _ in range(budget):
        proposed = searching.propose()
        if proposed is None:
            break
        row, config = proposed
        searching.tell(row, as_trial(config, float(recorded.times_ms[row])))
        rows.append(row)
    return [float(x) for x in recorded.reached(rows, budget)]


def as_source(recorded: RecordedSpace) -> Source:
    """Return all configurations of a recording that ran, as a source."""
    ran = np.flatnonzero(np.isfinite(recorded.times_ms))
    return Source(
        recorded.name, [recorded.space.config(int(row)) for row in ran], (1e3 * recorded.times_ms[ran]).tolist()
    )


def summary(jobs: list[Job], curves: list[list[float]], to: Path, source: Path | None) -> dict[str, Any]:
    """Return the mean over the seeds of one search at each mark."""
    chosen = [curve for job, curve in zip(jobs, curves, strict=True) if job[:2] == (to, source)]
    mean = np.mean(chosen, axis=0)
    at_marks = [float(mean[mark - 1]) for mark in _MARKS if mark <= len(mean)]
    return {"space": to.stem, "source": source.stem if source is not None else None, "reached": at_marks}


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line per pair, and the means with and without a source."""
    table = Table("space", "source", *[f"after {mark}" for mark in _MARKS])
    for row in rows:
        table.add_row(row["space"], row["source"] or "", *[f"{reached:.3f}" for reached in row["reached"]])
    for label, with_source in (("mean with a source", True), ("mean without", False)):
        means = np.mean([row["reached"] for row in rows if (row["source"] is not None) is with_source], axis=0)
        table.add_row(label, "", *[f"{mean:.3f}" for mean in means])
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
