"""How many blocks of a kernel an SM holds at once, and which limit binds.

Four limits are counted on their own, and the least of them is the answer: the SM's threads, its registers, its
shared memory and its block slots. The rule is the one that the CUDA driver applies in
``cuOccupancyMaxActiveBlocksPerMultiprocessor`` when the largest shared-memory carveout is available, as stated in
NVIDIA's ``cuda_occupancy.h`` (CUDA 13) for compute capability 5 and later, and in section 4.2 of the CUDA C
Programming Guide 4.2 for compute capability 1. docs/occupancy.md works through examples.

Named barriers beyond the first and thread-block clusters are outside the rule: a kernel that uses them may get
fewer blocks from the driver.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy

Blocks = npt.NDArray[np.int64]

UNLIMITED = 2**31 - 1
"""Blocks that a resource allows when a block uses none of it."""


def occupancy(threads: int, registers: int, smem_bytes: int, device: DeviceProperties) -> Occupancy:
    """Occupancy of one kernel at one block size.

    Parameters
    ----------
    threads
        Threads in a block.
    registers
        Registers a thread, as the compiler reports them.
    smem_bytes
        Static and dynamic shared memory of a block, in bytes, without what the system reserves.
    device
        The device's limits.

    Returns
    -------
    Occupancy
        A block over a hard limit (threads or registers a block, registers a thread, shared memory after opting in)
        gets 0 blocks, limited by that resource.
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
    """Blocks per SM of many kernels at once: `occupancy`'s ``blocks_per_sm`` over arrays.

    Parameters
    ----------
    threads, registers, smem_bytes
        Whole numbers as for `occupancy`, of any shapes that broadcast together.
    device
        The device's limits.

    Returns
    -------
    numpy.ndarray
        ``int64``, of the broadcast shape; 0 where a block cannot run at all.
    """
    return np.asarray(reduce(np.minimum, block_limits(threads, registers, smem_bytes, device).values()))


def block_limits(
    threads: npt.ArrayLike, registers: npt.ArrayLike, smem_bytes: npt.ArrayLike, device: DeviceProperties
) -> dict[str, Blocks]:
    """Blocks per SM that each resource allows on its own.

    Parameters
    ----------
    threads, registers, smem_bytes, device
        As for `max_blocks_per_sm`.

    Returns
    -------
    dict
        ``threads``, ``registers``, ``shared_memory`` and ``blocks``, each an ``int64`` array that broadcasts with the
        others; `UNLIMITED` where a block uses none of a resource.
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
    """Registers go to single warps, from the part of the register file beside each of ``warp_unit`` schedulers.

    What one part has left over no other can use, so the warps that an SM holds are a multiple of ``warp_unit``. The
    launch check assumes that a block takes a warp's worth from all parts alike, so the block's own warps count
    rounded up there, and there only.
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
    """Compute capability 1: registers go to whole blocks, for warps rounded up to ``warp_unit``."""
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
    """Blocks that share ``available`` when each needs ``needed``; 0 where a block is not ``possible``."""
    shared = np.where(needed > 0, available // np.maximum(needed, 1), UNLIMITED)
    return np.where(possible, shared, 0)


def _divide_up(value: Blocks, unit: int) -> Blocks:
    return -(-value // unit)


def _round_up(value: Blocks, unit: int) -> Blocks:
    return _divide_up(value, unit) * unit


def _round_down(value: Blocks, unit: int) -> Blocks:
    return value // unit * unit
