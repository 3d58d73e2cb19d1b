"""Runs configurations of a matrix template on the device and judges them as a tuning run would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.cuda.function import LaunchSequence, StepFunctions
from autotile.cuda.instance import ProblemInstance
from autotile.cuda.packing import pack_arguments
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.launch import LaunchData, LaunchPlan
from autotile.kernel.library import Kernel

Sizes = dict[str, int]


class TemplateOnDevice:
    def __init__(self, kernel: Kernel, device: DeviceProperties, support: SupportKernels) -> None:
        self._kernel, self._device, self._support = kernel, device, support

    def compiled(self, config: Config, dtype: str, flags: Sizes) -> StepFunctions:
        cubin = compile_cubin(
            compile_job(self._kernel, config, self._kernel.spec.at(flags, dtype), self._device.architecture)
        )
        symbols = {entry: found.symbol for entry, found in cubin.functions.items()}
        return StepFunctions(self._kernel.spec.steps, cubin.cubin, symbols)

    def expect_right(self, functions: StepFunctions, config: Config, dtype: str, sizes: Sizes, *, check: bool) -> None:
        """Twice in a row, so that what one launch leaves in the workspaces meets the next one."""
        instance = ProblemInstance(self._kernel.spec, self._kernel.spec.at(sizes, dtype), self._support, check=check)
        bound = instance.bind(config, self._device)
        launch = LaunchSequence(functions, bound.plan, bound.arguments)
        for _ in range(2):
            instance.prepare(bound)
            launch()
            verdict = instance.verdict(bound)
            assert verdict.outcome is Outcome.OK, (config, sizes, verdict.reason)

    def expect_right_at_shapes(
        self, config: Config, dtype: str, flags: Sizes, shapes: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """One cubin at M, N, K and batch of each, with the guard bands and inputs of the check at every second one."""
        functions = self.compiled(config, dtype, flags)
        for at, shape in enumerate(shapes):
            sizes = {**dict(zip(("M", "N", "K", "BATCH"), shape, strict=True)), **flags}
            self.expect_right(functions, config, dtype, sizes, check=at % 2 == 1)

    def expect_right_at_offsets(self, config: Config, sizes: Sizes, offsets: tuple[int, int, int]) -> None:
        """fp16 in and out with A, B and C so many elements behind an aligned address, beta = 0 over NaN."""
        cp = load_cupy()
        m, n, k = sizes["M"], sizes["N"], sizes["K"]
        room_a, room_b = (
            cp.random.standard_normal(c + 64, dtype=cp.float32).astype(cp.float16) for c in (m * k, k * n)
        )
        a, b = room_a[offsets[0] :][: m * k], room_b[offsets[1] :][: k * n]
        room_c = cp.full(m * n + 64, cp.nan, cp.float16)
        c = room_c[offsets[2] :][: m * n]
        of = self._kernel.spec, config, self._kernel.spec.at(sizes, "float16"), self._device
        data = LaunchData.of(*of)
        workspaces = {w.name: cp.zeros(w.size_bytes, cp.uint8) for w in data.workspaces}
        bound = {s.name: np.int32(sizes[s.name]) for s in self._kernel.spec.scalars if s.name in sizes}
        arguments = pack_arguments(
            self._kernel.spec,
            data,
            addresses={name: x.data.ptr if x.size else 0 for name, x in {"A": a, "B": b, "C": c, **workspaces}.items()},
            scalars={**bound, "alpha": np.float32(1), "beta": np.float32(0)},
        )
        plan = LaunchPlan.of(*of)
        LaunchSequence(self.compiled(config, "float16", sizes), plan, [arguments])()
        wide_a, wide_b = a.astype(cp.float64), b.astype(cp.float64)
        left = wide_a.reshape(k, m).T if sizes["TRANS_A"] else wide_a.reshape(m, k)
        right = wide_b.reshape(n, k).T if sizes["TRANS_B"] else wide_b.reshape(k, n)
        error = cp.abs(c.reshape(m, n).astype(cp.float64) - left @ right).max()
        assert float(error) < 0.005 * k**0.5, (config, sizes, offsets)
        outside = cp.concatenate([room_c[: offsets[2]], room_c[offsets[2] + m * n :]])
        assert bool(cp.isnan(outside).all())
