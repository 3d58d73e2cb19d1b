"""Matrix products against cuBLAS: tune (or load what was tuned), serve, check against float64, time side by side.

    python benchmarks/gemm.py [--dtype float32 bfloat16] [--shapes gemm_shapes.json] [--budget 60] [--output gemm.json]
    python benchmarks/gemm.py --no-tune                     # time what the database, or autotile itself, has to serve

Every product is computed by what `autotile.matmul` would launch for it, with random normal inputs and a cold L2, and is
timed interleaved with cuBLAS through PyTorch and through CuPy (the faster of the two counts), in one run on one GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from gemm_race import Row, race
from gemm_tuning import tune_product
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.device.properties import live_device
from autotile.dispatch.matmul import best_matmul
from autotile.dispatch.product import Product
from autotile.files.settings import read_settings
from autotile.ground.model import Problem
from autotile.store.database import Database
from autotile.store.winners import write_winners

_HERE = Path(__file__).parent
_WORTH_SHIPPING = 0.95
"""Of cuBLAS: what is slower was not tuned well enough to be served to others."""


def main() -> None:
    """Tune and time every shape, print the tables and write the JSON."""
    arguments = _arguments()
    document: dict[str, Any] = {**provenance(), "budget_s": arguments.budget, "dtypes": {}}
    good: list[Problem] = []
    for dtype in arguments.dtype:
        rows: list[Row] = []
        for shape in _read_shapes(arguments.shapes):
            product = Product(*shape, dtype=dtype)
            start = time.monotonic()
            if not arguments.no_tune:
                tune_product(product, arguments.budget, arguments.database)
            seconds = time.monotonic() - start
            kernel = best_matmul(product, database=arguments.database)
            row = race(product, kernel, rounds=arguments.rounds, tuning_s=seconds)
            print(row.line(), flush=True)
            rows.append(row)
            document["dtypes"][dtype] = _summary(rows)
            if arguments.output:
                arguments.output.write_text(json.dumps(document, indent=1))
        _show(dtype, rows)
        good += [row.kernel.problem for row in rows if row.right and row.ratio.value >= _WORTH_SHIPPING]
    if arguments.winners:
        with Database.open(arguments.database or read_settings().database) as database:
            stored = [best.winner for best in database.best(gpu_name=live_device().name) if best.confirmed]
        found = [winner for winner in stored if winner.key.problem in good]
        print(f"{write_winners(arguments.winners, found)} winners in {arguments.winners}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=Path, default=_HERE / "gemm_shapes.json", metavar="FILE", help="JSON list of [M, N, K]"
    )
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "float16", "bfloat16"]
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning a shape and dtype, all included")
    parser.add_argument("--no-tune", action="store_true", help="time what is served as things stand")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds of the timing")
    parser.add_argument("--database", help="path or URL; the user's own where absent")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file to write, after every shape")
    parser.add_argument(
        "--winners", type=Path, metavar="FILE", help="write the winners of products that reach 0.95 of cuBLAS"
    )
    return parser.parse_args()


def _read_shapes(path: Path) -> list[tuple[int, int, int]]:
    try:
        shapes = json.loads(path.read_text())
        return [(int(m), int(n), int(k)) for m, n, k in shapes]
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"{path}: expected a JSON list of [M, N, K]: {error}") from None


def _summary(rows: list[Row]) -> dict[str, Any]:
    ratios = [row.ratio.value for row in rows]
    return {
        "geometric_mean": _geometric_mean(ratios),
        "least": min(ratios),
        "right": all(row.right for row in rows),
        "rows": [row.to_json() for row in rows],
    }


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _show(dtype: str, rows: list[Row]) -> None:
    table = Table(
        "M x N x K", "autotile", "cuBLAS", "ratio", "95 %", "of peak", "right", "tuned", "kernel, configuration"
    )
    for row in rows:
        table.add_row(*row.cells())
    ratios = [row.ratio.value for row in rows]
    console = Console(width=200)
    console.print(f"{dtype}, TFLOP/s, {live_device().name}, cold L2")
    console.print(table)
    console.print(f"geometric mean {_geometric_mean(ratios):.3f}, least {min(ratios):.3f} of cuBLAS")


if __name__ == "__main__":
    main()
