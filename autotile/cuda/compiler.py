"""Compile CUDA C++ to cubins with NVRTC and cache them on disk; needs no GPU."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Resources, Value, canonical_json
from autotile.cuda.toolchain import include_folders, load_nvrtc, nvrtc_version
from autotile.errors import CompileError, InputError, ToolchainError
from autotile.kernel.library import Kernel

_BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache (12.9 and later, with a driver) answers without the assembler's report, so it stays off."""
_ENTRY = r"Compiling entry function '([^']+)'"
_FRAME = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_REGISTERS = r"Used (\d+) registers"
_STATIC_SMEM = r"(\d+) bytes smem"
"""In the assembler's report; none is compiled before there is a report."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """All that one compilation depends on.

    ``options`` holds macros and the author's options, not the include folders: those are found where the job runs, and
    their content is covered by ``source_hash`` and the NVRTC version.
    """

    source: str
    source_hash: str
    template_path: str
    entry: str
    architecture: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """SHA-256 that names the cubin: equal for jobs that give the same cubin."""
        identity = [self.source_hash, self.entry, self.architecture, list(self.options), nvrtc_version()]
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary, for the way to a compile worker."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileJob:
        """Inverse of `to_json`."""
        return cls(**{**data, "options": tuple(data["options"])})


@dataclass(frozen=True, slots=True)
class Compilation:
    """A cubin and what its entry function uses."""

    cubin: bytes
    resources: Resources


def macro_options(config: Config, dtype: str) -> tuple[str, ...]:
    """``-D`` options of parameters and flags; booleans become 1 and 0, ``DTYPE`` holds the element type's C name."""
    macros = [f"-D{name}={_macro_value(value)}" for name, value in config.items()]
    return (*macros, f"-DDTYPE={DTYPES[dtype].c_type}")


def compile_job(
    kernel: Kernel, config: Config, dtype: str, architecture: str, sizes: Mapping[str, int] | None = None
) -> CompileJob:
    """The compilation that a configuration needs.

    Parameters
    ----------
    kernel, config, dtype
        What is compiled.
    architecture
        The device's, such as ``"sm_90"``; a kernel that names its own is compiled for that.
    sizes
        Of the problem, for its flags; None for the kernel's defaults.
    """
    sizes = sizes if sizes is not None else kernel.spec.sizes
    flags = {name: sizes[name] for name in kernel.spec.flags}
    return CompileJob(
        source=kernel.source,
        source_hash=kernel.source_hash,
        template_path=str(kernel.template_path),
        entry=kernel.spec.entry,
        architecture=kernel.spec.architecture or architecture,
        options=(*kernel.spec.options, *macro_options({**config, **flags}, dtype)),
    )


def compile_cubin(job: CompileJob) -> Compilation:
    """Compile.

    Raises
    ------
    CompileError
        The source does not compile, or has no ``extern "C"`` entry function of the given name.
    ToolchainError
        NVRTC is missing, or does not know the architecture.
    """
    nvrtc = load_nvrtc()
    folders = (str(Path(job.template_path).parent), *include_folders())
    options = [f"--gpu-architecture={job.architecture}", *_BASE_OPTIONS, *job.options, *(f"-I{f}" for f in folders)]
    status, program = nvrtc.nvrtcCreateProgram(job.source.encode(), Path(job.template_path).name.encode(), 0, [], [])
    _expect_success(nvrtc, status)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise ToolchainError(f"NVRTC {nvrtc_version()} refuses an option for {job.architecture}: {log.strip()}")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_first_error(log) or f"NVRTC says {status.name}", log)
        return Compilation(_read(nvrtc, program, "CUBIN"), parse_resources(log, job.entry))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def known_architectures() -> tuple[str, ...]:
    """Targets that NVRTC compiles for, such as ``"sm_90"``, without those of architecture-specific features.

    Raises
    ------
    ToolchainError
        NVRTC is missing.
    """
    nvrtc = load_nvrtc()
    status, numbers = nvrtc.nvrtcGetSupportedArchs()
    _expect_success(nvrtc, status)
    return tuple(f"sm_{number}" for number in numbers)


