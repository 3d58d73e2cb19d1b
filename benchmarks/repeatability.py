"""Repeatability of tuning: ten tuning runs of one space, half of them disturbed.

    python benchmarks/repeatability.py [--shape 2048,2048,2048] [--configurations 320] [--output repeat.json]

1. Ground truth: every configuration of a sample of sgemm_2d's space is measured, and the fastest of them are timed
   interleaved for many rounds, with the default and the winner of every tuning run.
2. Ten tuning runs with different seeds, each with its own database; during every second one, another process runs
   matrix products in bursts on the same GPU.
3. For each run, Kernel Tuner's method on the same configurations: the smallest mean of seven runs wins.
4. A/A test: one configuration under two names must end as a tie.

    python benchmarks/repeatability.py --close 30 [--shape 2048,2048,2048] [--output close.json]

does steps 2 and 3 on a space whose ten best configurations were recorded within half a percent of each other, and
compares the winners with the fastest configuration of a long interleaved race of all of them, which no tuning is part
of. The configurations are neighbours in a recording that ships with autotile. ``--list`` shows them, and
needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table
from sgemm_bench import KERNEL, Matrices, sample_configs

from autotile.core.model import Config, config_key
from autotile.core.statistics import median_interval, paired_ratio
from autotile.cuda.driver import live_device
from autotile.cuda.timing import Timer
from autotile.exchange.recording import find_recording, read_recording
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import read_settings
from autotile.tuning.options import DEFAULT_TRIALS, TuneOptions
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune

CONTENDERS = 16
"""Number of the fastest configurations of the brute-force search that are timed again to find the true best."""
DISTURBANCE = """
import time, cupy
a = cupy.random.standard_normal((2048, 2048), dtype=cupy.float32)
while True:
    for _ in range(20):
        a @ a
    cupy.cuda.Device().synchronize()
    time.sleep(0.05)
"""


def main() -> None:
    """Run all parts, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,2048,2048", metavar="M,N,K")
    parser.add_argument("--configurations", type=int, default=320)
    parser.add_argument("--trials", type=int, default=DEFAULT_TRIALS, help="trials per tuning run")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--close", type=int, metavar="COUNT", help="tune a space of this many close configurations")
    parser.add_argument("--list", action="store_true", help="print the close configurations, and run nothing")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sizes = dict(zip("MNK", (int(size) for size in arguments.shape.split(",")), strict=True))
    if arguments.close or arguments.list:
        close_races(sizes, arguments)
        return
    configs = sample_configs(sizes, arguments.configurations)
    kernel = load_kernel(KERNEL)
    contenders = brute_force(kernel, sizes, configs)
    runs = [one_run(kernel, sizes, configs, seed, arguments.trials) for seed in range(arguments.runs)]
    truth = true_times(kernel, sizes, contenders, runs)
    judge(runs, truth)
    twins = [same_under_two_names(sizes, seed) for seed in range(arguments.runs)]
    show(runs, twins)
    if arguments.output:
        results = {
            "sizes": sizes,
            "configurations": len(configs),
            "runs": runs,
            "twins": twins,
            "true_us": sorted(truth["medians"].values()),
            "default_us": truth["medians"][truth["default"]],
        }
        arguments.output.write_text(json.dumps({**provenance(), **results}, indent=1) + "\n")


CLOSE = 10
CLOSE_RATIO = 1.005
"""The space of ``--close`` begins at the first configuration of the recording such that this many are this close. The
recorded times have an error of about half a percent, so that the true ones are within one."""


