"""Find a kernel by name or path, and read its search-space file and template."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from autotile.core.dtypes import Array, load_npy
from autotile.core.model import Config
from autotile.errors import DataError, InputError, SpecError, UnknownKernelError
from autotile.kernel.expressions import Location
from autotile.kernel.parser import parse_spec
from autotile.kernel.sources import OwnSources, check_source, is_file, read_text
from autotile.kernel.spec import KernelSpec, names_in
from autotile.settings import absolute_path, read_settings

if TYPE_CHECKING:
    from autotile.kernel.python_kernel import ReferenceFunction


class Inspection(NamedTuple):
    """A check of outputs by a function, in the process that tunes."""

    buffers: tuple[str, ...]
    """Names of the buffers whose content is checked. ``"y.value"`` stands for the values of ``y``, decoded, and
    ``"y.expected"`` for the expected ones."""
    check: Callable[[Config, Mapping[str, Array]], tuple[str, Mapping[str, float | str]]]
    """Called with a configuration and the content of each buffer after a launch, in the type that it is stored in.
    Returns what is wrong, empty if nothing is, and further telemetry of the trial."""
    folder: str
    """Folder through which the contents reach this process."""

    def inspect(self, config: Config, folder: Path) -> tuple[str, Mapping[str, float | str]]:
        """Check the contents in a folder, which is then removed."""
        try:
            contents = {name: load_npy(folder / f"{name}.npy") for name in self.buffers}
        except DataError as error:
            raise InputError(f"cannot read what a kernel wrote from {folder}: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self.check(config, contents)


class Kernel(msgspec.Struct, frozen=True):
    """A search space with the text of its template."""

    spec: KernelSpec
    source: str
    """Text of the template."""
    template_path: Path
    """Path of the template; its folder is the first include folder."""
    source_hash: str
    """SHA-256 of the template and of the author's files that it includes, directly or indirectly. Comments and
    indentation are ignored, so that editing a comment does not invalidate measurements. Where a macro names the
    included file, all text files below the template's folder and below the include folders count."""
    variant: Callable[[Config], tuple[str, tuple[str, ...]]] | None = None
    """Function that makes the source of a configuration, which then has no macros for its parameters, and its compiler
    options besides those of the search space; None if the source is the template."""
    inspection: Inspection | None = None
    """Check of the outputs by a function; None if the reference is all."""
    reference_function: ReferenceFunction | None = None
    """Function that computes the expected outputs, if the reference is one."""
    include_folders: tuple[Path, ...] = ()
    """The author's own folders of headers, which the compiler searches after the template's."""
    template_names: frozenset[str] = frozenset()
    """Names that are no macros: those of template parameters in the author's files, whose declarations a macro would
    break, and those in the names of entries that these files do not use, as a header might declare them."""
    headers: tuple[tuple[str, str], ...] = ()
    """Path and SHA-256 of the author's files that the template includes, as of ``source_hash``."""

    def has_source_of(self, other: Kernel) -> bool:
        """Return True if a configuration of both compiles to the same code: their files are the same."""
        return (self.source_hash, self.spec.text) == (other.source_hash, other.spec.text)

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


KernelName: TypeAlias = Annotated[
    str | os.PathLike[str] | KernelHolder | Kernel,
    Meta(description="the name of a kernel, the path of its search-space file, or a kernel from autotile.kernel"),
]
"""A kernel: its name, the path of its search-space file, or an object that holds it."""


_read: dict[Path, Kernel] = {}
"""Last kernel of each search-space file; while the files of one are unchanged, it is the same object."""


def load_kernel(name: KernelName, folders: Sequence[Path] | None = None) -> Kernel:
    """Read a kernel: a name is looked up in the kernel folders; anything with a slash or ``.toml`` is a path.

    An object that holds a kernel is asked for it.

    The files are read at each call. If they have not changed since the last call, the same object is returned, so that
    thousands of served problems share it. Raise `UnknownKernelError` if there is no such kernel; the message suggests
    similar names. Raise `SpecError` if the search-space file is malformed. Raise `InputError` if a file cannot be read.
    """
    if held := held_kernel(name):
        return held
    name, folders = str(name), folders if folders is not None else read_settings().kernel_folders
    path = find_file(name, folders)
    if path is None or path.suffix != ".toml":
        if find_file(own := f"{name.removesuffix('.cu')}.toml", ()) is not None:
            raise UnknownKernelError(f"no search-space file {name!r}; did you mean {own}?")
        if is_path(name):
            raise UnknownKernelError(f"no search-space file {name!r}: expected the path of a .toml file that exists")
        if find_file(name, read_settings().operation_folders) is not None:
            raise UnknownKernelError(f"{name} is an operation, not a kernel; name one of its kernels")
        names = kernel_names(folders)
        import difflib  # needed for errors only

        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known kernels: {', '.join(names)}."
        mine = "To use a kernel of your own, give path/to/mine.toml"
        raise UnknownKernelError(f"no kernel named {name!r}; {hint} {mine}")
    text, shown = read_text(path, "search-space file"), str(path)
    path = path.absolute()  # the template is compiled later, maybe from another working directory
    last = _read.get(path)
    if last is not None and last.spec.text != text:
        last = None
    spec = last.spec if last is not None else parse_spec(text, shown, folder=str(path.parent))
    shared = Path(os.path.normpath(path.parent / os.pardir / "templates"))  # the parent of "." is "..", not itself
    candidates = (path.parent / spec.template, shared / spec.template)
    template = next(filter(is_file, candidates), None)
    if template is None:
        paths = " nor ".join(map(str, candidates))
        raise SpecError(f"there is no template {paths}", source=spec.source, key="kernel.template")
    kernel = make_kernel(spec, template, folder=path.parent)
    check_source(spec, kernel.source)
    if last is not None and last == kernel:
        return last
    _read[path] = kernel
    return kernel


