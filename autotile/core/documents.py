"""Documents, rows and messages from outside: parsed by a declared schema, written as JSON that every reader accepts.

A schema is a type: a dataclass, a named tuple or a `msgspec.Struct` whose fields have bounds. Nothing else takes
documents apart. What does not match is a `DataError` that names the field.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
from msgspec import Meta

from autotile.errors import DataError, type_text

Schema = TypeVar("Schema")

JsonObject = dict[str, Any]
"""An object of JSON, its values by their names."""

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

_PLACE = r"(?s) - at (`key` in )?`\$\.?(.*)`\Z"
_SHOWN_CHARACTERS = 300
_first_use = threading.Lock()


@cache
def _decoder(schema: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a schema.

    msgspec crashes where two threads meet a dataclass first: it stores what it knows of it before that is complete.
    """
    with _first_use:
        return msgspec.json.Decoder(schema, dec_hook=_foreign)


def decode_json(text: str | bytes, schema: type[Schema]) -> Schema:
    """Parse a JSON document.

    Raise `DataError` if it is not JSON (NaN, Infinity and numbers beyond a double are not), is nested too deeply, or
    does not match the schema.
    """
    try:
        found: Schema = _decoder(schema).decode(text)  # type: ignore[arg-type]  # mypy: types are not hashable
        return found
    except (ValueError, OverflowError, RecursionError) as error:
        raise _data_error(error) from None


def convert(value: Any, schema: type[Schema]) -> Schema:
    """Parse a value of dictionaries, lists, strings and numbers, such as a row of a database or a table of TOML.

    Raise `DataError` if it does not match the schema.
    """
    _decoder(schema)  # type: ignore[arg-type]
    try:
        return msgspec.convert(value, schema, dec_hook=_foreign)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _data_error(error) from None


def _foreign(kind: Any, value: Any) -> Any:
    """Return a value of a type that JSON has not: one that was made before, or a path from its text."""
    if isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, got {type_text(type(value))}")


