"""Reading C++ sources without a compiler: comments, includes, ``__global__`` and host functions, names of entries."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autotile.errors import InputError
from autotile.settings import toolkit_folders

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
_REST = r"\b[^\S\n]*([^\n]*)"
_DIRECTIVE = re.compile(rf"(?:#|%:)[^\S\n]*(?:include_next|include|import){_REST}")
_EMBED = re.compile(rf"(?:#|%:)[^\S\n]*embed{_REST}")
_OPERATOR_OPERAND = r"\b[^\S\n]*(?:\([^\S\n]*(\"[^\"\n]*\"?|<[^>\n]*>?|))?"
_HAS_INCLUDE = re.compile(rf"__has_include(?:_next)?{_OPERATOR_OPERAND}")
_HAS_EMBED = re.compile(rf"__has_embed{_OPERATOR_OPERAND}")
_IS_DEFINED = re.compile(r"(?:\bdefined[\s(]*|\b(?:ifn?def|elifn?def|undef)\s+)\Z")
_DEFINED_CHARACTERS = 40  # searched for ``defined``
_OPERAND = re.compile(r'"([^"\n]*)"|<([^>\n]*)>')
_CONTINUED = re.compile(r"\\\s")


def included_names(code: str) -> Iterator[str | None]:
    """Yield the operands of the directives and of ``__has_include``; None for a macro. Lines are spliced."""
    return _named_files(code, _DIRECTIVE, _HAS_INCLUDE)


def embedded_names(code: str) -> Iterator[str | None]:
    """Yield the operands of ``#embed`` and ``__has_embed``, files that are data; otherwise as `included_names`."""
    return _named_files(code, _EMBED, _HAS_EMBED) if "embed" in code else iter(())


def _named_files(code: str, directive: re.Pattern[str], operator: re.Pattern[str]) -> Iterator[str | None]:
    for match in directive.finditer(code):
        if not code[code.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            yield _operand(match[1])
    for match in operator.finditer(code):
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


_CURE = "copy it into the kernel's folder, and include it from there"


def permitted_folders(template: Path, further: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the folders, without links in their paths, below which a template may include files.

    These are its own, the one around it (``../common/x.h``) unless that is the home folder or the root, the toolkit's,
    and further ones.
    """
    own = template.parent.resolve()
    around = [own.parent] if own.parent not in (Path(own.anchor), _home()) else []
    return (own, *around, *(folder.resolve() for folder in (*further, *toolkit_folders())))


def is_permitted(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a file, wherever links lead to, is below one of the folders; `permitted_folders`' order counts.

    Hidden files count only below the first folder, the template's own: others, such as ``.ssh``, hold secrets.
    """
    found = path.resolve()
    if found.is_relative_to(folders[0]):
        return True
    below = [found.relative_to(folder) for folder in folders[1:] if found.is_relative_to(folder)]
    return any(not any(part.startswith(".") for part in rest.parts) for rest in below)


def check_include(path: Path, folders: Sequence[Path], name: str, place: str) -> None:
    """Raise if a template must not include a file.

    Parameters
    ----------
    path, folders
        File, and folders as from `permitted_folders`.
    name, place
        The name in the directive, and the file and line of the directive, for the message.

    Raises
    ------
    InputError
        The file is a pipe, a device or another special file, or is outside of the folders.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a name may not be a path at all
    except (OSError, ValueError):
        return
    if stat.S_ISDIR(mode):
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{place}: {name!r} is a pipe, a device or another special file; include a regular file")
    if not is_permitted(path, folders):
        raise InputError(f"{place}: {name!r} is outside of the kernel's folder {folders[0]}; {_CURE}")


def _home() -> Path:
    return Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - Path.home raises if there is none
