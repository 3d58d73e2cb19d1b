"""Properties of CUDA devices: profiles of known GPUs, and the limits of each compute capability.

The figures are in ``devices/*.toml`` (one file per GPU) and ``compute_capabilities.toml``, each with its source. Memory
sizes are those of the datasheets, in GiB; a live device reports slightly less.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from autotile.core.frozen import dataclass
from autotile.errors import InputError

Source = Literal["cuda", "profile", "replayed"]


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Limits and rates of a GPU, from a live device, a profile file or a recording.

    The limits are those that the CUDA occupancy calculation uses.
    """

    name: str
    compute_capability: str
    """Such as ``"9.0"``."""
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_block: int
    registers_per_sm: int
    max_registers_per_thread: int
    register_unit: int
    """Register allocation unit, per warp (compute capability 2 and later) or per block."""
    warp_unit: int
    """Warp allocation granularity: warps of a block are rounded up to a multiple of it for register allocation."""
    smem_per_block_bytes: int
    """Maximum shared memory per block without opt-in."""
    smem_per_block_optin_bytes: int
    """Maximum shared memory per block with opt-in."""
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    """Shared memory per block reserved by the system (1 KiB from compute capability 8.0)."""
    smem_unit_bytes: int
    """Shared memory allocation unit."""
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    clock_mhz: float
    """Maximum SM clock."""
    fp32_lanes_per_sm: int
    """fp32 fused multiply-adds per SM and clock cycle."""
    source: Source = "cuda"
    driver: str = ""

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
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceProperties:
        """Create an instance from JSON values; the inverse of `to_json`.

        Raises
        ------
        ValueError
            A field is missing.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in data:
                value = data[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
            elif field.name not in ("source", "driver"):
                raise ValueError(f"device properties lack {field.name!r}")
        return cls(**values)


EXPRESSION_NAMES = tuple(f.name for f in fields(DeviceProperties) if f.type in ("int",))
"""Names of ``device.*`` in expressions: all integer properties."""


_KINDS = {field.name: str(field.type) for field in fields(DeviceProperties)} | {"like": "str"}
_EXPECTED = {"int": "a whole number, 0 or more", "float": "a number, 0 or more", "str": "a string"}


def read_table(text: str, source: str) -> dict[str, Any]:
    """Parse TOML.

    Raises
    ------
    InputError
        The text is not TOML; the message gives ``source`` and the location.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None


def read_figures(table: Any, sources: Any, location: str) -> dict[str, Any]:
    """Return the checked values of the figures in a table.

    Parameters
    ----------
    table
        Figures by field of `DeviceProperties`, and ``like``, the name of another table.
    sources
        Table ``[sources]`` of the file: documents by the short names that figures refer to.
    location
        File and table, for messages.

    Raises
    ------
    InputError
        A figure is unknown, has no source, or does not have the type of its field.
    """
    if not isinstance(sources, dict):
        raise InputError(f"{location}: there is no [sources] table; list the documents that the figures come from")
    if not isinstance(table, dict):
        raise InputError(f"{location}: expected a table of figures, got {table!r}")
    return {name: _value(entry, _KINDS.get(name), sources, f"{location}: {name}") for name, entry in table.items()}


def _value(entry: Any, kind: str | None, sources: Mapping[str, Any], location: str) -> Any:
    if kind is None:
        raise InputError(f"{location}: unknown figure; expected a field of DeviceProperties")
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise InputError(f"{location}: expected {{ value = ..., source = ... }}, got {entry!r}")
    if entry["source"] not in sources:
        raise InputError(f"{location}: source {entry['source']!r} is not in [sources]; listed: {', '.join(sources)}")
    return _of_kind(entry["value"], kind, location)


