"""Compile CUDA C++ to cubins, without a GPU, with NVRTC or nvcc; and the cache of cubins on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import shlex
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from autotile.core.documents import Name, convert, decode_json, encode_json, json_hash
from autotile.core.model import CompiledFunction, Config, Problem, Resources
from autotile.cuda.driver import Cluster, live_device
from autotile.cuda.toolchain import find_nvcc, load_nvrtc, nvcc_version, nvrtc_version
from autotile.errors import CompileError, DataError, InputError, SpecError, ToolchainError
from autotile.settings import ADDR_NO_RANDOMIZE, read_settings, worker_environment

if TYPE_CHECKING:
    from autotile.kernel.library import Kernel


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
    headers: tuple[tuple[str, str], ...] = ()
    """Path and SHA-256 of the author's files that are included, as of ``source_hash``."""
    may_redefine: bool = False
    """Whether the source may define macros of ``options`` again, as that of a reference kernel."""

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
            identity.append(f"nvcc {nvcc_version()}")
        return json_hash(identity)


def compile_job(
    kernel: Kernel, config: Config, problem: Problem, architecture: str, *, may_redefine: bool = False
) -> CompileJob:
    """Return the compilation of a configuration for a problem, of which `KernelSpec.compiled_names` are compiled in.

    An architecture in the search-space file takes precedence over that of the device. Raise `InputError` if a file that
    an option names cannot be read, or an option has no value.
    """
    from autotile.core.dtypes import DTYPES  # imports NumPy, which a compile worker does without
    from autotile.kernel.sources import read_bytes, sources_with_options
    from autotile.kernel.spec import controls_file, macro_text, with_values

    spec, build = kernel.spec, kernel.spec.build
    shared: dict[str, Any] = {
        "template_path": str(kernel.template_path),
        "architecture": spec.architecture or architecture,
        "include_folders": tuple(map(str, kernel.include_folders)),
        "compiler": build.compiler,
        "headers": kernel.headers,
        "may_redefine": may_redefine or kernel.variant is not None,  # whose options are not of the parameters
    }
    if kernel.variant is not None:
        source, options = kernel.variant(config)
        own = sources_with_options(kernel.template_path, source, kernel.include_folders, options)
        identity = "\0".join((kernel.source_hash, source, *([own.digest] if own.included else [])))
        digest = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
        options = (*spec.options, *options)
        return CompileJob(source=source, source_hash=digest, entry=spec.entry, options=options, **shared)
    sizes, names = problem.sizes, {**problem.names, **config}
    arguments = build.arguments(names)
    flags = {name: sizes[name] for name in spec.flags}
    texts = {name: macro_text(value) for name, value in {**config, **flags}.items()}
    texts |= {"DTYPE": DTYPES[problem.dtype].c_type, **build.macros(names)}
    # A macro of a template parameter's name would replace the name in the declaration of the template, too; the value
    # goes into the expressions that name the entries instead.
    values = {name: text for name, text in texts.items() if name in kernel.template_names}
    values |= {name: str(size) for name, size in sizes.items() if name not in texts}
    expressions = ((entry, with_values(entry, values)) for entry in spec.entries)
    controls = filter(None, map(controls_file, arguments))
    folder = kernel.template_path.parent
    return CompileJob(
        source=kernel.source,
        source_hash=kernel.source_hash,
        entry=spec.entries[0],
        further_entries=spec.entries[1:],
        options=(*arguments, *(f"-D{name}={text}" for name, text in texts.items() if name not in values)),
        expressions=tuple((entry, expression) for entry, expression in expressions if expression != entry),
        files=tuple(
            (name, hashlib.sha256(read_bytes(folder / name, "file of compiler controls")).hexdigest())
            for name in controls
        ),
        **shared,
    )


@dataclass(frozen=True, slots=True)
class Compilation:
    """A cubin and its functions, by the names of the job's entries."""

    cubin: bytes
    functions: Mapping[Name, CompiledFunction]

    @property
    def resources(self) -> Resources:
        """Resources of the job's first entry."""
        return next(iter(self.functions.values())).resources


