"""The author's files that a template consists of: their text, their hash, and checks against the search-space file.

Macros are checked before compilation, the compiled parameters after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autotile.core.forks import cached_property
from autotile.core.text import plural
from autotile.errors import InputError
from autotile.settings import toolkit_folders

if TYPE_CHECKING:
    from autotile.kernel.spec import KernelSpec, Step  # imports NumPy, which compile workers do without

SPLICE = "\\\n"
_S = r"(?:\\\n)*"  # a line can be continued within any token
_QUOTED = "|".join(rf"{q}[^{q}\\\n]*(?:(?:\\\n|\\{_S}[^\n]|\\)[^{q}\\\n]*)*{q}?" for q in "\"'")
_COMMENT = rf"/{_S}/[^\\\n]*(?:\\\n?[^\\\n]*)*|/{_S}\*.*?(?:\*{_S}/|\Z)"
# Patterns are compiled at their first use: a look-up in a new process needs few of them.
_TOKEN = rf"(?s)({_QUOTED})|{_COMMENT}"
_RARE_TOKEN = (
    rf"(?ms)((?<!\w)\.?\d(?:[\w.]|'{_S}\w|\\\n)*|"  # 1'000
    r"^[^\S\n]*(?:#|%:)[^\S\n]*include(?:_next)?[^\S\n]*<[^>\n]*>)|"  # <a//b.h>
    rf'((?<!\w)(?:(?:u{_S}8|[uUL]){_S})?R{_S}"(?P<delimiter>[^()\\\s"]{{0,16}})\(.*?(?:\)(?P=delimiter)"|\Z))|'
    rf"({_QUOTED})|{_COMMENT}"
)
_RAW = rf'R{_S}"'
_HEADER_NAME = r"include(?:_next)?[^\S\n]*<([^>\n]*)"
_SEPARATOR_BACKWARDS = r"'[\w.]*(?:\n\\|(?<=[\d.])(?![\w.]))"
"""A single quote after a number, in a reversed text: to search for what begins with a quote is four times as fast."""
_REST = r"\b[^\S\n]*([^\n]*)"
_DIRECTIVE = rf"(?:#|%:)[^\S\n]*(?:include_next|include|import){_REST}"
_EMBED = rf"(?:#|%:)[^\S\n]*embed{_REST}"
_OPERATOR_OPERAND = r"\b[^\S\n]*(?:\([^\S\n]*(\"[^\"\n]*\"?|<[^>\n]*>?|))?"
_HAS_INCLUDE = rf"__has_include(?:_next)?{_OPERATOR_OPERAND}"
_HAS_EMBED = rf"__has_embed{_OPERATOR_OPERAND}"
_IS_DEFINED = r"(?:\bdefined[\s(]*|\b(?:ifn?def|elifn?def|undef)\s+)\Z"
_DEFINED_CHARACTERS = 40  # searched for ``defined``
_OPERAND = r'"([^"\n]*)"|<([^>\n]*)>'
_CONTINUED = r"\\\s"


def included_names(code: str) -> Iterator[str | None]:
    """Yield the operands of the directives and of ``__has_include``; None for a macro. Lines are spliced."""
    return _named_files(code, _DIRECTIVE, _HAS_INCLUDE)


def embedded_names(code: str) -> Iterator[str | None]:
    """Yield the operands of ``#embed`` and ``__has_embed``, files that are data; otherwise as `included_names`."""
    return _named_files(code, _EMBED, _HAS_EMBED) if "embed" in code else iter(())


