"""Properties of a live CUDA device, read through CuPy without making a context."""

from __future__ import annotations

import ctypes
import sys

from autotile.device.toolchain import load_cupy
from autotile.files.profiles import limits_for
from autotile.ground.errors import ToolchainError
from autotile.ground.hardware import DeviceProperties


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed; where that cannot be told quickly, it is taken to be."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_count() -> int:
    """CUDA devices that this process can see; 0 where there is no driver, no device or no CuPy."""
    try:
        runtime = load_cupy().cuda.runtime
    except ToolchainError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def live_device(index: int = 0) -> DeviceProperties:
    """Properties of a CUDA device.

    What the runtime does not report (allocation units, fp32 lanes) comes from the table of compute capabilities.

    Raises
    ------
    ToolchainError
        CuPy is missing, or the device cannot be queried.
    """
    runtime = load_cupy().cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)

        def attribute(name: str) -> int:
            return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), index))

        capability = f"{properties['major']}.{properties['minor']}"
        limits = limits_for(capability)
        memory_hz = 1e3 * attribute("MemoryClockRate")
        return DeviceProperties(
            name=properties["name"].decode(),
            compute_capability=capability,
            sm_count=attribute("MultiProcessorCount"),
            warp_size=attribute("WarpSize"),
            max_threads_per_block=attribute("MaxThreadsPerBlock"),
            max_threads_per_sm=attribute("MaxThreadsPerMultiProcessor"),
            max_blocks_per_sm=attribute("MaxBlocksPerMultiprocessor"),
            registers_per_block=attribute("MaxRegistersPerBlock"),
            registers_per_sm=attribute("MaxRegistersPerMultiprocessor"),
            max_registers_per_thread=limits.max_registers_per_thread,
            register_unit=limits.register_unit,
            warp_unit=limits.warp_unit,
            smem_per_block_bytes=attribute("MaxSharedMemoryPerBlock"),
            smem_per_block_optin_bytes=attribute("MaxSharedMemoryPerBlockOptin"),
            smem_per_sm_bytes=attribute("MaxSharedMemoryPerMultiprocessor"),
            smem_reserved_per_block_bytes=attribute("ReservedSharedMemoryPerBlock"),
            smem_unit_bytes=limits.smem_unit_bytes,
            max_block_dim=tuple(attribute(f"MaxBlockDim{axis}") for axis in "XYZ"),  # type: ignore[arg-type]
            max_grid_dim=tuple(attribute(f"MaxGridDim{axis}") for axis in "XYZ"),  # type: ignore[arg-type]
            l2_bytes=attribute("L2CacheSize"),
            memory_bytes=int(properties["totalGlobalMem"]),
            # two transfers a clock: every memory of these devices is double data rate
            memory_bandwidth_bytes_per_s=2.0 * memory_hz * attribute("GlobalMemoryBusWidth") / 8,
            clock_mhz=attribute("ClockRate") / 1e3,
            fp32_lanes_per_sm=limits.fp32_lanes_per_sm,
            source="cuda",
            driver=driver_version(),
        )
    except runtime.CUDARuntimeError as error:
        raise ToolchainError(f"CUDA device {index} cannot be queried: {error}; see `autotile doctor`") from None


def driver_version() -> str:
    """Version of CUDA that the driver supports, such as ``"13.0"``."""
    version = int(load_cupy().cuda.runtime.driverGetVersion())
    return f"{version // 1000}.{version % 1000 // 10}"
