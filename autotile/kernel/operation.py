"""Operations: kernels that compute the same thing, when each of them may be used, and the libraries beside them.

docs/file-format.md specifies the file. It declares sizes, flags, which select what is computed, and conditions, which
only limit how. A kernel has the sizes and flags of its own file; those of equal names are the operation's, and an
expression gives any other.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from autotile.core.device import EXPRESSION_NAMES, DeviceProperties
from autotile.core.forks import cached_property
from autotile.core.model import DTYPE_BYTES, Problem, Sizes
from autotile.errors import ProblemError, SpecError, UnknownKernelError, nearest
from autotile.kernel.expressions import Expression
from autotile.kernel.functions import Kind
from autotile.kernel.library import Kernel, find_file, is_path, kernel_names, load_kernel
from autotile.kernel.parser import KERNEL_NAME, NAME_RULE, parse_defaults, parse_dtypes
from autotile.kernel.problem import completed_problem
from autotile.kernel.sources import read_text
from autotile.kernel.table import Table, read_document
from autotile.settings import read_settings

LIBRARIES = ("cublas",)
"""Libraries that an operation file may name. Others are Python callables, which no file names."""
_KEYS = ("name", "summary", "sizes", "flags", "conditions", "dtypes", "libraries")
_MAX_KERNELS = 64


class Library(msgspec.Struct, frozen=True):
    """A library that computes an operation."""

    name: str
    version: str
    """Name, and version; times of another version are not compared."""
    call: Callable[..., object] | None = None
    """Callable over the arrays of the operation's kernels, in the order of their arguments, which writes the outputs.
    None for cuBLAS."""


class Member(msgspec.Struct, frozen=True):
    """A kernel of an operation."""

    name: str
    kernel: str
    """Name of the kernel, or path of its search-space file."""
    when: Expression | None
    """Condition on the operation's sizes, flags and conditions, and on ``device.*``; None if there is none."""
    sizes: Mapping[str, Expression | str]
    """Value of each size and flag of the kernel, as an expression of the operation's."""
    required: Sizes
    """Sizes and flags that the kernel lacks, each with the only value for which it computes the operation."""
    dtypes: tuple[str, ...]
    measured_only: bool = False
    """Whether it is served only on a GPU on which it was measured."""

    def load(self) -> Kernel:
        """Read the kernel; see `load_kernel`."""
        return load_kernel(self.kernel)

    def sizes_for(self, problem: Problem, device: DeviceProperties | None = None) -> dict[str, int] | None:
        """Return the sizes and flags of a problem by the kernel's names; None if it does not compute the problem.

        The problem is one of the operation, with its conditions among the sizes. Without a device, conditions on
        ``device.*`` hold.
        """
        sizes = problem.sizes
        if problem.dtype not in self.dtypes or any(sizes[name] != value for name, value in self.required.items()):
            return None
        given = problem.names
        if self.when is not None:
            used = [name for name in self.when.names if name.startswith("device.")]
            if device is not None or not used:
                properties = {name: getattr(device, name.removeprefix("device.")) for name in used}
                if not self.when.value({**given, **properties} if properties else given):
                    return None
        return {
            name: given[value] if isinstance(value, str) else int(value.value(given))
            for name, value in self.sizes.items()
        }


