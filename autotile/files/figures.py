"""Read the project's own tables of figures: TOML in which every figure names its source.

A figure is written ``sm_count = { value = 132, source = "whitepaper" }``, and the table ``[sources]`` of the same file
says which document ``whitepaper`` is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotile.ground.errors import InputError
from autotile.ground.hardware import DeviceProperties

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
