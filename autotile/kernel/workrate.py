"""Rates of a kernel in FLOP/s and bytes per second, relative to the peaks of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Problem, Value
from autotile.core.text import NOTHING, bandwidth_text, flops_text, percent_text
from autotile.errors import SpecError
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec

_FP32 = "float32"


@dataclass(frozen=True, slots=True)
class Workrate:
    """Amount of work of a problem, from which a time gives a rate.

    Attributes
    ----------
    flops
        Floating-point operations; None if the search-space file does not state them.
    bytes
        Minimum memory traffic, reads and writes; None if the search-space file does not state it.
    dtype
        Element type. Only float32 rates are given in percent of the fp32 peak, since other types have other peaks.
    """

    flops: int | None
    bytes: int | None
    dtype: str

    @classmethod
    def of(cls, spec: KernelSpec, problem: Problem, config: Config | None = None) -> Workrate:
        """Evaluate the ``[work]`` section of a search-space file for a problem.

        Work that depends on parameters is known only with a configuration.
        """
        names = {**problem.sizes, **(config or {})}
        flops, size_bytes = (_evaluate(expression, names) for expression in (spec.work.flops, spec.work.bytes))
        return cls(flops, size_bytes, problem.dtype)

    def text(self, time_us: float | None, device: DeviceProperties | None) -> str:
        """Format the rate that a time gives, relative to a peak: ``28.7 TFLOP/s (42.9 % of fp32 peak)``.

        Operations are compared with the fp32 peak and bytes with the memory bandwidth, as in the roofline model. The
        larger fraction belongs to the limiter, so that rate is the one given.

        Parameters
        ----------
        time_us
            Time of one run, in microseconds; None if it was not measured.
        device
            Device that it was measured on; None if unknown, for a rate without a percentage.
        """
        if time_us is None:
            return NOTHING
        flops_per_s = self.flops / time_us * 1e6 if self.flops is not None else None
        bytes_per_s = self.bytes / time_us * 1e6 if self.bytes is not None else None
        compute = _fraction(flops_per_s, device.peak_fp32_flops_per_s if device else 0.0)
        memory = _fraction(bytes_per_s, device.memory_bandwidth_bytes_per_s if device else 0.0)
        if flops_per_s is not None and (bytes_per_s is None or compute >= memory):
            peak = "fp32 peak" if compute <= 1.0 else "the CUDA cores' fp32 peak"  # exceeded by tensor cores
            percentage = f" ({percent_text(compute)} of {peak})" if compute and self.dtype == _FP32 else ""
            return flops_text(flops_per_s) + percentage
        if bytes_per_s is not None:
            percentage = f" ({percent_text(memory)} of bandwidth)" if memory else ""
            return bandwidth_text(bytes_per_s) + percentage
        return NOTHING


def _evaluate(expression: Expression | None, names: Mapping[str, Value]) -> int | None:
    """Return the value of an expression; None if there is none, a name is unknown, or the value overflows 64 bits."""
    if expression is None or not expression.names <= names.keys():
        return None
    try:
        return int(expression.evaluate(names))
    except SpecError:
        return None


def _fraction(rate: float | None, peak: float) -> float:
    return rate / peak if rate is not None and peak > 0.0 else 0.0
