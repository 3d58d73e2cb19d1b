"""Load NVRTC and find the toolkit's headers, wherever they were installed from."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

from autotile.errors import ToolchainError

INSTALL_WHEELS = (
    'install the wheels: pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere, with '
    "cuda12 in place of cuda13 for a driver older than 580"
)

_NVRTC_WHEEL = "nvidia_cuda_nvrtc"


@lru_cache
def load_nvrtc() -> ModuleType:
    """The ``cuda.bindings.nvrtc`` module, with its library found to load.

    Raises
    ------
    ToolchainError
        The bindings or the library are not installed.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"cuda.bindings is not installed ({error}); {INSTALL_WHEELS}") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own errors share no base class
        raise ToolchainError(f"the NVRTC library cannot be loaded ({error}); {INSTALL_WHEELS}") from None
    module: ModuleType = nvrtc
    return module


@lru_cache
def nvrtc_version() -> str:
    """Version of NVRTC, such as ``"13.0"``; part of every tuning key and cubin key.

    The wheel's name tells it, where there is one: what is compiled already is then served without loading NVRTC,
    which takes longer than all the rest of serving it. The loader takes a wheel before anything else
    (cuda.pathfinder, "Search order").

    Raises
    ------
    ToolchainError
        As for `load_nvrtc`.
    """
    wheel = _wheel_version()
    if wheel is not None:
        return wheel
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _wheel_version() -> str | None:
    """Version in the folder name of an installed wheel of NVRTC; None where there is none, or more than one."""
    found = {version for folder in sys.path if folder for version in _wheels(folder)}
    return found.pop() if len(found) == 1 else None


def _wheels(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # a path that is no folder: an archive, say
        for name in os.listdir(folder):  # noqa: PTH208 - a folder of packages holds hundreds of names
            if name.startswith(_NVRTC_WHEEL) and (
                match := re.fullmatch(_NVRTC_WHEEL + r"(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info", name)
            ):
                yield match[1]


@lru_cache
def include_folders() -> tuple[str, ...]:
    """Folders with the toolkit's headers, such as ``cuda_fp16.h`` and ``cuda/std``; empty where there are none."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # it comes with the bindings of NVRTC
        return ()
    found = (find_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    return tuple(folder for folder in found if folder)


@lru_cache
def load_cupy() -> ModuleType:
    """The ``cupy`` module.

    Raises
    ------
    ToolchainError
        CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise ToolchainError(f"CuPy is not installed ({error}); {INSTALL_WHEELS}") from None
    module: ModuleType = cupy
    return module