def compile_cubin(job: CompileJob, folder: Path | None = None) -> Compilation:
    """Compile a source to a cubin; precompiled headers are kept in the folder, if there is one.

    Raise `CompileError` if the source does not compile, or an entry does not name one ``__global__`` function;
    `InputError` if a header has changed since; `ToolchainError` if the compiler is missing, or does not support the
    architecture.
    """
    from autotile.kernel.sources import check_unchanged

    try:
        return _compiled(job, folder)
    finally:
        check_unchanged(job.headers)


def _compiled(job: CompileJob, folder: Path | None) -> Compilation:
    if job.compiler == "nvcc":
        return _compile_with_nvcc(job)
    from autotile.cuda.headers import check_macros, compile_error, include_folders, own_headers

    folders = (str(Path(job.template_path).parent), *job.include_folders, *include_folders())
    target = f"--gpu-architecture={job.architecture}"
    options = [target, *_NVRTC_OPTIONS, *job.compiler_options, *(f"-I{folder}" for folder in folders)]
    attempt = None if job.source_hash in _written_for_nvcc else _with_headers(job, options, folder)
    if attempt is None or (attempt.fault and _NVCC_ONLY.search(attempt.log)):
        _written_for_nvcc.add(job.source_hash)
        attempt = _with_headers(job, options, folder, as_nvcc=True)
        if attempt.fault and _NVCC_ONLY.search(attempt.log):  # the author's headers may hold code for the host, too
            texts, own = own_headers(job.source, Path(job.template_path), job.include_folders)
            if texts:
                options += [f"-I{folder}" for folder in own]
                attempt = _with_headers(job, options, folder, as_nvcc=True, own_headers=texts)
    if attempt.fault == "NVRTC_ERROR_INVALID_OPTION" and "gpu-architecture" in attempt.log:
        raise ToolchainError(f"NVRTC {nvrtc_version()} refuses an option for {job.architecture}: {attempt.log.strip()}")
    if attempt.fault:
        raise compile_error(attempt.log or f"NVRTC returned {attempt.fault}", job)
    check_macros(attempt.log, job)
    symbols = dict(zip(job.entries, attempt.symbols, strict=True))
    return Compilation(attempt.cubin, compiled_functions(attempt.cubin, attempt.log, symbols))


def compiled_functions(cubin: bytes, log: str, symbols: Mapping[str, str]) -> dict[str, CompiledFunction]:
    """Return the functions of a cubin by entry, with the resources that the assembler reported (``-Xptxas -v``).

    A report of an unknown format, or that lacks a function, is a `ToolchainError`.
    """
    reports, functions = _reports(log), {}
    for entry, symbol in symbols.items():
        report = reports.get(symbol, "")
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        registers = re.search(r"Used (\d+) registers", report)
        if frame is None or registers is None:
            found = report.strip() or f"only {', '.join(reports) or 'nothing'}"
            raise ToolchainError(f"the assembler's report on {symbol!r} has an unknown format: {found!r:.400}")
        static_smem = re.search(r"(\d+) bytes smem", report)
        resources = Resources(
            registers=int(registers[1]),
            stack_bytes=int(frame[1]),
            spill_store_bytes=int(frame[2]),
            spill_load_bytes=int(frame[3]),
            static_smem_bytes=int(static_smem[1]) if static_smem else 0,
        )
        functions[entry] = CompiledFunction(symbol, resources, *function_attributes(cubin, symbol))
    return functions


def _reports(log: str) -> dict[str, str]:
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


_ELF_MAGIC = b"\x7fELF\x02\x01"
"""An ELF file of 64 bits, little-endian."""
_SECTION_TABLE_AT, _SECTION_COUNTS_AT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAX_SECTIONS = 1 << 14
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4
"""Format of an attribute that is followed by as many bytes as its last field says."""
_PARAMETER = 0x17
"""EIATTR_KPARAM_INFO: ordinal, offset and size of a parameter."""
_MAX_THREADS = 0x05
"""EIATTR_MAX_THREADS: greatest block of a function with ``__launch_bounds__``."""
_CLUSTER = 0x3D
"""EIATTR_CTA_PER_CLUSTER: extents of ``__cluster_dims__``."""
_SIZE_SHIFT = 18
"""The size is in the upper bits of the last word."""


