"""Compile CUDA C++ to cubins, without a GPU: sources and options, results, and parameters of the functions in them."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.core.documents import Bytes, Name, canonical_json
from autotile.core.model import Config, Resources, Value
from autotile.cuda.toolchain import nvrtc_version
from autotile.errors import ToolchainError

if TYPE_CHECKING:
    from autotile.kernel.library import Kernel, Variant


_ENTRY = r"Compiling entry function '([^']+)'"
_FRAME = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_REGISTERS = r"Used (\d+) registers"
_STATIC_SMEM = r"(\d+) bytes smem"
"""Patterns of the assembler's report, which are compiled when the first report is parsed."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Input of one compilation.

    ``options`` holds the macros and the options of the search-space file. It does not hold the include folders: these
    are located where the job runs, and their content is covered by ``source_hash`` and the NVRTC version.
    """

    source: str
    source_hash: str
    template_path: str
    entry: str
    """C++ name of the kernel's function, with template arguments if it is a template."""
    architecture: str
    options: tuple[str, ...]
    further_entries: tuple[str, ...] = ()
    """Names of further functions that the same cubin holds."""
    include_folders: tuple[str, ...] = ()
    """The author's own folders of headers; ``source_hash`` covers what is included from them."""
    expressions: tuple[tuple[str, str], ...] = ()
    """C++ expression of each entry whose name holds values of parameters or sizes."""
    compiler: str = "nvrtc"
    files: tuple[tuple[str, str], ...] = ()
    """Name and SHA-256 of each file in the template's folder that options name."""

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of all functions, each once."""
        return tuple(dict.fromkeys((self.entry, *self.further_entries)))

    def expression(self, entry: str) -> str:
        """Return the C++ expression that names a function."""
        return dict(self.expressions).get(entry, entry)

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """The options with the paths of the files that they name."""
        controls, folder = "--ptxas-options=--apply-controls=", Path(self.template_path).parent
        return tuple(
            f"{controls}{folder / one.removeprefix(controls)}" if one.startswith(controls) else one
            for one in self.options
        )

    @property
    def key(self) -> str:
        """Name of the cubin in the cache: a SHA-256 hash of everything that the cubin depends on."""
        identity: list[object] = [self.source_hash, self.entry, self.architecture, list(self.options), nvrtc_version()]
        if self.further_entries:
            identity.append(list(self.further_entries))
        if self.expressions:
            identity.append(["expressions", *map(list, self.expressions)])
        if self.files:
            identity.append(dict(self.files))
        if self.compiler == "nvcc":
            from autotile.cuda.nvcc import nvcc_version

            identity.append(f"nvcc {nvcc_version()}")
        return hashlib.sha256(canonical_json(identity).encode(errors="surrogatepass")).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values, for a compile worker."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A ``__global__`` function in a cubin."""

    symbol: Name
    """Its name in the cubin: mangled, unless the function is ``extern "C"``."""
    resources: Resources
    parameter_bytes: tuple[Bytes, ...] | None = None
    """Size of each parameter; None if the cubin does not tell."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A cubin and its functions, by the names of the job's entries."""

    cubin: bytes
    functions: Mapping[Name, CompiledFunction]

    @property
    def resources(self) -> Resources:
        """Resources of the job's first entry."""
        return next(iter(self.functions.values())).resources


def macro_options(config: Config, dtype: str) -> tuple[str, ...]:
    """Return the ``-D`` options of parameters, flags and ``DTYPE``, the C type of an element; booleans are 1 and 0."""
    from autotile.core.dtypes import DTYPES  # imports NumPy, which a compile worker does without

    macros = [f"-D{name}={_macro_value(value)}" for name, value in config.items()]
    return (*macros, f"-DDTYPE={DTYPES[dtype].c_type}")