def _named_files(code: str, directive: str, operator: str) -> Iterator[str | None]:
    def operand(text: str) -> str | None:
        match = re.match(_OPERAND, text)
        return (match[1] or match[2] or "") if match else None

    for match in re.finditer(directive, code):
        if not code[code.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            yield operand(match[1])
    for match in re.finditer(operator, code):
        if match[1] is not None:
            yield operand(match[1])
        elif not re.compile(_IS_DEFINED).search(code, max(0, match.start() - _DEFINED_CHARACTERS), match.start()):
            yield None


def has_trigraphs(text: str) -> bool:
    """Return True if the text has trigraphs that matter here; they count with ``--std=c++14`` only."""
    return "??" in text and ("??=" in text or "??/" in text)


def strip_comments(text: str) -> str:
    """Return the text with each comment replaced by a space, and raw strings spelled on one line.

    Line continuations stay. An unclosed literal ends with its line, an unclosed comment or raw string with the file.
    """
    has_header_comment = any("//" in name or "/*" in name for name in re.findall(_HEADER_NAME, text))
    if not (
        re.search(_RAW, text) or has_header_comment or ("'" in text and re.search(_SEPARATOR_BACKWARDS, text[::-1]))
    ):
        return re.sub(_TOKEN, lambda match: match[1] or " ", text)
    # The groups are a number or the name of a header, a raw string, its delimiter, and a quoted text.
    return re.sub(_RARE_TOKEN, lambda m: repr(m[2]).replace(" ", r"\x20") if m[2] else m[1] or m[4] or " ", text)


def normalize(code: str) -> str:
    """Return the code without indentation and blank lines, except where they end or follow a continued line."""
    if not re.search(_CONTINUED, code):
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


_COMMENT_OR_LITERAL = r'(?s)//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"'
_GLOBAL = r"\b__global__\b"
_TEMPLATE = r"\btemplate\s*<"
_NAME = r"([A-Za-z_]\w*)\s*\Z"
_ATTRIBUTE = (
    r"\b(?:__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__|__declspec|alignas)\s*\("
)
_MAX_DECLARATION = 20_000
"""Characters of one declaration that are read."""
_OPEN = {"(": ")", "[": "]", "{": "}", "<": ">"}


class GlobalFunction(NamedTuple):
    """A ``__global__`` function."""

    name: str
    template: tuple[str, ...]
    """Template parameters as written; empty if it is none."""
    parameters: tuple[tuple[str, str], ...]
    """Name, "" if it has none, and type as written of each parameter."""

    @property
    def display(self) -> str:
        """The name, with the template parameters if there are any."""
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name


def global_functions(source: str) -> list[GlobalFunction]:
    """Return the ``__global__`` functions that a source declares, in order.

    Macros are not expanded and included files are not read, so that functions may be missing.
    """
    code = re.sub(_COMMENT_OR_LITERAL, lambda match: '""' if match[0].startswith('"') else " ", source)
    code = re.sub(r"^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*", "", code, flags=re.MULTILINE)  # directives
    found = []
    for match in re.finditer(_GLOBAL, code):
        text = code[match.end() : match.end() + _MAX_DECLARATION]
        while attribute := re.search(_ATTRIBUTE, text):  # __launch_bounds__(...) and the like before the parameters
            inside = _inside(text, attribute.end() - 1)
            if inside is None or text.find("(") < attribute.end() - 1:
                break
            text = text[: attribute.start()] + " " + text[attribute.end() + len(inside) + 1 :]
        opening = text.find("(")
        name = re.search(_NAME, text[:opening]) if opening >= 0 else None
        if name is None or set(text[:opening]) & set(";{}="):
            continue
        parameters = _inside(text, opening)
        if parameters is None:
            continue
        declared = max(code.rfind(mark, 0, match.start()) for mark in ";}{") + 1
        before = re.compile(_TEMPLATE).search(code, declared, match.start())
        template = _inside(code[before.end() - 1 : match.start()], 0) if before else None
        parts = tuple(filter(None, _split(template or "")))
        found.append(GlobalFunction(name[1], parts, tuple(_parameters(parameters))))
    return found


def template_names(source: str) -> frozenset[str]:
    """Return the names of all template parameters that a source declares; comments are skipped, macros not expanded."""
    if "template" not in source:
        return frozenset()
    code = re.sub(_COMMENT_OR_LITERAL, " ", source)
    names = set()
    for match in re.finditer(_TEMPLATE, code):
        inside = _inside(code[match.end() - 1 : match.end() + _MAX_DECLARATION], 0)
        for part in _split(inside or ""):
            if name := re.search(_NAME, part.partition("=")[0].rstrip()):
                names.add(name[1])
    return frozenset(names)


def _closing(text: str, opening: int) -> int | None:
    """Return the position of the bracket that closes another; None if there is none."""
    left, right = text[opening], _OPEN[text[opening]]
    depth = 0
    for match in re.compile(f"[{re.escape(left + right)}]").finditer(text, opening):
        depth += 1 if match[0] == left else -1
        if depth == 0:
            return match.start()
    return None


def _inside(text: str, opening: int) -> str | None:
    closing = _closing(text, opening)
    return None if closing is None else text[opening + 1 : closing]


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for part in _split(text):
        declared = " ".join(part.split("=", 1)[0].split())
        if declared in ("", "void"):
            continue
        array = re.fullmatch(r"(.*?)\s*(\w*)\s*(?:\[[^\]]*\])+", declared)
        if array:
            yield array[2], f"{array[1]}*"
            continue
        match = re.fullmatch(r"(.*[\s*&>])(\w+)", declared)
        name, kind = (match[2], match[1]) if match else ("", declared)
        if name in ("int", "long", "char", "short", "double", "float", "unsigned", "const", "bool"):
            name, kind = "", declared
        pointer = kind.replace("__restrict__", " ").replace("__restrict", " ").strip()
        yield name, re.sub(r"\s*\*", "*", pointer)


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


_MASKED = r"(?ms)//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*"
_DEVICE = r"\b(?:__global__|__device__|__constant__|__shared__|__managed__|constexpr|consteval)\b"
_TRANSPARENT = r"\s*(?:(?:inline\s+)?namespace\b[^()=;]*|extern\s+)\Z"
_NOT_A_FUNCTION = r"\b(?:struct|class|union|enum|typedef|using|static_assert|operator|asm|concept|friend)\b"
_NAME_AND_PARAMETERS = r"[\w>&*\]:]\s*[\s&*>]\s*[A-Za-z_][\w:]*\s*\Z|\bmain\s*\Z"
_MACRO = r"(?m)^[^\S\n]*#[^\S\n]*define[^\S\n]+(\w+)"
_MACRO_LIKE = r"\b[A-Z][A-Z0-9_]{2,}\b"
_BLANKED = r"(?m)(^[^\S\n]*#(?:[^\\\n]|\\\n|\\)*|\n)|[^\n]"
"""A directive, which stays as it may open or close a condition, or a line break; or a character to blank."""
_HOST_TYPE = (
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
    code = re.sub(_MASKED, lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    macros = set(re.findall(_MACRO, source))
    blanked: list[tuple[int, int]] = []
    position = start = depth = 0
    while position < len(code):
        character = code[position]
        if character == ";":
            declaration = code[start:position]
            is_host_data = re.search(_HOST_TYPE, declaration) and not re.search(_DEVICE, declaration)
            if is_host_data or _is_host_function(declaration, macros):
                blanked.append((start, position + 1))
            start = position + 1
        elif character == "}":
            depth -= 1
            start = position + 1
        elif character == "{" and re.compile(_TRANSPARENT).fullmatch(code, start, position):
            depth += 1
            start = position + 1
        elif character in "{(":
            end = _closing(code, position)
            if end is None:
                return source
            if character == "{" and "(" in code[start:position]:
                if _is_host_function(code[start:position], macros):
                    blanked.append((start, end + 1))
                if not re.search(_NOT_A_FUNCTION, _head(code[start:position])):
                    start = end + 1
            position = end
        position += 1
    if depth != 0:
        return source
    for begin, end in reversed(blanked):
        source = source[:begin] + re.sub(_BLANKED, lambda match: match[1] or " ", source[begin:end]) + source[end:]
    return source


def _is_host_function(declaration: str, macros: set[str]) -> bool:
    if "(" not in declaration or re.search(_DEVICE, declaration):
        return False
    head = _head(declaration)
    before = head[: head.find("(")] if "(" in head else ""
    if "=" in before or re.search(_NOT_A_FUNCTION, before) or re.search(_NAME_AND_PARAMETERS, before.strip()) is None:
        return False
    return not any(name in macros or re.fullmatch(_MACRO_LIKE, name) for name in re.findall(r"\w+", before))


def _head(declaration: str) -> str:
    declaration = declaration.strip()
    while match := re.match(r"template\s*<", declaration):
        closing = _closing(declaration, match.end() - 1)
        declaration = "" if closing is None else declaration[closing + 1 :].strip()
    return declaration


_CURE = "copy it into the kernel's folder, and include it from there"


def permitted_folders(template: Path, further: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the folders, without links in their paths, below which a template may include files.

    These are its own, the one around it (``../common/x.h``) unless that is the home folder or the root, the toolkit's,
    and further ones.
    """
    own = template.parent.resolve()
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - Path.home raises if there is none
    around = [own.parent] if own.parent not in (Path(own.anchor), home) else []
    return (own, *around, *(folder.resolve() for folder in (*further, *toolkit_folders())))


def is_permitted(path: Path, folders: Sequence[Path]) -> bool:
    """Return True if a file, wherever links lead to, is below one of the folders; `permitted_folders`' order counts.

    Hidden files count only below the first folder, the template's own: others, such as ``.ssh``, hold secrets.
    """
    found = path.resolve()
    if found.is_relative_to(folders[0]):
        return True
    below = [found.relative_to(folder) for folder in folders[1:] if found.is_relative_to(folder)]
    return any(not any(part.startswith(".") for part in rest.parts) for rest in below)


_PATH = r'[^\s"<>(),;#]+'

_UPWARD = rb'[^\s"<>(),;#]*\.\./[^\s"<>(),;#]*'
_ABSOLUTE = rb'[\s"<(,](/[\w.][^\s"<>(),;#]*)'
_INCLUDE = rb'(?m)^[^\S\n]*#[^\S\n]*include(?:_next)?[^\S\n]*["<]([^">\n]+)[">]'
_INCLUDE_WORD = rb"(\binclude(?:_next)?\b|\bimport\b|\bembed\b)|__has_(?:include|embed)|%:|\?\?[=/]"
"""Whatever may belong to the name of a file, in a text without line continuations."""
_RARE_MARKS = (b"%:", b"??", b"import", b"embed")
_TEST = r"(?m)^[^\S\n]*#[^\S\n]*(?:el)?if([^\n]*)"
_CONDITION = r"(?m)^[^\S\n]*#[^\S\n]*(if|endif|define)(?:\w*[^\S\n]+(\w+))?([^\n]*)"

_MAX_FILE_BYTES = 16 << 20
_FIRST_READ_BYTES = 1 << 16
_MAX_TREE_BYTES = 64 << 20
_MAX_TREE_ENTRIES = 2000
_MAX_LIBRARY_BYTES = 256 << 20
_MAX_LIBRARY_ENTRIES = 20_000
"""Limits of a folder of further headers; the largest libraries, such as Boost, have about 15,000 headers."""
_BINARY_CHECK_BYTES = 8000
"""A file with a NUL in its first bytes is not text; Git decides in the same way (buffer_is_binary)."""
_NOT_SOURCES = (".toml", "-wal", "-shm", "-journal")
"""Endings of search-space files, which have a hash of their own, and of the files beside an open database."""
_NOT_CODE = (".md", ".rst", ".txt", ".py", ".sh", ".json", ".yaml", ".yml")
"""Endings of files whose paths are not operands of an ``#include``; as files they count."""

_MAX_QUOTED = 120


def read_text(path: Path, what: str) -> str:
    """Return the text of a file, whose lines end with a line feed; ``what`` names it in errors.

    Raise `InputError` if it cannot be read, is too large, is not UTF-8, or holds a NUL character.
    """
    try:
        text = read_bytes(path, what).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise InputError(f"the {what} {path} is not UTF-8 text") from None
    if "\0" in text:  # where the compiler would take it to end
        line = text.partition("\0")[0].count("\n") + 1
        raise InputError(f"the {what} {path} holds a NUL character in line {line}; remove it, or save it as UTF-8")
    return text


def read_bytes(path: Path, what: str) -> bytes:
    """Return the content of a file of at most 16 MiB; parameters and errors as for `read_text`."""
    try:
        with path.open("rb") as file:
            content = file.read(_FIRST_READ_BYTES)  # a read of the whole limit would allocate it
            if len(content) == _FIRST_READ_BYTES:
                content += file.read(_MAX_FILE_BYTES + 1 - _FIRST_READ_BYTES)
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise InputError(f"the {what} {path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return content


def is_file(path: Path) -> bool:
    """Return True if a path is that of a file."""
    try:
        return path.is_file()
    except OSError:  # not a valid file name: too long, for example
        return False


_PRE_INCLUDE = ("--pre-include=", "-include=")


def sources_with_options(
    path: Path, source: str, include_folders: Sequence[Path], options: Sequence[str]
) -> OwnSources:
    """Read the author's files of a source, with those that compiler options name; parameters as for `OwnSources`.

    ``-I`` names a folder, and ``--pre-include=`` a header that is included first.
    """
    folders = [Path(option[2:]) for option in options if option.startswith("-I")]
    first = [option.partition("=")[2] for option in options if option.startswith(_PRE_INCLUDE)]
    lines = "".join(f'#include "{name}"\n' for name in first)
    return OwnSources(path, lines + source, (*folders, *include_folders))


@lru_cache(maxsize=64)  # a kernel's files are read at each of its calls
def _scanned(text: str) -> tuple[str, str, frozenset[str], frozenset[str]]:
    """Return the code that stands for a file, its spliced lines without comments, and names in them.

    These are of template parameters, and what is tested by ``#if``.
    """
    stripped = strip_comments(text)
    code = normalize(stripped)
    if has_trigraphs(text):
        code = text
        stripped += "\n" + strip_comments(text.replace("??=", "#").replace("??/", "\\"))
    spliced = stripped.replace(SPLICE, "")
    return code, spliced, template_names(spliced), frozenset(re.findall(r"\w+", " ".join(re.findall(_TEST, spliced))))


class OwnSources:
    """The author's files that a template can include, found as the compiler finds them.

    Files are found too often rather than too rarely: in both folders that the compiler searches before the toolkit's,
    and in branches that the preprocessor skips. The toolkit's headers are identified by the NVRTC version.

    What is included from ``include_folders``, further folders of the author's headers, is hashed as it is; where a
    macro names an included file, which those in ``macro_texts`` may too, all their text files are.
    """

    def __init__(
        self,
        template: Path,
        source: str,
        include_folders: Sequence[Path] = (),
        names: frozenset[str] = frozenset(),
        macro_texts: Iterable[str] = (),
    ) -> None:
        self._folder = template.parent
        self._template = template
        self._include_folders = include_folders
        self._digest = hashlib.sha256()
        self._seen: set[Path] = set()
        self._waiting = [(template, template.name, source)]
        self._read = [(template, text) for text in macro_texts]
        self._has_macro = False
        self._trees: set[Path] = set()
        self._resolved: dict[Path, Path] = {}
        self._libraries = tuple(folder.resolve() for folder in include_folders)
        self._headers: list[Path] = []
        self._read_headers: list[Path] = []
        self._embedded: set[Path] = set()
        self._has_embed_macro = False
        self._names = names
        self.template_names: frozenset[str] = frozenset()
        """Names of the template parameters that they declare, without those in folders of further headers."""
        self.tested_names: frozenset[str] = frozenset()
        """Words in their conditions of the preprocessor."""
        self.used_names: frozenset[str] = frozenset()
        """Those of ``names`` that are identifiers in them."""
        self.included: set[Path] = set()
        """The files that the template can include, with the links of their folders resolved."""
        self._read_files()
        self.digest = self._digest.hexdigest()
        """SHA-256 of the files."""
        self.headers = tuple(
            (str(path), ["", *islice(_digests(path), 1 if self._is_library(path) else 2)][-1])
            for path in sorted(self.included if not self._has_macro else ())
        )
        """Path and one of `_digests` of each file that is included; none where a macro may name any."""

    def _is_library(self, path: Path) -> bool:
        return any(path.is_relative_to(library) for library in self._libraries)

    @cached_property
    def _permitted(self) -> tuple[Path, ...]:
        """Folders of files that may be included; most templates include none."""
        return permitted_folders(self._template, self._include_folders)

    def _read_files(self) -> None:
        while self._waiting or self._headers:
            names: Iterable[str | None]
            embedded: Iterable[str | None]
            if self._headers:
                path, text = self._headers.pop(), None
                digest, names, embedded = _header(path, *_version(path))
                self._digest.update(f"{path.name}\0{digest}".encode(errors="surrogateescape"))
                self._read_headers.append(path)
            else:
                path, label, text = self._waiting.pop()
                code, spliced, declared, tested = _scanned(text)
                self._digest.update(f"{label}\0{len(code)}\0{code}".encode(errors="surrogateescape"))
                self._read.append((path, spliced))
                self.template_names |= declared
                self.tested_names |= tested
                if self._names:
                    self.used_names |= self._names.intersection(re.findall(r"\w+", spliced))
                names, embedded = included_names(spliced), embedded_names(spliced)
            for name in names:
                if name is not None:
                    self._add_included(path, name, text)
                    continue
                self._has_macro = True
                if text is not None:
                    self._add_tree(path.parent)
            self._add_embedded(path, embedded, text)
            self._add_macro_operands()

    def _add_included(self, path: Path, name: str, text: str | None = None) -> bool:
        """Add the files that a file of the given path includes by a name; return whether there are any.

        With the text of a directive's file, one that must not be included is an error. Without, it counts as a header:
        nothing keeps the compiler from opening what a macro or a library's header names.
        """
        is_found = False
        for folder in dict.fromkeys((path.parent, self._folder, *self._include_folders)):  # before the toolkit's
            included = folder / name
            if not is_file(included):
                if text is not None and os.path.exists(included):  # noqa: PTH110 - never raises
                    self._check(included, path, name, text)
                continue
            parent = included.parent
            if parent not in self._resolved:
                self._resolved[parent] = parent.resolve()
            included = self._resolved[parent] / included.name  # not resolved itself: the compiler looks beside a link
            if included not in self._seen:
                # Nearly all lie in the template's folder; to ask of the rest takes ten times as long.
                is_beside = self._resolved.get(self._folder) == included.parent and not included.is_symlink()
                may_include = is_beside or is_permitted(included, self._permitted)
                if not may_include and text is not None:
                    self._check(included, path, name, text)
                    continue
                self._seen.add(included)
                if not may_include or self._is_library(included):
                    self._headers.append(included)
                else:
                    self._waiting.append((included, included.name, _text(read_bytes(included, "included file"))))
            self.included.add(included)
            is_found = True
        return is_found

    def _add_embedded(self, path: Path, names: Iterable[str | None], text: str | None = None) -> None:
        """Add files that a file of the given path embeds, whose every byte counts."""
        for name in names:
            if name is None:
                self._has_macro = self._has_embed_macro = True
                continue
            for folder in dict.fromkeys((path.parent, self._folder, *self._include_folders)):
                data = folder / name
                if not is_file(data) or data in self._embedded:
                    continue
                if text is not None:
                    self._check(data, path, name, text)
                self._embedded.add(data)
                self.included.add(data.parent.resolve() / data.name)
                digest = hashlib.sha256(read_bytes(data, "embedded file")).hexdigest()
                self._digest.update(f"embed\0{data.name}\0{digest}".encode(errors="surrogateescape"))

    def _check(self, included: Path, path: Path, name: str, text: str) -> None:
        """Raise if a file includes one that it must not: a special one, or one outside of the folders."""
        try:
            mode = os.stat(included).st_mode  # noqa: PTH116 - a name may not be a path at all
        except (OSError, ValueError):
            return
        if stat.S_ISDIR(mode):
            return
        line = text.count("\n", 0, max(0, text.find(name))) + 1
        if not stat.S_ISREG(mode):
            problem = "is a pipe, a device or another special file; include a regular file"
        elif not is_permitted(included, self._permitted):
            problem = f"is outside of the kernel's folder {self._permitted[0]}; {_CURE}"
        else:
            return
        raise InputError(f"{path}:{line}: {name!r} {problem}")

    def _add_macro_operands(self) -> None:
        """Add what a macro can name, once all else is read.

        These are the files of the template's folder and of the folders of further headers, and the paths in the code
        that lead elsewhere.
        """
        if not self._has_macro or self._waiting or self._headers:
            return
        self._add_tree(self._folder)
        for folder in self._libraries:
            self._add_tree(folder, are_headers=True)
        while self._read:
            path, code = self._read.pop()
            if path.name.endswith(_NOT_CODE):
                continue
            for word in sorted(set(re.findall(_PATH, code))):
                is_upward = ".." in word.split("/")
                if not (is_upward or word.startswith((".", "/")) or "/." in word):
                    continue
                if not self._add_included(path, word) and is_upward:  # the rest of the name may be pasted to it
                    for named in (path.parent / word, self._folder / word):
                        self._add_tree(named if os.path.isdir(named) else named.parent)  # noqa: PTH112 - never raises
        while self._read_headers:
            path = self._read_headers.pop()
            for name in _raw_file(path, *_version(path))[1]:
                self._add_included(path, name)

    def _add_tree(self, folder: Path, *, are_headers: bool = False) -> None:
        """Add all text files below a folder; those of a folder of further headers as they are."""
        if not os.path.isdir(folder):  # noqa: PTH112 - never raises
            return
        folder = folder.resolve()
        for tree in self._trees:  # a walk of one has met the folder
            if folder.is_relative_to(tree) and not any(map(_is_hidden, folder.relative_to(tree).parts)):
                return
        self._trees.add(folder)
        limits = (_MAX_LIBRARY_ENTRIES, _MAX_LIBRARY_BYTES) if are_headers else (_MAX_TREE_ENTRIES, _MAX_TREE_BYTES)
        max_entries, max_bytes = limits
        total_bytes = 0
        for path in _tree(folder, max_entries):
            name = path.relative_to(folder).as_posix()
            if _is_binary(path) and not (are_headers and self._has_embed_macro):
                if self._has_embed_macro:
                    self._add_embedded(folder / "any", [name])
                continue
            version, content = _version(path), b"" if are_headers else read_bytes(path, "file")
            total_bytes += version[1]
            if total_bytes > max_bytes:
                raise _too_large(folder, f"{max_bytes >> 20} MiB of text")
            self.included.add(path)
            if are_headers:
                self._read_headers.append(path)
                digest, _ = _raw_file(path, *version)
                self._digest.update(f"{name}\0{digest}".encode(errors="surrogateescape"))
            else:
                self._waiting.append((path, name, _text(content)))


_RECENT_NS = 2_000_000_000
"""Resolution of the times of changes on the coarsest file systems."""


def _version(path: Path) -> tuple[int, int, int]:
    """Return the time of a file's last change, its size and a number, with which it is read once only.

    A file that was changed just now may be changed again within the resolution of its time, so it is read each time.
    """
    status = path.stat()
    now = time.time_ns()
    return status.st_mtime_ns, status.st_size, now if now - status.st_mtime_ns < _RECENT_NS else 0


@lru_cache(maxsize=4096)
def _header(
    path: Path, _mtime_ns: int, _size: int, _now_ns: int
) -> tuple[str, tuple[str | None, ...], tuple[str | None, ...]]:
    """Read a header in a folder of further headers; it is read again when its status changes.

    Returns its hash, the names that it includes, and those that it embeds, with None for a macro.

    Nearly all directives are literal. Only where a word is left over that may belong to another one is the text read as
    the compiler reads it, which takes many times as long.
    """
    content = read_bytes(path, "included file")
    digest = hashlib.sha256(content).hexdigest()
    found = re.findall(_INCLUDE, content)
    names = tuple(dict.fromkeys(name.decode(errors="surrogateescape") for name in found))
    spliced = content.replace(b"\\\r\n", b"").replace(b"\\\n", b"")
    words = spliced.count(b"include") - sum(name.count(b"include") for name in found)
    if words != len(found) or any(mark in spliced for mark in _RARE_MARKS):  # else the search takes the longest
        words = sum(_may_name(match, spliced) for match in re.finditer(_INCLUDE_WORD, spliced))
    if words == len(found):
        return digest, names, ()
    text = _text(content)
    codes = [strip_comments(text).replace(SPLICE, "")]
    if has_trigraphs(text):
        codes.append(strip_comments(text.replace("??=", "#").replace("??/", "\\")).replace(SPLICE, ""))
    further = dict.fromkeys((*names, *(name for code in codes for name in included_names(code))))
    embedded = dict.fromkeys(name for code in codes for name in embedded_names(code))
    return digest, tuple(further), tuple(embedded)


def _may_name(match: re.Match[bytes], spliced: bytes) -> bool:
    """Return True if a word may belong to a directive or an operator, rather than to the prose of a comment."""
    start = spliced.rfind(b"\n", 0, match.start()) + 1
    before = spliced[start : match.start()]
    if b"*/" in before:
        return True
    return not before.lstrip().startswith(b"//") and (match[1] is None or b"#" in before)


@lru_cache(maxsize=_MAX_LIBRARY_ENTRIES)
def _raw_file(path: Path, _mtime_ns: int, _size: int, _now_ns: int) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a file that a macro may name, and the paths in it that may lead out of the folders of headers.

    It is read again when its status changes.
    """
    content = read_bytes(path, "file")
    words = {*re.findall(_ABSOLUTE, content), *(re.findall(_UPWARD, content) if b"../" in content else ())}
    return hashlib.sha256(content).hexdigest(), tuple(os.fsdecode(word) for word in sorted(words))


def _digests(path: Path) -> Iterator[str]:
    """Yield the SHA-256 of a file, and that of its code, which comments do not change; nothing if it cannot be read."""
    with contextlib.suppress(OSError, InputError):
        yield _raw_file(path, *_version(path))[0]
        code = _scanned(_text(read_bytes(path, "file")))[0]
        yield hashlib.sha256(code.encode(errors="surrogateescape")).hexdigest()


def check_unchanged(headers: Iterable[tuple[str, str]]) -> None:
    """Raise `InputError` if one of `OwnSources.headers` has another code now."""
    for path, digest in headers:
        if digest not in _digests(Path(path)):
            raise InputError(f"{path} has changed since the kernel was read, and would be compiled in: start again")


def _text(content: bytes) -> str:
    return content.decode(errors="surrogateescape").replace("\r\n", "\n")  # a lone \\r does not end a line in NVRTC


def _tree(folder: Path, max_entries: int) -> list[Path]:
    """Return the regular files below a folder, sorted; hidden ones, such as ``.git``, are left out."""
    found: list[Path] = []
    entries, visited = 0, set()
    for base, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(base)
        if real in visited:  # links can form a loop
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        entries += len(folders) + len(names)
        if entries > max_entries:
            raise _too_large(folder, f"{max_entries} files")
        files = (Path(base, name) for name in names if not _is_hidden(name) and not name.endswith(_NOT_SOURCES))
        found += [path for path in files if is_file(path)]
    return sorted(found)


def _is_binary(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b"\0" in file.read(_BINARY_CHECK_BYTES)
    return False


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _too_large(folder: Path, limit: str) -> InputError:
    return InputError(
        f"a macro names a file that the template includes, so that all files below {folder} count as its source, and "
        f"there are more than {limit}; name the file in the #include, or keep the kernel, or the headers, in a folder "
        "of their own"
    )


def check_source(spec: KernelSpec, source: str) -> None:
    """Raise if a template defines a parameter itself, or lacks a ``__constant__`` variable."""
    only = {parameter.name: str(parameter.values[0]) for parameter in spec.parameters if len(parameter.values) == 1}
    names = [*spec.default, *spec.flags, *spec.build.defines]
    depth = 0
    for match in re.finditer(_CONDITION, strip_comments(source)):
        if match[1] != "define":
            depth += 1 if match[1] == "if" else -1
        elif depth == 0 and match[2] in names and only.get(match[2]) != match[3].strip():  # the same has no effect
            fault = f"#define {match[2]} in the template overrides the values of {match[2]}"
            raise InputError(f"{spec.source}: {fault}; remove it, or put it between #ifndef {match[2]} and #endif")
    for buffer in spec.buffers:
        name = buffer.constant.rpartition("::")[2]
        if name and not re.search(rf"\b{name}\b", source) and not re.search(r'#\s*include\s*"', source):
            from autotile.core.dtypes import DTYPES  # imports NumPy, which compile workers do without

            dtype = DTYPES.get(buffer.dtype.chosen)
            hint = f"declare it as in __constant__ {dtype.c_type if dtype else 'DTYPE'} {name}[...];"
            raise InputError(f"{spec.source}: {buffer.name}: the template has no variable {buffer.constant}; {hint}")


def signature_fault(
    spec: KernelSpec, step: Step, problem_dtype: str, parameter_bytes: Sequence[int] | None, source: str
) -> str:
    """Return how the arguments differ from the parameters, as one line; "" if they do not.

    ``parameter_bytes`` has the size of each parameter of the function that the step launches, as compiled; None if
    they are not known. The types of the parameters are quoted from the template's text where they can be read.
    """
    if parameter_bytes is None:
        return ""
    declared = [(name, spec.argument(name).parameter_bytes(problem_dtype)) for name in step.arguments]
    count = len(parameter_bytes)

    def shown(position: int) -> str:
        """Return a parameter as a message names it, with its type and name where the source tells for certain."""
        function = step.entry.partition("<")[0].rpartition(")")[2].rpartition("::")[2].strip()
        written = {
            one.parameters for one in global_functions(source) if one.name == function and len(one.parameters) == count
        }
        name, kind = written.pop()[position] if len(written) == 1 else ("", "")
        quoted = " ".join(filter(None, (kind, name)))[:_MAX_QUOTED]
        return f"parameter {position + 1} of {step.entry}" + (f" ({quoted})" if quoted else "")

    for position, ((name, passed), taken) in enumerate(zip(declared, parameter_bytes, strict=False)):
        if passed != taken:
            return (
                f"the argument {name} has {plural(passed, 'byte')}, but {shown(position)} has {taken}; give the "
                "argument the type of the parameter, and list the arguments in the order of the parameters"
            )
    if len(declared) == count:
        return ""
    if len(declared) < count:
        cure = f"add {shown(len(declared))} to [arguments]"
    else:
        cure = f"remove {declared[count][0]} from [arguments], or set pass = false"
    return f"{step.entry} takes {plural(count, 'parameter')}, but {len(declared)} are declared as arguments; {cure}"
