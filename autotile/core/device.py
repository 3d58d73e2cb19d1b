"""Properties of CUDA devices: profiles of known GPUs, and the limits of each compute capability.

The figures are in ``devices/*.toml`` (one file per GPU) and ``compute_capabilities.toml``, each with its source, as a
test checks. Memory sizes are those of the datasheets, in GiB; a live device reports slightly less.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autotile.core.documents import Bytes, Name, NonNegative, Positive, convert
from autotile.errors import InputError

Source = Literal["cuda", "profile", "replayed"]
Capability = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,3}\.[0-9]{1,3}\Z")]
"""Compute capability, such as ``"9.0"``."""


class DeviceProperties(msgspec.Struct, frozen=True):
    """Properties of a GPU, from a live device, a profile file or a recording.

    The first ones, as the CUDA occupancy calculation uses them, are those of its compute capability: see `limits_for`.
    """

    warp_size: Positive
    max_threads_per_block: Positive
    max_threads_per_sm: Positive
    max_blocks_per_sm: Positive
    registers_per_block: Positive
    registers_per_sm: Positive
    max_registers_per_thread: Positive
    register_unit: Positive
    """Register allocation unit, per warp (compute capability 2 and later) or per block."""
    warp_unit: Positive
    """Warp allocation granularity: warps of a block are rounded up to a multiple of it for register allocation."""
    smem_per_block_bytes: Bytes
    """Maximum shared memory per block without opt-in."""
    smem_per_block_optin_bytes: Bytes
    """Maximum shared memory per block with opt-in."""
    smem_per_sm_bytes: Bytes
    smem_reserved_per_block_bytes: Bytes
    """Shared memory per block reserved by the system (1 KiB from compute capability 8.0)."""
    smem_unit_bytes: Positive
    """Shared memory allocation unit."""
    max_block_dim: tuple[Positive, Positive, Positive]
    max_grid_dim: tuple[Positive, Positive, Positive]
    fp32_lanes_per_sm: Positive
    """fp32 fused multiply-adds per SM and clock cycle."""
    name: Name
    compute_capability: Capability
    """Such as ``"9.0"``."""
    sm_count: Positive
    l2_bytes: Bytes
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: NonNegative
    clock_mhz: NonNegative
    """Maximum SM clock."""
    source: Source = "cuda"
    driver: Name = ""

    @property
    def architecture(self) -> str:
        """Compilation target, such as ``"sm_90"``."""
        return "sm_" + self.compute_capability.replace(".", "")

    @property
    def max_warps_per_sm(self) -> int:
        """Maximum resident warps per SM."""
        return self.max_threads_per_sm // self.warp_size

    @property
    def peak_fp32_flops_per_s(self) -> float:
        """Peak fp32 rate: two operations (multiply and add) per lane and cycle at the maximum clock."""
        return 2.0 * self.sm_count * self.fp32_lanes_per_sm * self.clock_mhz * 1e6

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return msgspec.structs.asdict(self)

    @property
    def identity(self) -> dict[str, Any]:
        """Name and source, as JSON values."""
        return {"name": self.name, "source": self.source}


EXPRESSION_NAMES = tuple(
    name for name, hint in DeviceProperties.__annotations__.items() if hint in {"Positive", "Bytes"}
)
"""Names of ``device.*`` in expressions: all integer properties."""


_FOLDER = Path(__file__).parent
_CAPABILITIES = _FOLDER / "compute_capabilities.toml"


def device_profile(name: str) -> DeviceProperties:
    """Return the properties of a known GPU, by the name of its profile or that of the device in CUDA.

    Case, punctuation and the words NVIDIA, GeForce, Tesla and RTX are ignored: ``"rtx-3060"``, ``"RTX 3060"`` and
    ``"NVIDIA GeForce RTX 3060"`` are equivalent. Raise `InputError` if there is no such profile; the message lists
    similar names and all names.
    """
    files, plain_name = _files(), _plain(name)
    for key in files:
        if _plain(key) == plain_name:
            return _profile(key)
    keys = {alias: key for key in files for alias in (_plain(_profile(key).name), _plain(key))}
    if plain_name in keys:
        return _profile(keys[plain_name])
    import difflib  # needed for errors only

    nearest = dict.fromkeys(keys[alias] for alias in difflib.get_close_matches(plain_name, keys, n=3, cutoff=0.4))
    hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
    raise InputError(f"no GPU profile is named {name!r}; {hint}known: {', '.join(files)}")


def gpu_name_of(name: str) -> str:
    """Return the name by which CUDA knows the GPU of a profile; the name itself where there is no such profile."""
    try:
        return device_profile(name).name
    except InputError:
        return name


def is_name_of(name: str, gpu: DeviceProperties) -> bool:
    """Return True if a name is that of a GPU or of its profile."""
    return name.casefold() == gpu.name.casefold() or gpu_name_of(name) == gpu_name_of(gpu.name)


def profile_names() -> list[str]:
    """Return the names of the known GPUs, sorted."""
    return list(_files())


@cache
def limits_for(compute_capability: str) -> Mapping[str, Any]:
    """Return the limits and rates of all devices of a compute capability, by the names of `DeviceProperties`.

    An unknown capability has the limits of the nearest lower one with the same major version, or, if there is none, of
    the newest. Raise `InputError` if ``compute_capability`` is not of the form ``"9.0"``.
    """
    requested, table = version_of(compute_capability), _capabilities()
    names = {version_of(name): name for name in table if name != "sources"}
    lower = [version for version in names if version[0] == requested[0] and version <= requested]
    row: str | None = names[max(lower, default=max(names))]
    figures: dict[str, Any] = {}
    while row is not None:  # a row has the figures that differ from those of the row that it is like
        found = _values(table[row])
        row = found.pop("like", None)
        figures = {**found, **figures}
    return figures


def parse_profile(text: str, source: str) -> DeviceProperties:
    """Parse the text of a profile file.

    Raise `InputError` if the text is malformed; the message gives ``source`` and the figure.
    """
    try:
        figures = _values(tomllib.loads(text))
        limits = limits_for(str(figures.get("compute_capability")))
        return convert({**limits, **figures, "source": "profile"}, DeviceProperties)
    except ValueError as error:  # it is not TOML, or has other figures
        raise InputError(f"{source}: {error}") from None


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the figures in a table, each of which names its source, and of its names as they are."""
    return {
        name: entry.get("value") if isinstance(entry, dict) else entry
        for name, entry in table.items()
        if name != "sources"
    }


@cache
def _files() -> Mapping[str, Path]:
    return {file.stem: file for file in sorted(_FOLDER.joinpath("devices").glob("*.toml"))}


@cache
def _profile(key: str) -> DeviceProperties:
    file = _files()[key]
    return parse_profile(file.read_text(encoding="utf-8"), f"devices/{file.name}")


@cache
def _capabilities() -> dict[str, Any]:
    return tomllib.loads(_CAPABILITIES.read_text(encoding="utf-8"))


@cache
def version_of(text: str) -> tuple[int, int]:
    """Return the numbers of a compute capability, or of a version of CUDA, such as ``"9.0"``; or an `InputError`."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise InputError(f"compute capability {text!r}: expected major and minor version, such as '9.0'")
    return int(major), int(minor)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())
