"""Common parts of the tuner benchmarks: a sample of sgemm_2d's space, and launches of its configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.model import Config
from autotile.cuda.compiler import compile_job
from autotile.cuda.driver import live_device
from autotile.cuda.function import Module
from autotile.cuda.timing import Launch
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel, load_kernel
from autotile.settings import read_settings
from autotile.space.search_space import feasible_space
from autotile.workers.compile_pool import CompilePool

KERNEL = "sgemm_2d"


def sample_configs(sizes: Mapping[str, int], count: int, seed: int = 0) -> list[Config]:
    """Return the default and a random sample of the valid configurations, in the order of the space."""
    kernel = load_kernel(KERNEL)
    space = feasible_space(kernel.spec, kernel.spec.at(sizes), live_device())
    rows = set(np.random.default_rng(seed).choice(len(space), size=min(count, len(space)) - 1, replace=False).tolist())
    default = space.row_of(kernel.spec.default)
    assert default is not None
    return [space.config(row) for row in sorted(rows | {default})]


class Matrices:
    """Operands of one product on the device, and launches of configurations on them."""

    def __init__(self, sizes: Mapping[str, int], kernel: Kernel | None = None) -> None:
        import cupy

        self._kernel = kernel or load_kernel(KERNEL)
        self._sizes = dict(sizes)
        self._device = live_device()
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        generator = np.random.default_rng(0)
        a, b = (cupy.asarray(generator.standard_normal(s, dtype=np.float32)) for s in ((m, k), (k, n)))
        c = cupy.empty((m, n), dtype=np.float32)
        scalars = (np.int32(m), np.int32(n), np.int32(k), np.float32(1.0), np.float32(0.0))
        self._arguments: tuple[Any, ...] = (a, b, c, *scalars)

    def launches(self, configs: Sequence[Config]) -> list[Launch]:
        """Compile the configurations in parallel and return one launch for each."""
        settings = read_settings()
        pool = CompilePool(settings)
        try:
            jobs = [
                compile_job(self._kernel, config, self._kernel.spec.at(), self._device.architecture)
                for config in configs
            ]
            compiled = [pool.submit(job) for job in jobs]
            cubins = [future.result().cubin for future in compiled]
        finally:
            pool.close()
        return [
            self._launch(cubin.path, config) for cubin, config in zip(cubins, configs, strict=True) if cubin is not None
        ]

    def _launch(self, path: Path, config: Config) -> Launch:
        function = Module(path).function(self._kernel.spec.entry)
        geometry = launch_geometry(self._kernel.spec, config, self._kernel.spec.at(self._sizes), self._device)
        function.opt_in(geometry.dynamic_smem_bytes)
        return lambda: function.launch(geometry.grid, geometry.block, self._arguments, geometry.dynamic_smem_bytes)
