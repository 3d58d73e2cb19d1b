"""The CUDA driver: its library, devices, launches with attributes, and ``__constant__`` variables."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import UUID

from autotile.core.device import DeviceProperties, limits_for
from autotile.core.model import LaunchGeometry, Outcome, Problem
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError

if TYPE_CHECKING:
    from autotile.kernel.spec import KernelSpec

PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle that stands for a different stream in each thread."""


@lru_cache
def load_driver() -> ctypes.CDLL:
    """Return the driver's library, initialised; its functions have the signatures of cuda.h and return a ``CUresult``.

    Importing ``cuda.bindings`` would take longer than the rest of a process's first launch. Raise `ToolchainError` if
    there is no driver.
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


# CUresult codes after which the context still works (cuda.h): the launch or load was rejected before it began.
_REJECTED = {
    1: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_INVALID_VALUE: a launch geometry that the device does not support
    2: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_OUT_OF_MEMORY: local memory for the launch
    200: Outcome.CRASHED,  # CUDA_ERROR_INVALID_IMAGE
    209: Outcome.CRASHED,  # CUDA_ERROR_NO_BINARY_FOR_GPU
    301: Outcome.CRASHED,  # CUDA_ERROR_FILE_NOT_FOUND: the cubin was trimmed from the cache
    500: Outcome.CRASHED,  # CUDA_ERROR_NOT_FOUND
    701: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    720: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    912: Outcome.RESOURCE_EXCEEDED,  # CUDA_ERROR_INVALID_CLUSTER_SIZE
}


def rejected(error: Any) -> Outcome | None:
    """Return the outcome of a launch that a CUDA error of CuPy rejected; None for one that breaks the context."""
    return _REJECTED.get(int(error.status))


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


@lru_cache
def has_driver() -> bool:
    """Return True if the NVIDIA driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_count() -> int:
    """Return the number of CUDA devices visible to this process; 0 without a driver, a device or CuPy."""
    if not has_driver() or find_spec("cupy") is None:
        return 0
    count = ctypes.c_int()
    return count.value if load_driver().cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


_ATTRIBUTES = {
    "max_threads_per_block": 1,
    "max_block_x": 2,
    "max_block_y": 3,
    "max_block_z": 4,
    "max_grid_x": 5,
    "max_grid_y": 6,
    "max_grid_z": 7,
    "smem_per_block_bytes": 8,
    "warp_size": 10,
    "registers_per_block": 12,
    "clock_khz": 13,
    "sm_count": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "max_threads_per_sm": 39,
    "major": 75,
    "minor": 76,
    "smem_per_sm_bytes": 81,
    "registers_per_sm": 82,
    "smem_per_block_optin_bytes": 97,
    "max_blocks_per_sm": 106,
    "smem_reserved_per_block_bytes": 111,
}
"""``CUdevice_attribute``, cuda.h."""
_OWN_FIELDS = _ATTRIBUTES.keys() & set(DeviceProperties.__struct_fields__)
"""Properties that are an attribute as it is."""


def live_device(index: int = 0) -> DeviceProperties:
    """Return the properties of a CUDA device, without a context and without CuPy, whose import takes half a second.

    Properties that the driver does not report (allocation units, fp32 lanes) come from the table of compute
    capabilities. Raise `ToolchainError` if there is no driver, or the device cannot be queried.
    """
    driver, device, number = load_driver(), ctypes.c_int(), ctypes.c_int()

    def check(status: int) -> None:
        if status:
            raise ToolchainError(f"CUDA device {index} cannot be queried: {result_name(status)}; see `autotile doctor`")

    name, memory_bytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
    check(driver.cuDeviceGet(ctypes.byref(device), index))
    check(driver.cuDeviceGetName(name, len(name), device))
    check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device))
    found = {}
    for attribute, code in _ATTRIBUTES.items():
        check(driver.cuDeviceGetAttribute(ctypes.byref(number), code, device))
        found[attribute] = number.value
    capability = f"{found['major']}.{found['minor']}"
    figures = {**limits_for(capability), **{field: found[field] for field in _OWN_FIELDS}}
    figures |= {f"max_{each}_dim": tuple(found[f"max_{each}_{axis}"] for axis in "xyz") for each in ("block", "grid")}
    return DeviceProperties(
        name=name.value.decode(),
        compute_capability=capability,
        memory_bytes=memory_bytes.value,
        # two transfers per clock, as all memory of these devices is double data rate
        memory_bandwidth_bytes_per_s=2.0 * 1e3 * found["memory_clock_khz"] * found["memory_bus_bits"] / 8,
        clock_mhz=found["clock_khz"] / 1e3,
        source="cuda",
        driver=driver_version(),
        **figures,
    )


