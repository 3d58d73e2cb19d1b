"""Loss at untuned sizes: by the rule of a family, by the nearest tuned size, and by the default.

    python benchmarks/unseen_sizes.py --folder DIR --output FILE.json [--kernel gemm_mma] [--dtype bfloat16]
        [--points 24] [--sizes 60] [--trials 28] [--finals 4] [--seed 0] [--draw log|linear]
        [M=64..4096 N=256..4096 K=256..4096]

A family of sizes is tuned at some points. Then sizes are drawn at random from it, and each is tuned by itself with the
same effort, in its own copy of the family's database: it benefits from the family like any further tuning, and from
none of the other sizes. The winner of its own tuning, the configuration of the rule, that of the nearest tuned point,
and the default are then timed interleaved. The loss of each is its time over the fastest of the four, minus 1; the loss
relative to its own tuning, which may be negative, is reported as well.

DIR holds the databases. Results in them and in FILE.json are not measured again, so a killed run resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.api.tuning import tune_family
from autotile.core.model import Config, Outcome, Problem, config_key
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.exchange.shipped import write_rules
from autotile.families.family import Extent, Family, parse_family
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving.choice import Choice
from autotile.serving.selection import KernelRequest, Shelf, choose
from autotile.settings import read_settings
from autotile.space.search_space import feasible_space
from autotile.tuning.lanes import Lane
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.progress_state import Place, Progress
from autotile.tuning.session import tune
from autotile.workers.child import WorkerPool
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Entry, Race, Time, Workload

_FAMILY = ("M=64..4096", "N=256..4096", "K=256..4096")
_WAYS = ("family", "nearest", "default")
_ROUNDS = 60
"""Interleaved rounds: the maximum of the finals of a session."""


def main() -> None:
    """Tune the family, then each size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", default=_FAMILY)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the databases")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, rewritten after each size")
    parser.add_argument("--rules", type=Path, help="file for the rule, written if it is worth shipping")
    parser.add_argument("--kernel", default="gemm_mma")
    parser.add_argument("--dtype")
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--max-configs", type=int, default=8)
    parser.add_argument("--sizes", type=int, default=60)
    parser.add_argument("--trials", type=int, default=28)
    parser.add_argument("--finals", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", choices=("log", "linear"), default="log")
    arguments = parser.parse_args()
    with WorkerPool() as worker_pool:
        Bench(arguments, worker_pool).run()


class Bench:
    """One run of the benchmark; the sessions after that of the family share their workers."""

    def __init__(self, arguments: argparse.Namespace, worker_pool: WorkerPool) -> None:
        self.arguments = arguments
        self.worker_pool = worker_pool
        self.kernel = load_kernel(arguments.kernel)
        self.family = parse_family(self.kernel.spec, arguments.family)
        self.dtype = arguments.dtype or self.kernel.spec.dtypes[0]
        self.device = live_device()
        arguments.folder.mkdir(parents=True, exist_ok=True)
        self.own, self.alone = (str(arguments.folder / f"{name}.db") for name in ("family", "alone"))
        self.options = TuneOptions(trials=arguments.trials, finals=arguments.finals, seed=arguments.seed)

    def run(self) -> None:
        """Run everything that is not done yet."""
        document = self.tune_family()
        rows = self._rows_before(document)
        points = [point["sizes"] for point in document["rule"]["points"]]
        for sizes in draw(self.family, self.kernel, self.device, self.arguments, points):
            if sizes not in [row["sizes"] for row in rows]:
                rows.append(self.compare(sizes))
                print(f"{len(rows)} of {self.arguments.sizes}: {line(rows[-1])}", flush=True)
                self.write(document, rows)
        self.write(document, rows)
        show(rows)
        if self.arguments.rules is not None:
            self._write_rules(rows)

    def _write_rules(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rule, unless it loses more than the nearest tuned size."""
        found = summary(rows)
        if found["family"]["mean_loss"] > found["nearest"]["mean_loss"]:
            print("no rule is written: it loses more than the nearest tuned size")
            return
        write_rules(self.arguments.rules, self._rules())

    def _rules(self) -> list[StoredRule]:
        """Return the rules learned for the family so far, newest first."""
        with Database.open(self.own) as database:
            rules = database.rules(self.kernel.name, self.dtype)
        return [stored for stored in rules if stored.rule.family == self.family]

    def tune_family(self) -> dict[str, Any]:
        """Return the rule of the family, learned now or in an earlier run."""
        if known := self._rules():
            rule = known[0].rule
            return {"rule": rule.to_json(), "loss": rule.mean_loss, "held_out_loss": rule.mean_held_out}
        plan = FamilyPlan(self.arguments.points, self.arguments.max_configs)
        reported: set[Place] = set()

        def observe(progress: Progress) -> None:
            place = progress.path[0]
            if place not in reported:
                reported.add(place)
                print(f"{place.of} {place.number} of {place.count}: {progress.problem}", flush=True)

        options = replace(self.options, database=self.own)
        sizes = dict(word.split("=", 1) for word in self.arguments.family)
        result: Any = tune_family(self.kernel, sizes, dtype=self.dtype, plan=plan, options=options, observe=observe)
        if result.rule is None:
            raise SystemExit("interrupted")
        print("\n".join(result.rule.lines()), f"after {result.seconds:.0f} s", sep="\n", flush=True)
        rule = result.rule
        found = {"rule": rule.to_json(), "loss": rule.mean_loss, "held_out_loss": rule.mean_held_out}
        return found | {"default_loss": result.default_loss, "seconds": result.seconds}

    def compare(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Tune one size by itself, and time its winner against the configurations that would have been served."""
        for ending in ("-wal", "-shm"):  # left by a killed run
            Path(self.alone + ending).unlink(missing_ok=True)
        shutil.copy(self.own, self.alone)  # the database is closed, so the file is complete
        problem = Problem(self.kernel.name, sizes, self.dtype)
        served = {way: self.served(way, problem) for way in _WAYS}
        options = replace(self.options, database=self.alone)
        result = tune(self.kernel, problem, read_settings(), options, lane=Lane(worker_pool=self.worker_pool))
        if result.winner is None:
            raise SystemExit(f"no configuration of {problem} ran")
        configs = {"alone": result.winner.config} | {way: choice.config for way, choice in served.items()}
        begun = time.perf_counter()
        times_us = self.timed(problem, list({config_key(config): config for config in configs.values()}.values()))
        race_s = round(time.perf_counter() - begun, 3)
        found = {way: times_us.get(config_key(config)) for way, config in configs.items()}
        return {
            "sizes": sizes,
            "tier": served["family"].tier,  # another tier if no configuration of the rule is valid
            "time_us": found,
            "configs": {way: dict(config) for way, config in configs.items()},
            "seconds": {**result.phases, "session": round(result.seconds, 3), "race": race_s},
            **losses(found),
        }

    def served(self, way: str, problem: Problem) -> Choice:
        """Return what the family's database serves: with its rule, without it, or without any tuned result."""
        with Database.open(self.own) as database:
            best = database.best(problem.kernel, dtype=problem.dtype) if way != "default" else []
            rules = database.rules(problem.kernel, problem.dtype) if way == "family" else []
        winners = [one.winner for one in best]
        return choose(KernelRequest(self.kernel, problem, self.device, nvrtc_version(), Shelf(winners, rules=rules)))

    def timed(self, problem: Problem, configs: Sequence[Config]) -> dict[str, float]:
        """Return the median times of the verified configurations by key, timed interleaved."""
        settings, spec = read_settings(), self.kernel.spec
        cache = CubinCache(settings.cache, settings.cache_limit_bytes)
        workload = Workload(
            spec_text=spec.text,
            spec_source=spec.source,
            sizes=problem.sizes,
            dtype=problem.dtype,
            l2=self.options.l2,
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
            sample_limit_s=self.options.sample_limit_s,
        )

        def candidate(config: Config) -> Candidate:
            job = compile_job(self.kernel, config, problem, self.device.architecture)
            return Candidate(config, str(cache.get_or_compile(job).path))

        with closing(Gpu(workload, self.options.run_deadline_s, worker_pool=self.worker_pool)) as gpu:
            candidates = [candidate(config) for config in configs]
            right = [one for one in candidates if gpu.run(Time((Entry(one),)))[0].outcome is Outcome.OK]
            rows = gpu.raced(Race(tuple(map(Entry, right)), _ROUNDS, self.arguments.seed))
        return {config_key(one.config): statistics.median(row.rounds_us) for one, row in zip(right, rows, strict=True)}

    def _rows_before(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self.arguments.output.exists():
            return []
        before = json.loads(self.arguments.output.read_text())
        return before["rows"] if before["family"]["rule"] == document["rule"] else []

    def write(self, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Write the JSON: the family, its rule, and the sizes so far."""
        chosen = {
            name: str(value)
            for name, value in vars(self.arguments).items()
            if name not in ("output", "folder", "rules", "earlier", "earlier_rules")
        }
        whole = {**provenance(), "options": chosen, "family": document, "summary": summary(rows), "rows": rows}
        self.arguments.output.write_text(json.dumps(whole, indent=1) + "\n")


def draw(
    family: Family, kernel: Kernel, device: Any, arguments: argparse.Namespace, points: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Draw random sizes of a family, excluding its points, at which the kernel has a valid configuration."""
    rng = np.random.default_rng(arguments.seed)
    found: list[dict[str, int]] = []
    while len(found) < arguments.sizes:
        sizes = {name: _value(extent, rng, arguments.draw) for name, extent in family.extents.items()}
        if sizes not in points and sizes not in found and _is_possible(kernel, sizes, device, arguments.dtype):
            found.append(sizes)
    return found


def _value(extent: Extent, rng: np.random.Generator, how: str) -> int:
    low, high = extent.parts[int(rng.integers(len(extent.parts)))]
    if how == "log" and low > 0:
        return int(np.clip(round(low * (high / low) ** rng.random()), low, high))
    return int(rng.integers(low, high + 1))


def _is_possible(kernel: Kernel, sizes: Mapping[str, int], device: Any, dtype: str | None) -> bool:
    try:
        return len(feasible_space(kernel.spec, kernel.spec.at(sizes, dtype), device)) > 0
    except InputError:
        return False


def losses(times_us: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """Return each time relative to the fastest and to its own tuning, minus 1."""
    fastest = min(time for time in times_us.values() if time is not None)
    alone = times_us["alone"]
    ways = ("alone", *_WAYS)
    return {
        "loss": {way: times_us[way] / fastest - 1 if times_us[way] else None for way in ways},
        "over_alone": {way: times_us[way] / alone - 1 if times_us[way] and alone else None for way in ways},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and worst loss of each way of serving."""
    found: dict[str, Any] = {}
    for way in ("alone", *_WAYS):
        lost = [row["loss"][way] for row in rows if row["loss"][way] is not None]
        over = [row["over_alone"][way] for row in rows if row["over_alone"][way] is not None]
        if lost and over:
            found[way] = {
                "mean_loss": statistics.fmean(lost),
                "worst_loss": max(lost),
                "mean_over_alone": statistics.fmean(over),
                "worst_over_alone": max(over),
            }
    return found


def line(row: Mapping[str, Any]) -> str:
    """Return the results of a size as one line."""
    sizes = " ".join(f"{name}={value}" for name, value in row["sizes"].items())
    times = ", ".join(f"{way} {time:.1f}" if time else f"{way} -" for way, time in row["time_us"].items())
    seconds = " ".join(f"{name} {value:.2f}" for name, value in row["seconds"].items())
    return f"{sizes}: {times} us; {seconds} s"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per size, then the means and the worst."""
    table = Table("sizes", *[f"{way}" for way in ("alone, us", *_WAYS)])
    for row in rows:
        sizes = " ".join(f"{name}={value}" for name, value in row["sizes"].items())
        lost = [f"{100 * row['loss'][way]:.1f} %" if row["loss"][way] is not None else "-" for way in _WAYS]
        table.add_row(sizes, f"{row['time_us']['alone']:.1f}" if row["time_us"]["alone"] else "-", *lost)
    found = summary(rows)
    for figure in ("mean_loss", "worst_loss", "mean_over_alone", "worst_over_alone"):
        means = [f"{100 * found[way][figure]:.1f} %" if way in found else "-" for way in ("alone", *_WAYS)]
        table.add_row(figure.replace("_", " "), *means)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
