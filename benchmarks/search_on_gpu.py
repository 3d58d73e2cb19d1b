"""Results of search methods on a live GPU with the same number of measurements.

    python benchmarks/search_on_gpu.py [--shape 2048,2048,2048] [--configurations 1000] [--trials 100] [--seeds 10]
        [--samplers feasible kernel-tuner:pso ...] [--output search.json]

1. Ground truth: a random sample of sgemm_2d's space is measured completely, without early stopping.
2. Every method tunes the same configurations with the same number of trials, from an empty database, with each seed;
   the winner of the search is rated by its time in the ground truth.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table
from sgemm_bench import KERNEL, sample_configs

from autotile.core.model import config_key
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.session import open_session

SAMPLERS = (
    "feasible",
    "kernel-tuner:adaptive_tabu_greywolf",
    "kernel-tuner:pso",
    "kernel-tuner:simulated_annealing",
    "random",
)
"""The default, and Kernel Tuner's best three after 100 measurements of recorded spaces."""
_MARKS = (10, 25, 50, 100)


def main() -> None:
    """Measure the ground truth, run every method with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,2048,2048", metavar="M,N,K")
    parser.add_argument("--configurations", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sizes = dict(zip("MNK", (int(size) for size in arguments.shape.split(",")), strict=True))
    configs = tuple(sample_configs(sizes, arguments.configurations))
    truth = dict(search(sizes, TuneOptions(sampler=BRUTE_FORCE, only=configs, finals=0, discard=False)))
    ran = sum(map(math.isfinite, truth.values()))
    print(f"truth: {ran} of {len(configs)} ran, best {min(truth.values()):.1f} us", file=sys.stderr, flush=True)
    runs: list[dict[str, Any]] = []
    for sampler in arguments.samplers:
        for seed in range(arguments.seeds):
            options = TuneOptions(sampler=sampler, only=configs, trials=arguments.trials, seed=seed, finals=0)
            runs.append({"sampler": sampler, "seed": seed, "found": judged(search(sizes, options), truth)})
        print(f"{sampler}: {mean_of(runs, sampler)[-1]:.4f}", file=sys.stderr, flush=True)
        if arguments.output:
            results = {"sizes": sizes, "configurations": len(configs), "best_us": min(truth.values()), "runs": runs}
            arguments.output.write_text(json.dumps({**provenance(), **results}, indent=1) + "\n")
    show(runs, list(arguments.samplers))


def search(sizes: dict[str, int], options: TuneOptions) -> list[tuple[str, float]]:
    """Return the configurations and times in trial order; the time of a failure is infinite."""
    kernel = load_kernel(KERNEL)
    with tempfile.TemporaryDirectory() as folder:
        problem = resolve_problem(kernel.spec, sizes)
        own = replace(options, database=str(Path(folder) / "tuning.db"))
        with open_session(kernel, problem, read_settings(), own, lambda _: None) as session:
            session.run()
            return [(config_key(trial.config), trial.time_us or math.inf) for trial in session.trials]


def judged(order: list[tuple[str, float]], truth: dict[str, float]) -> list[float]:
    """Return the ratio of best possible to best found time at each mark, using the true time of the apparent best."""
    found = []
    for mark in _MARKS:
        key, _ = min(order[:mark], key=lambda entry: entry[1])
        found.append(min(truth.values()) / truth[key])
    return found


def mean_of(runs: list[dict[str, Any]], sampler: str) -> list[float]:
    """Return the mean over a method's seeds at each mark."""
    return [float(x) for x in np.mean([run["found"] for run in runs if run["sampler"] == sampler], axis=0)]


def show(runs: list[dict[str, Any]], samplers: list[str]) -> None:
    """Print one line per method."""
    table = Table("sampler", *[f"after {mark}" for mark in _MARKS], "worst at the end", "seeds")
    for sampler in samplers:
        last = [run["found"][-1] for run in runs if run["sampler"] == sampler]
        means = [f"{mean:.4f}" for mean in mean_of(runs, sampler)]
        table.add_row(sampler, *means, f"{min(last):.4f}", str(len(last)))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
