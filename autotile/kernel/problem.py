"""A problem: its sizes, its dtype, and the devices that a kernel can run on."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from functools import cache

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.model import Problem
from autotile.errors import DeviceError, ProblemError
from autotile.kernel.spec import KernelSpec

ARCHITECTURE = r"sm_(\d+)(\d)a?"
"""Pattern of a target of NVRTC, ``sm_90`` or ``sm_90a``: a major and a one-digit minor compute capability."""

CAPABILITY = r"\d+\.\d"

CLUSTER_CAPABILITY = "9.0"
"""Thread block clusters and tensor maps: CUDA C++ Programming Guide, features per compute capability."""

_EMBEDDED = {"5.3", "6.2", "7.2", "8.7", "10.1", "11.0"}
"""Compute capabilities of Jetson and DRIVE (developer.nvidia.com/cuda-gpus)."""


def capability_of(architecture: str) -> str:
    """Compute capability of a target: ``"9.0"`` for ``sm_90a``."""
    match = re.fullmatch(ARCHITECTURE, architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is no target such as sm_90a")
    return f"{match[1]}.{match[2]}"


def is_below(capability: str, other: str) -> bool:
    """Whether a compute capability is lower than another."""
    return _parts(capability) < _parts(other)


def runs_on(target: str, capability: str) -> bool:
    """Whether a cubin for a target runs on a device of a compute capability.

    A cubin runs on its own major version, from its minor version upward; one with architecture-specific features, such
    as ``sm_90a``, on its own capability alone; and chips of the embedded line are compatible with themselves alone:
    CUDA C++ Programming Guide, binary compatibility.
    """
    built = capability_of(target)
    if target.endswith("a") or {built, capability} & _EMBEDDED:
        return built == capability
    return _parts(built)[0] == _parts(capability)[0] and not is_below(capability, built)


def unsupported_reason(spec: KernelSpec, device: DeviceProperties) -> str:
    """Why a device cannot run the kernel, whatever its configuration, in one line; "" where it can."""
    has = f"{device.name} has {device.compute_capability}"
    if spec.architecture is not None and capability_of(spec.architecture) != device.compute_capability:
        wanted = capability_of(spec.architecture)
        return (
            f"{spec.name} is compiled for {spec.architecture} alone, which takes compute capability {wanted}, but "
            f"{has}; choose a device of capability {wanted}, or another kernel"
        )
    least, what_for = _min_capability(spec)
    if least and is_below(device.compute_capability, least):
        return (
            f"{spec.name} needs compute capability {least}{what_for}, but {has}; choose a newer device, or another "
            "kernel"
        )
    return ""


def target_conflict(spec: KernelSpec) -> str:
    """Why no device at all can run the kernel, in one line; "" where one may."""
    least, what_for = _min_capability(spec)
    if spec.architecture is None or not least or not is_below(capability_of(spec.architecture), least):
        return ""
    needed = f"{least}{what_for or ', its minimum_compute_capability'}"
    return (
        f"{spec.architecture} runs on compute capability {capability_of(spec.architecture)} alone, but the kernel "
        f"needs {needed}; no device meets both, so change one"
    )


def check_device(spec: KernelSpec, device: DeviceProperties) -> None:
    """Refuse a device that cannot run the kernel.

    Raises
    ------
    DeviceError
        Its compute capability is not what the kernel needs.
    """
    fault = unsupported_reason(spec, device)
    if fault:
        raise DeviceError(fault)


def _min_capability(spec: KernelSpec) -> tuple[str, str]:
    """The least compute capability that will do, empty where any does, and what needs it where the file is silent."""
    declared = spec.minimum_compute_capability or ""
    # With a minimum of its own, a kernel may leave clusters to devices that have them: the first gate looks at each.
    features = [("tensor maps", spec.tensor_maps), ("clusters", spec.launch.cluster and not declared)]
    used = " and ".join(name for name, declared_of_it in features if declared_of_it)
    if used and (not declared or is_below(declared, CLUSTER_CAPABILITY)):
        return CLUSTER_CAPABILITY, f" for its {used}"
    return declared, ""


@cache
def _parts(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


MAX_SIZE = 2**31 - 1
"""Sizes reach kernels as int32 by convention."""
_FLOAT64_BYTES = 8


def resolve_problem(
    spec: KernelSpec, sizes: Mapping[str, int], dtype: str | None = None, *, defaults: bool = False
) -> Problem:
    """Check sizes and dtype against the kernel's own.

    Parameters
    ----------
    spec
        The kernel.
    sizes
        Sizes and flags as given. Flags, and sizes whose default is 1, may be left out; with ``defaults``, all may.
    dtype
        One of the kernel's; None for its first.
    defaults
        Fill in missing sizes from the search-space file.

    Returns
    -------
    Problem
        With every size and flag of the kernel, in the order of its file.

    Raises
    ------
    ProblemError
        A size is missing, unknown, not positive or over 2**31 - 1, a flag is not 0 or 1, an array would be empty, or
        the dtype is not the kernel's.
    """
    expected = " ".join(f"{name}={value}" for name, value in spec.sizes.items())
    unknown = [name for name in sizes if name not in spec.sizes]
    if unknown:
        raise ProblemError(f"{spec.name} has no size {unknown[0]!r}; give its sizes like {expected}")
    missing = [name for name in spec.sizes if name not in sizes and not spec.is_optional(name)]
    if missing and not defaults:
        raise ProblemError(f"{spec.name} needs the size {missing[0]}; give its sizes like {expected}")
    values = {name: _value(spec, name, sizes.get(name, default)) for name, default in spec.sizes.items()}
    if dtype is not None and dtype not in spec.dtypes:
        raise ProblemError(f"{spec.name} is not written for dtype {dtype!r}; it takes {', '.join(spec.dtypes)}")
    problem = Problem(spec.name, values, dtype or spec.dtypes[0])
    for buffer in spec.buffers:
        shape = buffer.extents(values)
        if min(shape) < 1:
            raise ProblemError(f"{problem} is too small: its array {buffer.name} would have the shape {shape}")
    return problem


def _value(spec: KernelSpec, name: str, given: object) -> int:
    """A size or flag as an int; NumPy's integers are taken too, and booleans for flags."""
    is_flag = name in spec.flags
    try:
        if isinstance(given, bool) and not is_flag:
            raise TypeError
        value = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        wanted = "0 or 1" if is_flag else f"a whole number such as {spec.sizes[name]}"
        raise ProblemError(f"{'flag' if is_flag else 'size'} {name} is {given!r}, expected {wanted}") from None
    if is_flag and value not in (0, 1):
        raise ProblemError(f"flag {name} is {value}, expected 0 or 1")
    if not is_flag and not 1 <= value <= MAX_SIZE:
        raise ProblemError(f"size {name} is {value}, expected 1 to {MAX_SIZE}")
    return value