def parse_resources(log: str, entry: str) -> Resources:
    """Read the assembler's report (``-Xptxas -v``) on one entry function.

    Raises
    ------
    CompileError
        The log reports no entry function of that name.
    """
    sections = re.split(_ENTRY, log)
    reports = dict(zip(sections[1::2], sections[2::2], strict=True))
    if entry not in reports:
        found = ", ".join(sorted(reports)) or "none"
        raise CompileError(
            f'no extern "C" __global__ function {entry!r} in the template; entry functions found: {found}'
        )
    report = reports[entry]
    frame, registers = re.search(_FRAME, report), re.search(_REGISTERS, report)
    if frame is None or registers is None:
        raise ToolchainError(f"the assembler's report on {entry!r} has an unknown form: {report.strip()!r}")
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


def _first_error(log: str) -> str:
    """The compiler's first error with the lines that show the place."""
    lines = [line.rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if "error" in line.lower():
            rest = [follow for follow in lines[index + 1 : index + 3] if follow.strip()]
            return "\n".join([line, *rest])
    return log.strip()


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


_WRITES_BETWEEN_TRIMS = 32
_TRIM_TO = 0.9
"""Trimming leaves a tenth free, so that the next write does not trim again."""


@dataclass(frozen=True, slots=True)
class CachedCubin:
    """A cubin on disk with what its entry function uses."""

    path: Path
    cubin_hash: str
    """SHA-256 of the cubin: equal for configurations that compile to the same code."""
    resources: Resources


class CubinCache:
    """A folder of cubins, each with a small JSON file of its resources.

    Each file appears by an atomic rename, the cubin after its description, so any number of processes may write and
    read at once. The least recently used go first when the folder outgrows its limit.

    Parameters
    ----------
    folder
        Created where it is missing.
    limit_bytes
        Size that the folder is trimmed to.

    Raises
    ------
    InputError
        The folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder / "cubins"
        self._limit_bytes = limit_bytes
        self._writes = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal("make", error) from None

    def get_or_compile(self, job: CompileJob) -> CachedCubin:
        """The job's cubin, from the cache or compiled now.

        Raises
        ------
        CompileError, ToolchainError
            As `compile_cubin`.
        """
        key = job.key
        return self.get(key) or self.put(key, compile_cubin(job))

    def get(self, key: str) -> CachedCubin | None:
        """The cubin stored under a key, or None where it is missing or damaged."""
        cubin = self._path(key)
        try:
            description = json.loads(cubin.with_suffix(".json").read_text(encoding="utf-8"))
            data = cubin.read_bytes()
            if hashlib.sha256(data).hexdigest() != description["cubin_hash"]:
                return None
            with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
                for file in (cubin, cubin.with_suffix(".json")):
                    os.utime(file)  # recently used
            return CachedCubin(cubin, description["cubin_hash"], Resources(**description["resources"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, compilation: Compilation) -> CachedCubin:
        """Store a compilation under its key.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        cubin = self._path(key)
        cubin_hash = hashlib.sha256(compilation.cubin).hexdigest()
        description = json.dumps({"cubin_hash": cubin_hash, "resources": asdict(compilation.resources)})
        try:
            self._write(cubin.with_suffix(".json"), description.encode())
            self._write(cubin, compilation.cubin)
        except OSError as error:
            raise self._refusal("write", error) from None
        self._writes += 1
        if self._writes % _WRITES_BETWEEN_TRIMS == 0:
            self.trim()
        return CachedCubin(cubin, cubin_hash, compilation.resources)

    def size_bytes(self) -> int:
        """Bytes that the folder holds now."""
        return sum(entry.st_size for _, entry in self._entries())

    def trim(self) -> None:
        """Delete the least recently used cubins until the folder is within its limit."""
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in entries)
        if total <= self._limit_bytes:
            return
        for path, stat in entries:
            with contextlib.suppress(OSError):  # another process trims too
                path.unlink()
            total -= stat.st_size
            if total <= _TRIM_TO * self._limit_bytes:
                return

    def _refusal(self, action: str, error: OSError) -> InputError:
        cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "change its permissions"
        return InputError(
            f"cannot {action} the cubin cache {self._folder}: {error.strerror}; {cure}, or set AUTOTILE_CACHE to a "
            "folder elsewhere"
        )

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.cubin"

    def _write(self, path: Path, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield Path(entry.path), entry.stat()
