"""Folders of headers: the toolkit's, from wheels or an installation, and what NVRTC lacks of the standard ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from autotile.cuda.toolchain import nvrtc_version
from autotile.settings import toolkit_folders

_OWN = Path(__file__).resolve().parent
_DEVICE_HEADERS = _OWN / "device_headers"
"""Headers in place of the toolkit's, which NVRTC refuses."""
_STANDARD_HEADERS = _OWN / "standard_headers"
"""Standard headers that NVRTC lacks."""
PRELUDE = "autotile_prelude.h"
"""Header of what nvcc declares without any ``#include``."""
_VERSION = re.compile(rb"#define\s+CUDA_VERSION\s+(\d+)")
_LIBRARIES = ("cudart", "cccl", "curand")
"""Libraries of `cuda.pathfinder` whose headers kernels include."""

HOST_HEADERS = (
    *("cerrno", "condition_variable", "deque", "errno.h", "exception", "filesystem", "forward_list", "fstream"),
    *("future", "getopt.h", "iomanip", "ios", "iostream", "istream", "list", "locale", "map", "memory", "mutex"),
    *("ostream", "queue", "random", "regex", "set", "signal.h", "sstream", "stack", "stdexcept", "streambuf", "string"),
    *("string_view", "sys/time.h", "sys/types.h", "thread", "typeinfo", "unistd.h", "unordered_map", "unordered_set"),
    *("vector", "ctype.h", "cctype", "valarray", "inttypes.h", "cinttypes", "malloc.h"),
)
"""Standard headers of which device code can use nothing; for a source with host functions, they are empty."""


class HeaderFolders(NamedTuple):
    """Folders of headers in the order in which the compiler searches them, after the kernel's own."""

    folders: tuple[str, ...]
    toolkit: tuple[str, ...]
    """Folders of the toolkit among them, best first."""


@lru_cache
def header_folders() -> HeaderFolders:
    """Return the folders of headers: the wheels' before an installed toolkit's, unless only the latter fits NVRTC."""
    toolkit = tuple(dict.fromkeys(str(folder) for folder in _ranked([*_wheel_folders(), *_installed_folders()])))
    return HeaderFolders((str(_DEVICE_HEADERS), *toolkit, str(_STANDARD_HEADERS)), toolkit)


def include_folders() -> tuple[str, ...]:
    """Return the folders of the toolkit's headers, such as ``cuda_fp16.h`` ``cuda/std``, and of the standard ones."""
    return header_folders().folders


def find_header(name: str, folders: Iterable[str] | None = None) -> Path | None:
    """Return the path of a header, such as ``mma.h``; None if there is none."""
    paths = (Path(folder) / name for folder in (include_folders() if folders is None else folders))
    return next((path for path in paths if path.is_file()), None)


def _wheel_folders() -> list[Path]:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # it is installed with the bindings of NVRTC
        return []
    found = []
    for library in _LIBRARIES:
        try:
            folder = find_nvidia_header_directory(library)
        except Exception:
            continue
        found += [Path(folder)] if folder else []
    return found


def _installed_folders() -> list[Path]:
    found = []
    for toolkit in toolkit_folders():
        for folder in (toolkit / "include", toolkit / "include" / "cccl"):
            if os.path.isdir(folder):  # noqa: PTH112 - never raises
                found.append(folder.resolve())
    return found


def _ranked(folders: list[Path]) -> list[Path]:
    """Return the folders of NVRTC's major version, those of its very version first."""
    wanted = _number(nvrtc_version())
    versions = [_version(folder) or wanted for folder in folders]
    pairs = [pair for pair in zip(versions, folders, strict=True) if pair[0][0] == wanted[0]]
    return [folder for _, folder in sorted(pairs, key=lambda pair: pair[0] != wanted)]


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _version(folder: Path) -> tuple[int, int] | None:
    """Return the toolkit's version that a folder's ``cuda.h`` states; None if it has none."""
    for place in (folder, folder.parent):
        try:
            match = _VERSION.search((place / "cuda.h").read_bytes())
        except OSError:
            continue
        if match:
            return int(match[1]) // 1000, int(match[1]) % 1000 // 10
    return None
