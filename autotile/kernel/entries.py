"""C++ names of ``__global__`` functions, as a file writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MAX_CHARACTERS = 1000
_QUALIFIED = r"(?a:(?:::\s*)?[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)"
_CAST = r"\(\s*void\s*\(\s*\*\s*\)\s*\((?P<types>[^;{}]*?)\)\s*\)\s*&?"
"""An overloaded function with its type."""
_OTHER = re.compile(r"[^\w\s:,<>()\[\]*&+\-/%!=|^~.?']|//|/\*|\n", re.ASCII)
"""Characters that no template argument contains."""
_IDENTIFIER = re.compile(r"(?<![\w:])[A-Za-z_]\w*(?!\w|\s*::)", re.ASCII)


def is_entry(text: str) -> bool:
    """Return whether a text can be the C++ name of a function.

    That is a name with its namespaces, ``space::name``, maybe followed by template arguments, ``name<BLOCK, float>``,
    or an overloaded name with its type, ``(void (*)(float*, int))name``. The compiler reads it as an expression, so it
    must not be able to end it.
    """
    if len(text) > _MAX_CHARACTERS or _OTHER.search(text):
        return False
    if match := re.match(_CAST, text.lstrip()):
        return _is_balanced(match["types"]) and is_entry(text.lstrip()[match.end() :])
    name, opening, arguments = text.partition("<")
    if re.fullmatch(_QUALIFIED, name.strip()) is None:
        return False
    return not opening or (arguments.rstrip().endswith(">") and _is_balanced(arguments.rstrip()[:-1]))


def template_arguments(entry: str) -> str:
    """Return the template arguments of an entry as written; "" if it has none."""
    return entry.partition("<")[2].rpartition(">")[0]


def names_in(entry: str) -> frozenset[str]:
    """Return the identifiers in the template arguments of an entry, without those that a namespace or class holds."""
    return frozenset(_IDENTIFIER.findall(template_arguments(entry)))


def with_values(entry: str, values: Mapping[str, str]) -> str:
    """Return an entry with values in place of names in its template arguments."""
    name, opening, _ = entry.partition("<")
    if not opening:
        return entry
    arguments = _IDENTIFIER.sub(lambda match: values.get(match[0], match[0]), template_arguments(entry))
    return f"{name}<{arguments}>"


def _is_balanced(text: str) -> bool:
    """Return whether each parenthesis and bracket is closed; ``<`` and ``>`` may be comparisons."""
    opened: list[str] = []
    for character in text:
        if character in "([":
            opened.append(character)
        elif character in ")]" and (not opened or opened.pop() + character not in ("()", "[]")):
            return False
    return not opened
