"""Child process that compiles one job at a time into the cubin cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotile.core.documents import convert
from autotile.cuda.compiler import CompileJob, CubinCache
from autotile.errors import CompileError, InputError, ToolchainError
from autotile.workers.protocol import Stage, limit_memory, serve


class CompileWorker:
    """Handler of requests ``{"job", "cache", "limit_bytes", "memory_bytes"}``.

    It replies with the cubin's path, hash and functions, or with the error.
    """

    def __init__(self) -> None:
        self._is_limited = False
        self._caches: dict[tuple[str, int], CubinCache] = {}

    def __call__(self, message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
        """Handle one request."""
        try:
            if not self._is_limited:
                limit_memory(message["memory_bytes"])
                self._is_limited = True
            cache = self._cache(message["cache"], message["limit_bytes"])
            cubin = cache.get_or_compile(convert(message["job"], CompileJob))
        except CompileError as error:
            return {"error": str(error), "kind": "limit" if error.exceeds_limit else "compile"}
        except InputError as error:  # the cache cannot be written: not the candidate's failure
            return {"error": str(error), "kind": "input"}
        except ToolchainError as error:
            return {"error": str(error), "kind": "setup"}
        functions = {entry: asdict(function) for entry, function in cubin.functions.items()}
        return {"path": str(cubin.path), "cubin_hash": cubin.cubin_hash, "functions": functions}

    def _cache(self, folder: str, limit_bytes: int) -> CubinCache:
        if (folder, limit_bytes) not in self._caches:
            self._caches[folder, limit_bytes] = CubinCache(Path(folder), limit_bytes)
        return self._caches[folder, limit_bytes]


if __name__ == "__main__":
    serve(CompileWorker())