def function_attributes(cubin: bytes, symbol: str) -> tuple[tuple[int, ...] | None, int | None, Cluster | None]:
    """Return `CompiledFunction.parameter_bytes`, ``max_threads`` and ``cluster`` of a function of a cubin."""
    sizes: dict[int, int] = {}
    max_threads: int | None = None
    cluster: Cluster | None = None
    try:
        attributes = _elf_section(cubin, f".nv.info.{symbol}".encode())
        if attributes is None:
            return None, None, None
        position = 0
        while position < len(attributes):
            kind, attribute, value = _ATTRIBUTE.unpack_from(attributes, position)
            position += _ATTRIBUTE.size
            if kind == _SIZED:
                if attribute == _PARAMETER:
                    _, ordinal, _, word = struct.unpack_from("<IHHI", attributes, position)
                    sizes[ordinal] = word >> _SIZE_SHIFT
                elif attribute == _MAX_THREADS:
                    max_threads = math.prod(struct.unpack_from("<III", attributes, position))
                elif attribute == _CLUSTER:
                    cluster = struct.unpack_from("<III", attributes, position)
                position += value
    except (struct.error, ValueError, OverflowError):  # an offset may be any number of 64 bits
        return None, None, None
    is_complete = sorted(sizes) == list(range(len(sizes)))
    return tuple(sizes[ordinal] for ordinal in sorted(sizes)) if is_complete else None, max_threads, cluster


def _elf_section(data: bytes, name: bytes) -> bytes | None:
    if not data.startswith(_ELF_MAGIC):
        return None
    (table,) = struct.unpack_from("<Q", data, _SECTION_TABLE_AT)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", data, _SECTION_COUNTS_AT)
    if count > _MAX_SECTIONS or names_index >= count:
        return None
    headers = [_SECTION.unpack_from(data, table + number * entry_bytes) for number in range(count)]
    names_at = headers[names_index][4]
    for header in headers:
        start = names_at + header[0]
        if data[start : start + len(name) + 1] == name + b"\0":
            return data[header[4] : header[4] + header[5]]
    return None


_NVRTC_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache (12.9 and later, with a driver) omits the assembler's report, so it is disabled."""
_NVCC_ONLY = re.compile(
    r'identifier "\w+" is undefined|namespace "std" has no member|name must be a namespace name'
    r"|not allowed in JIT mode|(?:cannot|could not) open source file"
)
"""Errors of sources that nvcc may compile."""
_NO_CODE = "#include <iosfwd>\n"  # content of a header for the host
_written_for_nvcc: set[str] = set()  # hashes of sources that did not compile otherwise


def known_architectures() -> tuple[str, ...]:
    """Return the targets of NVRTC, such as ``"sm_90"``, without the architecture-specific ones (``"sm_90a"``)."""
    return tuple(f"sm_{number}" for number in _nvrtc("GetSupportedArchs"))


class _Attempt(NamedTuple):
    """Result of one run of NVRTC."""

    log: str
    cubin: bytes = b""
    symbols: tuple[str, ...] = ()
    """Name in the cubin of each entry."""
    fault: str = ""
    """Status that NVRTC returned; empty on success."""