class Operation(msgspec.Struct, frozen=True, dict=True):
    """A parsed operation file, whose kernels are read when they are asked for."""

    name: str
    summary: str
    sizes: Sizes
    """Every size, flag and condition with its default."""
    flags: tuple[str, ...]
    """Names that select what is computed, 0 or 1."""
    conditions: tuple[str, ...]
    """Names that limit how it is computed, 0 or 1."""
    dtypes: tuple[str, ...]
    entries: Mapping[str, Table]
    """Statements of the file on each kernel, by the key of its table."""
    libraries: tuple[str, ...]
    source: str
    folder: Path
    """Folder that relative paths of kernels are below."""
    digest: str
    """SHA-256 of what is computed: name, sizes, flags and element types."""

    @property
    def members(self) -> tuple[Member, ...]:
        """All kernels, in the order of the file; a `SpecError` if an entry contradicts its kernel."""
        return self.members_for(None)

    def members_for(self, dtype: str | None) -> tuple[Member, ...]:
        """Return the kernels of an element type; None for all.

        The files of kernels that the operation lists for other types are not read: half of the time of a first look-up.
        """
        if (known := self._by_dtype.get(dtype)) is not None:
            return known
        members: dict[str, Member] = {}
        for key, table in self.entries.items():
            listed = parse_dtypes(table) if "dtypes" in table.data else ()
            if dtype is not None and listed and dtype not in listed:
                continue
            member = _member(table, key, self, listed)
            if members.setdefault(member.name, member) is not member:
                reason = f"{member.name} is the kernel of an earlier entry; join their conditions in one"
                raise table.error("", reason)
        found = tuple(member for member in members.values() if dtype is None or dtype in member.dtypes)
        return self._by_dtype.setdefault(dtype, found)

    _by_dtype = cached_property[dict[str | None, tuple[Member, ...]]](lambda self: {})

    @property
    def proper_sizes(self) -> tuple[str, ...]:
        """Sizes that are neither flags nor conditions."""
        return tuple(name for name in self.sizes if name not in self.flags and name not in self.conditions)

    def without_conditions(self, problem: Problem) -> dict[str, int]:
        """Return the sizes and flags of a problem."""
        return {name: size for name, size in problem.sizes.items() if name not in self.conditions}

    def is_optional(self, name: str) -> bool:
        """Return True if a problem may omit a size: flags, conditions, and sizes whose default is 1."""
        return name in self.flags or name in self.conditions or self.sizes[name] == 1

    def member(self, name: str) -> Member | None:
        """Return the kernel of a name."""
        return next((member for member in self.members if member.name == name), None)

    def resolve(self, sizes: Sizes, dtype: str | None = None, *, defaults: bool = False) -> Problem:
        """Check sizes and dtype, and complete them with the defaults of what is optional; parameters as for a kernel.

        See `autotile.kernel.problem.resolve_problem`.
        """
        return completed_problem(self, sizes, dtype, defaults=defaults, conditions=self.conditions)

    def problem_of(self, kernel: str, sizes: Sizes, dtype: str) -> Problem | None:
        """Return the problem that a kernel's sizes are of; None if they do not determine one.

        Conditions have their defaults if the kernel computes the problem with them, else other values with which it
        does.
        """
        member = self.member(kernel)
        if member is None:
            return None
        own = {value if isinstance(value, str) else value.text: name for name, value in member.sizes.items()}
        known = {name: sizes[own[name]] for name in self.sizes if own.get(name) in sizes}
        for values in itertools.product(*((self.sizes[name], 1 - self.sizes[name]) for name in self.conditions)):
            try:
                problem = self.resolve({**known, **dict(zip(self.conditions, values, strict=True))}, dtype)
            except ProblemError:
                return None
            found = member.sizes_for(problem)
            if found is not None and found.items() <= sizes.items():
                return problem
        return None

    def stated(self, problem: Problem) -> Problem:
        """Return a problem without what may be left out: flags, conditions and other sizes that have their defaults."""
        given = problem.sizes.items()
        kept = {name: size for name, size in given if not self.is_optional(name) or size != self.sizes[name]}
        return replace(problem, sizes=kept)

    def fitting(
        self, problem: Problem, device: DeviceProperties | None = None
    ) -> Iterator[tuple[Member, dict[str, int]]]:
        """Yield the kernels that compute a problem, each with the problem's sizes by the kernel's names."""
        for member in self.members_for(problem.dtype):
            if (sizes := member.sizes_for(problem, device)) is not None:
                yield member, sizes


def parse_operation(text: str, source: str, *, folder: Path = Path()) -> Operation:
    """Parse an operation file."""
    document = read_document(text, source)
    document.allow(("operation", "kernels"))
    table = document.table("operation")
    table.allow(_KEYS)
    taken: dict[str, str] = {}
    sizes, flags, conditions = (parse_defaults(table, each, taken) for each in ("sizes", "flags", "conditions"))
    dtypes, libraries = parse_dtypes(table), table.texts("libraries", optional=True)
    for library in libraries:
        if library not in LIBRARIES:
            raise table.error(
                "libraries",
                f"{library!r} is not known{nearest(library, LIBRARIES)} (known: {', '.join(LIBRARIES)}); a library of "
                "your own is added from Python, by autotile.add_library",
            )
    name = table.matching("name", KERNEL_NAME, NAME_RULE)
    content = [name, *(f"{size}={value}" for size, value in {**sizes, **flags}.items()), *dtypes]
    kernels = document.table("kernels")
    if not 1 <= len(kernels.data) <= _MAX_KERNELS:
        raise kernels.error("", f"expected 1 to {_MAX_KERNELS} kernels, got {len(kernels.data)}")
    return Operation(
        name=name,
        summary=table.text("summary", ""),
        sizes={**sizes, **flags, **conditions},
        flags=tuple(flags),
        conditions=tuple(conditions),
        dtypes=dtypes,
        entries={key: kernels.table(key) for key in kernels.data},
        libraries=libraries,
        source=source,
        folder=folder,
        digest=hashlib.sha256("\n".join(content).encode()).hexdigest(),
    )


