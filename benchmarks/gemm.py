"""Matrix products against cuBLAS: tune (or load tuned configurations), serve, verify against float64, time interleaved.

    python benchmarks/gemm.py [--dtype float32 bfloat16] [--shapes gemm_shapes.json] [--budget 60] [--output gemm.json]
    python benchmarks/gemm.py --no-tune                     # time what the database, or autotile itself, serves

Every product is computed by the kernel that `autotile.matmul` would launch for it, with random normal inputs and a cold
L2, and is timed interleaved with cuBLAS through PyTorch and through CuPy (the faster of the two counts), in one run on
one GPU. A float32 product is also computed by the kernel that `autotile.matmul` would launch with ``emulate=False``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemm_product import Product
from gemm_race import race
from gemm_row import Row, headings, summary
from gemm_seeds import Seed, read_seeds
from gemm_tuning import Tuned, tune_product
from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.cuda.driver import live_device
from autotile.database.database import Database
from autotile.exchange.shipped import write_winners
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.operations import MatmulOptions
from autotile.settings import read_settings
from autotile.workers.child import WorkerPool

_HERE = Path(__file__).parent
_WORTH_SHIPPING = 0.95
"""Minimum speed relative to cuBLAS: slower results were not tuned well enough to ship."""


def main() -> None:
    """Tune and time every shape, print the tables and write the JSON."""
    arguments = _arguments()
    seeds = read_seeds(arguments.seeds) if arguments.seeds else []
    budget_s = None if arguments.no_tune else arguments.budget
    document: dict[str, Any] = {**provenance(), "budget_s": budget_s, "dtypes": {}}
    all_rows: list[Row] = []
    for dtype in arguments.dtype:
        rows: list[Row] = []
        for row in _rows(dtype, arguments, seeds):
            print("  ".join((dtype, *row.cells())), flush=True)
            rows.append(row)
            document["dtypes"][dtype] = summary(rows)
            if arguments.output:
                arguments.output.write_text(json.dumps(document, indent=1))
        _show(dtype, rows)
        all_rows += rows
    if arguments.winners:
        print(f"{_write_winners(all_rows, arguments)} winners in {arguments.winners}")


def _rows(dtype: str, arguments: argparse.Namespace, seeds: Sequence[Seed]) -> Iterator[Row]:
    """Tune and time the products one by one."""
    database = arguments.database
    with WorkerPool() as worker_pool:
        for shape in _read_shapes(arguments.shapes):
            product = Product(*shape, dtype=dtype, emulate=not arguments.no_emulation)
            tuned = (
                Tuned() if arguments.no_tune else tune_product(product, arguments.budget, database, worker_pool, seeds)
            )
            yield race(product, _kernels(product, database), rounds=arguments.rounds, tuned=tuned)


def _kernels(product: Product, database: str | None) -> list[BoundKernel]:
    """Return the kernel that `autotile.matmul` launches, and the one without emulation if it is another kernel."""
    plain, options = replace(product, emulate=False), MatmulOptions(database=database)
    best = default_dispatcher.serve_product(product.sizes, product.dtype, options)
    alone = default_dispatcher.serve_product(plain.sizes, plain.dtype, options)
    return [best] if alone.kernel == best.kernel else [best, alone]


def _write_winners(rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    """Write the winners of all timed products that are fast enough and return their number."""
    raced = [(row, runner) for row in rows for runner in row.runners]
    good = [r.kernel.problem for row, r in raced if row.is_right(r) and r.ratio.value >= _WORTH_SHIPPING]
    with Database.open(arguments.database or read_settings().database) as database:
        stored = [best.winner for best in database.best(gpu_name=live_device().name) if best.confirmed]
    found = [winner for winner in stored if winner.key.problem in good]
    return write_winners(arguments.winners, found) if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=Path, default=_HERE / "gemm_shapes.json", metavar="FILE", help="JSON list of [M, N, K]"
    )
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "float16", "bfloat16"]
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning per shape and dtype, in total")
    parser.add_argument("--no-tune", action="store_true", help="time what is served without further tuning")
    parser.add_argument("--no-emulation", action="store_true", help="compute float32 on the CUDA cores alone")
    parser.add_argument(
        "--seeds",
        type=Path,
        metavar="FILE",
        help='configurations to try first: {"float32": [{"kernel": NAME, "shape": [M, N, K], "config": {}}], ...}',
    )
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds of the timing")
    parser.add_argument("--database", help="path or URL (default: the user's database)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file, rewritten after every shape")
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


def _show(dtype: str, rows: Sequence[Row]) -> None:
    table = Table(*headings(dtype))
    for row in rows:
        table.add_row(*row.cells())
    console = Console(width=220)
    console.print(f"{dtype}, TFLOP/s, {live_device().name}, cold L2")
    console.print(table)
    found = summary(rows)
    for what, ratios in (("autotile.matmul", found), ("CUDA cores alone", found.get("cuda_cores"))):
        if ratios is not None:
            mean, least = ratios["geometric_mean"], ratios["least"]
            console.print(f"{what}: geometric mean {mean:.3f}, minimum {least:.3f} of cuBLAS")


if __name__ == "__main__":
    main()
