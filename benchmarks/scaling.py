"""Tuning on one and several GPUs: configurations a second, a family, and the quality after equal trials.

    python benchmarks/scaling.py [--gpus 1 2 4] [--problems large small] [--trials 300] [--points 24]
                                 [--output scaling.json]
    python benchmarks/scaling.py --simulated 1 8 64 256 [--through threads dask postgresql claims] [--seconds 0.15]
                                 [--samplers feasible random] [--output scaling_simulated.json]

On GPUs, two problems are tuned with each number of them, each session with a database and a cubin cache of its own: a
large one, whose launches of tens of milliseconds keep a GPU busy, and a small one, where compiling takes longer than
measuring, so that more GPUs do not help once the cores are busy. All sessions compile on all cores of the machine. Then
a family is tuned with each number. The quality is the time of each winner in one last race on the first GPU, over the
best of all.

Simulated GPUs replay a recording, each candidate taking ``--seconds``, with compilers that take no time. They need no
GPU and measure what a trial costs besides: CPU time of the parent, of Dask's scheduler and its worker processes, and of
a PostgreSQL server. ``threads`` is one session with all GPUs in its process, ``dask`` one with a scheduler and one
process of workers, ``postgresql`` eight commands that share a study and the GPUs, and ``claims`` a claimant for each
GPU, which does nothing but claim and store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table
from simulated_gpus import COMMANDS, KERNEL, MOST_GPUS, SIZES, THROUGH, claims

from autotile.core.model import config_key
from autotile.core.text import percent_text
from autotile.cuda.driver import device_count
from autotile.families.family import parse_family
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings
from autotile.tuning.family_session import tune_family
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune

PROBLEMS = {"large": {"M": 8192, "N": 8192, "K": 8192}, "small": SIZES}
FAMILY = "M=256..4096 N=2048 K=2048"
_BUSY = 0.8
"""Share of the time from which the GPUs or the compilers are the limit."""


def main() -> None:
    """Run the benchmark, and show and write its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, metavar="N", help="numbers of GPUs; all powers of 2 by default")
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--points", type=int, default=24, help="points of the family; 0 for no family")
    parser.add_argument("--family-trials", type=int, default=60)
    parser.add_argument("--simulated", nargs="+", type=int, metavar="N", help="numbers of simulated GPUs")
    parser.add_argument("--seconds", type=float, default=0.15, help="time of a candidate on a simulated GPU")
    parser.add_argument("--samplers", nargs="+", default=["feasible"], help="searches on simulated GPUs, of threads")
    parser.add_argument("--through", nargs="+", choices=[*THROUGH, "claims"], default=["threads"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = provenance() | {"kernel": KERNEL}
    if arguments.simulated:
        results |= {"sizes": SIZES, "seconds": arguments.seconds, "commands": COMMANDS}
        results["simulated"] = list(simulations(arguments))
        show_simulated(results["simulated"])
    else:
        present = device_count()
        counts = arguments.gpus or [count for count in (1, 2, 4, 8) if count <= present]
        if not present or max(counts) > present:
            sys.exit(f"this machine has {present} GPUs; name fewer with --gpus, or use --simulated")
        results |= on_gpus(sorted(counts), arguments)
        show(results)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def on_gpus(counts: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of sessions and families on each number of GPUs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sessions = []
        for problem in arguments.problems:
            entries, winners = [], []
            for count in counts:
                result = session(folder, problem, count, arguments.trials)
                entries.append({"problem": problem} | figures(result, count))
                winners.append(result)
                print(json.dumps(entries[-1]), file=sys.stderr, flush=True)
            for entry, ratio in zip(entries, race(folder, problem, winners), strict=True):
                entry["loss"] = ratio
            sessions += entries
        families = []
        for count in counts if arguments.points else ():
            families.append(family(folder, count, arguments.points, arguments.family_trials))
            print(json.dumps(families[-1]), file=sys.stderr, flush=True)
    return {"problems": PROBLEMS, "trials": arguments.trials, "sessions": sessions, "families": families}


def options_for(count: int, folder: Path, **choices: Any) -> TuneOptions:
    """Return the options of a session on the first so many GPUs."""
    devices = tuple(range(count)) if count > 1 else ()
    return TuneOptions(devices=devices, database=str(folder / "tuning.db"), transfer=False, **choices)


def session(folder: Path, problem: str, count: int, trials: int) -> TuneResult:
    """Tune a problem on a study of its own, with an empty cache."""
    kernel = load_kernel(KERNEL)
    own = folder / f"{problem}-{count}"
    own.mkdir()
    settings = replace(read_settings(), cache=own / "cache")
    chosen = options_for(count, own, trials=trials, spend=True, sampler="feasible")
    return tune(kernel, resolve_problem(kernel.spec, PROBLEMS[problem], None), settings, chosen)


def figures(result: TuneResult, count: int) -> dict[str, Any]:
    """Return the speed of a session's search, and what limits it."""
    trials = sum(result.outcomes.values())
    search_s = result.phases["search"]
    load = result.load
    gpu, compilers = (load.gpu_busy, load.compilers_busy) if load is not None else (0.0, 0.0)
    bound = "GPUs" if gpu >= _BUSY else "cores" if compilers >= _BUSY else "parent"
    return {
        "gpus": count,
        "trials": trials,
        "search_s": search_s,
        "per_s": round(trials / search_s, 2),
        "gpu_busy": round(gpu, 3),
        "compilers_busy": round(compilers, 3),
        "bound": bound,
        "winner": dict(result.winner.config) if result.winner is not None else None,
        "winner_us": result.winner.time_us if result.winner is not None else None,
        "scales": [use.scale for use in result.gpus],
        "spread": result.confirmation.spread if result.confirmation is not None else None,
    }


def race(folder: Path, problem: str, results: list[TuneResult]) -> list[float | None]:
    """Race all winners on the first GPU; return the time of each over the best, less 1."""
    kernel = load_kernel(KERNEL)
    configs = {config_key(one.winner.config): one.winner.config for one in results if one.winner is not None}
    own = folder / f"{problem}-race"
    own.mkdir()
    chosen = TuneOptions(
        database=str(own / "tuning.db"),
        sampler="brute-force",
        only=tuple(configs.values()),
        finals=len(configs) + 1,
        discard=False,
        transfer=False,
    )
    seen: dict[str, float] = {}
    tune(kernel, resolve_problem(kernel.spec, PROBLEMS[problem], None), read_settings(), chosen)
    from autotile.database.database import Database

    with Database.open(own / "tuning.db") as database:
        for study in database.studies():
            for trial in database.trials(study.study_id, phase="final"):
                if trial.time_us is not None:
                    seen[config_key(trial.config)] = trial.time_us
    best = min(seen.values())
    times = [seen.get(config_key(one.winner.config)) if one.winner is not None else None for one in results]
    return [round(time_us / best - 1.0, 5) if time_us is not None else None for time_us in times]


def family(folder: Path, count: int, points: int, trials: int) -> dict[str, Any]:
    """Tune a family, one problem a GPU at the same time."""
    kernel = load_kernel(KERNEL)
    own = folder / f"family-{count}"
    own.mkdir()
    settings = replace(read_settings(), cache=own / "cache")
    chosen = options_for(count, own, trials=trials)
    begun = time.monotonic()
    parsed = parse_family(kernel.spec, FAMILY.split())
    result = tune_family(kernel, parsed, "float32", settings, chosen, plan=FamilyPlan(points=points))
    rule = result.rule
    return {
        "gpus": count,
        "points": points,
        "trials": trials,
        "seconds": round(time.monotonic() - begun, 2),
        "mean_loss": rule.mean_loss if rule is not None else None,
    }


def simulations(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of sessions on each number of simulated GPUs."""
    for through in arguments.through:
        for count in sorted(arguments.simulated):
            if count > MOST_GPUS.get(through, count):
                continue
            samplers = arguments.samplers if through == "threads" else arguments.samplers[:1]
            for sampler in samplers:
                if through == "claims":
                    entry = claims(count, arguments.seconds)
                else:
                    entry = THROUGH[through](count, arguments.trials, arguments.seconds, sampler)
                print(json.dumps(entry), file=sys.stderr, flush=True)
                yield entry


def show_simulated(entries: list[dict[str, Any]]) -> None:
    """Print a table of CPU times."""
    table = Table("through", "GPUs", "sampler", "trials", "a second", "CPU time a trial, ms", "load")
    for one in entries:
        used = [f"{name.removesuffix('_ms_per_trial')} {one[name]}" for name in one if name.endswith("_ms_per_trial")]
        row = [one["through"], one["gpus"], one.get("sampler", ""), one["trials"], one["per_s"], ", ".join(used)]
        table.add_row(*map(str, row), str(one["load"]))
    Console().print(table)


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    entries = results["sessions"]
    fewest = entries[0]["gpus"]
    base = {entry.get("problem"): entry["per_s"] for entry in entries if entry["gpus"] == fewest}
    table = Table(
        "GPUs", "problem", "trials", "search s", "a second", "times one", "GPUs busy", "cores busy", "bound", "loss"
    )
    for one in entries:
        loss = percent_text(one["loss"], 2) if one.get("loss") is not None else ""
        speed = f"{one['per_s'] / base[one.get('problem')]:.2f}"
        row = [one["gpus"], one.get("problem", ""), one["trials"], one["search_s"], one["per_s"], speed]
        busy = [percent_text(one["gpu_busy"], 0), percent_text(one["compilers_busy"], 0)]
        table.add_row(*map(str, row), *busy, one["bound"], loss)
    console.print(table)
    families = results.get("families", [])
    if families:
        table = Table("GPUs", "points", "seconds", "times one", "mean loss")
        for one in families:
            loss = f"{100 * one['mean_loss']:.2f} %" if one["mean_loss"] is not None else ""
            speed = f"{families[0]['seconds'] / one['seconds']:.2f}"
            table.add_row(str(one["gpus"]), str(one["points"]), str(one["seconds"]), speed, loss)
        console.print(table)


if __name__ == "__main__":
    main()
