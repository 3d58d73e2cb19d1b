"""Documents, rows and messages from outside: parsed by a declared schema, written as JSON that every reader accepts.

A schema is a type: a dataclass, a named tuple or a `msgspec.Struct` whose fields have bounds. Nothing else takes
documents apart. What does not match is a `DataError` that names the field.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from autotile.errors import DataError

Schema = TypeVar("Schema")

Name = Annotated[str, Meta(max_length=1000)]
"""Name of a kernel, a device, a parameter and the like."""
Text = Annotated[str, Meta(max_length=2**20)]
"""Text for people, such as a compiler's message."""
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Integer that every database can store."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Number of things, or size of a problem; by convention, sizes are passed to kernels as int32."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""`Count` that something is divided by."""
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e18)]
TimeUs = Annotated[float, Meta(ge=1e-6, le=1e15)]
"""Time of a launch in microseconds, from a picosecond to thirty years."""
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Moment = Annotated[datetime, Meta(tz=True)]
"""Date and time with an offset from UTC."""

_PLACE = re.compile(r" - at (`key` in )?`\$\.?(.*)`\Z", re.DOTALL)
_SHOWN_CHARACTERS = 300


def decode_json(text: str | bytes, schema: type[Schema]) -> Schema:
    """Parse a JSON document.

    Raises
    ------
    DataError
        It is not JSON (NaN, Infinity and numbers beyond a double are not), is nested too deeply, or does not match the
        schema.
    """
    try:
        return msgspec.json.decode(text, type=schema)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _data_error(error) from None


def convert(value: Any, schema: type[Schema]) -> Schema:
    """Parse a value of dictionaries, lists, strings and numbers, such as a row of a database or a table of TOML.

    Raises
    ------
    DataError
        It does not match the schema.
    """
    try:
        return msgspec.convert(value, schema)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _data_error(error) from None


def storable(text: str) -> str:
    """Return text that every database accepts: a compiler log may hold lone surrogates, and PostgreSQL rejects NUL."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


class NotJson:
    """Cell of a JSON column that holds something else, which matches no schema."""

    __slots__ = ()


def json_cell(cell: Any) -> Any:
    """Return the value of a cell of a JSON column, or `NotJson` for its schema to refuse."""
    if cell is None:
        return None
    try:
        return msgspec.json.decode(cell)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return NotJson()


class Format(msgspec.Struct):
    """Version of a document, which is read before anything else of it."""

    format: Any


def encode_json(value: Any, *, indent: int | str | None = None, compact: bool = False) -> str:
    """Return a JSON document in ASCII; a number that is not finite becomes null, as JSON has none.

    Parameters
    ----------
    indent
        Indent, or its number of spaces; None for one line.
    compact
        Whether to leave out the spaces after commas and colons.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and without spaces, which is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def _data_error(error: Exception) -> DataError:
    if isinstance(error, RecursionError):
        return DataError("nested too deeply")
    if isinstance(error, UnicodeError):
        return DataError("it is not UTF-8 text")
    message = str(error)
    place = _PLACE.search(message)
    fault = (message[: place.start()] if place else message).replace("`", "")[:_SHOWN_CHARACTERS]
    fault = fault.replace(f"got {NotJson.__name__}", "got something that is not JSON")
    field = (f"a key of {place[2]}" if place[1] else place[2]) if place else ""
    return DataError(fault[:1].lower() + fault[1:], field=field[:_SHOWN_CHARACTERS])
