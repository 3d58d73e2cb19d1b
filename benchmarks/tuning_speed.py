"""Configurations per second of autotile and Kernel Tuner, for the same configurations of the same kernel.

    python benchmarks/tuning_speed.py [--shape 4096,4096,4096] [--configurations 120] [--rounds 3] [--output speed.json]

Both try the same configurations of sgemm_2d, each verified against the same product and measured, on the same GPU, in
alternating rounds, each round in a fresh process with empty caches. Kernel Tuner uses its CuPy backend, brute force,
and seven repetitions; autotile uses brute force with its default settings, including the finals. The winners of both
are then timed interleaved by an independent timer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from rich.console import Console
from rich.table import Table
from sgemm_bench import KERNEL, Matrices, sample_configs


def main() -> None:
    """Run the rounds, or one round of one tool in a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096,4096,4096", metavar="M,N,K")
    parser.add_argument("--configurations", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--child", choices=sorted(TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = dict(zip("MNK", (int(size) for size in arguments.shape.split(",")), strict=True))
    if arguments.child:
        print(json.dumps(TOOLS[arguments.child](sizes, arguments.folder)))
        return
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_configs(Path(folder), sizes, arguments.configurations)
        for number, tool in product(range(arguments.rounds), TOOLS):
            entry = {"tool": tool, "round": number, **run_child(tool, arguments.shape, Path(folder))}
            print(f"{tool}, round {number}: {entry['wall_s']:.1f} s", file=sys.stderr, flush=True)
            rounds.append(entry)
            save(arguments.output, {"sizes": sizes, "rounds": rounds})
    duel = time_winners(rounds, sizes)
    show(rounds, duel)
    save(arguments.output, {"sizes": sizes, "times_faster": times_faster(rounds), "rounds": rounds, "winners": duel})


def save(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results so far, so that an interruption does not lose them."""
    if path is not None:
        path.write_text(json.dumps({**provenance(), **results}, indent=1) + "\n")


def write_configs(folder: Path, sizes: dict[str, int], count: int) -> None:
    """Write the sample of configurations for both tools."""
    configs = [dict(config) for config in sample_configs(sizes, count)]
    (folder / "configs.json").write_text(json.dumps(configs))


def run_child(tool: str, shape: str, folder: Path) -> dict[str, Any]:
    """Run one round of a tool in a fresh process with empty caches; add the wall time of the whole process."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "AUTOTILE_DB": f"{caches}/tuning.db",
            "AUTOTILE_CACHE": f"{caches}/autotile",
            "CUPY_CACHE_DIR": f"{caches}/cupy",
            "CUDA_CACHE_DISABLE": "1",
        }
        command = [sys.executable, __file__, "--child", tool, "--folder", str(folder), "--shape", shape]
        start = time.perf_counter()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        wall_s = time.perf_counter() - start
    return {"wall_s": wall_s, **json.loads(done.stdout.splitlines()[-1])}


def run_autotile(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Search the sample by brute force with autotile."""
    from autotile.core.model import Outcome
    from autotile.kernel.library import load_kernel
    from autotile.kernel.problem import resolve_problem
    from autotile.search.samplers import BRUTE_FORCE
    from autotile.settings import read_settings
    from autotile.tuning.options import TuneOptions
    from autotile.tuning.progress_state import Progress
    from autotile.tuning.session import open_session

    kernel = load_kernel(KERNEL)
    configs = json.loads((folder / "configs.json").read_text())
    first_s: list[float] = []
    start = time.perf_counter()

    def watch(progress: Progress) -> None:
        if progress.last is not None and not first_s:
            first_s.append(time.perf_counter() - start)

    problem = resolve_problem(kernel.spec, sizes)
    options = TuneOptions(sampler=BRUTE_FORCE, only=tuple(configs))
    with open_session(kernel, problem, read_settings(), options, watch) as session:
        result = session.run()
        seconds = [trial.seconds for trial in session.trials]
    return {
        "configurations": len(seconds),
        "launched": result.gates["launched"],
        **{f"{stage}_s": sum(s.get(stage, 0.0) for s in seconds) for stage in ("compile", "verify", "measure")},
        "search_s": result.phases["search"],
        "finals_s": result.phases["finals"],
        "first_trial_s": first_s[0],
        **(result.to_json()["load"] or {}),
        "failed": sum(count for outcome, count in result.outcomes.items() if not Outcome(outcome).has_time),
        "winner": dict(result.winner.config) if result.winner else None,
    }


def run_kernel_tuner(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Search the sample by brute force with Kernel Tuner's CuPy backend."""
    import kernel_tuner
    from constraint import FunctionConstraint
    from cupy.cuda import runtime

    # CuPy cuts a UUID at its first zero byte, and Kernel Tuner does not begin on a GPU that has one
    properties = runtime.getDeviceProperties
    runtime.getDeviceProperties = lambda device: {
        **(found := properties(device)),
        "uuid": found["uuid"].ljust(16, b"\0"),
    }

    from autotile.kernel.library import load_kernel

    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    c = np.zeros((m, n), dtype=np.float32)
    answer = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    configs = json.loads((folder / "configs.json").read_text())
    for config in configs:
        config["block_size_x"] = (config["BM"] // config["TM"]) * (config["BN"] // config["TN"])
    names = list(configs[0])
    allowed = {tuple(config[name] for name in names) for config in configs}
    results, environment = kernel_tuner.tune_kernel(
        KERNEL,
        load_kernel(KERNEL).source,
        (m, n),
        [a, b, c, np.int32(m), np.int32(n), np.int32(k), np.float32(1.0), np.float32(0.0)],
        {name: sorted({config[name] for config in configs}) for name in names},
        grid_div_x=["BM"],
        grid_div_y=["BN"],
        restrictions=[FunctionConstraint(lambda *values: tuple(values) in allowed)],
        answer=[None, None, answer, None, None, None, None, None],
        atol=1e-2,
        lang="CUPY",
        compiler_options=["--std=c++17"],
        strategy="brute_force",
        quiet=True,
    )
    del environment
    timed = [result for result in results if isinstance(result["time"], float)]
    best = min(timed, key=lambda result: result["time"])
    return {
        "configurations": len(results),
        "launched": len(timed),
        **{f"{part}_s": sum(r[f"{key}_time"] for r in results) / 1e3 for part, key in PARTS.items()},
        "winner": {name: best[name] for name in names if name != "block_size_x"},
    }


PARTS = {"compile": "compile", "verify": "verification", "measure": "benchmark"}
EXTRAS = {
    "GPU busy": "gpu_busy",
    "compilers busy": "compilers_busy",
    "first trial s": "first_trial_s",
    "finals s": "finals_s",
}
TOOLS = {"autotile": run_autotile, "kernel-tuner": run_kernel_tuner}


def time_winners(rounds: list[dict[str, Any]], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Time the winners of all rounds interleaved; return one entry per winner."""
    from autotile.core.statistics import median_interval
    from autotile.cuda.driver import live_device
    from autotile.cuda.timing import Timer

    winners = {json.dumps(entry["winner"], sort_keys=True): entry["winner"] for entry in rounds}
    timer = Timer(live_device().l2_bytes, "cold", limit_s=0.1)
    launches = Matrices(sizes).launches(list(winners.values()))
    timer.warm_up(launches[0])
    times = timer.race(launches, rounds=100, seed=0)
    entries = []
    for (key, config), samples in zip(winners.items(), times, strict=True):
        interval = median_interval(samples)
        named_by = [f"{r['tool']} {r['round']}" for r in rounds if json.dumps(r["winner"], sort_keys=True) == key]
        entries.append({"config": config, "named_by": named_by, "time_us": interval.value,
                        "interval_us": [interval.low, interval.high]})  # fmt: skip
    return entries


def show(rounds: list[dict[str, Any]], duel: list[dict[str, Any]]) -> None:
    """Print one line per round, the ratio, and the winners."""
    table = Table("tool", "round", "configs", "wall s", "configs/s", "compile s", "verify s", "measure s", *EXTRAS)
    for r in rounds:
        parts = [f"{r[key]:.1f}" for key in ("compile_s", "verify_s", "measure_s")]
        extras = [f"{r[key]:.2f}" if key in r else "" for key in EXTRAS.values()]
        rate_text = f"{r['configurations'] / r['wall_s']:.2f}"
        table.add_row(
            r["tool"], str(r["round"]), str(r["configurations"]), f"{r['wall_s']:.1f}", rate_text, *parts, *extras
        )
    Console(width=160).print(table)
    binding = {r["binds"] for r in rounds if "binds" in r}
    print(f"autotile tries {times_faster(rounds):.1f} times as many configurations per second; bound by: {binding}")
    for entry in sorted(duel, key=lambda e: e["time_us"]):
        config = " ".join(f"{name}={value}" for name, value in entry["config"].items())
        print(f"{entry['time_us']:10.1f} us  {', '.join(entry['named_by'])}: {config}")


def times_faster(rounds: list[dict[str, Any]]) -> float:
    """Return the ratio of autotile's to Kernel Tuner's configurations per second of the whole process, by medians."""
    rate = {tool: np.median([r["configurations"] / r["wall_s"] for r in rounds if r["tool"] == tool]) for tool in TOOLS}
    return float(rate["autotile"] / rate["kernel-tuner"])


if __name__ == "__main__":
    main()
