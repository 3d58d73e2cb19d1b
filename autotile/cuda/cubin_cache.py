"""A cache of cubins on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from autotile.core.documents import Name, canonical_json, decode_json, encode_json
from autotile.core.model import Resources
from autotile.cuda.compiler import Compilation, CompiledFunction, CompileJob, compile_cubin
from autotile.errors import DataError, InputError

if TYPE_CHECKING:
    from autotile.kernel.library import Kernel


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


def _entry_hash(key: str, cubin_hash: str, functions: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json([key, cubin_hash, functions]).encode(errors="surrogatepass")).hexdigest()


def _to_json(functions: Mapping[str, CompiledFunction]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(functions)  # a tenth of the time of `asdict`
    return plain


_WRITES_BETWEEN_TRIMS = 32
_TRIM_TO = 0.9
"""Trimming leaves a tenth of the limit free, so that the next write does not trim again."""


@dataclass(frozen=True, slots=True)
class CachedCubin:
    """A cubin on disk and its functions."""

    path: Path
    cubin_hash: str
    """SHA-256 hash of the cubin: equal for configurations that compile to the same code."""
    functions: Mapping[Name, CompiledFunction]
    """Functions, by the names of the job's entries; the kernel's own is the first."""

    @property
    def resources(self) -> Resources:
        """Resources of the first function."""
        return next(iter(self.functions.values())).resources

    @property
    def symbols(self) -> dict[str, str]:
        """Name in the cubin of each entry."""
        return {entry: function.symbol for entry, function in self.functions.items()}


class _Description(msgspec.Struct):
    """File beside a cubin in the cache."""

    entry_hash: Name
    functions: Annotated[dict[Name, CompiledFunction], msgspec.Meta(min_length=1)]


class CubinCache:
    """A folder of cubins, each with a small JSON file of its functions.

    Files are created by atomic renames, the cubin after its description, so that any number of processes may read and
    write at once. When the folder exceeds its limit, the least recently used cubins are deleted.

    Cubins run with the rights of the user, so the folder must be one that only the user may write. Each description
    holds a hash of the key, the cubin and the functions, so a file copied to another key is not used.

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
            if description.entry_hash != _entry_hash(key, cubin_hash, _to_json(description.functions)):
                return None
            with contextlib.suppress(OSError):  # the cache may be read-only
                for file in (cubin, cubin.with_suffix(".json")):
                    os.utime(file)  # marks it as recently used
            return CachedCubin(cubin, cubin_hash, description.functions)
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
        functions = _to_json(compilation.functions)
        entry_hash = _entry_hash(key, cubin_hash, functions)
        description = encode_json({"cubin_hash": cubin_hash, "entry_hash": entry_hash, "functions": functions})
        try:
            self._write(cubin.with_suffix(".json"), description.encode())
            self._write(cubin, compilation.cubin)
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


def check_signatures(kernel: Kernel, problem_dtype: str, cubin: CachedCubin) -> None:
    """Raise if a function of a kernel takes other parameters than the arguments that are declared for it.

    Raises
    ------
    SpecError
        The number or the size of the parameters differs.
    """
    from autotile.kernel.sources import check_signature  # a compile worker does without

    for step in kernel.spec.steps:
        if (function := cubin.functions.get(step.entry)) is not None:
            check_signature(kernel.spec, step, problem_dtype, function.parameter_bytes, kernel.source)
