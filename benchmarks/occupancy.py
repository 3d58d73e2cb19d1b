"""Compare the occupancy calculator with the driver, on configurations compiled for this machine's GPU.

    python benchmarks/occupancy.py [--configurations 800] [--seed 0] [--output occupancy.json]

Draws valid configurations of each kernel at random, compiles them for the GPU, and compares the calculator's number of
blocks per SM with ``cuOccupancyMaxActiveBlocksPerMultiprocessor``.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from autotile.core.device import DeviceProperties
from autotile.core.model import Config
from autotile.cuda.compiler import CompileJob, CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.cuda.function import Module
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel, load_kernel
from autotile.settings import available_cores, read_settings
from autotile.space.limits import compiled_occupancy
from autotile.space.search_space import feasible_space

KERNELS = ("matmul_naive", "matmul_tiled", "sgemm_2d")


def main() -> None:
    """Compare every kernel, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=800, help="maximum number per kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = live_device()
    load_cupy().zeros(1)  # creates a context
    rows = {name: compare(load_kernel(name), device, arguments.configurations, arguments.seed) for name in KERNELS}
    for name, row in rows.items():
        print(f"{name}: {row['agreed']:,} of {row['configurations']:,} agree")
    if arguments.output:
        arguments.output.write_text(json.dumps({**provenance(), "kernels": rows}, indent=1) + "\n")


def compare(kernel: Kernel, device: DeviceProperties, count: int, seed: int) -> dict[str, int]:
    """Return the number of configurations compared and the number that agreed."""
    spec = kernel.spec
    space = feasible_space(spec, spec.at(), device)
    drawn = np.random.default_rng(seed).permutation(len(space))[:count]
    configs = [space.config(int(row)) for row in drawn]
    jobs = [compile_job(kernel, config, spec.at(), device.architecture) for config in configs]
    with ProcessPoolExecutor(available_cores()) as pool:
        paths = list(pool.map(cached, jobs))
    agreed = sum(
        agree(kernel, config, device, job, path) for config, job, path in zip(configs, jobs, paths, strict=True)
    )
    return {"configurations": len(configs), "agreed": agreed}


def cached(job: CompileJob) -> Path:
    """Compile into the user's cubin cache and return the path of the cubin."""
    settings = read_settings()
    return CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job).path


def agree(kernel: Kernel, config: Config, device: DeviceProperties, job: CompileJob, path: Path) -> bool:
    """Return True if calculator and driver give the same number of blocks per SM."""
    settings = read_settings()
    resources: Any = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job).resources
    geometry = launch_geometry(kernel.spec, config, kernel.spec.at(), device)
    function = Module(path).function(kernel.spec.entry)
    function.opt_in(geometry.dynamic_smem_bytes)
    measured = function.blocks_per_sm(geometry.threads, geometry.dynamic_smem_bytes)
    return measured == compiled_occupancy(geometry, resources, device).blocks_per_sm


if __name__ == "__main__":
    main()
