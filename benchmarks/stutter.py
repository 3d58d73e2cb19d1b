"""First calls at new sizes: autotile.torch.matmul beside torch.matmul, in a cold and in a warm process.

    python benchmarks/stutter.py [--sizes 1000] [--dtypes float32,float16,bfloat16] [--seed 0] [--output stutter.json]

Each size is called once by either, in turn, and the host time of the call is measured until it returns; the GPU is
idle before it. Products are checked against torch's. A cold process begins with an empty cubin cache and database, a
warm one has called the same number of other sizes before. The table gives the host time in milliseconds: median, 99th
percentile and worst; and the share of sizes that were served by something else while the choice was compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from any_size_draw import Sizes, draw
from provenance import provenance
from rich.console import Console
from rich.table import Table

RANGES = {"M": (1, 8192), "N": (16, 8192), "K": (16, 8192)}
DTYPES = ("float32", "float16", "bfloat16")


def main() -> None:
    """Measure in processes of their own, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=1000)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # the dtype, in a process of its own
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.sizes, given.seed)))
        return
    rows: dict[str, Any] = {}
    for dtype in given.dtypes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"AUTOTILE_CACHE": f"{folder}/cache", "AUTOTILE_DB": f"{folder}/empty.db"}
            command = [sys.executable, __file__, "--measure", dtype, "--sizes", str(given.sizes)]
            done = subprocess.run(
                [*command, "--seed", str(given.seed)], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            rows[dtype] = json.loads(done.stdout)
    table = Table("", *(f"{name} ms" for name in ("median", "p99", "worst")), "stood in")
    for dtype, phases in rows.items():
        for phase, figures in phases.items():
            for who in ("torch", "autotile"):
                cells = (f"{figures[who][name]:.3f}" for name in ("median", "p99", "worst"))
                share = f"{figures['stood_in']:.1%}" if who == "autotile" else ""
                table.add_row(f"{dtype} {phase} {who}", *cells, share)
    Console().print(table)
    if given.output:
        given.output.write_text(json.dumps({**provenance(), "sizes": given.sizes, "ms": rows}, indent=1) + "\n")


def measure(dtype: str, count: int, seed: int) -> dict[str, Any]:
    """Return the distribution of the host times in milliseconds in the cold and in the warm state of this process."""
    import torch

    import autotile
    from autotile.serving.dispatcher import default_dispatcher

    kind = getattr(torch, dtype)
    problems = draw(RANGES, (), 2 * count, seed)
    memory = torch.randn(RANGES["M"][1] * RANGES["K"][1], device="cuda").to(kind)
    torch.mm(memory[:64].view(8, 8), memory[:64].view(8, 8))  # context and cuBLAS
    autotile.torch.matmul(memory[:64].view(8, 8), memory[:64].view(8, 8))

    def timed(sizes: Sizes) -> tuple[float, float, bool]:
        a = memory[: sizes["M"] * sizes["K"]].view(sizes["M"], sizes["K"])
        b = memory[-sizes["K"] * sizes["N"] :].view(sizes["K"], sizes["N"])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        expected = torch.matmul(a, b)
        middle = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        found = autotile.torch.matmul(a, b)
        end = time.perf_counter()
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        assert error < (1e-4 if dtype == "float32" else 2e-2), (sizes, error)
        served = next(reversed(default_dispatcher.products.kernels.values()))
        return 1e3 * (middle - begin), 1e3 * (end - again), bool(served.choice.awaited)

    found = {}
    for phase, part in (("cold", problems[:count]), ("warm", problems[count:])):
        times = [timed(sizes) for sizes in part]
        found[phase] = {
            name: {
                "median": float(np.median(column)),
                "p99": float(np.percentile(column, 99)),
                "worst": float(np.max(column)),
            }
            for name, column in zip(("torch", "autotile"), np.array([row[:2] for row in times]).T, strict=True)
        } | {"stood_in": float(np.mean([row[2] for row in times]))}
    return found


if __name__ == "__main__":
    main()
