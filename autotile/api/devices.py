"""The GPUs of this machine, profiles of GPUs, and the ceilings that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotile.api.targets import local_gpus, resolve_gpu, resolve_gpus, simulated_gpus
from autotile.core.argument_types import checked
from autotile.core.ceilings import DeviceCeilings
from autotile.core.device import DeviceProperties, device_profile, profile_names
from autotile.core.text import RIGHT, Part, Result, ResultTable, bandwidth_text, bytes_text, flops_text, plural
from autotile.cuda.driver import device_count, has_driver
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database, database_location, open_for_reading
from autotile.database.learned import read_ceilings, save_ceilings
from autotile.errors import InputError, ToolchainError
from autotile.settings import available_cores, read_settings


@dataclass(frozen=True, slots=True, repr=False)
class DeviceList(Result):
    """GPUs of this machine, profiles of GPUs that need not be present, and measured ceilings.

    Attributes
    ----------
    gpus
        GPUs of this machine, in the order of their CUDA indices.
    profiles
        Devices by the names of their profiles.
    ceilings
        Ceilings in the database, of this machine's GPUs and of others, newest first.
    """

    gpus: tuple[DeviceProperties, ...]
    profiles: Mapping[str, DeviceProperties]
    ceilings: tuple[DeviceCeilings, ...] = ()

    def _headline(self) -> str:
        return f"{plural(len(self.gpus), 'CUDA device')} on this machine, {plural(len(self.profiles), 'profile')}"

    def _parts(self) -> Iterator[Part]:
        """Yield the GPUs of this machine, the profiles, and the ceilings of each GPU."""
        if self.gpus:
            yield _device_table("index", {str(index): gpu for index, gpu in enumerate(self.gpus)})
        else:
            yield "no CUDA device on this machine; `autotile doctor` says why"
        yield _device_table("profile", self.profiles)
        for measured in self.ceilings:
            yield measured.table._replace(caption=measured._headline())

    def to_json(self) -> dict[str, Any]:
        """Return every property of every device, and every ceiling."""

        def properties(device: DeviceProperties) -> dict[str, Any]:
            return {**device.to_json(), "peak_fp32_flops_per_s": device.peak_fp32_flops_per_s}

        return {
            "live": [{"index": index, **properties(gpu)} for index, gpu in enumerate(self.gpus)],
            "profiles": [{"profile": name, **properties(device)} for name, device in self.profiles.items()],
            "ceilings": [measured.to_json() for measured in self.ceilings],
        }


def _device_table(key: str, devices: Mapping[str, DeviceProperties]) -> ResultTable:
    figures = ("SMs", "fp32 peak", "memory", "bandwidth", "smem a block")
    rows = [
        (
            name,
            device.name,
            device.compute_capability,
            str(device.sm_count),
            flops_text(device.peak_fp32_flops_per_s),
            bytes_text(device.memory_bytes),
            bandwidth_text(device.memory_bandwidth_bytes_per_s),
            bytes_text(device.smem_per_block_optin_bytes),
        )
        for name, device in devices.items()
    ]
    return ResultTable((key, "name", "capability", *(f"{RIGHT}{name}" for name in figures)), rows, ("name",))


@checked
def devices(*, database: str | Path | None = None) -> DeviceList:
    """List the GPUs of this machine, the GPU profiles, and the ceilings that were measured.

    Parameters
    ----------
    database
        Path or URL of the database with the ceilings; None for the user's own.

    Raises
    ------
    DatabaseError
        The database cannot be read.
    """
    profiles = {name: device_profile(name) for name in profile_names()}
    opened = open_for_reading(database)
    if opened is None:
        return DeviceList(local_gpus(), profiles)
    with opened:
        return DeviceList(local_gpus(), profiles, tuple(read_ceilings(opened)))


@checked
def measure_device(device: int | str | None = None, *, database: str | Path | None = None) -> DeviceCeilings:
    """Measure the ceilings of a GPU and store them; takes about ten seconds.

    These are the rates of copying and reading in DRAM and in the L2 cache, of fused multiply-adds, of the tensor cores,
    and the time of an empty launch. Reports draw rooflines with the newest measurement of a GPU.

    Parameters
    ----------
    device
        CUDA index or name of a GPU of this machine; None for the first.
    database
        Path or URL of the database; None for the user's own.

    Returns
    -------
    DeviceCeilings
        Its ``warnings`` say what may have lowered them, such as another process on the GPU.

    Raises
    ------
    InputError
        This machine has no such GPU, or the cubin cache cannot be used.
    ToolchainError
        The toolchain does not work, or the GPU computes wrong results or impossible rates; nothing is stored then.
    DatabaseError
        The database cannot be written.
    """
    from autotile.workers.device_ceilings import CeilingRequest, request_ceilings

    settings, index = read_settings(), resolve_gpu(device)
    with Database.open(database_location(database)) as opened:
        measured = request_ceilings(CeilingRequest(str(settings.cache), settings.cache_limit_bytes, index))
        save_ceilings(opened, measured)
    return measured


@checked
def worker(
    scheduler: str,
    *,
    devices: str | None = None,
    compilers: int | None = None,
    insecure: bool = False,
    replay: Path | None = None,
    replay_seconds: float = 0.0,
    observe: Callable[[str], None] = lambda _: None,
) -> None:
    """Offer GPUs and cores of this machine to the sessions of a scheduler of Dask, until Ctrl-C or SIGTERM.

    Parameters
    ----------
    scheduler
        Address of the scheduler, such as ``tls://host:8786``.
    devices
        ``"all"`` or indices such as ``"0,2"``; in replay, numbers of the simulated GPUs. None for all that there are,
        maybe none.
    compilers
        Number of compilations at the same time; 0 for none. None for one a core that the GPUs leave; for none in
        replay, or without NVRTC.
    insecure
        Whether the connection may leave the machine without TLS.
    replay
        Recording that simulated GPUs replay, or folder of recordings; None to offer the machine's own.
    replay_seconds
        Time that a simulated GPU takes for a candidate, in seconds.
    observe
        Called with one line for the user when a GPU joins or loses the scheduler.

    Raises
    ------
    InputError
        The address is not allowed, no scheduler answers there, certificates are missing, this machine has no such GPU,
        or nothing is offered.
    ToolchainError
        Dask is not installed; or there are compilers to offer, and NVRTC is not.
    """
    from autotile.tuning.cluster.connection import check_scheduler
    from autotile.tuning.cluster.worker import live_gpus, offer, replayed_gpus

    check_scheduler(scheduler, insecure=insecure)
    if replay is not None:
        numbers = simulated_gpus("0" if devices in (None, "all") else devices or "")
        gpus = replayed_gpus(replay, numbers, replay_seconds)
    elif replay_seconds:
        raise InputError("--replay-seconds is of simulated GPUs; name their recording with --replay")
    elif devices is None and not (has_driver() and device_count()):
        gpus = []
        observe("this machine has no CUDA device: its cores are offered")
    else:
        gpus = live_gpus(resolve_gpus(devices or "all"))
    if compilers is None:
        compilers = _free_cores(len(gpus), observe) if replay is None else 0
    if not gpus and not compilers:
        raise InputError("this machine has no CUDA device, and offers no cores; leave --compile out, or give a number")
    offer(scheduler, gpus, observe, compilers=compilers, insecure=insecure)


def _free_cores(gpus: int, observe: Callable[[str], None]) -> int:
    """Return the number of cores that GPUs leave to compilers; none where NVRTC is not installed."""
    try:
        nvrtc_version()
    except ToolchainError as error:
        observe(f"no cores are offered: {error}")
        return 0
    return max(1, available_cores() - gpus)
