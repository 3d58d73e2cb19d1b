"""The CUDA driver: its library, devices and their properties, and calls during a stream capture."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from autotile.core.device import DeviceProperties, limits_for
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError


@lru_cache
def load_driver() -> ctypes.CDLL:
    """Return the driver's library, initialised; its functions have the signatures of cuda.h and return a ``CUresult``.

    Importing ``cuda.bindings`` would take longer than the rest of a process's first launch.

    Raises
    ------
    ToolchainError
        There is no driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ToolchainError(f"the NVIDIA driver cannot be loaded ({error}); see `autotile doctor`") from None
    driver.cuInit(0)
    return driver


def result_name(status: int) -> str:
    """Return the name of a ``CUresult``, such as ``CUDA_ERROR_INVALID_VALUE``."""
    name = ctypes.c_char_p()
    load_driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else str(status)


_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``, cuda.h."""


@contextmanager
def outside_of_captures() -> Iterator[None]:
    """Allow calls in this thread that are forbidden by default while any stream is captured, such as allocations.

    In the relaxed mode only calls that would invalidate the capture are forbidden; see the CUDA driver API,
    ``cuThreadExchangeStreamCaptureMode``.
    """
    exchange, mode = load_driver().cuThreadExchangeStreamCaptureMode, ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # mode is now the previous one
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def has_driver() -> bool:
    """Return whether the NVIDIA driver is installed; true on systems where this cannot be checked quickly."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_count() -> int:
    """Return the number of CUDA devices visible to this process; 0 without a driver, a device or CuPy."""
    try:
        runtime = load_cupy().cuda.runtime
    except ToolchainError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def live_device(index: int = 0) -> DeviceProperties:
    """Return the properties of a CUDA device.

    Properties that the runtime does not report (allocation units, fp32 lanes) come from the table of compute
    capabilities.

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
            # two transfers per clock, as all memory of these devices is double data rate
            memory_bandwidth_bytes_per_s=2.0 * memory_hz * attribute("GlobalMemoryBusWidth") / 8,
            clock_mhz=attribute("ClockRate") / 1e3,
            fp32_lanes_per_sm=limits.fp32_lanes_per_sm,
            source="cuda",
            driver=driver_version(),
        )
    except runtime.CUDARuntimeError as error:
        raise ToolchainError(f"CUDA device {index} cannot be queried: {error}; see `autotile doctor`") from None


def driver_version() -> str:
    """Return the CUDA version that the driver supports, such as ``"13.0"``."""
    version = int(load_cupy().cuda.runtime.driverGetVersion())
    return f"{version // 1000}.{version % 1000 // 10}"