def size_distance(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[int, float]:
    """How far apart two problems of a kernel are: flags that differ, then doublings over all sizes.

    Names that only one of them has are passed over.
    """
    pairs = [(a[name], b[name]) for name in a.keys() & b.keys() if a[name] != b[name]]
    flags = sum(1 for pair in pairs if 0 in pair)  # a size is at least 1
    return flags, math.fsum(abs(math.log2(first / second)) for first, second in pairs if first and second)


def check_memory(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> None:
    """Refuse a problem that cannot be tuned in the device's memory.

    Tuning holds each buffer once, each input twice (to see that it stays unchanged) and each output in float64.

    Raises
    ------
    ProblemError
        More memory is needed than the device has.
    """
    needed_bytes = device.l2_bytes
    for buffer in spec.buffers:
        elements = math.prod(buffer.extents(problem.sizes))
        element_bytes = DTYPES[buffer.element_type(problem.dtype, problem.sizes)].size_bytes
        needed_bytes += elements * element_bytes * (1 if buffer.access == "out" else 2)
        if buffer.access != "in":
            needed_bytes += elements * _FLOAT64_BYTES
    if needed_bytes > device.memory_bytes:
        raise ProblemError(
            f"{problem} needs {needed_bytes / 2**30:,.1f} GiB of device memory to tune, "
            f"but {device.name} has {device.memory_bytes / 2**30:,.1f} GiB; choose smaller sizes"
        )
