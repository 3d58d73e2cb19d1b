"""How one product fared: figures of the kernels and of cuBLAS, as a row of a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemm_tuning import Tuned

from autotile.core.model import config_text
from autotile.core.statistics import Interval
from autotile.serving.bound import BoundKernel
from autotile.serving.matmul import EMULATED, Product

_TENSOR_FMAS_PER_SM = {"8.0": 1024, "9.0": 2048}
"""Dense 16-bit multiply-adds that an SM starts in a cycle (NVIDIA A100 and H100 white papers: 312 TFLOP/s on 108 SMs at
1410 MHz, 989 TFLOP/s on 132 SMs at 1830 MHz)."""
_PRODUCTS_OF_PARTS = 6
"""Of bfloat16, for one of float32."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A kernel, and how it fared."""

    kernel: BoundKernel
    time_us: Interval
    ratio: Interval
    """Time of cuBLAS over time of the kernel: above 1 where the kernel is faster."""
    error: float
    """Greatest error over the larger of an element and the root mean square."""
    deterministic: bool


@dataclass(frozen=True, slots=True)
class CuBlas:
    """How cuBLAS fared, by the faster of its callers."""

    time_us: Interval
    through: str
    error: float


@dataclass(frozen=True, slots=True)
class Row:
    """How one product fared.

    Attributes
    ----------
    runners
        First what `autotile.matmul` launches; then, where that is another kernel, what it launches with
        ``emulate=False``.
    """

    product: Product
    runners: tuple[Runner, ...]
    cublas: CuBlas
    tolerance: float
    tuned: Tuned

    @property
    def best(self) -> Runner:
        """What `autotile.matmul` launches."""
        return self.runners[0]

    @property
    def cuda_cores(self) -> Runner | None:
        """What it launches for a float32 product with ``emulate=False``; None for other types."""
        return self.runners[-1] if self.product.dtype == "float32" else None

    def is_right(self, runner: Runner) -> bool:
        """Whether a result is within tolerance, and the same in every run."""
        return runner.error <= self.tolerance and runner.deterministic

    def cells(self) -> tuple[str, ...]:
        """For the table of `headings`."""
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
        """Plain dictionary."""
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
        """TFLOP/s."""
        return self.product.flops / time_us.value / 1e6


def headings(dtype: str) -> tuple[str, ...]:
    """Of the table of all rows of a type."""
    alone = ("CUDA cores alone",) if dtype == "float32" else ()
    return (
        *("M x N x K", "autotile", "cuBLAS", "ratio", "95 %"),
        *alone,
        *("of peak", "error (cuBLAS's)", "right", "tuned", "kernel, configuration"),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric mean and least ratio of what `autotile.matmul` launches, and of the CUDA cores alone; and the rows."""
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
    """Operations a second at the highest clock; None where the tensor cores' rate is not known."""
    device, emulated = kernel.device, kernel.kernel in EMULATED
    if dtype == "float32" and not emulated:
        return device.peak_fp32_flops_per_s
    fmas = _TENSOR_FMAS_PER_SM.get(device.compute_capability)
    if fmas is None:
        return None
    return 2.0 * fmas * device.sm_count * device.clock_mhz * 1e6 / (_PRODUCTS_OF_PARTS if emulated else 1)
