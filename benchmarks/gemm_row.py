"""Results of one product: figures of the kernels and of cuBLAS, as a row of a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemm_product import Product, emulating_kernels
from gemm_tuning import Tuned

from autotile.core.model import config_text
from autotile.core.statistics import Interval
from autotile.serving.bound import BoundKernel

_TENSOR_FMAS_PER_SM = {"8.0": 1024, "9.0": 2048}
"""Dense 16-bit multiply-adds per cycle and SM (NVIDIA A100 and H100 white papers: 312 TFLOP/s on 108 SMs at
1410 MHz, 989 TFLOP/s on 132 SMs at 1830 MHz)."""
_LIMB_PRODUCTS = 6
"""bfloat16 products per float32 product."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Results of one kernel."""

    kernel: BoundKernel
    time_us: Interval
    ratio: Interval
    """Time of cuBLAS over time of the kernel: above 1 if the kernel is faster."""
    error: float
    """Largest error relative to the larger of the element and the root mean square."""
    deterministic: bool


@dataclass(frozen=True, slots=True)
class CuBlas:
    """Results of cuBLAS through the faster of its callers."""

    time_us: Interval
    through: str
    error: float


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one product.

    Attributes
    ----------
    runners
        The kernel that `autotile.matmul` launches, then the one that it launches with ``emulate=False`` if that is
        another kernel.
    """

    product: Product
    runners: tuple[Runner, ...]
    cublas: CuBlas
    tolerance: float
    tuned: Tuned

    @property
    def best(self) -> Runner:
        """The kernel that `autotile.matmul` launches."""
        return self.runners[0]

    @property
    def cuda_cores(self) -> Runner | None:
        """The kernel that it launches for a float32 product with ``emulate=False``; None for other types."""
        return self.runners[-1] if self.product.dtype == "float32" else None

    def is_right(self, runner: Runner) -> bool:
        """Return True if a result is within tolerance and bit-identical in every run."""
        return runner.error <= self.tolerance and runner.deterministic

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row of the table with `headings`."""
        best, alone = self.best, self.cuda_cores
        rate, peak = self._rate(best.time_us), _peak(self.product.dtype, best.kernel)
        return (
            f"{self.product.m} x {self.product.n} x {self.product.k}",
            f"{rate:.1f}",
            f"{self._rate(self.cublas.time_us):.1f}",
            f"{best.ratio.value:.3f}",
            f"{best.ratio.low:.3f} to {best.ratio.high:.3f}",
            *([f"{self._rate(alone.time_us):.1f} ({alone.ratio.value:.3f})"] if alone is not None else []),
            f"{1e14 * rate / peak:.1f} %" if peak else "",
            f"{best.error:.1e} ({self.cublas.error:.1e})",
            "yes" if all(map(self.is_right, self.runners)) else "NO",
            f"{self.tuned.seconds:.1f} s" if self.tuned.tried else best.kernel.tier,
            f"{best.kernel.kernel}: {config_text(best.kernel.config)}",
        )

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "shape": [self.product.m, self.product.n, self.product.k],
            **self._runner_to_json(self.best),
            **({"cuda_cores": self._runner_to_json(self.cuda_cores)} if self.cuda_cores is not None else {}),
            "cublas_tflops_per_s": self._rate(self.cublas.time_us),
            "cublas_through": self.cublas.through,
            "cublas_error_over_rms": self.cublas.error,
            "tolerance": self.tolerance,
            "tuning_s": round(self.tuned.seconds, 1),
            "configurations_tried": dict(self.tuned.tried),
        }

    def _runner_to_json(self, runner: Runner) -> dict[str, Any]:
        kernel, rate, peak = runner.kernel, self._rate(runner.time_us), _peak(self.product.dtype, runner.kernel)
        return {
            "tflops_per_s": rate,
            "ratio": runner.ratio.value,
            "ratio_interval": [runner.ratio.low, runner.ratio.high],
            "time_us": runner.time_us.value,
            "time_interval_us": [runner.time_us.low, runner.time_us.high],
            "share_of_peak": 1e12 * rate / peak if peak else None,
            "error_over_rms": runner.error,
            "deterministic": runner.deterministic,
            "kernel": kernel.kernel,
            "config": dict(kernel.config),
            "tier": kernel.tier,
        }

    def _rate(self, time_us: Interval) -> float:
        """Return TFLOP/s."""
        return self.product.flops / time_us.value / 1e6


def headings(dtype: str) -> tuple[str, ...]:
    """Return the headings of the table of a dtype."""
    alone = ("CUDA cores alone",) if dtype == "float32" else ()
    return (
        *("M x N x K", "autotile", "cuBLAS", "ratio", "95 %"),
        *alone,
        *("of peak", "error (cuBLAS's)", "right", "tuned", "kernel, configuration"),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return geometric mean and minimum of the ratios, of all kernels and of the CUDA cores alone, and the rows."""
    alone = [row.cuda_cores for row in rows if row.cuda_cores is not None]
    return {
        **_ratios([row.best for row in rows]),
        **({"cuda_cores": _ratios(alone)} if alone else {}),
        "right": all(row.is_right(runner) for row in rows for runner in row.runners),
        "rows": [row.to_json() for row in rows],
    }


def _ratios(runners: Sequence[Runner]) -> dict[str, float]:
    ratios = [runner.ratio.value for runner in runners]
    return {"geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)), "least": min(ratios)}


def _peak(dtype: str, kernel: BoundKernel) -> float | None:
    """Return operations per second at the maximum clock; None if the rate of the tensor cores is not known."""
    device, emulated = kernel.device, kernel.kernel in emulating_kernels()
    if dtype == "float32" and not emulated:
        return device.peak_fp32_flops_per_s
    fmas = _TENSOR_FMAS_PER_SM.get(device.compute_capability)
    if fmas is None:
        return None
    return 2.0 * fmas * device.sm_count * device.clock_mhz * 1e6 / (_LIMB_PRODUCTS if emulated else 1)
