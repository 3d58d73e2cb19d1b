"""The second gate: whether a compiled candidate can run, and runs as densely as its author asks."""

from __future__ import annotations

from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import LaunchGeometry, Occupancy, Resources
from autotile.ground.occupancy import occupancy
from autotile.ground.spec import Limits


def compiled_occupancy(geometry: LaunchGeometry, resources: Resources, device: DeviceProperties) -> Occupancy:
    """Occupancy that the compiled resources give."""
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    return occupancy(geometry.threads, resources.registers, smem_bytes, device)


def resource_fault(
    limits: Limits, geometry: LaunchGeometry, resources: Resources, found: Occupancy, device: DeviceProperties
) -> str:
    """Why a compiled candidate must not be launched, in one line; empty when it may.

    Parameters
    ----------
    limits
        What the author accepts.
    geometry, resources, found
        Of the candidate; ``found`` is its `compiled_occupancy`.
    device
        The device that would run it.
    """
    if found.blocks_per_sm == 0:
        smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
        return (
            f"no block fits on an SM of {device.name}: {geometry.threads} threads, {resources.registers} registers a "
            f"thread, {smem_bytes} bytes of shared memory; limited by {', '.join(found.limited_by)}"
        )
    if limits.max_spill_bytes is not None and resources.spill_bytes > limits.max_spill_bytes:
        return f"spills {resources.spill_bytes} bytes, over max_spill_bytes = {limits.max_spill_bytes}"
    if found.occupancy < limits.min_occupancy:
        return (
            f"occupancy {found.occupancy:.3f} is under min_occupancy = {limits.min_occupancy:g}; "
            f"limited by {', '.join(found.limited_by)}"
        )
    return ""