def close_races(sizes: dict[str, int], arguments: argparse.Namespace) -> None:
    """Run the tunings of a space of close configurations, print the table and write the JSON."""
    recorded = close_configs(sizes, arguments.close or 3 * CLOSE)
    if arguments.list:
        for time_us, config in recorded:
            print(f"{time_us:9.2f} us  {json.dumps(config)}")
        return
    kernel, configs = load_kernel(KERNEL), [config for _, config in recorded]
    configs.append(dict(kernel.spec.default))  # against which a speed-up is measured
    runs = [one_run(kernel, sizes, configs, seed, len(configs)) for seed in range(arguments.runs)]
    truth = true_times(kernel, sizes, configs, runs)
    judge(runs, truth)
    show(runs, [])
    true_us = sorted(truth["medians"].values())
    print(f"true times: the {CLOSE} best within {100 * (true_us[CLOSE - 1] / true_us[0] - 1):.2f} %")
    for percent in (0.5, 1.0):
        tuned_runs, by_mean = (
            sum(100 * run[f"{which}_loss"] <= percent for run in runs) for which in ("winner", "mean_of_7_winner")
        )
        print(f"within {percent} % of the best: {tuned_runs} of {len(runs)} (mean of seven runs: {by_mean})")
    if arguments.output:
        results = {"sizes": sizes, "configurations": len(configs), "runs": runs, "true_us": true_us}
        arguments.output.write_text(json.dumps({**provenance(), **results}, indent=1) + "\n")


def close_configs(sizes: dict[str, int], count: int) -> list[tuple[float, Config]]:
    """Return neighbouring configurations of a recording with their times in microseconds, the fastest first."""
    path = find_recording(read_settings().recording_folders, KERNEL, sizes, "float32")
    if path is None:
        raise SystemExit(f"there is no recording of {KERNEL} at {sizes}; name another --shape")
    recording = read_recording(path)
    configs = [recording.config(number) for number in range(len(recording))]
    results = [(recording.lookup(config), config) for config in configs]
    times = sorted(
        ((found.measurement.time_us, config) for found, config in results if found and found.measurement),
        key=lambda timed: timed[0],
    )
    for first in range(len(times) - count):
        if times[first + CLOSE - 1][0] <= CLOSE_RATIO * times[first][0]:
            return times[first : first + count]
    raise SystemExit(f"the recording has no {CLOSE} configurations within {CLOSE_RATIO} of each other; use another")


def brute_force(kernel: Kernel, sizes: dict[str, int], configs: list[Config]) -> list[Config]:
    """Return the fastest configurations of the sample, and the default."""
    options = TuneOptions(sampler=BRUTE_FORCE, only=tuple(configs), finals=CONTENDERS)
    result, trials = tuned(kernel, sizes, options)
    assert result.winner is not None
    ran = sorted((t for t in trials if t["time_us"] is not None), key=lambda t: t["time_us"])
    return [t["config"] for t in ran[:CONTENDERS]] + [dict(kernel.spec.default)]


def one_run(kernel: Kernel, sizes: dict[str, int], configs: list[Config], seed: int, trials: int) -> dict[str, Any]:
    """Run one tuning and Kernel Tuner's method; every second run is disturbed."""
    disturbed = seed % 2 == 1
    with disturbance(disturbed):
        options = TuneOptions(only=tuple(configs), trials=trials, seed=seed)
        result, _ = tuned(kernel, sizes, options)
        mean_winner = mean_of_seven(kernel, sizes, configs)
    assert result.winner is not None
    assert result.speedup is not None
    print(f"run {seed}: {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "disturbed": disturbed,
        "winner": dict(result.winner.config),
        "speedup": [result.speedup.low, result.speedup.value, result.speedup.high],
        "ties": len(result.ties),
        "seconds": result.seconds,
        "drift": result.to_json()["drift"],
        "mean_of_7_winner": dict(mean_winner),
    }


def tuned(kernel: Kernel, sizes: dict[str, int], options: TuneOptions) -> tuple[TuneResult, list[dict[str, Any]]]:
    """Tune with an empty database; all runs share the cubin cache."""
    from autotile.database.database import Database

    with tempfile.TemporaryDirectory() as folder:
        location = str(Path(folder) / "tuning.db")
        options = replace(options, database=location)
        result = tune(kernel, resolve_problem(kernel.spec, sizes), read_settings(), options)
        with Database.open(location) as database:
            trials = [t for study in database.studies() for t in database.trials(study.study_id, phase="search")]
    return result, [{"config": dict(t.config), "time_us": t.time_us} for t in trials]


def mean_of_seven(kernel: Kernel, sizes: dict[str, int], configs: list[Config]) -> Config:
    """Time each configuration seven times in a row with a warm L2 and return the one with the smallest mean."""
    timer = Timer(live_device().l2_bytes, "hot", limit_s=0.1)
    launches = Matrices(sizes, kernel).launches(configs)
    means = [float(np.mean(timer.samples(launch, 8)[1:])) for launch in launches]
    return configs[int(np.argmin(means))]