def make_context(index: int) -> None:
    """Make the primary context of a device, which CuPy then finds, if that is possible."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if has_driver() and load_driver().cuDeviceGet(ctypes.byref(device), index) == 0:
        load_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def device_uuid(index: int = 0) -> str:
    """Return the UUID of a CUDA device as ``nvidia-smi -L`` lists it, ``GPU-...``; empty if it cannot be queried."""
    try:
        driver = load_driver()
    except ToolchainError:
        return ""
    device, data = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(ctypes.byref(data), device):
        return ""
    return f"GPU-{UUID(bytes=bytes(data))}"


def driver_version() -> str:
    """Return the CUDA version that the driver supports, such as ``"13.0"``."""
    version = ctypes.c_int()
    load_driver().cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


COOPERATIVE, CLUSTER_DIMENSION, _OVERLAP = 2, 4, 6
"""``CU_LAUNCH_ATTRIBUTE_COOPERATIVE``, ``_CLUSTER_DIMENSION`` and ``_PROGRAMMATIC_STREAM_SERIALIZATION``, cuda.h."""
_REQUIRED_CLUSTER_WIDTH = 11
"""``CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH``, cuda.h."""

Cluster = tuple[int, int, int]


_ATTRIBUTE = struct.Struct("i4x3I52x")
"""``CUlaunchAttribute``, cuda.h: its kind, and the first words of a union of 64 bytes."""
_LAUNCH_CONFIG = struct.Struct("7IPPI4x")
"""``CUlaunchConfig``, cuda.h: grid, block, dynamic shared memory, stream, attributes and their number."""


def attribute_launch(
    function_pointer: int,
    geometry: LaunchGeometry,
    *,
    is_cooperative: bool,
    cluster: Cluster | None,
    overlaps: bool = False,
) -> Callable[[int, int, int], None]:
    """Return a function of the stream handle and the addresses of a parameter block and of a buffer, which launches.

    One of the addresses is 0. Of a cooperative launch, all blocks are resident at once, so that they may wait for each
    other. ``cluster`` is None if there is none, or if the function declares it itself. With ``overlaps``, the launch
    begins before the one before it ends, for which it waits itself. That the driver is too old is a `ToolchainError`.
    """
    try:
        launch_with_attributes = load_driver().cuLaunchKernelEx
    except AttributeError:
        raise ToolchainError("this driver has no cuLaunchKernelEx; install a driver for CUDA 12 or newer") from None
    words = [_ATTRIBUTE.pack(COOPERATIVE, 1, 0, 0)] if is_cooperative else []
    words += [_ATTRIBUTE.pack(CLUSTER_DIMENSION, *cluster)] if cluster is not None else []
    words += [_ATTRIBUTE.pack(_OVERLAP, 1, 0, 0)] if overlaps else []
    attributes = ctypes.create_string_buffer(b"".join(words))
    extents = (*geometry.grid, *geometry.block, geometry.dynamic_smem_bytes)
    launch_with_attributes.argtypes = [ctypes.c_void_p] * 4  # integers are then converted in half the time
    error, packed = load_cupy().cuda.driver.CUDADriverError, (-1, b"")

    def launch(stream: int, address: int, extra: int) -> None:
        nonlocal packed
        own, config = packed
        if own != stream:
            config = _LAUNCH_CONFIG.pack(*extents, stream, ctypes.addressof(attributes), len(words))
            packed = stream, config
        status = launch_with_attributes(config, function_pointer, address, extra)
        if status:
            raise error(status)

    return launch


def declares_cluster(function_pointer: int) -> bool:
    """Return True if a function has a cluster of its own, ``__cluster_dims__``."""
    driver, value = load_driver(), ctypes.c_int()
    function = ctypes.c_void_p(function_pointer)
    return driver.cuFuncGetAttribute(ctypes.byref(value), _REQUIRED_CLUSTER_WIDTH, function) == 0 and value.value > 0


_DEVICE_TO_DEVICE = 3
"""``cudaMemcpyDeviceToDevice``"""


ConstantCopy = tuple[str, int, int]
"""A copy to a ``__constant__`` variable: name of the buffer, device address of the variable, and size in bytes."""


def constant_copies(spec: KernelSpec, module: int, problem: Problem) -> tuple[ConstantCopy, ...]:
    """Return the copies that a module, given by its driver handle, needs before a launch.

    A variable that the module does not have, as with another value of a parameter, is left out. Raise `InputError` if a
    buffer is larger than its variable.
    """
    copies = []
    for buffer in spec.buffers:
        if not buffer.constant:
            continue
        address, variable_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        handle, symbol = ctypes.c_void_p(module), ctypes.c_char_p(variable_symbol(buffer.constant).encode())
        find = load_driver().cuModuleGetGlobal_v2
        if find(ctypes.byref(address), ctypes.byref(variable_bytes), handle, symbol) != 0:
            continue
        size_bytes = buffer.size_bytes(problem.dtype, problem.names)
        if size_bytes > variable_bytes.value:
            raise InputError(
                f"{spec.source}: {buffer.name} has {size_bytes} bytes, but its __constant__ variable "
                f"{buffer.constant} has {variable_bytes.value}; declare a larger array in the template"
            )
        copies.append((buffer.name, address.value, size_bytes))
    return tuple(copies)


def copy_constants(copies: tuple[ConstantCopy, ...], pointers: Mapping[str, int], stream: int) -> None:
    """Queue copies of the buffers at the given addresses on a stream."""
    for buffer, address, size_bytes in copies:
        copy_async(address, pointers[buffer], size_bytes, stream)


def copy_async(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy within the device on a stream."""
    load_cupy().cuda.runtime.memcpyAsync(target, source, size_bytes, _DEVICE_TO_DEVICE, stream)


def variable_symbol(name: str) -> str:
    """Return the symbol of a variable of a C++ name: its own name, or one mangled with its namespaces."""
    parts = name.split("::")
    return name if len(parts) == 1 else f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E"