def _of_kind(value: Any, kind: str, location: str) -> Any:
    if (kind == "int" and _is_whole(value)) or (kind == "str" and isinstance(value, str)):
        return value
    if kind == "float" and (_is_whole(value) or (isinstance(value, float) and value >= 0.0)):
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list) and len(value) == 3 and all(map(_is_whole, value)):
        return tuple(value)
    raise InputError(f"{location}: expected {_EXPECTED.get(kind, 'three whole numbers, 0 or more')}, got {value!r}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class CapabilityLimits:
    """Properties common to all devices of a compute capability; fields as in `DeviceProperties`."""

    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    registers_per_block: int
    registers_per_sm: int
    max_registers_per_thread: int
    register_unit: int
    warp_unit: int
    smem_per_block_bytes: int
    smem_per_block_optin_bytes: int
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    smem_unit_bytes: int
    fp32_lanes_per_sm: int


_LIMITS = frozenset(field.name for field in fields(CapabilityLimits))
_CHIP_FIGURES = frozenset({"sm_count", "clock_mhz", "memory_bytes", "memory_bandwidth_bytes_per_s", "l2_bytes"})


def device_profile(name: str) -> DeviceProperties:
    """Return the properties of a known GPU.

    Parameters
    ----------
    name
        Name of the profile, or name of the device in CUDA. Case, punctuation and the words NVIDIA, GeForce, Tesla and
        RTX are ignored: ``"rtx-3060"``, ``"RTX 3060"`` and ``"NVIDIA GeForce RTX 3060"`` are equivalent.

    Raises
    ------
    InputError
        There is no such profile; the message lists similar names and all names.
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


def profile_names() -> list[str]:
    """Return the names of the known GPUs, sorted."""
    return list(_files())


@cache
def limits_for(compute_capability: str) -> CapabilityLimits:
    """Return the limits of a compute capability.

    An unknown capability has the limits of the nearest lower one with the same major version, or, if there is none, of
    the newest.

    Raises
    ------
    InputError
        ``compute_capability`` is not of the form ``"9.0"``.
    """
    requested = _version(compute_capability)
    table = _capabilities()
    lower = [version for version in table.versions if version[0] == requested[0] and version <= requested]
    return table.limits(max(lower, default=max(table.versions)))


def parse_profile(text: str, source: str) -> DeviceProperties:
    """Parse the text of a profile file.

    Raises
    ------
    InputError
        The text is malformed; the message gives ``source`` and the figure.
    """
    table = read_table(text, source)
    sources = table.pop("sources", None)
    names = {key: table.pop(key, None) for key in ("name", "compute_capability")}
    for key, value in names.items():
        if not isinstance(value, str):
            raise InputError(f"{source}: {key}: expected a string, got {value!r}")
    figures = read_figures(table, sources, source)
    _check_names(figures, _CHIP_FIGURES, source)
    limits = asdict(limits_for(names["compute_capability"]))
    return DeviceProperties.from_json({**names, **limits, **figures, "source": "profile"})


class Capabilities:
    """The table of compute capabilities; a row is checked when it is used, as a look-up needs only one.

    Parameters
    ----------
    text
        Text of the file.
    source
        Name of the file, for messages.

    Attributes
    ----------
    versions
        Major and minor version of each row.

    Raises
    ------
    InputError
        The text is not a table of figures.
    """

    def __init__(self, text: str, source: str) -> None:
        self._rows = read_table(text, source)
        self._source = source
        self._sources = self._rows.pop("sources", None)
        self._names = {_version(name): name for name in self._rows}
        self.versions = tuple(self._names)

    def limits(self, version: tuple[int, int]) -> CapabilityLimits:
        """Return the limits of a row.

        Raises
        ------
        InputError
            The row is malformed.
        """
        return CapabilityLimits(**self._figures(self._names[version]))

    def _figures(self, name: str) -> dict[str, Any]:
        """Return the figures of a row, completed by those of the row that it is ``like``."""
        location = f"{self._source}: [{name}]"
        figures = read_figures(self._rows[name], self._sources, location)
        like = figures.pop("like", None)
        if like is not None:
            above = list(self._rows)[: list(self._rows).index(name)]
            if like not in above:
                raise InputError(f"{location}: like: {like!r} is not a row above this one")
            figures = {**self._figures(like), **figures}
        _check_names(figures, _LIMITS, location)
        return figures


@cache
def _files() -> Mapping[str, Path]:
    """Return the profile files by name."""
    return {file.stem: file for file in sorted(_FOLDER.joinpath("devices").glob("*.toml"))}


@cache
def _profile(key: str) -> DeviceProperties:
    file = _files()[key]
    return parse_profile(file.read_text(encoding="utf-8"), f"devices/{file.name}")


@cache
def _capabilities() -> Capabilities:
    file = _FOLDER.joinpath("compute_capabilities.toml")
    return Capabilities(file.read_text(encoding="utf-8"), file.name)


def _check_names(figures: Mapping[str, Any], expected: frozenset[str], location: str) -> None:
    if missing := expected - figures.keys():
        raise InputError(f"{location}: missing: {', '.join(sorted(missing))}")
    if surplus := figures.keys() - expected:
        raise InputError(f"{location}: does not belong here: {', '.join(sorted(surplus))}")


def _version(compute_capability: str) -> tuple[int, int]:
    major, _, minor = compute_capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise InputError(f"compute capability {compute_capability!r}: expected major and minor version, such as '9.0'")
    return int(major), int(minor)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())
