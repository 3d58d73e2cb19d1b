"""Compare two checkouts of autotile: start-up, first look-up, calls, and a tuning run of 200 trials.

    python benchmarks/checkouts.py --before DIR [--rounds 15] [--tunes 3] [--output checkouts.json]

Every measurement is a fresh process that imports one of the checkouts, in alternation, after a process that warms the
page cache. Without a GPU, measurements that need one are skipped, and the tuning run replays a recording.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from autotile.cuda.driver import device_count

ROOT = Path(__file__).resolve().parents[1]
CLOCK = "import json, time; start = time.perf_counter()\n"
REPORT = "\nprint(json.dumps(dict(ms=1e3 * (time.perf_counter() - start), modules=modules())))"
MODULES = "import sys\ndef modules(): return sum(name.split('.')[0] == 'autotile' for name in sys.modules)\n"
LOOK_UP = "autotile.get_best_kernel({kernel!r}, M=4096, N=4096, K=4096, device='h200')"
PROGRAMS = {
    "import autotile": "import autotile",
    "autotile --help": "import runpy, contextlib, io\n"
    "sys.argv = ['autotile', '--help']\n"
    "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
    "    runpy.run_module('autotile', run_name='__main__')",
    "first look-up, sgemm_2d": f"import autotile; {LOOK_UP.format(kernel='sgemm_2d')}",
    "first look-up, sgemm": f"import autotile; {LOOK_UP.format(kernel='sgemm')}",
}
AGAIN = """
import autotile, timeit, json
look_up = lambda: autotile.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096, device="h200")
look_up()
print(json.dumps(dict(us=1e6 * min(timeit.repeat(look_up, number=20_000, repeat=7)) / 20_000)))
"""
CALLS = """
import autotile, cupy, json, statistics, time
kernel = autotile.get_best_kernel("sgemm_2d", M=64, N=64, K=64)
a = cupy.ones((64, 64), cupy.float32); c = cupy.zeros_like(a)
bound = kernel.bind(a, a, c)
def burst(call, count=300):
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(count): call()
    spent = time.perf_counter() - start
    cupy.cuda.Device().synchronize()
    return 1e6 * spent / count
calls = {"bound kernel, CuPy arrays": lambda: kernel(a, a, c), "pre-bound launch": bound}
for call in calls.values(): burst(call)
times = {name: [] for name in calls}
for _ in range(40):
    for name, call in calls.items(): times[name].append(burst(call))
print(json.dumps({name: statistics.median(each) for name, each in times.items()}))
"""


def main() -> None:
    """Measure both checkouts, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15, help="processes per checkout for start-up and look-ups")
    parser.add_argument("--tunes", type=int, default=3, help="tuning runs of 200 trials per checkout")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve(), "after": ROOT}
    rows = {name: in_turn(checkouts, code, arguments.rounds) for name, code in programs().items()}
    figures = {f"{name}, {unit}": spread(runs, unit) for name, runs in rows.items() for unit in units(runs)}
    if arguments.tunes:
        figures["tune of 200 trials, s"] = tunes(checkouts, arguments.tunes)
    print(f"{'':<44}{'before':>24}{'after':>24}")
    for name, found in figures.items():
        print(f"{name:<44}" + "".join(f"{'{:.3g} ({:.3g} to {:.3g})'.format(*found[side]):>24}" for side in checkouts))
    if arguments.output:
        report = {**provenance(), "rounds": arguments.rounds, "figures": figures}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def programs() -> dict[str, str]:
    """Return the programs to time, by name."""
    timed = {name: f"{MODULES}{CLOCK}{code}{REPORT}" for name, code in PROGRAMS.items()}
    return timed | {"look-up again": AGAIN} | ({"call": CALLS} if device_count() else {})


def in_turn(checkouts: dict[str, Path], code: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run a program ``rounds`` times in each checkout, alternating, after one uncounted run."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for side, checkout in checkouts.items():
                done = python(checkout, Path(folder) / side, "-c", code)
                if number:
                    runs[side].append(json.loads(done.splitlines()[-1]))
    return runs


def tunes(checkouts: dict[str, Path], count: int) -> dict[str, list[float]]:
    """Return median, minimum and maximum of the wall times of tuning runs with empty caches."""
    times: dict[str, list[float]] = {side: [] for side in checkouts}
    for number in range(count):
        for side, checkout in checkouts.items():
            words = ["tune", "sgemm_2d", "M=4096", "N=4096", "K=4096", "--seed", str(number), "--json"]
            answer = json.loads(in_fresh_folder(checkout, "-m", "autotile", *words))
            times[side].append(float(answer["seconds"]))
    return {side: statistics(each) for side, each in times.items()}


def in_fresh_folder(checkout: Path, *words: str) -> str:
    """Run Python with the package of a checkout, an empty database and an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return python(checkout, Path(folder), *words)


def environment_of(checkout: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a process that uses the package of a checkout, with a database and cache of its own."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), *inherited])}
    return environment | {"AUTOTILE_DB": str(folder / "tuning.db"), "AUTOTILE_CACHE": str(folder / "cache")}


def python(checkout: Path, folder: Path, *words: str) -> str:
    """Run Python with the package of a checkout and with its own database and cache."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=checkout, env=environment_of(checkout, folder), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]} in {checkout} failed:\n{done.stderr}")
    return done.stdout


def units(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the names of the figures that a program measures."""
    return list(runs["before"][0])


def spread(runs: dict[str, list[dict[str, float]]], unit: str) -> dict[str, list[float]]:
    """Return median, minimum and maximum of one figure for each checkout."""
    return {side: statistics([run[unit] for run in each]) for side, each in runs.items()}


def statistics(values: list[Any]) -> list[float]:
    """Return median, minimum and maximum."""
    return [float(np.median(values)), float(min(values)), float(max(values))]


if __name__ == "__main__":
    main()