def compile_job(
    kernel: Kernel, config: Config, dtype: str, architecture: str, sizes: Mapping[str, int] | None = None
) -> CompileJob:
    """Return the compilation of a configuration.

    Parameters
    ----------
    kernel, config, dtype
        The kernel, its configuration and the dtype of the problem.
    architecture
        Architecture of the device, such as ``"sm_90"``; an architecture in the search-space file takes precedence.
    sizes
        Sizes and flags of the problem, of which `KernelSpec.compiled_names` are compiled in; None for the kernel's
        defaults.

    Raises
    ------
    InputError
        A file that an option names cannot be read, or an option has no value.
    """
    sizes = sizes if sizes is not None else kernel.spec.sizes
    flags = {name: sizes[name] for name in kernel.spec.flags}
    build = kernel.spec.build
    if kernel.variant is not None:
        return _variant_job(kernel, kernel.variant(config), architecture)
    names = {**sizes, **config}
    arguments = build.arguments(names)
    macros = (*macro_options({**config, **flags}, dtype), *build.macros(names))
    return CompileJob(
        source=kernel.source,
        source_hash=kernel.source_hash,
        template_path=str(kernel.template_path),
        entry=kernel.spec.entries[0],
        further_entries=kernel.spec.entries[1:],
        architecture=kernel.spec.architecture or architecture,
        options=(*arguments, *(macro for macro in macros if _macro_name(macro) not in kernel.template_names)),
        expressions=_expressions(kernel, macros, sizes),
        include_folders=tuple(map(str, kernel.include_folders)),
        compiler=build.compiler,
        files=_controls(kernel, arguments),
    )


def _macro_name(option: str) -> str:
    return option.removeprefix("-D").partition("=")[0]