def storable(text: str) -> str:
    """Return text that every database accepts: a compiler log may hold lone surrogates, and PostgreSQL rejects NUL."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def json_text(value: Any) -> str:
    """Return the content of a JSON column."""
    return storable(encode_json(value, compact=True))


def json_cell(cell: Any) -> Any:
    """Return the value of a cell of a JSON column; `Ellipsis`, which matches no schema, if it holds something else."""
    if cell is None:
        return None
    try:
        return msgspec.json.decode(cell)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return ...


class Format(msgspec.Struct):
    """Version of a document, which is read before anything else of it."""

    format: Any


def encode_json(value: Any, *, indent: int | str | None = None, compact: bool = False) -> str:
    """Return a JSON document in ASCII; a number that is not finite becomes null, as JSON has none.

    ``indent`` is text, or a number of spaces; None for one line. ``compact`` leaves out the spaces after commas and
    colons.
    """
    dump = partial(json.dumps, indent=indent, separators=(",", ":") if compact else None, allow_nan=False)
    try:
        return dump(value)
    except ValueError:
        return dump(_finite(value))


def to_document(value: Any) -> Any:
    """Return the JSON values of a value, whatever is nested in it.

    An object with a method ``to_json`` is what that returns, another dataclass or structure is an object of its fields,
    an enum is its value, a mapping an object, another collection a list, a date ISO 8601, a path text, a NumPy scalar a
    number.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "to_json"):
        return to_document(value.to_json())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): to_document(each) for name, each in value.items()}
    if isinstance(value, list | tuple | Set):
        return [to_document(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, msgspec.Struct):
        return {name: to_document(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {field.name: to_document(getattr(value, field.name)) for field in fields(value)}
    return value.item() if hasattr(value, "item") else str(value)


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a value by their names, as entries of a document."""
    return {name: getattr(value, name) for name in names}


def to_fields(value: Any) -> Any:
    """Return the JSON values of all fields of a message, for a schema to parse; methods ``to_json`` are not called."""
    return msgspec.to_builtins(
        value,
        enc_hook=lambda other: (
            dict(other) if isinstance(other, Mapping) else other.item() if hasattr(other, "item") else str(other)
        ),
    )


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and without spaces, which is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def json_hash(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode(errors="surrogatepass")).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def _data_error(error: Exception) -> DataError:
    if isinstance(error, RecursionError):
        return DataError("nested too deeply")
    message = str(error)
    if isinstance(error, UnicodeError) or message.startswith("Invalid UTF-8"):  # of msgspec before 0.23, and since
        return DataError("it is not UTF-8 text")
    place = re.search(_PLACE, message)
    fault = (message[: place.start()] if place else message).replace("`", "")[:_SHOWN_CHARACTERS]
    fault = fault.replace("got ellipsis", "got something that is not JSON")
    field = (f"a key of {place[2]}" if place[1] else place[2]) if place else ""
    is_word = fault[1:2].islower()
    return DataError(fault[:1].lower() + fault[1:] if is_word else fault, field=field[:_SHOWN_CHARACTERS])


_BARE_KEY = r"[A-Za-z0-9_-]+"


def toml_text(document: Mapping[str, Any]) -> str:
    """Return a document as TOML, which `tomllib` reads back as an equal document.

    It is tables by name, of strings, whole numbers, booleans, floats, lists and tables; a list of tables is written as
    an array of tables, and an entry of a table that is None is left out. Another type is a `TypeError`.
    """
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            tables += [(f"[[{_key(name)}]]", each) for each in value]
        elif isinstance(value, Mapping):
            tables.append((f"[{_key(name)}]", value))
        else:
            raise TypeError(f"{name} is {type_text(type(value))}, expected a table")
    sections = []
    for heading, table in tables:
        lines = [f"{_key(name)} = {toml_value(value)}" for name, value in table.items() if value is not None]
        sections.append("\n".join([heading, *lines]) + "\n")
    return "\n".join(sections)


def toml_value(value: Any) -> str:
    """Return a value on one line; errors as for `toml_text`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML string, except that it may contain DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        entries = ", ".join(f"{_key(name)} = {toml_value(each)}" for name, each in value.items() if each is not None)
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"{value!r} is {type_text(type(value))}, which TOML cannot hold")


def _key(name: str) -> str:
    return name if re.fullmatch(_BARE_KEY, name) else toml_value(name)


MAX_KEY_PARTS = 16
"""Maximum number of parts of a dotted key; `tomllib` takes time and memory that grow with its square."""

_DOT = r"[ \t]*+\.[ \t]*+"
_PART = r"""(?:[A-Za-z0-9_-]++|"(?!"")(?:[^"\\\n]++|\\[^\n])*+"|'(?!'')[^'\n]*+')"""
_KEY = rf"{_PART}(?:{_DOT}{_PART}){{0,{MAX_KEY_PARTS - 1}}}+(?!{_DOT})"
_COMMENT = r"\#[^\n]*+"
_BASIC = r'''"""(?:[^"\\]++|\\.|"{1,2}(?!"))*+"{3,5}'''
_LITERAL = r"""'''(?:[^']++|'{1,2}(?!'))*+'{3,5}"""
_REST = r"""[^A-Za-z0-9_\-"'\#]++"""
_SHALLOW = rf"(?s:{_REST}|{_COMMENT}|{_BASIC}|{_LITERAL}|{_KEY})*+"
"""Longest start of a text without a dotted key of too many parts.

It follows the lexical rules of https://toml.io/en/v1.0.0. Where it ends early for another reason, such as an open
string, the text is not TOML, and `tomllib` reads it no further.
"""
_DEEP = rf"{_PART}(?:{_DOT}{_PART}){{{MAX_KEY_PARTS}}}"


class NotRegularError(OSError):
    """Input path of something other than a regular file or a folder, such as a named pipe or a device."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a named pipe or device, which could block or never end, is refused.

    A path of something else is a `NotRegularError` or an `IsADirectoryError`, whose ``strerror`` says what.
    """
    _check_regular(path, path.stat().st_mode)  # opening some devices has effects
    # Without O_NONBLOCK, opening a named pipe waits for a writer; it has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        stream = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with stream:
        yield stream


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; one of more than ``max_bytes`` is an `OSError` (``EFBIG``)."""
    with open_regular(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML in time and memory proportional to its length.

    Raise `ValueError` if the text is not TOML, a whole number has more digits than Python converts, a dotted key has
    more than `MAX_KEY_PARTS` parts, or values are nested too deeply.
    """
    if any(line.count(".") >= MAX_KEY_PARTS for line in text.split("\n")):  # else the patterns need not be compiled
        shallow = re.match(_SHALLOW, text)
        end = shallow.end() if shallow else 0
        if re.compile(_DEEP).match(text, end):
            line, column = text.count("\n", 0, end) + 1, end - text.rfind("\n", 0, end)
            raise ValueError(f"a dotted key has more than {MAX_KEY_PARTS} parts (at line {line}, column {column})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the values are nested too deeply; use plain tables and lists") from None


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise NotRegularError(errno.EINVAL, f"it is a {kind}, expected a regular file", str(path))
