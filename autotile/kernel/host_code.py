"""Host functions in a source: nvcc compiles them for the processor, NVRTC refuses them."""

from __future__ import annotations

import re

_MASKED = re.compile(
    r"//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*",
    re.DOTALL | re.MULTILINE,
)
_DEVICE = re.compile(r"\b(?:__global__|__device__|__constant__|__shared__|__managed__|constexpr|consteval)\b")
_TRANSPARENT = re.compile(r"\s*(?:(?:inline\s+)?namespace\b[^()=;]*|extern\s+)\Z")
_NOT_A_FUNCTION = re.compile(r"\b(?:struct|class|union|enum|typedef|using|static_assert|operator|asm|concept|friend)\b")
_NAME_AND_PARAMETERS = re.compile(r"[\w>&*\]:]\s*[\s&*>]\s*[A-Za-z_][\w:]*\s*\Z|\bmain\s*\Z")
_MACRO = re.compile(r"^[^\S\n]*#[^\S\n]*define[^\S\n]+(\w+)", re.MULTILINE)
_MACRO_LIKE = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")
_HOST_TYPE = re.compile(
    r"\bstd\s*::\s*(?:vector|deque|list|map|set|unordered_map|unordered_set|string|string_view|unique_ptr|shared_ptr"
    r"|[io]?f?stream|[io]?stringstream|thread|mutex|condition_variable|future|random_device|mt19937(?:_64)?)\b"
)


def without_host_functions(source: str) -> str:
    """Return the source with the definitions and declarations of host functions blanked; lines keep their numbers.

    These are the functions in namespaces that have no annotation and are not ``constexpr``; device code cannot call
    them. Classes and variables without device functions that need types such as ``std::vector`` are blanked, too.
    What cannot be told for sure, such as a function that a macro annotates, stays. The source is returned as it is if
    its braces are not balanced, as where an ``#if`` chooses between two openings.
    """
    code = _MASKED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    macros = set(_MACRO.findall(source))
    blanked: list[tuple[int, int]] = []
    position = start = depth = 0
    while position < len(code):
        character = code[position]
        if character == ";":
            if _is_host_function(code[start:position], macros) or _is_host_data(code[start:position]):
                blanked.append((start, position + 1))
            start = position + 1
        elif character == "}":
            depth -= 1
            start = position + 1
        elif character == "{" and _TRANSPARENT.fullmatch(code, start, position):
            depth += 1
            start = position + 1
        elif character in "{(":
            end = _closing(code, position)
            if end is None:
                return source
            if character == "{" and "(" in code[start:position]:
                if _is_host_function(code[start:position], macros):
                    blanked.append((start, end + 1))
                if not _NOT_A_FUNCTION.search(_head(code[start:position])):
                    start = end + 1
            position = end
        position += 1
    if depth != 0:
        return source
    for begin, end in reversed(blanked):
        source = source[:begin] + _blank(source[begin:end]) + source[end:]
    return source


def _is_host_data(declaration: str) -> bool:
    """Return whether a declaration is that of a class or variable that needs the host's library."""
    return _HOST_TYPE.search(declaration) is not None and _DEVICE.search(declaration) is None


def _is_host_function(declaration: str, macros: set[str]) -> bool:
    if "(" not in declaration or _DEVICE.search(declaration):
        return False
    head = _head(declaration)
    before = head[: head.find("(")] if "(" in head else ""
    if "=" in before or _NOT_A_FUNCTION.search(before) or _NAME_AND_PARAMETERS.search(before.strip()) is None:
        return False
    return not any(name in macros or _MACRO_LIKE.fullmatch(name) for name in re.findall(r"\w+", before))


def _head(declaration: str) -> str:
    """Return a declaration without its ``template <...>``."""
    declaration = declaration.strip()
    while match := re.match(r"template\s*<", declaration):
        depth, position = 1, match.end()
        while depth and position < len(declaration):
            depth += {"<": 1, ">": -1}.get(declaration[position], 0)
            position += 1
        declaration = declaration[position:].strip()
    return declaration


def _closing(code: str, opening: int) -> int | None:
    """Return the position of the bracket that closes another; None if there is none."""
    closing, depth = {"{": "}", "(": ")"}[code[opening]], 0
    for match in re.compile(rf"[{re.escape(code[opening])}{closing}]").finditer(code, opening):
        depth += 1 if match[0] == code[opening] else -1
        if depth == 0:
            return match.start()
    return None


def _blank(text: str) -> str:
    """Return the text with spaces in place of code; directives stay, as they may open or close a condition."""
    kept = re.compile(r"^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*|\n", re.MULTILINE)
    parts, position = [], 0
    for match in kept.finditer(text):
        parts += [" " * (match.start() - position), match[0]]
        position = match.end()
    return "".join(parts) + " " * (len(text) - position)