def true_times(
    kernel: Kernel, sizes: dict[str, int], contenders: list[Config], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Time the contenders and the winners of all runs interleaved for many rounds, undisturbed."""
    named = [run[which] for run in runs for which in ("winner", "mean_of_7_winner")]
    every = list({config_key(config): config for config in [*contenders, *named]}.values())
    timer = Timer(live_device().l2_bytes, "cold", limit_s=0.1)
    launches = Matrices(sizes, kernel).launches(every)
    timer.warm_up(launches[0])
    times = timer.race(launches, rounds=300, seed=0)
    medians = {config_key(config): median_interval(row).value for config, row in zip(every, times, strict=True)}
    rows = {config_key(config): row for config, row in zip(every, times, strict=True)}
    return {"medians": medians, "rows": rows, "best": min(medians.values()), "default": config_key(contenders[-1])}


def judge(runs: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    """Add to each run the losses of its winners and whether its interval contains the true ratio."""
    for run in runs:
        for which in ("winner", "mean_of_7_winner"):
            run[f"{which}_loss"] = truth["medians"][config_key(run[which])] / truth["best"] - 1.0
        ratio = paired_ratio(truth["rows"][config_key(run["winner"])], truth["rows"][truth["default"]])
        run["true_speedup"] = [ratio.low, ratio.value, ratio.high]
        low, _, high = run["speedup"]
        run["interval_holds"] = low <= ratio.value <= high


def same_under_two_names(sizes: dict[str, int], seed: int) -> dict[str, Any]:
    """Tune a space that holds one configuration under two names."""
    original = load_kernel(KERNEL)
    with tempfile.TemporaryDirectory() as folder:
        text = original.spec.text.replace("[parameters]", "[parameters]\nNAME = [1, 2]", 1)
        text = text.replace("[default]", "[default]\nNAME = 1", 1)
        (Path(folder) / f"{KERNEL}.toml").write_text(text)
        (Path(folder) / original.spec.template).write_text(original.source)
        twins = load_kernel(str(Path(folder) / f"{KERNEL}.toml"))
        only = tuple({**twins.spec.default, "NAME": name} for name in (1, 2))
        result, _ = tuned(twins, sizes, TuneOptions(only=only, trials=2, seed=seed, discard=False))
    assert result.winner is not None
    return {"seed": seed, "tie": len(result.ties) == 1, "winner": result.winner.config["NAME"]}


@contextmanager
def disturbance(active: bool) -> Iterator[None]:
    """Run matrix products in bursts in another process if ``active``."""
    if not active:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", DISTURBANCE], env=dict(os.environ)) as other:
        try:
            yield
        finally:
            other.send_signal(signal.SIGKILL)


def show(runs: list[dict[str, Any]], twins: list[dict[str, Any]]) -> None:
    """Print one line per run and the totals."""
    table = Table(
        "seed", "disturbed", "loss of the winner", "loss by mean of 7", "stated speed-up", "true", "covered", "ties"
    )
    for run in runs:
        table.add_row(
            str(run["seed"]),
            "yes" if run["disturbed"] else "",
            f"{100 * run['winner_loss']:.2f} %",
            f"{100 * run['mean_of_7_winner_loss']:.2f} %",
            "{0:.4f} to {2:.4f}".format(*run["speedup"]),
            f"{run['true_speedup'][1]:.4f}",
            "yes" if run["interval_holds"] else "NO",
            str(run["ties"]),
        )
    Console(width=130).print(table)
    close = sum(run["winner_loss"] <= 0.01 for run in runs)
    held = sum(run["interval_holds"] for run in runs)
    ties = f"; A/A reported as a tie: {sum(twin['tie'] for twin in twins)} of {len(twins)}" if twins else ""
    close_by_mean = sum(run["mean_of_7_winner_loss"] <= 0.01 for run in runs)
    print(f"winner within 1 % of the best: {close} of {len(runs)} (mean of seven runs: {close_by_mean})")
    print(f"interval contains the true ratio: {held} of {len(runs)}{ties}")


if __name__ == "__main__":
    main()
