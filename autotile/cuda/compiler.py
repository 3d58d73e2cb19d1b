"""Compile CUDA C++ to cubins with NVRTC, without a GPU, and cache the cubins on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from autotile.core.documents import Name, canonical_json, decode_json, encode_json
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Resources, Value
from autotile.cuda.toolchain import include_folders, load_nvrtc, nvrtc_version
from autotile.errors import CompileError, DataError, InputError, ToolchainError
from autotile.kernel.includes import is_permitted, permitted_folders

if TYPE_CHECKING:
    from autotile.kernel.library import Kernel

_BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache (12.9 and later, with a driver) omits the assembler's report, so it is disabled."""
_PLACE = re.compile(r"(/[^\n]*?)\(\d+\)")
"""Absolute path and line at the start of an error."""
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
    architecture: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Name of the cubin in the cache: a SHA-256 hash of everything that the cubin depends on."""
        identity = [self.source_hash, self.entry, self.architecture, list(self.options), nvrtc_version()]
        return hashlib.sha256(canonical_json(identity).encode(errors="surrogatepass")).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values, for a compile worker."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Compilation:
    """A cubin and the resources of its entry function."""

    cubin: bytes
    resources: Resources


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
        Sizes and flags of the problem, of which the flags are compiled in; None for the kernel's defaults.
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
    """Compile a source to a cubin.

    Raises
    ------
    CompileError
        The source does not compile, or has no ``extern "C"`` entry function of the given name.
    ToolchainError
        NVRTC is missing, or does not support the architecture.
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
            raise CompileError(_first_error(log, Path(job.template_path)) or f"NVRTC returned {status.name}", log)
        return Compilation(_read(nvrtc, program, "CUBIN"), parse_resources(log, job.entry))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


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


def parse_resources(log: str, entry: str) -> Resources:
    """Parse the assembler's report (``-Xptxas -v``) on an entry function.

    Raises
    ------
    CompileError
        The log has no entry function of that name.
    ToolchainError
        The report has an unknown format.
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
        raise ToolchainError(f"the assembler's report on {entry!r} has an unknown format: {report.strip()!r}")
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


def _first_error(log: str, template: Path) -> str:
    """Return the compiler's first error, with the lines that show the source.

    Of a file that the template must not include, which a macro may have named, nothing is shown.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if "error" in line.lower():
            place = _PLACE.match(line)
            if place is not None and _is_foreign(Path(place[1]), template):
                return f"{place[0]}: error in a file that the template must not include, as it is outside of its folder"
            context = [following for following in lines[index + 1 : index + 3] if following.strip()]
            return "\n".join([line, *context])
    return log.strip()


def _is_foreign(path: Path, template: Path) -> bool:
    folders = permitted_folders(template, [Path(folder) for folder in include_folders()])
    return not is_permitted(path, folders)


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


def _entry_hash(key: str, cubin_hash: str, resources: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json([key, cubin_hash, resources]).encode(errors="surrogatepass")).hexdigest()


_WRITES_BETWEEN_TRIMS = 32
_TRIM_TO = 0.9
"""Trimming leaves a tenth of the limit free, so that the next write does not trim again."""


@dataclass(frozen=True, slots=True)
class CachedCubin:
    """A cubin on disk and the resources of its entry function."""

    path: Path
    cubin_hash: str
    """SHA-256 hash of the cubin: equal for configurations that compile to the same code."""
    resources: Resources


class _Description(msgspec.Struct):
    """File beside a cubin in the cache."""

    entry_hash: Name
    resources: Resources


class CubinCache:
    """A folder of cubins, each with a small JSON file of its resources.

    Files are created by atomic renames, the cubin after its description, so that any number of processes may read and
    write at once. When the folder exceeds its limit, the least recently used cubins are deleted.

    Cubins run with the rights of the user, so the folder must be one that only the user may write. Each description
    holds a hash of the key, the cubin and the resources, so a file copied to another key is not used.

    Parameters
    ----------
    folder
        Folder of caches, created if missing, for the user alone.
    limit_bytes
        Size to which the folder is trimmed.

    Raises
    ------
    InputError
        The folder cannot be created, or others may write it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder / "cubins"
        self._limit_bytes = limit_bytes
        self._writes = 0
        try:
            _create_private(self._folder)
            self._check_private(folder, is_shared_folder_accepted=True)
            self._check_private(self._folder, is_shared_folder_accepted=False)
        except OSError as error:
            raise self._refusal("create", error) from None

    def get_or_compile(self, job: CompileJob) -> CachedCubin:
        """Return the cubin of a job, compiled if it is not in the cache.

        Raises
        ------
        CompileError, ToolchainError
            As for `compile_cubin`.
        InputError
            As for `put`.
        """
        key = job.key
        return self.get(key) or self.put(key, compile_cubin(job))

    def get(self, key: str) -> CachedCubin | None:
        """Return the cubin of a key; None if it is missing or damaged."""
        cubin = self._path(key)
        try:
            description = decode_json(cubin.with_suffix(".json").read_bytes(), _Description)
            data = cubin.read_bytes()
            cubin_hash = hashlib.sha256(data).hexdigest()
            if description.entry_hash != _entry_hash(key, cubin_hash, asdict(description.resources)):
                return None
            with contextlib.suppress(OSError):  # the cache may be read-only
                for file in (cubin, cubin.with_suffix(".json")):
                    os.utime(file)  # marks it as recently used
            return CachedCubin(cubin, cubin_hash, description.resources)
        except (OSError, DataError):
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
        resources = asdict(compilation.resources)
        entry_hash = _entry_hash(key, cubin_hash, resources)
        description = encode_json({"cubin_hash": cubin_hash, "entry_hash": entry_hash, "resources": resources})
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