def held_kernel(name: KernelName) -> Kernel | None:
    """Return the kernel that an object holds; None for the name or path of a kernel."""
    if isinstance(name, str | os.PathLike):
        return None
    return name if isinstance(name, Kernel) else name.definition if isinstance(name, KernelHolder) else None


def make_kernel(spec: KernelSpec, template: Path, source: str | None = None, *, folder: Path | None = None) -> Kernel:
    """Return a kernel of a parsed search space, and of the template at a path unless its text is given.

    Relative include folders are below ``folder``; None for the template's. Raise `SpecError` if one does not exist;
    `InputError` if the template, or a file that it includes, cannot be read, or tests a parameter that is no macro.
    """
    if source is None:
        source = read_text(template, "template")
    folders = []
    for name in spec.include:
        path = Path(os.path.normpath(absolute_path(name, "a folder of headers", folder or template.parent)))
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where the name is too long
            raise Location(spec.source, "kernel.include").error(
                f"there is no folder {path} of headers; correct the path, or remove it and set AUTOTILE_INCLUDE"
            )
        folders.append(path)
    folders += read_settings().include_folders
    named = frozenset().union(*map(names_in, spec.entries))
    texts = _macro_texts(spec)
    own = OwnSources(template, source, folders, named, texts)
    for name in {*spec.default, *spec.flags, *spec.build.defines} & own.template_names & own.tested_names - named:
        fault = f"{name} is no macro, as a C++ template in the kernel's files has a parameter of that name"
        raise InputError(f"{spec.source}: {fault}, but they test it by #if; rename one of the two")
    digest = own.digest
    if (other := _reference_template(spec, template)) is not None:
        further = OwnSources(other, read_text(other, "template"), folders, macro_texts=texts).digest
        digest = hashlib.sha256((digest + further).encode()).hexdigest()
    names = own.template_names | (named - own.used_names)
    return Kernel(
        spec, source, template, digest, include_folders=tuple(folders), headers=own.headers, template_names=names
    )


def reference_source(kernel: Kernel) -> Kernel | None:
    """Return a kernel with the source of its reference kernel in place of its own; None if it has no such reference."""
    if kernel.spec.reference.kernel is None:
        return None
    path = _reference_template(kernel.spec, kernel.template_path)
    if path is None:
        return kernel
    text = read_text(path, "template")
    texts = _macro_texts(kernel.spec)
    own = OwnSources(path, text, kernel.include_folders, macro_texts=texts)
    read = {"source": text, "source_hash": own.digest, "headers": own.headers, "template_names": own.template_names}
    return replace(kernel, template_path=path, **read)


def _macro_texts(spec: KernelSpec) -> list[str]:
    """Return the texts of macros that the search-space file defines, which may name a file that is included."""
    values = [value for parameter in spec.parameters for value in parameter.values if isinstance(value, str)]
    return [*values, *(text if isinstance(text, str) else text.text for text in spec.build.defines.values())]


def _reference_template(spec: KernelSpec, template: Path) -> Path | None:
    """Return the path of the reference kernel's own source; None if it is in the template."""
    declared = spec.reference.kernel
    return template.parent / declared.template if declared is not None and declared.template is not None else None


def kernel_names(folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names of the files in folders, those of kernels unless others are given, sorted."""
    folders = folders if folders is not None else read_settings().kernel_folders
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml") if path.is_file()})


def load_named_kernel(name: str) -> Kernel:
    """Read a kernel by a name from a database, which leads to no file outside the kernel folders."""
    if is_path(name):
        raise UnknownKernelError(f"{name!r:.200} is a path, expected the name of a kernel")
    return load_kernel(name)


def is_path(name: str) -> bool:
    """Return True if a kernel is named by the path of its search-space file."""
    return name.endswith(".toml") or "/" in name or "\\" in name


def find_file(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the path of the file that a path, or else a name in the folders, denotes; None if there is none."""
    paths = [folder / f"{name}.toml" for folder in folders]
    if is_path(name):
        paths = [Path(os.path.expanduser(name))]  # noqa: PTH111 - Path.expanduser raises where there is no such user
    return next(filter(is_file, paths), None)
