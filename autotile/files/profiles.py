"""What is known of GPUs without having one: profiles by name, limits by compute capability.

The figures are in ``devices/*.toml`` (one GPU a file) and ``compute_capabilities.toml``, each with its source.
Memory sizes are those of the data sheets, which count in GiB; a live device reports a little less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from autotile.files.figures import read_figures, read_table
from autotile.ground.errors import InputError
from autotile.ground.frozen import dataclass
from autotile.ground.hardware import DeviceProperties

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
