"""What a tuning of some sizes does to the others: the served time, beside an empty database's and the best recorded.

    python benchmarks/neighbours.py [--trials 200] [--seeds 5] [--together 2] [--output neighbours.json] [--cells]

For each kernel with recordings of several problems, some of these problems are tuned by replay: a random search of
``--trials`` recorded configurations, whose twelve fastest are finalists with the default, as in a session. Then each
other problem is looked up, and the recorded time of what is served is compared with the winner of the nearest tuned
problem, with what an empty database serves, and with the fastest recorded configuration. ``--together`` is the largest
number of problems that are tuned together. The record has the cells of the first seed, and summaries of all.

An empty database may serve a configuration that is estimated to be far faster than the default and that was not
recorded; the recorded one of the least estimate then stands for it. Where something else that was not recorded is
served, the cell is counted apart.

The constants of `autotile.families.preference` were chosen on ``sgemm_2d``. As a check, the same comparison is made on
the times of the configurations of two families' rules at their 24 problems, from the records of
``benchmarks/unseen_sizes.py``: the fastest at each problem against each other configuration at each other problem.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Problem, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.exchange.recording import Recording, read_recording
from autotile.families.family import FamilyRule
from autotile.families.preference import Tuned, prefer
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import size_distance
from autotile.serving.dispatcher import Dispatcher
from autotile.space.search_space import SearchSpace
from autotile.space.time_estimate import estimate_times

ROOT = Path(__file__).parents[1]
KERNELS = ("sgemm_2d", "sgemm")
CHECKS = ("sgemm", "gemm_mma")
"""Kernels whose families were measured."""
_FINALISTS = 12
_TOLERANCE = 1.01
"""Ratio of two recorded times from which one is slower."""


def main() -> None:
    """Run both parts, print their tables, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--together", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--cells", action="store_true", help="print every cell of the first seed")
    arguments = parser.parse_args()
    cells = [
        cell
        for name in KERNELS
        for cell in cells_of(name, trials=arguments.trials, seeds=arguments.seeds, together=arguments.together)
    ]
    checks = [check_of(name) for name in CHECKS]
    console = Console(width=150)
    first = [cell for cell in cells if cell["seed"] == 0]
    if arguments.cells:
        console.print(cell_table(first))
    summaries = [summary(name, count, cells) for name in KERNELS for count in range(1, arguments.together + 1)]
    console.print(summary_table(summaries))
    console.print(check_table(checks))
    if arguments.output:
        document = {**provenance(), "trials": arguments.trials, "seeds": arguments.seeds}
        document |= {"summaries": summaries, "checks": checks, "cells": first}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


@dataclass(frozen=True)
class Recorded:
    """A recorded problem of a kernel."""

    kernel: Kernel
    recording: Recording

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.recording.header.problem

    @property
    def device(self) -> DeviceProperties:
        """The GPU that it was recorded on."""
        return self.recording.header.device or device_profile("h200")

    @property
    def name(self) -> str:
        """The sizes that are no flags, as text."""
        return "x".join(str(self.problem.sizes[name]) for name in "MNK")

    @property
    def times_us(self) -> np.ndarray:
        """Recorded times, NaN where a configuration failed, shape (rows,)."""
        return np.where(self.recording.ok, self.recording.columns["time_us"], np.nan)

    def time_us(self, config: Config) -> float | None:
        """Return the recorded time of a configuration; None if there is none."""
        row = self.recording.row_of(config)
        time_us = math.nan if row is None else float(self.times_us[row])
        return time_us if math.isfinite(time_us) else None

    def least_estimate(self) -> float:
        """Return the recorded time of the configuration of the least estimate."""
        codes = np.asfortranarray(self.recording.codes[self.recording.ok])
        space = SearchSpace(self.recording.header.parameters, codes, len(codes), (), (), 0.0)
        found = estimate_times(self.kernel.spec, self.problem, self.device, space)
        if found is None:
            raise SystemExit(f"{self.problem} has no estimates")
        return float(self.times_us[self.recording.ok][int(np.argmin(found.time_us))])


