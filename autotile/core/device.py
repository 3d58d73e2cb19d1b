"""Properties of CUDA devices: profiles of known GPUs and limits of each compute capability.

The figures are in ``devices/*.toml`` (one GPU a file) and ``compute_capabilities.toml``, each with its source.
Memory sizes are those of the data sheets, which count in GiB; a live device reports a little less.
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
    """Limits and rates of one GPU.

    The limits are the ones that the CUDA occupancy rules are stated in; a live device, a profile file and a
    recording all fill the same fields.
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
    """Registers are handed out to a warp (compute capability 2 and later) or a block in multiples of this."""
    warp_unit: int
    """Warps of a block are rounded up to a multiple of this when registers are handed out."""
    smem_per_block_bytes: int
    """Shared memory a block may use without opting in."""
    smem_per_block_optin_bytes: int
    """Shared memory a block may use after opting in to more dynamic shared memory."""
    smem_per_sm_bytes: int
    smem_reserved_per_block_bytes: int
    """What the system keeps of every block's shared memory (1 KiB from compute capability 8.0)."""
    smem_unit_bytes: int
    """Shared memory is handed out in multiples of this."""
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    clock_mhz: float
    """Highest SM clock."""
    fp32_lanes_per_sm: int
    """fp32 fused multiply-adds that an SM can start in one cycle."""
    source: Source = "cuda"
    driver: str = ""

    @property
    def architecture(self) -> str:
        """The compile target, such as ``"sm_90"``."""
        return "sm_" + self.compute_capability.replace(".", "")

    @property
    def max_warps_per_sm(self) -> int:
        """Warps that an SM can hold."""
        return self.max_threads_per_sm // self.warp_size

    @property
    def peak_fp32_flops_per_s(self) -> float:
        """Two operations (multiply and add) a lane and cycle, at the highest clock."""
        return 2.0 * self.sm_count * self.fp32_lanes_per_sm * self.clock_mhz * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of every field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceProperties:
        """Inverse of `to_json`.

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
"""The ``device.*`` names that an expression may use: every whole-number property."""


_KINDS = {field.name: str(field.type) for field in fields(DeviceProperties)} | {"like": "str"}
_EXPECTED = {"int": "a whole number, 0 or more", "float": "a number, 0 or more", "str": "a string"}


def read_table(text: str, source: str) -> dict[str, Any]:
    """Parse TOML.

    Raises
    ------
    InputError
        Not TOML; the message names ``source`` and the place.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None


def read_figures(table: Any, sources: Any, place: str) -> dict[str, Any]:
    """Values of the figures in a table, checked.

    Parameters
    ----------
    table
        Figures by the names of `DeviceProperties`' fields, and ``like``, the name of another table.
    sources
        The file's ``[sources]``: documents by the short names that figures use.
    place
        File and table, for messages.

    Raises
    ------
    InputError
        A figure is unknown, has no source, or is not of its field's kind.
    """
    if not isinstance(sources, dict):
        raise InputError(f"{place}: there is no [sources] table; list the documents that the figures come from")
    if not isinstance(table, dict):
        raise InputError(f"{place}: expected a table of figures, got {table!r}")
    return {name: _value(entry, _KINDS.get(name), sources, f"{place}: {name}") for name, entry in table.items()}


def _value(entry: Any, kind: str | None, sources: Mapping[str, Any], place: str) -> Any:
    if kind is None:
        raise InputError(f"{place}: unknown figure; expected a field of DeviceProperties")
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise InputError(f"{place}: expected {{ value = ..., source = ... }}, got {entry!r}")
    if entry["source"] not in sources:
        raise InputError(f"{place}: source {entry['source']!r} is not in [sources]; listed: {', '.join(sources)}")
    return _of_kind(entry["value"], kind, place)


