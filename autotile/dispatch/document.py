"""What is served, as a plain dictionary for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotile.dispatch.bound import BoundKernel


def document(kernel: BoundKernel) -> dict[str, Any]:
    """Everything that is known of a served kernel; it is compiled now where that says more."""
    measurement, choice, device = kernel.measurement, kernel.choice, kernel.device
    return {
        "kernel": kernel.kernel,
        "problem": dict(kernel.problem.sizes),
        "dtype": kernel.problem.dtype,
        "tier": kernel.tier,
        "config": dict(kernel.config),
        "time_us": measurement.time_us if measurement else None,
        "interval_us": [measurement.low_us, measurement.high_us] if measurement else None,
        "device": {"name": device.name, "source": device.source},
        "source": kernel.source,
        "tuned_on": kernel.tuned_on,
        "tuned_at": kernel.tuned_at.isoformat() if kernel.tuned_at else None,
        "differences": [list(difference) for difference in choice.differences],
        "aged": list(choice.aged),
        "shipped": choice.shipped,
        "bundle": choice.packed or None,
        "resources": _resources(kernel),
        "explain": kernel.explain(),
    }


def _resources(kernel: BoundKernel) -> dict[str, Any] | None:
    resources, occupancy, geometry = kernel.resources, kernel.occupancy, kernel.geometry
    if resources is None:
        return None
    return {
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "static_smem_bytes": resources.static_smem_bytes,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
        "threads": geometry.threads,
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
        "occupancy": occupancy.occupancy if occupancy else None,
        "limited_by": list(occupancy.limited_by) if occupancy else None,
    }
