"""What a command is about: a kernel at given sizes, and the device it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotile.core.device import DeviceProperties, device_profile, profile_names
from autotile.core.model import Problem
from autotile.cuda.driver import device_count, live_device
from autotile.errors import InputError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.report.devices import DevicesReport

_FALLBACK_PROFILE = "h200"


@dataclass(frozen=True, slots=True)
class Target:
    """A device, and one line for the user where it is not the one that was asked for."""

    device: DeviceProperties
    notice: str = ""


def open_problem(
    kernel: str, sizes: Mapping[str, int], dtype: str | None = None, *, defaults: bool = False
) -> tuple[Kernel, Problem]:
    """Read a kernel and check a problem against it.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file.
    sizes, dtype
        As given; None for the kernel's first dtype.
    defaults
        Fill in missing sizes from the search-space file.

    Raises
    ------
    InputError
        Unknown kernel, malformed file, or a size or dtype that the kernel does not have.
    """
    loaded = load_kernel(kernel)
    return loaded, resolve_problem(loaded.spec, sizes, dtype, defaults=defaults)


def target_device(name: str | None) -> Target:
    """The device that a question is about.

    Parameters
    ----------
    name
        Name of a GPU profile, or the index of a GPU of this machine; None for the first GPU of this machine, and
        where there is none for the profile of an H200.

    Raises
    ------
    InputError
        No such profile, or no GPU of that index.
    """
    if name is not None and name.isdecimal():
        check_device_index(int(name))
        return Target(live_device(int(name)))
    if name is not None:
        return Target(device_profile(name))
    if device_count() > 0:
        return Target(live_device())
    device = device_profile(_FALLBACK_PROFILE)
    return Target(device, f"no CUDA device here: the answer is for the {device.name}; --device names another")


def check_device_index(index: int) -> None:
    """Refuse the index of a GPU that this machine does not have.

    Raises
    ------
    InputError
        There is no such GPU; the message says which there are.
    """
    count = device_count()
    if not 0 <= index < count:
        there = "there is none" if count == 0 else "there is only 0" if count == 1 else f"there are 0 to {count - 1}"
        raise InputError(f"no CUDA device {index} on this machine: {there}; see `autotile devices`")


def known_devices() -> DevicesReport:
    """The GPUs of this machine, and the known profiles."""
    live = [live_device(index) for index in range(device_count())]
    return DevicesReport(live, {name: device_profile(name) for name in profile_names()})
