"""Kernels against cuBLAS on one product and one GPU, verified against float64 and timed interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from gemm_product import Product
from gemm_row import CuBlas, Row, Runner
from gemm_tuning import Tuned

from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.statistics import Interval, median_interval, paired_ratio
from autotile.cuda.driver import live_device
from autotile.cuda.timing import BATCH_BELOW_US, Timer
from autotile.serving.bound import BoundKernel

_TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RUNS_COMPARED = 5
_LIMIT_S = 2.0
"""GPU time of a race, in seconds; long products get fewer rounds."""
_MIN_ROUNDS = 12
_LONG_US = 2 * BATCH_BELOW_US
"""Shorter products are timed in CUDA graphs, in which CuPy refuses to call cuBLAS."""


def race(product: Product, kernels: Sequence[BoundKernel], *, rounds: int, tuned: Tuned) -> Row:
    """Verify kernels on one product and time them against cuBLAS."""
    torch.backends.cuda.matmul.allow_tf32 = False
    data = _Data(product)
    checked = [data.check(kernel) for kernel in kernels]
    launches = [launch for launch, _, _ in checked]
    cublas = {"torch": _on_cupys_stream(lambda: torch.mm(data.a, data.b, out=data.theirs))}
    timer = Timer(live_device().l2_bytes, "cold", limit_s=0.1)
    timer.warm_up(launches[0])
    once_us = min(float(np.median(timer.samples(call, 3))) for call in (*launches, *cublas.values()))
    if product.dtype != "bfloat16" and once_us > _LONG_US:
        x, y, z = map(_in_cupy, (data.a, data.b, data.theirs))
        cublas["cupy"] = lambda: cupy.matmul(x, y, out=z)
    everyone = [*launches, *cublas.values()]
    rounds = int(np.clip(1e6 * _LIMIT_S / (once_us * len(everyone)), _MIN_ROUNDS, rounds))
    times = timer.race(everyone, rounds, seed=0)
    theirs = dict(zip(cublas, times[len(launches) :], strict=True))
    through = min(theirs, key=lambda name: float(np.median(theirs[name])))
    runners = tuple(
        Runner(kernel, median_interval(ours), _paired(ours, theirs[through]), error, deterministic)
        for kernel, (_, error, deterministic), ours in zip(kernels, checked, times[: len(kernels)], strict=True)
    )
    cublas_result = CuBlas(median_interval(theirs[through]), through, data.error(data.theirs))
    tolerance = output_tolerance(DTYPES[product.dtype], [DTYPES[product.dtype]], product.k)
    return Row(product, runners, cublas_result, tolerance, tuned)


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the ratio of two times over the rounds that both raced: a race drops what is clearly slower."""
    shared = min(len(ours), len(theirs))
    return paired_ratio(ours[:shared], theirs[:shared])


class _Data:
    """Random factors of a product on the GPU, the exact result, and a buffer for the result of cuBLAS."""

    def __init__(self, product: Product) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        kind = _TORCH_TYPES[product.dtype]
        self.a, self.b = (
            torch.randn(shape, device="cuda", generator=generator).to(kind)
            for shape in ((product.m, product.k), (product.k, product.n))
        )
        self.theirs = torch.empty((product.m, product.n), device="cuda", dtype=kind)
        self._exact = self.a.double() @ self.b.double()
        self._scale = torch.maximum(self._exact.abs(), self._exact.square().mean().sqrt())

    def check(self, kernel: BoundKernel) -> tuple[Callable[[], None], float, bool]:
        """Return a launch of the kernel, its error, and whether further runs are bit-identical."""
        result = torch.full_like(self.theirs, float("nan"))
        launch = kernel.bind(
            *map(_in_cupy, (self.a, self.b, result))
        )  # on CuPy's stream, where the timer records its events
        torch.cuda.synchronize()
        launch()
        error, first, same = self.error(result), result.clone(), True
        for _ in range(_RUNS_COMPARED):
            result.fill_(float("nan"))
            torch.cuda.synchronize()
            launch()
            torch.cuda.synchronize()
            same = same and torch.equal(result, first)
        return launch, error, same

    def error(self, result: torch.Tensor) -> float:
        """Return the largest error relative to the larger of the element and the RMS; infinite if there is a NaN."""
        torch.cuda.synchronize()
        error = float(((result.double() - self._exact).abs() / self._scale).max())
        return float("inf") if np.isnan(error) else error


def _in_cupy(tensor: torch.Tensor) -> Any:
    """Return a CuPy array on the same memory; bfloat16 as its bits."""
    if tensor.dtype is torch.bfloat16:
        return cupy.asarray(tensor.view(torch.int16)).view(np.uint16)
    return cupy.asarray(tensor)


def _on_cupys_stream(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a PyTorch call that is queued on CuPy's current stream, where the timer records its events."""

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            call()

    return launch
