"""Content-addressed cubins on disk, shared by every process of a user and bounded in size."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from autotile.device.compiler import Compilation, CompileJob, compile_cubin
from autotile.ground.errors import InputError
from autotile.ground.frozen import dataclass
from autotile.ground.model import Resources

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
