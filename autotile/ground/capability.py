"""Which devices a kernel can run on: the target it names, the compute capability that it needs."""

from __future__ import annotations

import re
from functools import cache

from autotile.ground.errors import DeviceError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.spec import KernelSpec

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


def device_fault(spec: KernelSpec, device: DeviceProperties) -> str:
    """Why a device cannot run the kernel, whatever its configuration, in one line; "" where it can."""
    has = f"{device.name} has {device.compute_capability}"
    if spec.architecture is not None and capability_of(spec.architecture) != device.compute_capability:
        wanted = capability_of(spec.architecture)
        return (
            f"{spec.name} is compiled for {spec.architecture} alone, which takes compute capability {wanted}, but "
            f"{has}; choose a device of capability {wanted}, or another kernel"
        )
    least, what_for = _least_capability(spec)
    if least and is_below(device.compute_capability, least):
        return (
            f"{spec.name} needs compute capability {least}{what_for}, but {has}; choose a newer device, or another "
            "kernel"
        )
    return ""


def contradiction(spec: KernelSpec) -> str:
    """Why no device at all can run the kernel, in one line; "" where one may."""
    least, what_for = _least_capability(spec)
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
    fault = device_fault(spec, device)
    if fault:
        raise DeviceError(fault)


def _least_capability(spec: KernelSpec) -> tuple[str, str]:
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
