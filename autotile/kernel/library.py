"""Find a kernel by name or path, and read its search-space file and template."""

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
    """A search space with the text of its template.

    Attributes
    ----------
    source
        Text of the template.
    template_path
        Path of the template; its folder is the first include folder.
    source_hash
        SHA-256 of the template and of the author's files that it includes, directly or indirectly. Comments and
        indentation are ignored, so that editing a comment does not invalidate measurements.
    """

    spec: KernelSpec
    source: str
    template_path: Path
    source_hash: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.spec.name


class KernelReader:
    """Reads kernels; while the files of one are unchanged, it returns the same object."""

    def __init__(self) -> None:
        self._last: dict[Path, Kernel] = {}

    def read(self, path: Path) -> Kernel:
        """Read a search-space file and its template; see `load_kernel`."""
        text, last = _read_text(path, "search-space file"), self._last.get(path)
        spec = last.spec if last is not None and last.spec.text == text else parse_spec(text, str(path))
        template = _template_path(path, spec)
        source = _read_text(template, "template")
        kernel = Kernel(spec, source, template, _hash_with_includes(template, source))
        if last is not None and last.spec is spec and last == kernel:
            return last
        self._last[path] = kernel
        return kernel


_reader = KernelReader()


def load_kernel(name_or_path: str, folders: Sequence[Path] | None = None) -> Kernel:
    """Read a kernel: a name is looked up in the kernel folders; anything with a slash or ``.toml`` is a path.

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
    return _reader.read(_find(name_or_path, folders if folders is not None else read_settings().kernel_folders))


def kernel_names(folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names of the kernels in the kernel folders, sorted."""
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
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"the {what} {path} is not UTF-8 text") from None


def _hash_with_includes(path: Path, source: str) -> str:
    """Return the hash of the author's files; the toolkit's headers are identified by the NVRTC version."""
    digest = hashlib.sha256()
    seen: set[Path] = set()
    waiting = [(path, source)]
    while waiting:
        current, text = waiting.pop()
        code = _without_comments(text)
        digest.update(f"{current.name}\0{len(code)}\0{code}".encode())
        for name in _INCLUDE.findall(text):
            for folder in {current.parent: None, path.parent: None}:  # searched before the toolkit's headers
                included = (folder / name).resolve()
                if included not in seen and _is_file(included):
                    seen.add(included)
                    waiting.append((included, _read_text(included, "included file")))
    return digest.hexdigest()


def _without_comments(text: str) -> str:
    """Return the code with each comment replaced by a space, and without blank lines and indentation."""
    code = _LITERAL_OR_COMMENT.sub(lambda match: match[1] or " ", text)
    lines = (" ".join(line.split()) for line in code.splitlines())
    return "\n".join(line for line in lines if line)
