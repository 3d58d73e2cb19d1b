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
from autotile.core.documents import to_document
from autotile.core.text import RIGHT, Part, Result, ResultTable, bandwidth_text, bytes_text, flops_text, plural
from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database, database_location, open_for_reading
from autotile.database.learned import read_ceilings, save_ceilings
from autotile.errors import InputError, ToolchainError
from autotile.settings import available_cores, forget_passwords, read_settings


@dataclass(frozen=True, slots=True, repr=False)
class DeviceList(Result):
    """GPUs of this machine, profiles of GPUs that need not be present, and measured ceilings."""

    gpus: tuple[DeviceProperties, ...]
    """GPUs of this machine, in the order of their CUDA indices."""
    profiles: Mapping[str, DeviceProperties]
    """Devices by the names of their profiles."""
    ceilings: tuple[DeviceCeilings, ...] = ()
    """Ceilings in the database, of this machine's GPUs and of others, newest first."""

    def _headline(self) -> str:
        return f"{plural(len(self.gpus), 'CUDA device')} on this machine, {plural(len(self.profiles), 'profile')}"

    def _parts(self) -> Iterator[Part]:
        if self.gpus:
            yield _device_table("index", {str(index): gpu for index, gpu in enumerate(self.gpus)})
        else:
            yield "no CUDA device on this machine; `autotile doctor` says why"
        yield _device_table("profile", self.profiles)
        for measured in self.ceilings:
            yield measured.table._replace(caption=measured._headline())

    def to_json(self) -> Any:
        """Return every property of every device, and every ceiling."""

        def properties(device: DeviceProperties) -> dict[str, Any]:
            return {**device.to_json(), "peak_fp32_flops_per_s": device.peak_fp32_flops_per_s}

        live = [{"index": index, **properties(gpu)} for index, gpu in enumerate(self.gpus)]
        profiles = [{"profile": name, **properties(device)} for name, device in self.profiles.items()]
        return to_document({"live": live, "profiles": profiles, "ceilings": self.ceilings})


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
def devices(
    *, measure: bool = False, device: int | str | None = None, database: str | Path | None = None
) -> DeviceList | DeviceCeilings:
    """List the GPUs of this machine, the GPU profiles and measured ceilings.

    With ``measure``: measures the ceilings of a GPU. Reports draw rooflines with the newest measurement instead of the
    datasheet's figures. Nothing else should run on the GPU meanwhile.

    Parameters
    ----------
    measure
        Measure what a GPU reaches: bandwidths and arithmetic rates, in 10 s.
    device
        GPU to run on: the name or the index of a GPU of this machine. None for the first.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        This machine has no such GPU, or a GPU is named and nothing is to be measured.
    DatabaseError
        The database cannot be read.
    """
    if measure:
        return measure_device(device, database=database)
    if device is not None:
        raise InputError("--device names the GPU to measure; add --measure")
    profiles = {name: device_profile(name) for name in profile_names()}
    with open_for_reading(database) as opened:
        return DeviceList(local_gpus(), profiles, tuple(read_ceilings(opened)) if opened is not None else ())


@checked
def measure_device(device: int | str | None = None, *, database: str | Path | None = None) -> DeviceCeilings:
    """Measure the ceilings of a GPU and store them; takes about ten seconds.

    These are the rates of copying and reading in DRAM and in the L2 cache, of fused multiply-adds, of the tensor cores,
    and the time of an empty launch. Reports draw rooflines with the newest measurement of a GPU.

    Parameters
    ----------
    device, database
        As for `autotile.devices`.

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
    from autotile.workers.device_ceilings import request_ceilings

    settings, index = read_settings(), resolve_gpu(device)
    with Database.open(database_location(database)) as opened:
        measured = request_ceilings(settings.cache, settings.cache_limit_bytes, index)
        save_ceilings(opened, measured)
    return measured


@checked
def worker(
    scheduler: str,
    *,
    devices: str | None = None,
    compilers: int | None = None,
    insecure: bool = False,
    replay: str | Path | None = None,
    replay_seconds: float = 0.0,
    observe: Callable[[str], None] = lambda _: None,
) -> None:
    """Offer GPUs and cores to `autotile tune --scheduler`, until Ctrl-C ends it.

    A process for each GPU, and one for all compilers, join the scheduler, which `dask scheduler` starts, and are
    replaced when they die. They listen on the interface by which this machine reaches the scheduler. A machine without
    a GPU offers its cores. Whoever may connect to the scheduler can run programs here: use TLS.

    Parameters
    ----------
    scheduler
        Its address: tls://HOST:PORT.
    devices
        GPUs to offer; of a replay, numbers of simulated ones. None for all that there are, maybe none.
    compilers
        Compilations at the same time, for sessions on any machine; 0 for none. None for one a core that the GPUs leave.
    insecure
        Allow a scheduler of another machine without TLS.
    replay
        Offer GPUs that replay recordings, to try a cluster without a GPU.
    replay_seconds
        Time that these take for a candidate.
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

    forget_passwords()  # the processes that are started need none
    check_scheduler(scheduler, insecure=insecure)
    if replay is not None:
        numbers = simulated_gpus("0" if devices in (None, "all") else devices or "")
        gpus = replayed_gpus(Path(replay), numbers, replay_seconds)
    elif replay_seconds:
        raise InputError("--replay-seconds is of simulated GPUs; name their recording with --replay")
    elif devices is None and not device_count():
        gpus = []
        observe("this machine has no CUDA device: its cores are offered")
    else:
        gpus = live_gpus(resolve_gpus(devices or "all"))
    if compilers is None and replay is not None:
        compilers = 0
    elif compilers is None:
        try:
            nvrtc_version()
            compilers = max(1, available_cores() - len(gpus))
        except ToolchainError as error:
            observe(f"no cores are offered: {error}")
            compilers = 0
    if not gpus and not compilers:
        raise InputError("this machine has no CUDA device, and offers no cores; leave --compile out, or give a number")
    offer(scheduler, gpus, observe, compilers=compilers, insecure=insecure)
