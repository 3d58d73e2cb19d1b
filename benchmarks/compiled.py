"""Gain from ranking more compiled candidates than are measured, on recordings with compiled resources.

    python benchmarks/compiled.py [--recordings DIR] [--seeds 20] [--budget 100] [--processes 2] [--output FILE.json]

Every recording of sgemm_2d in the folder is searched as in a tuning session: candidates are compiled, the second gate
rejects those that do not fit, and one of those that are ready is measured. Figures are the ratio of the best possible
to the best found time after a number of trials and after a number of measurements: means over the recordings of the
means over the seeds, with standard errors over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.core.model import Outcome, Trial
from autotile.exchange.recording import Recording, read_recording
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import load_kernel
from autotile.search.samplers import Lookahead
from autotile.search.search import Search, Shortlist
from autotile.space.limits import compiled_occupancy
from autotile.space.search_space import SearchSpace

KERNEL = "sgemm_2d"
MARKS = (10, 25, 50, 100)


class Method(NamedTuple):
    """Lookahead of a search, and whether it sees the compiled resources."""

    lookahead: Lookahead
    uses_resources: bool = True


METHODS = {
    "one at a time": Method(Lookahead(1)),
    "16 ahead, measured in order": Method(Lookahead(16)),
    "32 ahead, measured in order": Method(Lookahead(32)),
    "32 ahead, ranked by parameters": Method(Lookahead(32, per_measured=2), uses_resources=False),
    "32 ahead, ranked with resources": Method(Lookahead(32, per_measured=2)),
}
Job = tuple[str, Path, int]


class Run(NamedTuple):
    """Ratio of best possible to best found time after each trial and measurement, and compilation count."""

    by_trial: list[float]
    by_measurement: list[float]
    compiled: int


def main() -> None:
    """Search every recording with every method and seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=Path(__file__).parent.parent / "recordings")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    files = sorted(arguments.recordings.glob(f"{KERNEL}-*.npz"))
    jobs: list[Job] = [(name, file, seed) for seed in range(arguments.seeds) for name in METHODS for file in files]
    with get_context("fork").Pool(arguments.processes) as pool:
        runs = dict(zip(jobs, pool.imap(partial(search, arguments.budget), jobs), strict=True))
    marks = [mark for mark in MARKS if mark <= arguments.budget]
    rows = [summary(name, runs, files, arguments.seeds, marks) for name in METHODS]
    show(rows, marks)
    if arguments.output:
        report = {**provenance(), "recordings": [file.stem for file in files], "seeds": arguments.seeds}
        arguments.output.write_text(json.dumps({**report, "marks": marks, "methods": rows}, indent=1) + "\n")


def search(budget: int, job: Job) -> Run:
    """Search a recording once."""
    name, path, seed = job
    method, bench = METHODS[name], bench_of(path)
    shortlist = Shortlist(Search(bench.space, "feasible", seed), method.lookahead)
    compiled = 0
    times: list[float] = []
    measured: list[float] = []
    while len(times) < budget:
        while shortlist.propose(budget - len(times)) is not None:
            compiled += 1
        row, trial = bench.next_trial(shortlist, uses_resources=method.uses_resources)
        shortlist.tell(row, trial if method.uses_resources else without_resources(trial))
        times.append(trial.time_us or np.inf)
        if trial.time_us is not None:
            measured.append(trial.time_us)
    return Run(bench.reached(times), bench.reached(measured), compiled)


class Bench:
    """A recording that answers in place of a device."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        order = np.lexsort(recording.codes.T[::-1])
        self._row_of = order
        parameters = recording.header.parameters
        combinations = int(np.prod([len(each.values) for each in parameters]))
        codes = np.asfortranarray(recording.codes[order])
        self.space = SearchSpace(parameters, codes, combinations, rules=(), limits=(), seconds=0.0)
        self._best_us = float(recording.columns["time_us"][recording.ok].min())
        self._spec = load_kernel(KERNEL).spec
        self._trials: dict[int, Trial] = {}

    def next_trial(self, shortlist: Shortlist, *, uses_resources: bool) -> tuple[int, Trial]:
        """Return the next trial as the tuning pipeline would: a candidate that does not fit, else the chosen one."""
        compiled = {row: self.trial(row) for row in shortlist.ready()}
        rejected = next((row for row, trial in compiled.items() if trial.outcome is not Outcome.OK), None)
        if rejected is not None:
            return rejected, compiled[rejected]
        row = shortlist.choose({row: t if uses_resources else without_resources(t) for row, t in compiled.items()})
        return row, compiled[row]

    def trial(self, row: int) -> Trial:
        """Return the recorded trial of a row."""
        if row not in self._trials:
            result, device = self._recording.trial(int(self._row_of[row])), self._recording.header.device
            assert result.resources is not None
            assert device is not None
            problem = self._spec.at(self._recording.header.key.sizes)
            geometry = launch_geometry(self._spec, result.config, problem, device)
            occupancy = compiled_occupancy(geometry, result.resources, device)
            self._trials[row] = replace(result, geometry=geometry, occupancy=occupancy)
        return self._trials[row]

    def reached(self, times_us: list[float]) -> list[float]:
        """Return the ratio of best possible to best found time after each trial."""
        return [float(x) for x in self._best_us / np.minimum.accumulate(times_us)]


@cache
def bench_of(path: Path) -> Bench:
    """Return the cached bench of a recording."""
    return Bench(read_recording(path))


def without_resources(trial: Trial) -> Trial:
    """Return a trial without compiled resources."""
    return replace(trial, resources=None)


def summary(name: str, runs: dict[Job, Run], files: list[Path], seeds: int, marks: list[int]) -> dict[str, Any]:
    """Return the means of one method at each mark, with their standard errors."""
    chosen = [[runs[name, file, seed] for seed in range(seeds)] for file in files]
    return {
        "method": name,
        "after_trials": means([[run.by_trial for run in each] for each in chosen], marks),
        "after_measurements": means([[run.by_measurement for run in each] for each in chosen], marks),
        "compiled": round(float(np.mean([[run.compiled for run in each] for each in chosen])), 1),
    }


def means(curves: list[list[list[float]]], marks: list[int]) -> list[tuple[float, float]]:
    """Return mean and standard error at each mark; a shorter curve keeps its last value."""
    found = []
    for mark in marks:
        reached = np.array([[curve[min(mark, len(curve)) - 1] for curve in each] for each in curves])
        error = np.sqrt((reached.var(axis=1, ddof=1) / reached.shape[1]).sum()) / len(reached)
        found.append((round(float(reached.mean()), 4), round(float(error), 4)))
    return found


def show(rows: list[dict[str, Any]], marks: list[int]) -> None:
    """Print one line per method."""
    for key in ("after_trials", "after_measurements"):
        table = Table(key.replace("_", " "), *map(str, marks), "compiled", box=None)
        for row in rows:
            cells = [f"{mean:.4f} ± {error:.4f}" for mean, error in row[key]]
            table.add_row(row["method"], *cells, str(row["compiled"]))
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
