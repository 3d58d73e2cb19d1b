"""Compile with NVRTC, the compiler that is a library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.cuda.headers import HOST_HEADERS, PRELUDE, compile_error, include_folders
from autotile.cuda.toolchain import load_nvrtc, nvrtc_version
from autotile.errors import ToolchainError
from autotile.kernel.sources import without_host_functions

if TYPE_CHECKING:
    from autotile.cuda.compiler import Compilation, CompileJob

_BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache (12.9 and later, with a driver) omits the assembler's report, so it is disabled."""

_NVCC_ONLY = re.compile(
    r'identifier "\w+" is undefined|namespace "std" has no member|name must be a namespace name'
    r"|not allowed in JIT mode|(?:cannot|could not) open source file"
)
"""Errors of sources that nvcc may compile."""
_NO_CODE = "#include <iosfwd>\n"
"""Content of a header for the host."""
_written_for_nvcc: set[str] = set()
"""Hashes of sources that did not compile otherwise."""


def compile_with_nvrtc(job: CompileJob) -> Compilation:
    """Compile a source to a cubin; errors as for `autotile.cuda.compiler.compile_cubin`."""
    from autotile.cuda.compiler import Compilation, compiled_functions

    folders = (str(Path(job.template_path).parent), *job.include_folders, *include_folders())
    options = [
        f"--gpu-architecture={job.architecture}",
        *_BASE_OPTIONS,
        *job.compiler_options,
        *(f"-I{f}" for f in folders),
    ]
    attempt = None if job.source_hash in _written_for_nvcc else _attempt(job, options)
    if attempt is None or (attempt.fault and _NVCC_ONLY.search(attempt.log)):
        _written_for_nvcc.add(job.source_hash)
        attempt = _attempt(job, options, as_nvcc=True)
        if attempt.fault and _NVCC_ONLY.search(attempt.log):
            attempt = _without_host_code_in_headers(job, options) or attempt
    if attempt.is_option_refused:
        refusal = f"NVRTC {nvrtc_version()} refuses an option for {job.architecture}: {attempt.log.strip()}"
        raise ToolchainError(refusal)
    if attempt.fault:
        raise compile_error(attempt.log or f"NVRTC returned {attempt.fault}", job)
    symbols = dict(zip(job.entries, attempt.symbols, strict=True))
    return Compilation(attempt.cubin, compiled_functions(attempt.cubin, attempt.log, symbols))


def _without_host_code_in_headers(job: CompileJob, options: Sequence[str]) -> _Attempt | None:
    """Return the attempt without the host functions of the author's headers, too; None if there are no headers."""
    from autotile.cuda.headers import own_headers

    headers = own_headers(job.source, Path(job.template_path), job.include_folders)
    if not headers.texts:
        return None
    options = [*options, *(f"-I{folder}" for folder in headers.folders)]
    return _attempt(job, options, as_nvcc=True, own_headers=headers.texts)


def known_architectures() -> tuple[str, ...]:
    """Return the targets of NVRTC, such as ``"sm_90"``, without the architecture-specific ones (``"sm_90a"``).

    Raises
    ------
    ToolchainError
        NVRTC is missing.
    """
    nvrtc = load_nvrtc()
    status, numbers = nvrtc.nvrtcGetSupportedArchs()
    _expect_success(nvrtc, status)
    return tuple(f"sm_{number}" for number in numbers)


class _Attempt(NamedTuple):
    """Result of one run of the compiler."""

    log: str
    cubin: bytes = b""
    symbols: tuple[str, ...] = ()
    """Name in the cubin of each entry."""
    fault: str = ""
    """Status that NVRTC returned; empty on success."""
    is_option_refused: bool = False


def _attempt(
    job: CompileJob,
    options: Sequence[str],
    *,
    as_nvcc: bool = False,
    own_headers: Mapping[str, str] = MappingProxyType({}),
) -> _Attempt:
    """Compile a job.

    Parameters
    ----------
    as_nvcc
        Whether to accept what nvcc accepts besides: names that it declares without an ``#include``, and host functions
        with their headers.
    own_headers
        Text of headers by name, in place of files.
    """
    nvrtc, source = load_nvrtc(), job.source
    entries = [job.expression(entry) for entry in job.entries]
    headers: dict[str, str] = {}
    if as_nvcc:
        source, headers = without_host_functions(source), {**dict.fromkeys(HOST_HEADERS, _NO_CODE), **own_headers}
        options = [*options, f"--pre-include={PRELUDE}", "--device-as-default-execution-space"]
    names, texts = ([text.encode() for text in part] for part in (headers, headers.values()))
    name = Path(job.template_path).name.encode()
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), name, len(names), texts, names)
    _expect_success(nvrtc, status)
    try:
        for entry in entries:
            (status,) = nvrtc.nvrtcAddNameExpression(program, entry.encode())
            _expect_success(nvrtc, status)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        parts = _read(nvrtc, program, "ProgramLog").split(b"\0")  # of the front end, and of the assembler
        log = b"\n".join(filter(None, parts)).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            is_refused = status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION
            return _Attempt(log, fault=status.name, is_option_refused=is_refused)
        symbols = tuple(_lowered_name(nvrtc, program, entry) for entry in entries)
        return _Attempt(log, _read(nvrtc, program, "CUBIN"), symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _lowered_name(nvrtc: ModuleType, program: Any, entry: str) -> str:
    status, name = nvrtc.nvrtcGetLoweredName(program, entry.encode())
    _expect_success(nvrtc, status)
    return str(name.decode())


def _read(nvrtc: ModuleType, program: Any, what: str) -> bytes:
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _expect_success(nvrtc, status)
    data = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    _expect_success(nvrtc, status)
    return bytes(data)


def _expect_success(nvrtc: ModuleType, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC {nvrtc_version()} failed with {status.name}")