def _attempt(
    job: CompileJob,
    options: Sequence[str],
    *,
    as_nvcc: bool = False,
    own_headers: Mapping[str, str] = MappingProxyType({}),
) -> _Attempt:
    """Compile a job, with the texts of some headers in place of files.

    With ``as_nvcc``, accept what nvcc accepts besides: names that it declares without an ``#include``, and host
    functions with their headers.
    """
    nvrtc, source = load_nvrtc(), job.source
    entries = [job.expression(entry).encode() for entry in job.entries]
    headers: dict[str, str] = {}
    begin, options = _with_macros("", options)
    if as_nvcc:
        from autotile.cuda.headers import HOST_HEADERS, PRELUDE
        from autotile.kernel.sources import without_host_functions

        source, headers = without_host_functions(source), {**dict.fromkeys(HOST_HEADERS, _NO_CODE), **own_headers}
        options = [*options, f"--pre-include={PRELUDE}", "--device-as-default-execution-space"]
    source = begin + source
    names, texts = ([text.encode() for text in part] for part in (headers, headers.values()))
    name = Path(job.template_path).name.encode()
    program = _nvrtc("CreateProgram", source.encode(), name, len(names), texts, names)
    try:
        for entry in entries:
            _nvrtc("AddNameExpression", program, entry)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        parts = _nvrtc_text(program, "ProgramLog").split(b"\0")  # of the front end, and of the assembler
        log = b"\n".join(filter(None, parts)).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return _Attempt(log, fault=status.name)
        symbols = tuple(_nvrtc("GetLoweredName", program, entry).decode() for entry in entries)
        return _Attempt(log, _nvrtc_text(program, "CUBIN"), symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _with_headers(job: CompileJob, options: list[str], folder: Path | None, **how: Any) -> _Attempt:
    """Compile a job as `_attempt` does; the headers that a kernel begins with are parsed once for all configurations.

    NVRTC precompiles them to a file in the folder, which processes use that map memory at equal addresses, once a
    compilation has taken long, and if that compilation gives the same code with them. Macros are defined after the
    headers then, so that their values may differ; headers that could depend on a macro are not precompiled.
    """
    found = _LEADING_HEADERS.match(job.source)
    head = found[0] if found is not None else ""
    macros = {one[2:].partition("=")[0] for one in options if one.startswith("-D")}
    if folder is None or "include" not in head or any(map(_OF_LIBRARIES.match, macros)) or not _can_precompile():
        return _attempt(job, options, **how)
    digest, words = _own_headers(head, job.template_path, job.include_folders)
    if not words.isdisjoint(macros):
        return _attempt(job, options, **how)
    _, shared = _with_macros("", options)
    file = folder / f"{json_hash([head, shared, how, digest, nvrtc_version()])}.pch"

    def with_headers(one: CompileJob, option: str) -> _Attempt:
        rest, _ = _with_macros(one.source.removeprefix(head), one.options, head.count("\n") + 1)
        source = f"{head}\n#pragma nv_hdrstop\n{rest}"
        return _attempt(replace(one, source=source), [*shared, option, "--pch-messages=false"], **how)

    if file not in _refused and file.exists():
        attempt = with_headers(job, f"--use-pch={file}")
        with contextlib.suppress(OSError):
            os.utime(file)  # marks it as recently used
        plain = _attempt(job, options, **how) if attempt.fault else attempt  # whose message has the author's lines
        if "precompiled header" in attempt.log or plain.fault != attempt.fault:
            _refused.add(file)
        return plain
    if (first := _slow.pop(file, None)) is not None:
        with contextlib.suppress(OSError), _alone(folder):
            written = folder / f".writing-{file.name}"
            try:
                attempt = with_headers(job, f"--create-pch={written}")
                again = with_headers(first[0], f"--use-pch={written}")
                if not attempt.fault and not again.fault and _code(again) == _code(first[1]):
                    written.replace(file)
                    return attempt
                if not attempt.fault:
                    file.touch()  # empty, it is refused by all
            finally:
                written.unlink(missing_ok=True)
            _refused.add(file)
    start = time.perf_counter()
    attempt = _attempt(job, options, **how)
    if file not in _refused and not attempt.fault and time.perf_counter() - start > _SLOW_S:
        _slow[file] = (job, attempt)
    return attempt


def _with_macros(source: str, options: Sequence[str], line: int = 1) -> tuple[str, list[str]]:
    """Return the end of a source, from a line on, after macros of the options, and the other options.

    As options, they would also replace names in what the compiler itself declares first, such as T. Those that headers
    of libraries may ask for stay options, and so do all where the author has a header included first.
    """
    if any(one.startswith(("--pre-include=", "-include=")) for one in options):
        return source, [*options]
    macros = [one for one in options if one.startswith("-D") and not _OF_LIBRARIES.match(one, 2)]
    defines = (f"#define {one[2:].replace('=', ' ', 1) if '=' in one else f'{one[2:]} 1'}\n" for one in macros)
    lines = [*defines, f"#line {line}\n"] if macros else []
    return "".join([*lines, source]), [one for one in options if one not in macros]


_LEADING_HEADERS = re.compile(
    r"(?>(?:\s+|//[^\n]*|/\*.*?\*/|#[ \t]*include[ \t]*<[^>\n]*>|#[ \t]*pragma[ \t]+once)*)", re.DOTALL
)
_OF_LIBRARIES = re.compile("_|CCCL|CUB|CUDA|CUTE|CUTLASS|LIBCUDACXX|NDEBUG|NV|THRUST")
"""Starts of the names of macros that headers of libraries may ask for."""
_SLOW_S = 0.6
"""Time of a compilation from which on headers are precompiled; CUB's take 1.3 s, and 0.5 s once they are."""
_HEAP_BYTES = 768 << 20
"""Memory that NVRTC maps for precompiled headers; CUB's take 309 MB."""
_slow: dict[Path, tuple[CompileJob, _Attempt]] = {}
"""A compilation that took long, by the file that its headers would be precompiled to."""
_refused: set[Path] = set()  # files of headers that change the code, or that do not fit this process


@cache
def _can_precompile() -> bool:
    """Whether precompiled headers may be used: their addresses are not randomized, and NVRTC has memory for them."""
    try:
        personality = int(Path("/proc/self/personality").read_text(), 16)
        return bool(personality & ADDR_NO_RANDOMIZE) and _nvrtc("SetPCHHeapSize", _HEAP_BYTES) is None
    except (OSError, AttributeError, RuntimeError, ToolchainError):  # NVRTC before 12.8 has none
        return False


@cache
def _own_headers(head: str, template_path: str, include_folders: tuple[str, ...]) -> tuple[str, frozenset[str]]:
    """Return a hash of the author's headers that the start of a source includes, and all words in them."""
    from autotile.cuda.headers import own_headers
    from autotile.kernel.sources import strip_comments

    texts, _ = own_headers(head, Path(template_path), include_folders, strip_comments)
    return json_hash(texts), frozenset(word for text in texts.values() for word in re.findall(r"\w+", text))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder; an `OSError` if another process has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _code(attempt: _Attempt) -> list[bytes | None]:
    """Return the machine code of the entries and the data of a cubin; the order of its other symbols varies."""
    names = (*(f".text.{symbol}" for symbol in attempt.symbols), ".nv.constant3", ".nv.global.init")
    return [_elf_section(attempt.cubin, name.encode()) for name in names]


def _nvrtc(call: str, *arguments: Any) -> Any:
    """Return the result of a function of NVRTC, if it has one, or raise `ToolchainError` with its status."""
    nvrtc = load_nvrtc()
    status, *result = getattr(nvrtc, f"nvrtc{call}")(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC {nvrtc_version()} failed with {status.name}")
    return result[0] if result else None


def _nvrtc_text(program: Any, what: str) -> bytes:
    data = bytearray(_nvrtc(f"Get{what}Size", program))
    _nvrtc(f"Get{what}", program, data)
    return bytes(data)


def _compile_with_nvcc(job: CompileJob) -> Compilation:
    """Compile with nvcc, which has no name expressions.

    An entry with template arguments is instantiated by a reference to it that follows the source, and found among the
    functions that the assembler reports on.
    """
    from autotile.cuda.headers import check_macros, compile_error

    template = Path(job.template_path)
    named = [expression for entry in job.entries if not (expression := job.expression(entry)).isidentifier()]
    references = [
        f"static auto const autotile_entry_{number} __attribute__((used)) = "
        f"&{expression.replace('&', '', 1) if expression.startswith('(') else expression};"
        for number, expression in enumerate(named)
    ]
    with tempfile.TemporaryDirectory(prefix="autotile-nvcc-") as folder:
        source, cubin = Path(folder, template.name), Path(folder, "kernel.cubin")
        text, options = _with_macros("\n".join([job.source, *references, ""]), job.compiler_options)
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        has_standard = any(option.lstrip("-").startswith("std=") for option in job.options)
        arguments = [
            str(find_nvcc()),
            *("-cubin", "--resource-usage", "-Xptxas=-v"),
            f"-arch={job.architecture}",
            *(() if has_standard else ("-std=c++17",)),
            *options,
            *(f"-I{path}" for path in (template.parent, *job.include_folders)),
            *("-o", str(cubin), str(source)),
        ]
        try:
            done = subprocess.run(
                arguments,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                env={**worker_environment(), "LC_ALL": "C"},  # g++ says in English what is looked for in the log
            )
        except OSError as error:
            raise ToolchainError(f"{arguments[0]} cannot be run: {error}") from None
        log = (done.stdout + done.stderr).replace(f"{folder}/", "").replace("\0", "")
        if done.returncode < 0:
            raise ToolchainError(f"nvcc was killed by signal {-done.returncode}")
        if done.returncode != 0 or not cubin.is_file():
            raise compile_error(log or f"nvcc ended with code {done.returncode}", job)
        check_macros(log, job)
        image = cubin.read_bytes()
    found = list(_reports(log))
    symbols = {entry: _symbol(entry, found, template.name) for entry in job.entries}
    return Compilation(image, compiled_functions(image, log, symbols))


def _without_unnamed(symbol: str) -> str:
    """Return a mangled name without that of an unnamed namespace, which contains the name of the file."""
    match = re.match(r"(_ZN(?:\d+[A-Za-z_]\w*?)??)(\d+)_GLOBAL__N_", symbol)
    return match[1] + symbol[match.end(2) + int(match[2]) :] if match else symbol


def _symbol(entry: str, found: list[str], template: str) -> str:
    """Return the symbol of an entry among those of a cubin that nvcc made."""
    if entry in found:
        return entry
    named = entry.partition("<")[0].rpartition(")")[2].strip().removeprefix("::")
    path = "".join(f"{len(part)}{re.escape(part)}" for part in re.split(r"\s*::\s*", named))
    pattern = rf"_Z.*(?<!\d){path}{'I' if '<' in entry else '(?!I)'}"
    matching = [symbol for symbol in found if re.match(pattern, _without_unnamed(symbol))]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise CompileError(f"there is no __global__ function {entry!r}; found: {', '.join(found) or 'none'}")
    raise CompileError(
        f"{entry!r} may be any of {', '.join(matching)}: with nvcc, compile one instance of a template only, and give "
        f"overloaded functions names of their own (in {template})"
    )


_WRITES_BETWEEN_TRIMS = 32
_TRIM_TO = 0.9
"""Trimming leaves a tenth of the limit free, so that the next write does not trim again."""


@dataclass(frozen=True, slots=True)
class CachedCubin:
    """A cubin on disk and its functions."""

    path: Path
    cubin_hash: str
    """SHA-256 hash of the cubin: equal for configurations that compile to the same code."""
    functions: Annotated[Mapping[Name, CompiledFunction], msgspec.Meta(min_length=1)]
    """Functions, by the names of the job's entries; the kernel's own is the first."""

    @property
    def resources(self) -> Resources:
        """Resources of the first function."""
        return next(iter(self.functions.values())).resources

    @property
    def symbols(self) -> dict[str, str]:
        """Name in the cubin of each entry."""
        return {entry: function.symbol for entry, function in self.functions.items()}


class CubinCache:
    """A folder of cubins, each with a small JSON file of its functions.

    Files are created by atomic renames, the cubin after its description, so that any number of processes may read and
    write at once. When the folder exceeds its limit, the least recently used cubins are deleted.

    Cubins run with the rights of the user, so the folder must be one that only the user may write. Each description
    holds a hash of the key, the cubin and the functions, so a file copied to another key is not used. Raise
    `InputError` if the folder cannot be created, or others may write it.

    The folder of caches is created if missing, for the user alone.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder / "cubins"
        self._limit_bytes = limit_bytes
        self._writes = 0
        self._create()

    def _create(self) -> None:
        """Create the folders if missing; raise if they cannot be created, or others may write them."""
        try:
            _create_private(self._folder)
            self._check_private(self._folder.parent, is_shared_folder_accepted=True)
            self._check_private(self._folder, is_shared_folder_accepted=False)
        except OSError as error:
            raise self._refusal("create", error) from None

    def get_or_compile(self, job: CompileJob) -> CachedCubin:
        """Return the cubin of a job, compiled if it is not in the cache; errors of `compile_cubin` and `put`."""
        key = job.key
        return self.get(key) or self.put(key, compile_cubin(job, self._folder))

    def get(self, key: str) -> CachedCubin | None:
        """Return the cubin of a key; None if it is missing or damaged."""
        cubin = self._folder / f"{key}.cubin"
        try:
            description = decode_json(cubin.with_suffix(".json").read_bytes(), dict)
            cubin_hash = hashlib.sha256(cubin.read_bytes()).hexdigest()
            found = convert({**description, "path": cubin, "cubin_hash": cubin_hash}, CachedCubin)
            # `to_builtins` takes a tenth of the time of `asdict`
            if description.get("entry_hash") != json_hash([key, cubin_hash, msgspec.to_builtins(found.functions)]):
                return None
            with contextlib.suppress(OSError):  # the cache may be read-only
                for file in (cubin, cubin.with_suffix(".json")):
                    os.utime(file)  # marks it as recently used
            return found
        except (OSError, DataError):
            return None

    def put(self, key: str, compilation: Compilation) -> CachedCubin:
        """Store a compilation under its key; that the folder cannot be written is an `InputError`."""
        cubin = self._folder / f"{key}.cubin"
        cubin_hash = hashlib.sha256(compilation.cubin).hexdigest()
        functions = msgspec.to_builtins(compilation.functions)
        entry_hash = json_hash([key, cubin_hash, functions])
        description = encode_json({"cubin_hash": cubin_hash, "entry_hash": entry_hash, "functions": functions})
        if not self._folder.is_dir():  # deleted since
            self._create()
        try:
            for path, data in ((cubin.with_suffix(".json"), description.encode()), (cubin, compilation.cubin)):
                descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".writing-")
                try:
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(data)
                    Path(temporary).replace(path)
                except BaseException:
                    Path(temporary).unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise self._refusal("write", error) from None
        self._writes += 1
        if self._writes % _WRITES_BETWEEN_TRIMS == 0:
            self.trim()
        return CachedCubin(cubin, cubin_hash, compilation.functions)

    def size_bytes(self) -> int:
        """Return the size of the folder in bytes."""
        return sum(entry.st_size for _, entry in self._entries())

    def trim(self) -> None:
        """Delete the least recently used cubins until the folder is within its limit."""
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(status.st_size for _, status in entries)
        if total <= self._limit_bytes:
            return
        for path, status in entries:
            with contextlib.suppress(OSError):  # another process may trim as well
                path.unlink()
            total -= status.st_size
            if total <= _TRIM_TO * self._limit_bytes:
                return

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield Path(entry.path), entry.stat()

    def _check_private(self, folder: Path, *, is_shared_folder_accepted: bool) -> None:
        """Raise if another user than root may put files into the folder.

        A folder such as ``/tmp``, in which users cannot replace each other's entries, is accepted around the cache.
        """
        trusted = (os.geteuid(), 0)
        status = folder.stat()
        is_shared = is_shared_folder_accepted and status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted or folder.lstat().st_uid not in trusted:
            problem, cure = "belongs to another user", ""
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            problem = "can be written by other users"
            cure = f", or, if it is meant for you alone, run `chmod go-w {shlex.quote(str(folder))}`"
        else:
            return
        raise InputError(
            f"the cubin cache {self._folder} is not used: {folder} {problem}, who could exchange code that you run; "
            f"set AUTOTILE_CACHE to a folder of your own{cure}"
        )

    def _refusal(self, action: str, error: OSError) -> InputError:
        cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "change its permissions"
        return InputError(
            f"cannot {action} the cubin cache {self._folder}: {error.strerror}; {cure}, or set AUTOTILE_CACHE to a "
            "folder elsewhere"
        )


def _create_private(folder: Path) -> None:
    """Create a folder and its missing parents for the user alone, whatever the umask."""
    if folder.is_dir():
        return
    _create_private(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # the umask may have taken rights of the user
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def check_signatures(kernel: Kernel, problem_dtype: str, cubin: CachedCubin) -> None:
    """Raise `SpecError` if a function of a kernel takes other parameters than the arguments that are declared."""
    from autotile.kernel.sources import signature_fault  # a compile worker does without

    spec = kernel.spec
    for step in spec.steps:
        function = cubin.functions.get(step.entry)
        taken = function.parameter_bytes if function is not None else None
        if fault := signature_fault(spec, step, problem_dtype, taken, kernel.source):
            raise SpecError(fault, source=spec.source, key="arguments")


_SUPPORT = Path(__file__).with_name("support.cu")


def support_job(architecture: str, options: tuple[str, ...] = ()) -> CompileJob:
    """Return the compilation of the GPU worker's kernels; the options are macros of an element type."""
    source = _SUPPORT.read_text(encoding="utf-8")
    return CompileJob(source, source, str(_SUPPORT), "compare_elements", architecture, options)


def compile_support(index: int) -> None:
    """Compile these kernels for float32 on a device into the user's cache, if that is possible; needs no NumPy."""
    from autotile.cuda.headers import include_folders

    with contextlib.suppress(Exception):  # whatever needs them reports it
        settings = read_settings()
        if not (settings.cache.is_dir() and any(settings.cache.iterdir())):  # it prepares while the driver starts
            include_folders()
            load_nvrtc()
        job = support_job(live_device(index).architecture)
        CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
