"""The ladder of tiled matrix multiplication: naive, tiled, 2D-tiled and cuBLAS, side by side on one GPU.

    python benchmarks/ladder.py [--shapes 2048,2048,2048 1999,2999,1013] [--trials 200] [--output ladder.json]

Tunes the three kernels at each shape (M,N,K), serves them with `get_best_kernel`, verifies each result against float64,
and times all four interleaved: fp32 without TF32, cold L2, random normal inputs, CUDA events, medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from rich.console import Console
from rich.table import Table

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.statistics import median_interval
from autotile.cuda.driver import live_device
from autotile.cuda.timing import Timer

KERNELS = ("matmul_naive", "matmul_tiled", "sgemm_2d")
CUBLAS = "cuBLAS"
SINGLE = DTYPES["float32"]


def main() -> None:
    """Run every shape, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["2048,2048,2048", "1999,2999,1013"], metavar="M,N,K")
    parser.add_argument("--trials", type=int, default=200, help="tuning trials per kernel")
    parser.add_argument("--rounds", type=int, default=50, help="interleaved rounds of the final timing")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = live_device()
    rows = [
        row
        for shape in arguments.shapes
        for row in climb(tuple(int(size) for size in shape.split(",")), arguments.trials, arguments.rounds)
    ]
    show(rows, device.peak_fp32_flops_per_s)
    if arguments.output:
        document = {"device": device.to_json(), "trials": arguments.trials, "rounds": arguments.rounds, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1))


def climb(shape: tuple[int, ...], trials: int, rounds: int) -> list[dict[str, Any]]:
    """Tune, serve, verify and time the ladder at one shape; return one row per step."""
    m, n, k = shape
    generator = np.random.default_rng(0)
    a, b = (cupy.asarray(generator.standard_normal(s, dtype=np.float32)) for s in ((m, k), (k, n)))
    exact = cupy.asarray(a, dtype=np.float64) @ cupy.asarray(b, dtype=np.float64)
    steps: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {}
    for name in KERNELS:
        result = autotile.tune(name, options=autotile.TuneOptions(trials=trials), M=m, N=n, K=k)
        kernel = autotile.get_best_kernel(name, M=m, N=n, K=k)
        c = cupy.full((m, n), np.nan, dtype=np.float32)
        facts = {"tier": kernel.tier, "config": dict(kernel.config), "tuning_s": round(result.seconds, 1)}
        steps[name] = (kernel.bind(a, b, c), c, facts)
    c = cupy.empty((m, n), dtype=np.float32)
    steps[CUBLAS] = (lambda: cupy.matmul(a, b, out=c), c, {})

    launches = [launch for launch, _, _ in steps.values()]
    timer = Timer(live_device().l2_bytes, "cold", limit_s=0.1)
    timer.warm_up(launches[-1])
    times = timer.race(launches, rounds, seed=0)
    scale = float(cupy.sqrt(cupy.mean(exact**2)))
    tolerance = output_tolerance(SINGLE, [SINGLE], k)
    rows = []
    for (name, (_, product, facts)), samples in zip(steps.items(), times, strict=True):
        interval = median_interval(samples)
        error = float(cupy.max(cupy.abs(product - exact))) / scale
        flops = 2.0 * m * n * k
        rows.append(
            {
                "shape": list(shape),
                "kernel": name,
                "tflops_per_s": flops / interval.value / 1e6,
                "interval": [flops / interval.high / 1e6, flops / interval.low / 1e6],
                "time_us": interval.value,
                "error_over_rms": error,
                "right": error <= tolerance,
                **facts,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], peak_flops_per_s: float) -> None:
    """Print one line per step."""
    table = Table("M x N x K", "kernel", "TFLOP/s", "95 % interval", "of fp32 peak", "error / RMS", "right", "tier")
    for row in rows:
        table.add_row(
            "x".join(map(str, row["shape"])),
            row["kernel"],
            f"{row['tflops_per_s']:.1f}",
            "{:.1f} to {:.1f}".format(*row["interval"]),
            f"{100e12 * row['tflops_per_s'] / peak_flops_per_s:.1f} %",
            f"{row['error_over_rms']:.1e}",
            "yes" if row["right"] else "NO",
            row.get("tier", ""),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
