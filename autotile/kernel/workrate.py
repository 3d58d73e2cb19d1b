"""Rates of a kernel: FLOP/s and bytes per second against the peaks of the device."""

from __future__ import annotations

from dataclasses import dataclass

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.core.text import NOTHING, percent_text
from autotile.errors import SpecError
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec

_FP32 = "float32"


@dataclass(frozen=True, slots=True)
class Workrate:
    """Turns a time into a rate.

    Attributes
    ----------
    flops, bytes
        What the problem needs at least; None where the kernel does not say.
    dtype
        The percentage of the fp32 peak is given for float32 only: other types have peaks of their own.
    """

    flops: int | None
    bytes: int | None
    dtype: str

    @classmethod
    def of(cls, spec: KernelSpec, problem: Problem) -> Workrate:
        """Evaluate what a kernel states of its work."""
        flops, bytes_needed = (_amount(expression, problem) for expression in (spec.work.flops, spec.work.bytes))
        return cls(flops, bytes_needed, problem.dtype)

    def text(self, time_us: float | None, device: DeviceProperties | None) -> str:
        """Rate against the limit that the problem comes nearer to: ``28.7 TFLOP/s (42.9 % of fp32 peak)``.

        Operations are set against the fp32 peak, bytes against the memory's bandwidth; whichever share is larger is
        what holds the kernel back at least, so that one is shown.
        """
        if time_us is None:
            return NOTHING
        flops_per_s = self.flops / time_us * 1e6 if self.flops is not None else None
        bytes_per_s = self.bytes / time_us * 1e6 if self.bytes is not None else None
        compute_share = _share(flops_per_s, device.peak_fp32_flops_per_s if device else 0.0)
        memory_share = _share(bytes_per_s, device.memory_bandwidth_bytes_per_s if device else 0.0)
        if flops_per_s is not None and (bytes_per_s is None or compute_share >= memory_share):
            whose = "fp32 peak" if compute_share <= 1.0 else "the CUDA cores' fp32 peak"  # the tensor cores passed it
            share = f" ({percent_text(compute_share)} of {whose})" if compute_share and self.dtype == _FP32 else ""
            return flops_text(flops_per_s) + share
        if bytes_per_s is not None:
            share = f" ({percent_text(memory_share)} of bandwidth)" if memory_share else ""
            return bandwidth_text(bytes_per_s) + share
        return NOTHING


def flops_text(flops_per_s: float) -> str:
    """Operations a second: ``28.7 TFLOP/s``, ``812 GFLOP/s``."""
    return f"{flops_per_s / 1e12:.3g} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.3g} GFLOP/s"


def bandwidth_text(bytes_per_s: float) -> str:
    """Bytes a second: ``4,276 GB/s``."""
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:,.0f} GB/s" if gigabytes >= 100 else f"{gigabytes:.3g} GB/s"


def _amount(expression: Expression | None, problem: Problem) -> int | None:
    """Value of an expression; None where it leaves 64 bits, which is more work than any device is asked for."""
    if expression is None:
        return None
    try:
        return int(expression.evaluate(problem.sizes))
    except SpecError:
        return None


def _share(rate: float | None, limit: float) -> float:
    return rate / limit if rate is not None and limit > 0.0 else 0.0
