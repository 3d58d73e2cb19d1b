"""Benefit of a study of the same kernel on another GPU for the search, and the cost of one that misleads.

    python benchmarks/transfer.py --data DIR [--seeds 20] [--budget 50] [--processes 2] [--output transfer.json]
                                  [--sources complete trials:100 reversed shuffled ...]

DIR holds recorded spaces named KERNEL_GPU.npz, as for ``search.py``. For every pair of one kernel, the default sampler
searches one space with a source from the other one, and without. Sources are the ``complete`` recording, or the first
trials of a search of it (``trials:N``). A space is also searched with sources that mislead, made of its own recording:
reciprocal times (``reversed``), permuted times of 100 configurations (``shuffled``). Figures are the mean ratio of best
possible to best found time, and the difference from the search without a source with the same seed, with its standard
error over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

# one thread per process: parallelism is over the runs
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table
from search_methods import RecordedSpace, as_trial

from autotile.search.search import Search
from autotile.search.transfer import Source

_MARKS = (1, 5, 10, 25, 50)
_SHOWN = (10, 25, 50)
_STUDIES = 8
"""Number of searches that ``trials:N`` takes the first trials of."""
_SHUFFLED = 100
_MISLEADING = ("reversed", "shuffled")
Job = tuple[Path, Path | None, str | None, int, int]
"""Searched space, space of the source, kind of the source, seed, budget."""


def main() -> None:
    """Search every space with every source, and without, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--sources", nargs="+", default=["complete", "trials:100", *_MISLEADING])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    files = sorted(arguments.data.glob("*.npz"))
    pairs = [(to, at) for to, at in permutations(files, 2) if to.stem.rpartition("_")[0] == at.stem.rpartition("_")[0]]
    spaces = list(dict.fromkeys(to for to, _ in pairs))
    cases: list[tuple[Path, Path | None, str | None]] = [(to, None, None) for to in spaces]
    for kind in arguments.sources:
        cases += [(to, to, kind) for to in spaces] if kind in _MISLEADING else [(to, at, kind) for to, at in pairs]
    jobs: list[Job] = [(*case, seed, arguments.budget) for case in cases for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(arguments.processes) as pool:
        curves = list(pool.map(search, jobs))
    reached = {case: np.array([c for job, c in zip(jobs, curves, strict=True) if job[:3] == case]) for case in cases}
    rows = [summary(case, reached) for case in cases]
    show(rows)
    if arguments.output:
        document = {**provenance(), "seeds": arguments.seeds, "marks": _MARKS, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def search(job: Job) -> list[float]:
    """Return the ratio of best possible to best found time after each measurement."""
    path, source, kind, seed, budget = job
    recorded = read(path)
    sources = [] if source is None or kind is None else [as_source(source, kind, seed)]
    rows = rows_of(Search(recorded.space, "feasible", seed, sources=sources), recorded, budget)
    return [float(x) for x in recorded.reached(rows, budget)]


def rows_of(searching: Search, recorded: RecordedSpace, budget: int) -> list[int]:
    """Return the rows that a search measures."""
    rows: list[int] = []
    while len(rows) < budget and (proposed := searching.propose()) is not None:
        row, config = proposed
        searching.tell(row, as_trial(config, float(recorded.times_ms[row])))
        rows.append(row)
    return rows


@cache
def read(path: Path) -> RecordedSpace:
    """Read a recording once per process."""
    return RecordedSpace.read(path)


@cache
def study_rows(path: Path, number: int, trials: int) -> np.ndarray:
    """Return the rows that one of the studies of a recording measured."""
    recorded = read(path)
    return np.array(rows_of(Search(recorded.space, "feasible", 5000 + number), recorded, trials))


def as_source(path: Path, kind: str, seed: int) -> Source:
    """Return the configurations that ran, of those that a kind of source holds, with their times."""
    recorded = read(path)
    times = recorded.times_ms
    rows = np.flatnonzero(np.isfinite(times))
    name, _, trials = kind.partition(":")
    if name == "trials":
        found = study_rows(path, seed % _STUDIES, int(trials))
        rows = found[np.isfinite(times[found])]
    elif kind == "reversed":
        times = 1 / times
    elif kind == "shuffled":
        rng = np.random.default_rng(seed)
        rows = rng.choice(rows, min(_SHUFFLED, len(rows)), replace=False)
        times = times.copy()
        times[rows] = times[rng.permutation(rows)]
    elif kind != "complete":
        raise SystemExit(f"no source {kind!r}: expected complete, trials:N, {' or '.join(_MISLEADING)}")
    return recorded.name, [(recorded.space.config(row), 1e3 * float(times[row])) for row in rows.tolist()]


def summary(
    case: tuple[Path, Path | None, str | None], reached: dict[tuple[Path, Path | None, str | None], np.ndarray]
) -> dict[str, Any]:
    """Return the mean at each mark, and the mean and the standard error of the difference from the same without."""
    to, source, kind = case
    marks = [mark - 1 for mark in _MARKS if mark <= reached[case].shape[1]]
    own, alone = reached[case][:, marks], reached[to, None, None][:, marks]
    shown = own if source is None else own - alone
    error = shown.std(axis=0, ddof=1) / np.sqrt(len(own)) if len(own) > 1 else np.full(len(marks), np.nan)
    row: dict[str, Any] = {"space": to.stem, "source": source.stem if source is not None else None, "kind": kind}
    row["reached"] = [round(float(x), 5) for x in own.mean(axis=0)]
    row["difference"] = None if source is None else [round(float(x), 5) for x in shown.mean(axis=0)]
    row["error"] = [round(float(x), 5) for x in error]
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line per pair and kind of source, and the means of each kind."""
    table = Table("source", "of", "space", *[f"after {mark}" for mark in _SHOWN], box=None)
    for row in rows:
        table.add_row(row["kind"] or "none", row["source"] or "", row["space"], *cells(row))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        means = np.mean([row["reached"] for row in rows if row["kind"] == kind], axis=0)
        shown = [f"{mean:.3f}" for mark, mean in zip(_MARKS, means, strict=False) if mark in _SHOWN]
        table.add_row(kind or "none", "", "mean", *shown)
    Console(width=130).print(table)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the text of each mark that is shown."""
    difference = row["difference"] or [None] * len(row["reached"])
    return [
        f"{reached:.3f} ± {error:.3f}" if more is None else f"{reached:.3f} ({more:+.3f} ± {error:.3f})"
        for mark, reached, more, error in zip(_MARKS, row["reached"], difference, row["error"], strict=False)
        if mark in _SHOWN
    ]


if __name__ == "__main__":
    main()