def cells_of(name: str, *, trials: int, seeds: int, together: int) -> Iterator[dict[str, Any]]:
    """Yield a cell for each set of tuned problems of a kernel and each other problem."""
    kernel = load_kernel(name)
    paths = sorted((ROOT / "recordings").glob(f"{name}-*.npz"))
    problems = [Recorded(kernel, read_recording(path)) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        empty = {one.name: served_of(Path(folder) / "none.db", one) for one in problems}
        for seed in range(seeds):
            for count in range(1, together + 1):
                for number, tuned in enumerate(combinations(problems, count)):
                    path = Path(folder) / f"{seed}-{count}-{number}.db"
                    winners = {one.name: tune(path, one, trials, seed) for one in tuned}
                    for asked in problems:
                        if asked not in tuned:
                            yield {
                                "kernel": name,
                                "seed": seed,
                                "tuned": [one.name for one in tuned],
                                **cell_of(path, asked, tuned, winners, empty[asked.name]),
                            }


def cell_of(
    path: Path, asked: Recorded, tuned: Sequence[Recorded], winners: Mapping[str, Config], empty: tuple[str, Config]
) -> dict[str, Any]:
    """Return what is served for a problem, and the times of that and of the alternatives; None for unknown ones."""
    tier, config = served_of(path, asked)
    near = min(tuned, key=lambda one: size_distance(one.problem.sizes, asked.problem.sizes))
    without_us = asked.time_us(empty[1]) or asked.least_estimate()
    return {
        "asked": asked.name,
        "tier": tier,
        "served_us": without_us if config == empty[1] else asked.time_us(config),
        "nearest_us": asked.time_us(winners[near.name]),
        "empty_us": without_us,
        "best_us": float(np.nanmin(asked.times_us)),
    }


def tune(path: Path, problem: Recorded, trials: int, seed: int) -> Config:
    """Store a random search of a recorded problem and its finals; return the winner."""
    recording, times_us = problem.recording, problem.times_us
    drawn = np.random.default_rng(seed).choice(len(recording), min(trials, len(recording)), replace=False)
    default = recording.row_of(problem.kernel.spec.default)
    ran = sorted((row for row in drawn.tolist() if np.isfinite(times_us[row])), key=lambda row: times_us[row])
    finalists = {*ran[:_FINALISTS]} | ({default} if default is not None else set())
    ranked = sorted(finalists, key=lambda row: times_us[row])
    device = structs.replace(problem.device, source="cuda")
    key = key_of(problem.kernel, problem.problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    with Database.open(path) as database:
        searched, finals = map(problem.recording.trial, drawn.tolist()), map(problem.recording.trial, ranked)
        database.add_run(key, searched, sampler="random", device=device)
        database.add_run(key, finals, sampler="random", phase="final", is_ranked=True)
    return recording.config(ranked[0])


def served_of(path: Path, problem: Recorded) -> tuple[str, Config]:
    """Return the tier and the configuration that a database serves."""
    served = Dispatcher(database=path).get_best_kernel(
        problem.kernel.name, dtype=problem.problem.dtype, device=problem.device.name, **problem.problem.sizes
    )
    return served.tier, served.config


def check_of(name: str) -> dict[str, Any]:
    """Compare the fastest of a rule's configurations at each of its points with each other one at each other point."""
    document = json.loads((ROOT / "benchmarks" / "results" / "h200" / f"unseen_{name}.json").read_text())
    rule = FamilyRule.from_json(document["family"]["rule"])
    spec, device = load_kernel(name).spec, device_profile("h200")
    logs: list[tuple[float, float, float]] = []
    for there in rule.points:
        number = there.fastest()
        for here in rule.points:
            if number is None or here is there:
                continue
            times_here, times_there = (point.times_by_config(rule.configs) for point in (here, there))
            config = rule.configs[number].config
            key = config_key(config)
            for one in rule.configs:
                base = config_key(one.config)
                if base == key or not {base, key} <= times_here.keys() & times_there.keys():
                    continue
                tuned = Tuned(there.sizes, device, {key: config}, {key: times_there[key], base: times_there[base]})
                found = prefer(spec, spec.at(here.sizes), device, one.config, [tuned])
                log = math.log(times_here[key] / times_here[base])
                logs.append((log if found is not None and found.is_faster else 0.0, log, min(log, 0.0)))
    served, nearest, either = np.exp(np.mean(logs, axis=0)).tolist()
    slower = sum(1 for log, _, _ in logs if log > math.log(_TOLERANCE))
    return {
        "kernel": name,
        "cells": len(logs),
        "slower": slower,
        "served": served,
        "nearest": nearest,
        "faster_of_both": either,
        "worst": math.exp(max(log for log, _, _ in logs)),
    }


def summary(name: str, count: int, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the geometric means of the times over those of an empty database, and the cells that got slower."""
    own = [cell for cell in cells if cell["kernel"] == name and len(cell["tuned"]) == count]
    known = [cell for cell in own if cell["served_us"] is not None]
    ratios = [cell["served_us"] / cell["empty_us"] for cell in known]
    nearest = [cell["nearest_us"] / cell["empty_us"] for cell in known if cell["nearest_us"] is not None]
    best = [cell["best_us"] / cell["empty_us"] for cell in known]
    return {
        "kernel": name,
        "tuned": count,
        "cells": len(own),
        "unrecorded": len(own) - len(known),
        "slower": sum(1 for ratio in ratios if ratio > _TOLERANCE),
        "worst": max(ratios, default=None),
        "served": geometric_mean(ratios),
        "nearest": geometric_mean(nearest),
        "best": geometric_mean(best),
    }


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def cell_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of some cells."""
    table = Table("kernel", "tuned", "asked", "tier", box=None, title="microseconds")
    for name in ("served", "nearest", "empty", "best"):
        table.add_column(name, justify="right")
    for cell in cells:
        times = (cell[f"{name}_us"] for name in ("served", "nearest", "empty", "best"))
        table.add_row(cell["kernel"], ", ".join(cell["tuned"]), cell["asked"], cell["tier"], *map(figure, times))
    return table


def summary_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the geometric means, relative to an empty database."""
    table = Table("kernel", "tuned", "cells", "unrecorded", "slower", box=None, title="times over an empty database's")
    names = ("served", "nearest", "best", "worst")
    for name in names:
        table.add_column(name, justify="right")
    for one in summaries:
        counts = (str(one[name]) for name in ("tuned", "cells", "unrecorded", "slower"))
        table.add_row(one["kernel"], *counts, *(figure(one[name]) for name in names))
    return table


def check_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the check on families."""
    table = Table("kernel", "cells", "slower", box=None, title="check: times over another configuration's")
    names = ("served", "nearest", "faster_of_both", "worst")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for one in checks:
        table.add_row(one["kernel"], str(one["cells"]), str(one["slower"]), *(figure(one[name]) for name in names))
    return table


def figure(value: float | None) -> str:
    """Format a figure with four digits."""
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