def _of_kind(value: Any, kind: str, place: str) -> Any:
    if (kind == "int" and _is_whole(value)) or (kind == "str" and isinstance(value, str)):
        return value
    if kind == "float" and (_is_whole(value) or (isinstance(value, float) and value >= 0.0)):
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list) and len(value) == 3 and all(map(_is_whole, value)):
        return tuple(value)
    raise InputError(f"{place}: expected {_EXPECTED.get(kind, 'three whole numbers, 0 or more')}, got {value!r}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class CapabilityLimits:
    """What every device of a compute capability has alike; each field as in `DeviceProperties`."""

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
    """Properties of a known GPU.

    Parameters
    ----------
    name
        A profile's name or the name that CUDA gives the device. Case, punctuation and the words NVIDIA, GeForce, Tesla
        and RTX do not matter: ``"rtx-3060"``, ``"RTX 3060"`` and ``"NVIDIA GeForce RTX 3060"`` are one.

    Raises
    ------
    InputError
        No such profile; the message lists the nearest and all.
    """
    files, wanted = _files(), _plain(name)
    for key in files:
        if _plain(key) == wanted:
            return _profile(key)
    keys = {alias: key for key in files for alias in (_plain(_profile(key).name), _plain(key))}
    if wanted in keys:
        return _profile(keys[wanted])
    import difflib  # for errors alone

    nearest = dict.fromkeys(keys[alias] for alias in difflib.get_close_matches(wanted, keys, n=3, cutoff=0.4))
    hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
    raise InputError(f"no GPU profile is named {name!r}; {hint}known: {', '.join(files)}")


def profile_names() -> list[str]:
    """Names of the known GPUs, sorted."""
    return list(_files())


@cache
def limits_for(compute_capability: str) -> CapabilityLimits:
    """Limits of a compute capability.

    An unknown one has those of the nearest lower known one with the same major number, else of the newest known.

    Raises
    ------
    InputError
        ``compute_capability`` is not of the form ``"9.0"``.
    """
    wanted = _version(compute_capability)
    table = _capabilities()
    lower = [version for version in table.versions if version[0] == wanted[0] and version <= wanted]
    return table.limits(max(lower, default=max(table.versions)))


def parse_profile(text: str, source: str) -> DeviceProperties:
    """Read the text of a profile file.

    Raises
    ------
    InputError
        Malformed; the message names ``source`` and the figure.
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
    """The table of compute capabilities; a row is checked when it is asked for, and a look-up asks for one.

    Parameters
    ----------
    text
        Of the file.
    source
        Its name, for errors.

    Attributes
    ----------
    versions
        Major and minor number of each row.

    Raises
    ------
    InputError
        The text is no table of figures.
    """

    def __init__(self, text: str, source: str) -> None:
        self._rows = read_table(text, source)
        self._source = source
        self._sources = self._rows.pop("sources", None)
        self._names = {_version(name): name for name in self._rows}
        self.versions = tuple(self._names)

    def limits(self, version: tuple[int, int]) -> CapabilityLimits:
        """What a row says.

        Raises
        ------
        InputError
            It is malformed.
        """
        return CapabilityLimits(**self._figures(self._names[version]))

    def _figures(self, name: str) -> dict[str, Any]:
        """The row's own figures, and those of the row that it is like."""
        place = f"{self._source}: [{name}]"
        figures = read_figures(self._rows[name], self._sources, place)
        like = figures.pop("like", None)
        if like is not None:
            above = list(self._rows)[: list(self._rows).index(name)]
            if like not in above:
                raise InputError(f"{place}: like: {like!r} is not a row above this one")
            figures = {**self._figures(like), **figures}
        _check_names(figures, _LIMITS, place)
        return figures


@cache
def _files() -> Mapping[str, Path]:
    """The profiles' files, by their names."""
    return {file.stem: file for file in sorted(_FOLDER.joinpath("devices").glob("*.toml"))}


@cache
def _profile(key: str) -> DeviceProperties:
    file = _files()[key]
    return parse_profile(file.read_text(encoding="utf-8"), f"devices/{file.name}")


@cache
def _capabilities() -> Capabilities:
    file = _FOLDER.joinpath("compute_capabilities.toml")
    return Capabilities(file.read_text(encoding="utf-8"), file.name)


def _check_names(figures: Mapping[str, Any], expected: frozenset[str], place: str) -> None:
    if missing := expected - figures.keys():
        raise InputError(f"{place}: missing: {', '.join(sorted(missing))}")
    if surplus := figures.keys() - expected:
        raise InputError(f"{place}: does not belong here: {', '.join(sorted(surplus))}")


def _version(compute_capability: str) -> tuple[int, int]:
    major, _, minor = compute_capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise InputError(f"compute capability {compute_capability!r}: expected major and minor number, such as '9.0'")
    return int(major), int(minor)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())
