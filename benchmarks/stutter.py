"""First calls at new sizes: autotile.torch.matmul beside torch.matmul, in a cold and in a warm process.

    python benchmarks/stutter.py [--sizes 1000] [--dtypes float32,float16,bfloat16] [--seed 0] [--output stutter.json]

Each size is called once by either, in turn, and the host time of the call is measured until it returns; the GPU is
idle before it. Then all sizes are called once more, by when the choices for most have been made. Products are checked
against torch's. A cold process has called nothing of autotile before, and begins with an empty cubin cache and
database; a warm one has called the same number of other sizes. The table gives the host time in milliseconds, median,
99th percentile and worst, of the first and of the second calls; Python's full garbage collections, which may begin in
any call, are counted, and the longest given.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
    table = Table("", *(f"{name} ms" for name in ("median", "p99", "worst")), "collections, ms")
    for dtype, phases in rows.items():
        for phase, figures in phases.items():
            for who in ("torch", "autotile"):
                cells = (f"{figures[who][name]:.3f}" for name in ("median", "p99", "worst"))
                longest = ", ".join(f"{time_ms:.0f}" for time_ms in figures["collections_ms"])
                table.add_row(f"{dtype} {phase} {who}", *cells, longest if who == "autotile" else "")
    Console().print(table)
    if given.output:
        given.output.write_text(json.dumps({**provenance(), "sizes": given.sizes, "ms": rows}, indent=1) + "\n")


def measure(dtype: str, count: int, seed: int) -> dict[str, Any]:
    """Return the distribution of the host times in milliseconds in the cold and in the warm state of this process."""
    import torch

    import autotile

    kind = getattr(torch, dtype)
    problems = draw(RANGES, (), 2 * count, seed)
    memory = torch.randn(RANGES["M"][1] * RANGES["K"][1], device="cuda").to(kind)
    torch.mm(memory[:64].view(8, 8), memory[:64].view(8, 8))  # context and cuBLAS

    def timed(product: Callable[[Any, Any], Any], a: Any, b: Any) -> tuple[float, Any]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found = product(a, b)
        return 1e3 * (time.perf_counter() - begin), found

    def rounds(part: list[Sizes]) -> Iterator[tuple[float, float]]:
        for sizes in part:
            a = memory[: sizes["M"] * sizes["K"]].view(sizes["M"], sizes["K"])
            b = memory[-sizes["K"] * sizes["N"] :].view(sizes["K"], sizes["N"])
            by_torch, expected = timed(torch.matmul, a, b)
            own, found = timed(autotile.torch.matmul, a, b)
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            assert error < (1e-4 if dtype == "float32" else 2e-2), (sizes, error)
            yield by_torch, own

    collections: list[float] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            collections.append(time.perf_counter())

    gc.callbacks.append(collecting)
    found: dict[str, Any] = {}
    for phase, part in (("cold", problems[:count]), ("warm", problems[count:])):
        for name in ("first", "second"):
            collections.clear()
            columns = np.array(list(rounds(part))).T
            found[f"{phase} {name}"] = {
                who: {
                    "median": float(np.median(column)),
                    "p99": float(np.percentile(column, 99)),
                    "worst": float(np.max(column)),
                }
                for who, column in zip(("torch", "autotile"), columns, strict=True)
            } | {"collections_ms": [1e3 * (end - begin) for begin, end in zip(*[iter(collections)] * 2, strict=False)]}
    return found


if __name__ == "__main__":
    main()