def _expressions(kernel: Kernel, macros: Iterable[str], sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Return the expression of each entry with the values of sizes, and of macros that are template parameters' names.

    A macro would replace the name in the declaration of the template, too.
    """
    from autotile.kernel.spec import with_values

    texts = {_macro_name(macro): macro.partition("=")[2] for macro in macros}
    values = {name: text for name, text in texts.items() if name in kernel.template_names}
    values |= {name: str(size) for name, size in sizes.items() if name not in texts}
    pairs = ((entry, with_values(entry, values)) for entry in kernel.spec.entries)
    return tuple((entry, expression) for entry, expression in pairs if expression != entry)


def _controls(kernel: Kernel, options: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return name and hash of each file of compiler controls that options name, in the kernel's folder."""
    from autotile.kernel.sources import read_bytes
    from autotile.kernel.spec import controls_file

    names = filter(None, map(controls_file, options))
    folder = kernel.template_path.parent
    return tuple(
        (name, hashlib.sha256(read_bytes(folder / name, "file of compiler controls")).hexdigest()) for name in names
    )


def _variant_job(kernel: Kernel, variant: Variant, architecture: str) -> CompileJob:
    from autotile.kernel.sources import sources_with_options

    own = sources_with_options(kernel.template_path, variant.source, kernel.include_folders, variant.options)
    identity = "\0".join((kernel.source_hash, variant.source, *([own.digest] if own.included else [])))
    digest = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
    return CompileJob(
        source=variant.source,
        source_hash=digest,
        template_path=str(kernel.template_path),
        entry=kernel.spec.entry,
        architecture=kernel.spec.architecture or architecture,
        options=(*kernel.spec.options, *variant.options),
        include_folders=tuple(map(str, kernel.include_folders)),
        compiler=kernel.spec.build.compiler,
    )


def compile_cubin(job: CompileJob) -> Compilation:
    """Compile a source to a cubin.

    Raises
    ------
    CompileError
        The source does not compile, or an entry does not name one ``__global__`` function.
    ToolchainError
        The compiler is missing, or does not support the architecture.
    """
    if job.compiler == "nvcc":
        from autotile.cuda.nvcc import compile_with_nvcc

        return compile_with_nvcc(job)
    from autotile.cuda.nvrtc import compile_with_nvrtc

    return compile_with_nvrtc(job)


def compiled_functions(cubin: bytes, log: str, symbols: Mapping[str, str]) -> dict[str, CompiledFunction]:
    """Return the functions of a cubin, with the resources that the assembler reported.

    Parameters
    ----------
    cubin
        The cubin.
    log
        The assembler's report.
    symbols
        Name in the cubin of each entry.

    Raises
    ------
    ToolchainError
        The report has an unknown format, or lacks a function.
    """
    reports = _reports(log)
    return {
        entry: CompiledFunction(symbol, _resources(reports, symbol), parameter_bytes(cubin, symbol))
        for entry, symbol in symbols.items()
    }


def reported_symbols(log: str) -> list[str]:
    """Return the names of the functions that the assembler reports on."""
    return list(_reports(log))


def _reports(log: str) -> dict[str, str]:
    sections = re.split(_ENTRY, log)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def _resources(reports: Mapping[str, str], symbol: str) -> Resources:
    """Parse the assembler's report (``-Xptxas -v``) on a function."""
    report = reports.get(symbol, "")
    frame, registers = re.search(_FRAME, report), re.search(_REGISTERS, report)
    if frame is None or registers is None:
        found = report.strip() or f"only {', '.join(reports) or 'nothing'}"
        raise ToolchainError(f"the assembler's report on {symbol!r} has an unknown format: {found!r:.400}")
    static_smem = re.search(_STATIC_SMEM, report)
    return Resources(
        registers=int(registers[1]),
        stack_bytes=int(frame[1]),
        spill_store_bytes=int(frame[2]),
        spill_load_bytes=int(frame[3]),
        static_smem_bytes=int(static_smem[1]) if static_smem else 0,
    )


def _macro_value(value: Value) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


_MAGIC = b"\x7fELF\x02\x01"
"""An ELF file of 64 bits, little-endian."""
_SECTION_TABLE = struct.Struct("<Q")
_SECTION_TABLE_AT = 0x28
_SECTION_COUNTS = struct.Struct("<HHH")
_SECTION_COUNTS_AT = 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAX_SECTIONS = 1 << 14
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4
"""Format of an attribute that is followed by as many bytes as its last field says."""
_PARAMETER = 0x17
"""EIATTR_KPARAM_INFO: ordinal, offset and size of a parameter."""
_PARAMETER_INFO = struct.Struct("<IHHI")
_SIZE_SHIFT = 18
"""The size is in the upper bits of the last word."""


def parameter_bytes(cubin: bytes, symbol: str) -> tuple[int, ...] | None:
    """Return the size in bytes of each parameter of a function, in order; None if the cubin does not tell.

    Parameters
    ----------
    cubin
        Content of the cubin.
    symbol
        Name of the function in it.
    """
    try:
        attributes = _section(cubin, f".nv.info.{symbol}".encode())
        if attributes is None:
            return None
        sizes = dict(_parameters(attributes))
    except (struct.error, ValueError, OverflowError):  # an offset may be any number of 64 bits
        return None
    return tuple(sizes[ordinal] for ordinal in sorted(sizes)) if sorted(sizes) == list(range(len(sizes))) else None


def _section(data: bytes, name: bytes) -> bytes | None:
    """Return the content of a section."""
    if not data.startswith(_MAGIC):
        return None
    (table,) = _SECTION_TABLE.unpack_from(data, _SECTION_TABLE_AT)
    entry_bytes, count, names_index = _SECTION_COUNTS.unpack_from(data, _SECTION_COUNTS_AT)
    if count > _MAX_SECTIONS or names_index >= count:
        return None
    headers = [_SECTION.unpack_from(data, table + number * entry_bytes) for number in range(count)]
    names_at = headers[names_index][4]
    for header in headers:
        start = names_at + header[0]
        if data[start : start + len(name) + 1] == name + b"\0":
            return data[header[4] : header[4] + header[5]]
    return None


def _parameters(attributes: bytes) -> Iterator[tuple[int, int]]:
    """Yield the ordinal and size of each parameter."""
    position = 0
    while position < len(attributes):
        kind, attribute, value = _ATTRIBUTE.unpack_from(attributes, position)
        position += _ATTRIBUTE.size
        if kind != _SIZED:
            continue
        if attribute == _PARAMETER:
            _, ordinal, _, word = _PARAMETER_INFO.unpack_from(attributes, position)
            yield ordinal, word >> _SIZE_SHIFT
        position += value
