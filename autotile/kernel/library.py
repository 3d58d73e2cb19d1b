"""Find a kernel by name or by path and read its search space and template."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from autotile.core.frozen import dataclass
from autotile.errors import InputError, SpecError, UnknownKernelError
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.settings import read_settings

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_LITERAL_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A search space with its template's text.

    Attributes
    ----------
    source
        The template's text.
    template_path
        Where it was read from; its folder is the first include folder.
    source_hash
        SHA-256 over the template and the author's own files that it includes, their includes too. Comments and
        indentation do not count: a better comment must not throw away what was measured.
    """

    spec: KernelSpec
    source: str
    template_path: Path
    source_hash: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.spec.name


_read: dict[Path, Kernel] = {}
"""What was read last from each search-space file."""


def load_kernel(name_or_path: str, folders: Sequence[Path] | None = None) -> Kernel:
    """Read a kernel: a name is looked up in the kernel folders, anything with a slash or ``.toml`` is a path.

    Its files are read at every call; where they have not changed since the last, it is the same object again, so that
    thousands of served problems share one.

    Raises
    ------
    UnknownKernelError
        No such kernel; the message names the nearest ones.
    SpecError
        The search-space file is malformed.
    InputError
        A file cannot be read.
    """
    path = _find(name_or_path, folders if folders is not None else read_settings().kernel_folders)
    text, last = _read_text(path, "search-space file"), _read.get(path)
    spec = last.spec if last is not None and last.spec.text == text else parse_spec(text, str(path))
    template = _template_path(path, spec)
    source = _read_text(template, "template")
    source_hash = _hash_with_includes(template, source)
    kernel = Kernel(spec, source, template, source_hash)
    if last is not None and last.spec is spec and last == kernel:
        return last
    _read[path] = kernel
    return kernel


def kernel_names(folders: Sequence[Path] | None = None) -> list[str]:
    """Names of the kernels that can be tuned by name."""
    folders = folders if folders is not None else read_settings().kernel_folders
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml")})


def _find(name: str, folders: Sequence[Path]) -> Path:
    if name.endswith(".toml") or "/" in name or "\\" in name:
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where there is no such user
        if path.suffix == ".toml" and _is_file(path):
            return path
        raise UnknownKernelError(f"no search-space file {name!r}: expected the path of a .toml file that exists")
    for folder in folders:
        path = folder / f"{name}.toml"
        if _is_file(path):
            return path
    names = kernel_names(folders)
    import difflib  # for errors alone

    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known kernels: {', '.join(names)}."
    raise UnknownKernelError(f"no kernel named {name!r}; {hint} A kernel of your own is given as path/to/mine.toml")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have: too long, say
        return False


def _template_path(spec_path: Path, spec: KernelSpec) -> Path:
    beside = spec_path.parent
    shared = Path(os.path.normpath(beside / os.pardir / "templates"))  # the parent of "." is "..", not itself
    candidates = (beside / spec.template, shared / spec.template)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    places = " nor ".join(str(candidate) for candidate in candidates)
    raise SpecError(f"there is no template {places}", source=spec.source, key="kernel.template")


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"the {what} {path} is not UTF-8 text") from None


def _hash_with_includes(path: Path, source: str) -> str:
    """Hash of everything the author wrote; the toolkit's own headers are covered by the NVRTC version."""
    digest = hashlib.sha256()
    seen: set[Path] = set()
    waiting = [(path, source)]
    while waiting:
        current, text = waiting.pop()
        code = _without_comments(text)
        digest.update(f"{current.name}\0{len(code)}\0{code}".encode())
        for name in _INCLUDE.findall(text):
            for folder in {current.parent: None, path.parent: None}:  # where the compiler looks before its own headers
                included = (folder / name).resolve()
                if included not in seen and _is_file(included):
                    seen.add(included)
                    waiting.append((included, _read_text(included, "included file")))
    return digest.hexdigest()


def _without_comments(text: str) -> str:
    """The code alone: comments become a space, blank lines and indentation go."""
    code = _LITERAL_OR_COMMENT.sub(lambda match: match[1] or " ", text)
    lines = (" ".join(line.split()) for line in code.splitlines())
    return "\n".join(line for line in lines if line)
