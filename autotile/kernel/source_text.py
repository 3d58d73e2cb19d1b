"""The text of a source as the compiler's first phases read it: comments, literals and ``#include`` directives."""

from __future__ import annotations

import re
from collections.abc import Iterator

SPLICE = "\\\n"
_S = r"(?:\\\n)*"  # a line can be continued within any token
_QUOTED = "|".join(rf"{q}[^{q}\\\n]*(?:(?:\\\n|\\{_S}[^\n]|\\)[^{q}\\\n]*)*{q}?" for q in "\"'")
_COMMENT = rf"/{_S}/[^\\\n]*(?:\\\n?[^\\\n]*)*|/{_S}\*.*?(?:\*{_S}/|\Z)"
_TOKEN = re.compile(rf"({_QUOTED})|{_COMMENT}", re.DOTALL)
_RARE_TOKEN = re.compile(
    rf"((?<!\w)\.?\d(?:[\w.]|'{_S}\w|\\\n)*|"  # 1'000
    r"^[^\S\n]*(?:#|%:)[^\S\n]*include(?:_next)?[^\S\n]*<[^>\n]*>)|"  # <a//b.h>
    rf'((?<!\w)(?:(?:u{_S}8|[uUL]){_S})?R{_S}"(?P<delimiter>[^()\\\s"]{{0,16}})\(.*?(?:\)(?P=delimiter)"|\Z))|'
    rf"({_QUOTED})|{_COMMENT}",
    re.DOTALL | re.MULTILINE,
)
_RAW = re.compile(rf'R{_S}"')
_HEADER_NAME = re.compile(r"include(?:_next)?[^\S\n]*<([^>\n]*)")
_SEPARATOR_BACKWARDS = re.compile(r"'[\w.]*(?:\n\\|(?<=[\d.])(?![\w.]))")
"""A single quote after a number, in a reversed text: to search for what begins with a quote is four times as fast."""
_DIRECTIVE = re.compile(r"(?:#|%:)[^\S\n]*(?:include_next|include|import)\b[^\S\n]*([^\n]*)")
_HAS_INCLUDE = re.compile(r"__has_include(?:_next)?\b[^\S\n]*(?:\([^\S\n]*(\"[^\"\n]*\"?|<[^>\n]*>?|))?")
_IS_DEFINED = re.compile(r"(?:\bdefined[\s(]*|\b(?:ifn?def|elifn?def|undef)\s+)\Z")
_DEFINED_CHARACTERS = 40  # searched for ``defined``
_OPERAND = re.compile(r'"([^"\n]*)"|<([^>\n]*)>')
_CONTINUED = re.compile(r"\\\s")


def included_names(code: str) -> Iterator[str | None]:
    """Yield the operands of the directives and of ``__has_include``; None for a macro. Lines are spliced."""
    for match in _DIRECTIVE.finditer(code):
        if not code[code.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            yield _operand(match[1])
    for match in _HAS_INCLUDE.finditer(code):
        if match[1] is not None:
            yield _operand(match[1])
        elif not _IS_DEFINED.search(code, max(0, match.start() - _DEFINED_CHARACTERS), match.start()):
            yield None


def _operand(text: str) -> str | None:
    match = _OPERAND.match(text)
    return (match[1] or match[2] or "") if match else None


def has_trigraphs(text: str) -> bool:
    """Return whether the text has trigraphs that matter here; they count with ``--std=c++14`` only."""
    return "??" in text and ("??=" in text or "??/" in text)


def strip_comments(text: str) -> str:
    """Return the text with each comment replaced by a space, and raw strings spelled on one line.

    Line continuations stay. An unclosed literal ends with its line, an unclosed comment or raw string with the file.
    """
    if _has_rare_tokens(text):
        return _RARE_TOKEN.sub(_replace_token, text)
    return _TOKEN.sub(lambda match: match[1] or " ", text)


def _has_rare_tokens(text: str) -> bool:
    """Return whether there may be raw strings, digit separators, or header names with ``//`` or ``/*``."""
    if _RAW.search(text) or any("//" in name or "/*" in name for name in _HEADER_NAME.findall(text)):
        return True
    return "'" in text and _SEPARATOR_BACKWARDS.search(text[::-1]) is not None


def _replace_token(match: re.Match[str]) -> str:
    number, raw, _, quoted = match.groups()
    return repr(raw).replace(" ", r"\x20") if raw else number or quoted or " "


def normalize(code: str) -> str:
    """Return the code without indentation and blank lines, except where they end or follow a continued line."""
    if not _CONTINUED.search(code):
        return "\n".join(filter(None, (" ".join(line.split()) for line in code.split("\n"))))
    lines: list[str] = []
    before = ""
    for line in code.split("\n"):
        words = " ".join(line.split())
        if before.endswith("\\"):
            is_split = line[:1].isspace() and not before[-2:-1].isspace()  # the indentation separates two tokens
            lines.append(" " + words if is_split else words)
        elif words:
            lines.append(words)
        if words.endswith("\\") and line[-1].isspace():  # not a continuation
            lines[-1] += " "
        before = line
    return "\n".join(lines)
