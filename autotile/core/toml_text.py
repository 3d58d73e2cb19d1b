"""Text of a TOML document, laid out as people write search-space files: a table of tables has one line an entry."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(document: Mapping[str, Any]) -> str:
    """Return a document as TOML, which `tomllib` reads back as an equal document.

    Parameters
    ----------
    document
        Tables by name, of strings, whole numbers, booleans, finite floats, lists and tables; a value that is a list of
        tables is written as an array of tables. An entry of a table may be None, which is left out.

    Raises
    ------
    TypeError
        A value has another type.
    """
    sections = []
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            sections += [_section(f"[[{_key(name)}]]", each) for each in value]
        elif isinstance(value, Mapping):
            sections.append(_section(f"[{_key(name)}]", value))
        else:
            raise TypeError(f"{name} is a {type(value).__name__}, expected a table")
    return "\n".join(sections)


def _section(heading: str, table: Mapping[str, Any]) -> str:
    lines = [f"{_key(name)} = {toml_value(value)}" for name, value in table.items() if value is not None]
    return "\n".join([heading, *lines]) + "\n"


def toml_value(value: Any) -> str:
    """Return a value on one line; errors as for `toml_text`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML string, except that it may contain DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, Mapping):
        entries = ", ".join(f"{_key(name)} = {toml_value(each)}" for name, each in value.items() if each is not None)
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"{value!r} is a {type(value).__name__}, which TOML cannot hold")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)
