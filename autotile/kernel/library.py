"""Find a kernel by name or path, and read its search-space file and template."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from autotile.core.frozen import dataclass
from autotile.errors import InputError, SpecError, UnknownKernelError
from autotile.kernel.includes import check_include, is_permitted, permitted_folders
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.settings import read_settings

_SPLICE = "\\\n"
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
_PATH = re.compile(r'[^\s"<>(),;#]+')

_MAX_FILE_BYTES = 16 << 20
_FIRST_READ_BYTES = 1 << 16
_MAX_TREE_BYTES = 64 << 20
_MAX_TREE_ENTRIES = 2000
_BINARY_CHECK_BYTES = 8000
"""A file with a NUL in its first bytes is not text; Git decides in the same way (buffer_is_binary)."""
_NOT_SOURCES = (".toml", "-wal", "-shm", "-journal")
"""Endings of search-space files, which have a hash of their own, and of the files beside an open database."""
_NOT_CODE = (".md", ".rst", ".txt", ".py", ".sh", ".json", ".yaml", ".yml")
"""Endings of files whose paths are not operands of an ``#include``; as files they count."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A search space with the text of its template.

    Attributes
    ----------
    source
        Text of the template.
    template_path
        Path of the template; its folder is the first include folder.
    source_hash
        SHA-256 of the template and of the author's files that it includes, directly or indirectly. Comments and
        indentation are ignored, so that editing a comment does not invalidate measurements. Where a macro names the
        included file, all text files below the template's folder count.
    """

    spec: KernelSpec
    source: str
    template_path: Path
    source_hash: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.spec.name


@runtime_checkable
class KernelHolder(Protocol):
    """An object that holds a kernel, such as one that is written in Python."""

    @property
    def definition(self) -> Kernel:
        """The kernel."""


KernelName: TypeAlias = "str | os.PathLike[str] | KernelHolder | Kernel"
"""A kernel: its name, the path of its search-space file, or an object that holds it."""


class KernelReader:
    """Reads kernels; while the files of one are unchanged, it returns the same object."""

    def __init__(self) -> None:
        self._last: dict[Path, Kernel] = {}

    def read(self, path: Path) -> Kernel:
        """Read a search-space file and its template; see `load_kernel`."""
        text, shown = _read_text(path, "search-space file"), str(path)
        path = path.absolute()  # the template is compiled later, maybe from another working directory
        last = self._last.get(path)
        spec = (
            last.spec
            if last is not None and last.spec.text == text
            else parse_spec(text, shown, folder=str(path.parent))
        )
        template = _template_path(path, spec)
        kernel = make_kernel(spec, template)
        if last is not None and last.spec is spec and last == kernel:
            return last
        self._last[path] = kernel
        return kernel


_reader = KernelReader()


def load_kernel(name: KernelName, folders: Sequence[Path] | None = None) -> Kernel:
    """Read a kernel: a name is looked up in the kernel folders; anything with a slash or ``.toml`` is a path.

    An object that holds a kernel is asked for it.

    The files are read at each call. If they have not changed since the last call, the same object is returned, so that
    thousands of served problems share it.

    Raises
    ------
    UnknownKernelError
        There is no such kernel; the message suggests similar names.
    SpecError
        The search-space file is malformed.
    InputError
        A file cannot be read.
    """
    if held := held_kernel(name):
        return held
    return _reader.read(_find(str(name), folders if folders is not None else read_settings().kernel_folders))


def held_kernel(name: KernelName) -> Kernel | None:
    """Return the kernel that an object holds; None for the name or path of a kernel."""
    if isinstance(name, str | os.PathLike):
        return None
    return name if isinstance(name, Kernel) else name.definition if isinstance(name, KernelHolder) else None


def make_kernel(spec: KernelSpec, template: Path, source: str | None = None) -> Kernel:
    """Return a kernel of a parsed search space.

    Parameters
    ----------
    spec, template
        Search space, and path of the template.
    source
        Text of the template; None to read it from its path.

    Raises
    ------
    InputError
        The template, or a file that it includes, cannot be read.
    """
    if source is None:
        source = _read_text(template, "template")
    digest = _hash_with_includes(template, source)
    if (other := _reference_template(spec, template)) is not None:
        digest = hashlib.sha256(
            (digest + _hash_with_includes(other, _read_text(other, "template"))).encode()
        ).hexdigest()
    return Kernel(spec, source, template, digest)


def reference_source(kernel: Kernel) -> tuple[str, Path, str] | None:
    """Return the text, the path and the hash of the source of the reference kernel; None if there is none.

    Raises
    ------
    InputError
        The file cannot be read.
    """
    if kernel.spec.reference.kernel is None:
        return None
    path = _reference_template(kernel.spec, kernel.template_path)
    if path is None:
        return kernel.source, kernel.template_path, kernel.source_hash
    text = _read_text(path, "template")
    return text, path, _hash_with_includes(path, text)


def _reference_template(spec: KernelSpec, template: Path) -> Path | None:
    """Return the path of the reference kernel's own source; None if it is in the template."""
    declared = spec.reference.kernel
    return template.parent / declared.template if declared is not None and declared.template is not None else None


