"""Seconds that the compilations of a kernel take, with the headers that it begins with precompiled, and without.

    python benchmarks/headers.py [--configs 24] [--workers 2] [--rounds 3] [--output headers.json]

The first configurations of each kernel are compiled by a pool of workers, as in a tuning session, in turns: with an
empty cache, with the cache of that session less its cubins (as after a change of the kernel's body), and without
precompiled headers, which a macro of a name that is reserved for libraries prevents. Medians of the rounds. The example
with CuTe is compiled if AUTOTILE_INCLUDE names the folder of CUTLASS's headers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from statistics import median

from provenance import provenance
from rich.console import Console
from rich.table import Table

from autotile.core.model import Outcome
from autotile.cuda.compiler import CompileJob, compile_job
from autotile.kernel.library import load_kernel
from autotile.settings import read_settings
from autotile.workers.compile_pool import CompilePool

ROOT = Path(__file__).parents[1]
INCLUDED = {
    "cooperative_groups.h": "cooperative_groups::this_thread_block().sync();",
    "cuda/barrier": "__shared__ cuda::barrier<cuda::thread_scope_block> barrier;",
    "cub/cub.cuh": "__shared__ typename cub::BlockScan<float, TILE>::TempStorage storage;",
}
"""Statement that needs each header."""
WAYS = ("empty cache", "headers known", "without")


def jobs_of(name: str, count: int) -> list[CompileJob]:
    """Return compilations of an example, or of a kernel of a few lines that includes a header."""
    if name not in INCLUDED:
        kernel = load_kernel(str(ROOT / "examples" / name / f"{name}.toml"))
        values = islice(product(*(one.values for one in kernel.spec.parameters)), count)
        configs = [dict(zip((one.name for one in kernel.spec.parameters), each, strict=True)) for each in values]
        return [compile_job(kernel, config, kernel.spec.at(), "sm_90") for config in configs]
    body = f'extern "C" __global__ void f(float* x) {{ {INCLUDED[name]} x[threadIdx.x] = TILE; }}\n'
    source = f"#include <{name}>\n{body}"
    tiles = (f"-DTILE={32 * number}" for number in range(1, count + 1))
    return [CompileJob(source, name, "/nowhere/f.cu", "f", "sm_90", (tile,)) for tile in tiles]


def seconds(jobs: list[CompileJob], folder: Path, workers: int) -> float:
    """Return the time until all jobs are compiled, with the start of the workers."""
    begin = time.perf_counter()
    with closing(CompilePool(replace(read_settings(), cache=folder), workers, 60.0)) as pool:
        futures = [pool.submit(job) for job in jobs]
        assert {future.result().outcome for future in futures} == {Outcome.OK}
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for name in ("cub_rows", *(["cute_copy"] if read_settings().include_folders else []), *INCLUDED):
        jobs = jobs_of(name, given.configs)
        plain = [replace(job, options=(*job.options, "-DCUB_NOTHING=1")) for job in jobs]
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                taken["without"].append(seconds(plain, folder / "plain", given.workers))
                taken["empty cache"].append(seconds(jobs, folder, given.workers))
                for cubin in folder.glob("cubins/*.cubin"):
                    cubin.unlink()
                taken["headers known"].append(seconds(jobs, folder, given.workers))
        rows.append({"kernel": name, "seconds": {way: round(median(each), 2) for way, each in taken.items()}})
    table = Table("kernel", *WAYS)
    for row in rows:
        table.add_row(row["kernel"], *(f"{row['seconds'][way]:.1f} s" for way in WAYS))
    Console().print(table)
    document = {
        **provenance(),
        "configs": given.configs,
        "workers": given.workers,
        "rounds": given.rounds,
        "rows": rows,
    }
    if given.output:
        given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
