"""Sums of rows by whatever is fastest for their number and length: one of two kernels, or CuPy.

    python examples/row_sums/row_sums.py [--tune SECONDS]

With ``--tune``, sizes from the whole family are measured first, to learn what is the fastest for which.
"""

import argparse
from pathlib import Path

import cupy

import autotile

OPERATION = str(Path(__file__).with_name("row_sums.toml"))


def sum_rows(x: cupy.ndarray, sums: cupy.ndarray) -> None:
    """Compute the operation by CuPy."""
    cupy.sum(x, axis=1, out=sums)


autotile.add_library(OPERATION, "cupy", sum_rows, version=cupy.__version__)


def main() -> None:
    """Tune if asked to, then compute the sums for matrices of several shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="tune the whole family of sizes first")
    seconds = parser.parse_args().tune
    if seconds:
        options = autotile.TuneOptions(budget_s=seconds)
        autotile.tune_family(OPERATION, ROWS="1..65536", N="16..4194304", options=options)
    for rows, n in ((1, 10_000_000), (64, 200_000), (4096, 4096), (100_000, 33)):
        x = cupy.random.standard_normal((rows, n), dtype=cupy.float32)
        kernel = autotile.get_best_kernel(OPERATION, ROWS=rows, N=n)
        sums = kernel(x)
        assert cupy.allclose(sums, x.sum(axis=1), atol=1e-3 * n**0.5)
        print(f"{rows} x {n}: {kernel.explain()}")


if __name__ == "__main__":
    main()
