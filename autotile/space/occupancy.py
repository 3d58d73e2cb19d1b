"""Occupancy: resident blocks per SM, and the resources that limit them.

The number of blocks is the minimum over four resources: threads, registers, shared memory and block slots of the SM.
The calculation is that of ``cuOccupancyMaxActiveBlocksPerMultiprocessor`` with the largest shared memory carveout, as
defined by NVIDIA's ``cuda_occupancy.h`` (CUDA 13) for compute capability 5 and later, and by section 4.2 of the CUDA C
Programming Guide 4.2 for compute capability 1. docs/occupancy.md has worked examples.

Named barriers beyond the first and thread block clusters are not considered: the driver may allow fewer blocks for
kernels that use them.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt

from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy

Blocks = npt.NDArray[np.int64]

UNLIMITED = 2**31 - 1
"""Blocks allowed by a resource that a block does not use."""


@lru_cache(maxsize=4096)
def occupancy(threads: int, registers: int, smem_bytes: int, device: DeviceProperties) -> Occupancy:
    """Calculate the occupancy of a kernel at one block size.

    Parameters
    ----------
    threads
        Threads per block.
    registers
        Registers per thread, as reported by the compiler.
    smem_bytes
        Static and dynamic shared memory per block, in bytes, without the part reserved by the system.
    device
        Limits of the device.

    Returns
    -------
    Occupancy
        0 blocks if a block exceeds a hard limit (threads or registers per block, registers per thread, opt-in shared
        memory per block), limited by that resource.
    """
    limits = {name: int(blocks) for name, blocks in block_limits(threads, registers, smem_bytes, device).items()}
    blocks_per_sm = min(limits.values())
    warps_per_sm = blocks_per_sm * -(-threads // device.warp_size)
    return Occupancy(
        blocks_per_sm=blocks_per_sm,
        warps_per_sm=warps_per_sm,
        occupancy=warps_per_sm / device.max_warps_per_sm,
        limited_by=tuple(name for name, blocks in limits.items() if blocks == blocks_per_sm),
        limits=limits,
    )


def max_blocks_per_sm(
    threads: npt.ArrayLike, registers: npt.ArrayLike, smem_bytes: npt.ArrayLike, device: DeviceProperties
) -> Blocks:
    """Calculate ``blocks_per_sm`` of `occupancy` over arrays.

    Parameters
    ----------
    threads, registers, smem_bytes
        Integers as for `occupancy`, of shapes that broadcast against each other.
    device
        Limits of the device.

    Returns
    -------
    numpy.ndarray
        ``int64``, of the broadcast shape; 0 where a block cannot run.
    """
    return np.asarray(reduce(np.minimum, block_limits(threads, registers, smem_bytes, device).values()))


def block_limits(
    threads: npt.ArrayLike, registers: npt.ArrayLike, smem_bytes: npt.ArrayLike, device: DeviceProperties
) -> dict[str, Blocks]:
    """Calculate the blocks per SM that each resource allows.

    Parameters
    ----------
    threads, registers, smem_bytes, device
        See `max_blocks_per_sm`.

    Returns
    -------
    dict
        ``threads``, ``registers``, ``shared_memory`` and ``blocks``: ``int64`` arrays that broadcast against each
        other; `UNLIMITED` where a block does not use the resource.
    """
    thread_column, register_column, smem_column = (
        np.asarray(column, dtype=np.int64) for column in (threads, registers, smem_bytes)
    )
    warps = _divide_up(thread_column, device.warp_size)
    by_registers = _by_block_registers if device.compute_capability.startswith("1.") else _by_warp_registers
    return {
        "threads": _by_threads(thread_column, warps, device),
        "registers": by_registers(warps, register_column, device),
        "shared_memory": _by_shared_memory(smem_column, device),
        "blocks": np.asarray(device.max_blocks_per_sm, dtype=np.int64),
    }


def _by_threads(threads: Blocks, warps: Blocks, device: DeviceProperties) -> Blocks:
    possible = (threads >= 1) & (threads <= device.max_threads_per_block)
    return _blocks(device.max_warps_per_sm, warps, possible)


def _by_warp_registers(warps: Blocks, registers: Blocks, device: DeviceProperties) -> Blocks:
    """Allocate registers to warps, from ``warp_unit`` partitions of the register file.

    A partition cannot use the remainder of another, so the warps of an SM are a multiple of ``warp_unit``. Only the
    launch check rounds up the warps of the block itself, as it assumes equal allocation from all partitions.
    """
    per_warp = _round_up(registers * device.warp_size, device.register_unit)
    possible = (
        (registers >= 0)
        & (registers <= device.max_registers_per_thread)
        & (per_warp * _round_up(warps, device.warp_unit) <= device.registers_per_block)
    )
    resident_warps = _round_down(device.registers_per_sm // np.maximum(per_warp, 1), device.warp_unit)
    return np.where(registers == 0, UNLIMITED, _blocks(resident_warps, warps, possible))


def _by_block_registers(warps: Blocks, registers: Blocks, device: DeviceProperties) -> Blocks:
    """Allocate registers to blocks, for warps rounded up to ``warp_unit`` (compute capability 1)."""
    per_block = _round_up(
        _round_up(warps, device.warp_unit) * device.warp_size * registers,
        device.register_unit,
    )
    possible = (
        (registers >= 0) & (registers <= device.max_registers_per_thread) & (per_block <= device.registers_per_block)
    )
    return _blocks(device.registers_per_sm, per_block, possible)


def _by_shared_memory(smem_bytes: Blocks, device: DeviceProperties) -> Blocks:
    per_block = _round_up(smem_bytes + device.smem_reserved_per_block_bytes, device.smem_unit_bytes)
    possible = (smem_bytes >= 0) & (smem_bytes <= device.smem_per_block_optin_bytes)
    return _blocks(device.smem_per_sm_bytes, per_block, possible)


def _blocks(available: int | Blocks, needed: Blocks, possible: npt.NDArray[np.bool_]) -> Blocks:
    """Return the blocks that fit in ``available`` if each needs ``needed``; 0 where a block is not ``possible``."""
    shared = np.where(needed > 0, available // np.maximum(needed, 1), UNLIMITED)
    return np.where(possible, shared, 0)


def _divide_up(value: Blocks, unit: int) -> Blocks:
    return -(-value // unit)


def _round_up(value: Blocks, unit: int) -> Blocks:
    return _divide_up(value, unit) * unit


def _round_down(value: Blocks, unit: int) -> Blocks:
    return value // unit * unit
