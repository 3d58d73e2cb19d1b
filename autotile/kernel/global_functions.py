"""The ``__global__`` functions of a source, as far as they can be read without a compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_GLOBAL = re.compile(r"\b__global__\b")
_TEMPLATE = re.compile(r"\btemplate\s*<")
_NAME = re.compile(r"([A-Za-z_]\w*)\s*\Z")
_ATTRIBUTE = re.compile(
    r"\b(?:__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__|__declspec|alignas)\s*\("
)
_MAX_DECLARATION = 20_000
"""Characters of one declaration that are read."""
_OPEN = {"(": ")", "[": "]", "{": "}", "<": ">"}


class FunctionParameter(NamedTuple):
    """A parameter of a function: its name, "" if it has none, and its type as written."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether the type is written as a pointer or an array."""
        return self.type.endswith("*")


class GlobalFunction(NamedTuple):
    """A ``__global__`` function."""

    name: str
    template: tuple[str, ...]
    """Template parameters as written; empty if it is none."""
    parameters: tuple[FunctionParameter, ...]

    @property
    def display(self) -> str:
        """The name, with the template parameters if there are any."""
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name


def global_functions(source: str) -> list[GlobalFunction]:
    """Return the ``__global__`` functions that a source declares, in order.

    Macros are not expanded and included files are not read, so that functions may be missing.
    """
    code = _COMMENT_OR_LITERAL.sub(lambda match: '""' if match[0].startswith('"') else " ", source)
    code = re.sub(r"^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*", "", code, flags=re.MULTILINE)  # directives
    return list(_functions(code))


def template_names(source: str) -> frozenset[str]:
    """Return the names of all template parameters that a source declares; comments are skipped, macros not expanded."""
    if "template" not in source:
        return frozenset()
    code = _COMMENT_OR_LITERAL.sub(" ", source)
    names = set()
    for match in _TEMPLATE.finditer(code):
        inside = _inside(code[match.end() - 1 : match.end() + _MAX_DECLARATION], 0)
        for part in _split(inside or ""):
            if name := _NAME.search(part.partition("=")[0].rstrip()):
                names.add(name[1])
    return frozenset(names)


def _functions(code: str) -> Iterator[GlobalFunction]:
    for match in _GLOBAL.finditer(code):
        text = _without_attributes(code[match.end() : match.end() + _MAX_DECLARATION])
        opening = text.find("(")
        name = _NAME.search(text[:opening]) if opening >= 0 else None
        if name is None or set(text[:opening]) & set(";{}="):
            continue
        parameters = _inside(text, opening)
        if parameters is not None:
            yield GlobalFunction(name[1], _template_before(code, match.start()), tuple(_parameters(parameters)))


def _without_attributes(text: str) -> str:
    """Return the text with ``__launch_bounds__(...)`` and the like removed before the list of parameters."""
    while (match := _ATTRIBUTE.search(text)) is not None:
        inside = _inside(text, match.end() - 1)
        if inside is None or text.find("(") < match.end() - 1:  # it follows the parameters
            return text
        text = text[: match.start()] + " " + text[match.end() + len(inside) + 1 :]
    return text


def _inside(text: str, opening: int) -> str | None:
    """Return the text between a bracket and the one that closes it; None if it is not closed."""
    closing = _OPEN[text[opening]]
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == text[opening]:
            depth += 1
        elif text[position] == closing:
            depth -= 1
            if depth == 0:
                return text[opening + 1 : position]
    return None


def _template_before(code: str, position: int) -> tuple[str, ...]:
    """Return the template parameters of the declaration that a position is in."""
    start = max(code.rfind(mark, 0, position) for mark in ";}{")
    match = _TEMPLATE.search(code, start + 1, position)
    inside = _inside(code[match.end() - 1 : position], 0) if match else None
    return tuple(part for part in _split(inside or "") if part)


def _parameters(text: str) -> Iterator[FunctionParameter]:
    for part in _split(text):
        declared = " ".join(part.split("=", 1)[0].split())
        if declared in ("", "void"):
            continue
        array = re.fullmatch(r"(.*?)\s*(\w*)\s*(?:\[[^\]]*\])+", declared)
        if array:
            yield FunctionParameter(array[2], f"{array[1]}*")
            continue
        match = re.fullmatch(r"(.*[\s*&>])(\w+)", declared)
        name, kind = (match[2], match[1]) if match else ("", declared)
        if name in ("int", "long", "char", "short", "double", "float", "unsigned", "const", "bool"):
            name, kind = "", declared
        pointer = kind.replace("__restrict__", " ").replace("__restrict", " ").strip()
        yield FunctionParameter(name, re.sub(r"\s*\*", "*", pointer))


def _split(text: str) -> list[str]:
    """Return the parts of a list between commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in _OPEN) - (character in _OPEN.values())
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