def _member(table: Table, name: str, operation: Operation, listed: tuple[str, ...]) -> Member:
    """Return a kernel; ``listed`` are the element types of its entry."""
    selected = {*operation.flags, *operation.conditions}
    kinds: dict[str, Kind] = {size: "boolean" if size in selected else "number" for size in operation.sizes}
    kinds[DTYPE_BYTES] = "number"
    table.allow(("kernel", "when", "sizes", "dtypes", "measured_only"))
    given = table.text("kernel", name)
    path = os.path.expanduser(given)  # noqa: PTH111 - Path.expanduser raises where there is no such user
    kernel = str(operation.folder / path) if is_path(given) else given
    spec = load_kernel(kernel).spec
    declared = table.table("sizes", optional=True)
    declared.allow(spec.sizes)
    sizes: dict[str, Expression | str] = {size: declared.expression(size, kinds, "number") for size in declared.data}
    for size in spec.sizes:
        if size in operation.sizes:
            sizes.setdefault(size, size)
        elif size not in sizes and not spec.is_optional(size):
            hint = f"add sizes = {{ {size} = ... }}"
            raise table.error("sizes", f"{spec.name} has the size {size}, the operation has not; {hint}")
    used = {part for value in sizes.values() for part in ([value] if isinstance(value, str) else value.names)}
    lacking = [size for size in operation.sizes if size not in used and size not in operation.conditions]
    for size in lacking:
        if kinds[size] == "number" and operation.sizes[size] != 1:
            raise table.error("sizes", f"{spec.name} lacks the size {size} of the operation, whose default is not 1")
    device_kinds: dict[str, Kind] = {f"device.{each}": "number" for each in EXPRESSION_NAMES}
    dtypes = listed or tuple(dtype for dtype in operation.dtypes if dtype in spec.dtypes)
    if not dtypes or set(dtypes) - set(spec.dtypes):
        raise table.error("dtypes", f"{spec.name} supports {', '.join(spec.dtypes)}, none of which is meant here")
    return Member(
        name=spec.name,
        kernel=kernel,
        when=table.optional_expression("when", {**kinds, **device_kinds}, "boolean"),
        sizes=sizes,
        required={size: 0 if kinds[size] == "boolean" else 1 for size in lacking},
        dtypes=dtypes,
        measured_only=table.boolean("measured_only", default=False),
    )


_read: dict[Path, tuple[str, Operation]] = {}
"""Text and content of each file that was read: while a file is unchanged, it gives the same object."""


def load_operation(name: str, *, checks: bool = True) -> Operation:
    """Read an operation: a name is looked up in the folders of operations; with a slash or ``.toml`` it is a path.

    All its kernels are read, too, unless ``checks`` is False: a program that asks for one element type need not wait.
    """
    path = _find(name)
    if path is None:
        names = kernel_names(read_settings().operation_folders)
        raise UnknownKernelError(f"no operation named {name!r}{nearest(name, names)} (known: {', '.join(names)})")
    text, path = read_text(path, "operation file"), path.absolute()
    if path not in _read or _read[path][0] != text:
        _read[path] = text, parse_operation(text, str(path), folder=path.parent)
    operation = _read[path][1]
    if checks:
        operation.members_for(None)
    return operation


def find_operation(name: str) -> Path | None:
    """Return the path of the operation that a name or path denotes; None if it denotes a kernel, or nothing.

    A path denotes an operation if the file has a section ``[operation]``. A name that a kernel has denotes the kernel.
    """
    if not is_path(name) and find_file(name, read_settings().kernel_folders) is not None:
        return None
    return _find(name)


def named_operation(name: object, *, checks: bool = True) -> Operation | None:
    """Return the operation that a name or path denotes; None if it denotes a kernel, or nothing.

    ``checks`` is as for `load_operation`.
    """
    is_named = isinstance(name, str | os.PathLike) and find_operation(str(name)) is not None
    return load_operation(str(name), checks=checks) if is_named else None


def _find(name: str) -> Path | None:
    path = find_file(name, read_settings().operation_folders)
    if path is None or not is_path(name):
        return path
    with suppress(SpecError):  # the parser of kernels reports what is wrong with it
        text = read_text(path, "file")
        if "operation" in text and "operation" in read_document(text, str(path)).data:
            return path
    return None