def kernel_names(folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names of the kernels in the kernel folders, sorted."""
    folders = folders if folders is not None else read_settings().kernel_folders
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml")})


def is_path(name: str) -> bool:
    """Return whether a kernel is named by the path of its search-space file."""
    return name.endswith(".toml") or "/" in name or "\\" in name


def _find(name: str, folders: Sequence[Path]) -> Path:
    if is_path(name):
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where there is no such user
        if path.suffix == ".toml" and _is_file(path):
            return path
        raise UnknownKernelError(f"no search-space file {name!r}: expected the path of a .toml file that exists")
    for folder in folders:
        path = folder / f"{name}.toml"
        if _is_file(path):
            return path
    names = kernel_names(folders)
    import difflib  # needed for errors only

    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known kernels: {', '.join(names)}."
    raise UnknownKernelError(f"no kernel named {name!r}; {hint} To use a kernel of your own, give path/to/mine.toml")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # not a valid file name: too long, for example
        return False


def _template_path(spec_path: Path, spec: KernelSpec) -> Path:
    beside = spec_path.parent
    shared = Path(os.path.normpath(beside / os.pardir / "templates"))  # the parent of "." is "..", not itself
    candidates = (beside / spec.template, shared / spec.template)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    paths = " nor ".join(str(candidate) for candidate in candidates)
    raise SpecError(f"there is no template {paths}", source=spec.source, key="kernel.template")


def _read_text(path: Path, what: str) -> str:
    try:
        return _read_bytes(path, what).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise InputError(f"the {what} {path} is not UTF-8 text") from None


def _read_bytes(path: Path, what: str) -> bytes:
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


def _hash_with_includes(path: Path, source: str) -> str:
    """Return the hash of the author's files; the toolkit's headers are identified by the NVRTC version."""
    sources = _Sources(path)
    sources.add(path, path.name, source)
    return sources.hexdigest()


class _Sources:
    """The author's files that a template can include, found as the compiler finds them.

    Files are found too often rather than too rarely: in both folders that the compiler searches before the toolkit's,
    and in branches that the preprocessor skips.
    """

    def __init__(self, template: Path, include_folders: Sequence[Path] = ()) -> None:
        self._folder = template.parent
        self._template = template
        self._include_folders = include_folders
        self._digest = hashlib.sha256()
        self._seen: set[Path] = set()
        self._waiting: list[tuple[Path, str, str]] = []
        self._read: list[tuple[Path, str]] = []
        self._has_macro = False
        self._trees: set[Path] = set()
        self._resolved: dict[Path, Path] = {}

    @cached_property
    def _permitted(self) -> tuple[Path, ...]:
        """Folders of files that may be included; most templates include none."""
        return permitted_folders(self._template, self._include_folders)

    def add(self, path: Path, label: str, text: str) -> None:
        """Add a file, whose name is ``label`` in the hash."""
        self._waiting.append((path, label, text))

    def hexdigest(self) -> str:
        """Return the hash of the files and of all that they include."""
        while self._waiting:
            path, label, text = self._waiting.pop()
            stripped = _strip_comments(text)
            code = _normalize(stripped)
            if _has_trigraphs(text):
                code = text
                stripped += "\n" + _strip_comments(text.replace("??=", "#").replace("??/", "\\"))
            self._digest.update(f"{label}\0{len(code)}\0{code}".encode(errors="surrogateescape"))
            spliced = stripped.replace(_SPLICE, "")
            self._read.append((path, spliced))
            for name in _included_names(spliced):
                if name is None:
                    self._has_macro = True
                    self._add_tree(path.parent)
                else:
                    self._add_included(path, name, text)
            if self._has_macro and not self._waiting:
                self._add_macro_operands()
        return self._digest.hexdigest()

    def _add_included(self, path: Path, name: str, text: str | None = None) -> bool:
        """Add the files that a file of the given path includes by a name; return whether there are any.

        With the text of a directive's file, one that must not be included is an error; without, it is left out.
        """
        is_found = False
        for folder in {path.parent: None, self._folder: None}:  # searched before the toolkit's headers
            included = folder / name
            if not _is_file(included):
                if text is not None and os.path.exists(included):  # noqa: PTH110 - never raises
                    self._check(included, path, name, text)
                continue
            parent = included.parent
            if parent not in self._resolved:
                self._resolved[parent] = parent.resolve()
            included = self._resolved[parent] / included.name  # not resolved itself: the compiler looks beside a link
            if included not in self._seen:
                if not self._is_permitted(included):
                    if text is not None:
                        self._check(included, path, name, text)
                    continue
                self._seen.add(included)
                self.add(included, included.name, _text(_read_bytes(included, "included file")))
            is_found = True
        return is_found

    def _is_permitted(self, included: Path) -> bool:
        """Return whether a file, the links of whose folder are resolved, may be included."""
        if self._resolved.get(self._folder) == included.parent and not included.is_symlink():
            return True  # as nearly all are; the rest takes ten times as long
        return is_permitted(included, self._permitted)

    def _check(self, included: Path, path: Path, name: str, text: str) -> None:
        """Raise if a file includes one that it must not."""
        line = text.count("\n", 0, max(0, text.find(name))) + 1
        check_include(included, self._permitted, name, f"{path}:{line}")

    def _add_macro_operands(self) -> None:
        """Add what a macro can name: the template's folder, and the paths in the code that lead elsewhere."""
        self._add_tree(self._folder)
        while self._read:
            path, code = self._read.pop()
            if path.name.endswith(_NOT_CODE):
                continue
            for word in sorted(set(_PATH.findall(code))):
                is_upward = ".." in word.split("/")
                if not (is_upward or word.startswith((".", "/")) or "/." in word):
                    continue
                if not self._add_included(path, word) and is_upward:  # the rest of the name may be pasted to it
                    for named in (path.parent / word, self._folder / word):
                        self._add_tree(named if os.path.isdir(named) else named.parent)  # noqa: PTH112 - never raises

    def _add_tree(self, folder: Path) -> None:
        """Add all text files below a folder."""
        if not os.path.isdir(folder):  # noqa: PTH112 - never raises
            return
        folder = folder.resolve()
        if any(_is_below(folder, tree) for tree in self._trees):
            return
        self._trees.add(folder)
        total_bytes = 0
        for path in _tree(folder):
            if _is_binary(path):
                continue
            content = _read_bytes(path, "file")
            total_bytes += len(content)
            if total_bytes > _MAX_TREE_BYTES:
                raise _too_large(folder, f"{_MAX_TREE_BYTES >> 20} MiB of text")
            self.add(path, path.relative_to(folder).as_posix(), _text(content))


def _text(content: bytes) -> str:
    return content.decode(errors="surrogateescape").replace("\r\n", "\n")  # a lone \\r does not end a line in NVRTC


def _tree(folder: Path) -> list[Path]:
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
        if entries > _MAX_TREE_ENTRIES:
            raise _too_large(folder, f"{_MAX_TREE_ENTRIES} files")
        files = (Path(base, name) for name in names if not _is_hidden(name) and not name.endswith(_NOT_SOURCES))
        found += [path for path in files if _is_file(path)]
    return sorted(found)


def _is_binary(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b"\0" in file.read(_BINARY_CHECK_BYTES)
    return False


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_below(folder: Path, tree: Path) -> bool:
    """Return whether a walk of the tree meets the folder."""
    return folder.is_relative_to(tree) and not any(_is_hidden(name) for name in folder.relative_to(tree).parts)


def _too_large(folder: Path, limit: str) -> InputError:
    return InputError(
        f"a macro names a file that the template includes, so that all files below {folder} count as its source, and "
        f"there are more than {limit}; name the file in the #include, or keep the kernel in a folder of its own"
    )


def _included_names(code: str) -> Iterator[str | None]:
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


def _has_trigraphs(text: str) -> bool:
    """Return whether the text has trigraphs that matter here; they count with ``--std=c++14`` only."""
    return "??" in text and ("??=" in text or "??/" in text)


def _strip_comments(text: str) -> str:
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


def _normalize(code: str) -> str:
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
