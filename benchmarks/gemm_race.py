"""One product on one GPU: the served kernel against cuBLAS, checked against float64 and timed interleaved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch

from autotile.device.properties import live_device
from autotile.device.shots import BATCH_BELOW_US
from autotile.device.timing import Timer
from autotile.dispatch.bound import BoundKernel
from autotile.dispatch.product import Product
from autotile.ground.dtypes import DTYPES
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import config_text
from autotile.ground.stats import Interval, median_interval, paired_ratio
from autotile.ground.tolerance import output_tolerance

_TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TENSOR_FMAS_PER_SM = {"8.0": 1024, "9.0": 2048}
"""Dense 16-bit multiply-adds that an SM starts in a cycle (NVIDIA A100 and H100 white papers: 312 TFLOP/s on 108 SMs at
1410 MHz, 989 TFLOP/s on 132 SMs at 1830 MHz)."""
_RUNS_COMPARED = 5
_LIMIT_S = 2.0
"""GPU time of a race; long products get fewer rounds."""
_LEAST_ROUNDS = 12
_LONG_US = 2 * BATCH_BELOW_US
"""Shorter products are timed in CUDA graphs, in which CuPy refuses to call cuBLAS."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one product fared."""

    product: Product
    kernel: BoundKernel
    time_us: Interval
    cublas_us: Interval
    cublas_through: str
    ratio: Interval
    """Time of cuBLAS over time of the kernel: above 1 where the kernel is faster."""
    error: float
    tolerance: float
    deterministic: bool
    peak_flops_per_s: float | None
    tuning_s: float

    @property
    def right(self) -> bool:
        """Whether the result is within tolerance, and the same in every run."""
        return self.error <= self.tolerance and self.deterministic

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        rate = self.product.flops / self.time_us.value / 1e6
        return (
            f"{self.product.m} x {self.product.n} x {self.product.k}",
            f"{rate:.1f}",
            f"{self.product.flops / self.cublas_us.value / 1e6:.1f}",
            f"{self.ratio.value:.3f}",
            f"{self.ratio.low:.3f} to {self.ratio.high:.3f}",
            f"{1e14 * rate / self.peak_flops_per_s:.1f} %" if self.peak_flops_per_s else "",
            "yes" if self.right else "NO",
            f"{self.tuning_s:.0f} s" if self.tuning_s >= 0.5 else self.kernel.tier,
            f"{self.kernel.kernel}: {config_text(self.kernel.config)}",
        )

    def line(self) -> str:
        """The row as it is printed while the benchmark runs."""
        return "  ".join((self.product.dtype, *self.cells()))

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        tflop = self.product.flops / 1e6
        return {
            "shape": [self.product.m, self.product.n, self.product.k],
            "tflops_per_s": tflop / self.time_us.value,
            "cublas_tflops_per_s": tflop / self.cublas_us.value,
            "cublas_through": self.cublas_through,
            "ratio": self.ratio.value,
            "ratio_interval": [self.ratio.low, self.ratio.high],
            "time_us": self.time_us.value,
            "time_interval_us": [self.time_us.low, self.time_us.high],
            "share_of_peak": 1e12 * tflop / self.time_us.value / self.peak_flops_per_s
            if self.peak_flops_per_s
            else None,
            "error_over_rms": self.error,
            "tolerance": self.tolerance,
            "deterministic": self.deterministic,
            "kernel": self.kernel.kernel,
            "config": dict(self.kernel.config),
            "tier": self.kernel.tier,
            "tuning_s": round(self.tuning_s, 1),
        }


def race(product: Product, kernel: BoundKernel, *, rounds: int, tuning_s: float) -> Row:
    """Check and time one product."""
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(0)
    kind = _TORCH_TYPES[product.dtype]
    a, b = (
        torch.randn(shape, device="cuda", generator=generator).to(kind)
        for shape in ((product.m, product.k), (product.k, product.n))
    )
    ours, theirs = (torch.full((product.m, product.n), float("nan"), device="cuda", dtype=kind) for _ in range(2))
    launch = kernel.bind(*map(_in_cupy, (a, b, ours)))  # CuPy's current stream is where the timer listens
    error, deterministic = _proof(launch, a, b, ours)
    launches = {"torch": _on_cupys_stream(lambda: torch.mm(a, b, out=theirs))}
    device = live_device()
    timer = Timer(device.l2_bytes, "cold", limit_s=0.1)
    timer.warm_up(launch)
    once_us = min(float(np.median(timer.samples(call, 3))) for call in (launch, *launches.values()))
    if product.dtype != "bfloat16" and once_us > _LONG_US:
        x, y, z = map(_in_cupy, (a, b, theirs))
        launches["cupy"] = lambda: cupy.matmul(x, y, out=z)
    rounds = int(np.clip(1e6 * _LIMIT_S / (once_us * (1 + len(launches))), _LEAST_ROUNDS, rounds))
    times = timer.race([launch, *launches.values()], rounds, seed=0)
    cublas = dict(zip(launches, times[1:], strict=True))
    through = min(cublas, key=lambda name: float(np.median(cublas[name])))
    return Row(
        product,
        kernel,
        median_interval(times[0]),
        median_interval(cublas[through]),
        through,
        paired_ratio(times[0], cublas[through]),
        error,
        output_tolerance(DTYPES[product.dtype], [DTYPES[product.dtype]], product.k),
        deterministic,
        _peak(product.dtype, device),
        tuning_s,
    )


def _proof(launch: Callable[[], None], a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> tuple[float, bool]:
    """Greatest error over the larger of an element and the RMS, and whether further runs give the same bits."""
    torch.cuda.synchronize()
    launch()
    cupy.cuda.get_current_stream().synchronize()
    exact = a.double() @ b.double()
    first = result.clone()
    scale = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    error = float(((first.double() - exact).abs() / scale).max())
    same = True
    for _ in range(_RUNS_COMPARED):
        result.fill_(float("nan"))
        torch.cuda.synchronize()
        launch()
        cupy.cuda.get_current_stream().synchronize()
        same = same and torch.equal(result, first)
    return (float("inf") if np.isnan(error) else error), same


def _in_cupy(tensor: torch.Tensor) -> Any:
    """The same memory as a CuPy array; bfloat16 as its bits."""
    if tensor.dtype is torch.bfloat16:
        return cupy.asarray(tensor.view(torch.int16)).view(np.uint16)
    return cupy.asarray(tensor)


def _on_cupys_stream(call: Callable[[], Any]) -> Callable[[], None]:
    """A call of PyTorch that is queued on CuPy's current stream, where the timer listens."""

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            call()

    return launch


def _peak(dtype: str, device: DeviceProperties) -> float | None:
    """Operations a second at the highest clock; None where the tensor cores' rate is not known."""
    if dtype == "float32":
        return device.peak_fp32_flops_per_s
    fmas = _TENSOR_FMAS_PER_SM.get(device.compute_capability)
    return 2.0 * fmas * device.sm_count * device.clock_mhz * 1e6 if fmas else None
