"""Load NVRTC and CuPy."""

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
    """Return the ``cuda.bindings.nvrtc`` module, after checking that its library can be loaded.

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
    """Return the version of NVRTC, such as ``"13.0"``, which is part of every tuning key and cubin key.

    It is read from the metadata of the installed wheel, if there is one, as loading NVRTC takes longer than the rest of
    serving a cached cubin. The loader prefers a wheel to any other installation (cuda.pathfinder, "Search order").

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
    """Return the version of the installed NVRTC wheel; None if there is none or more than one."""
    found = {version for folder in sys.path if folder for version in _wheels(folder)}
    return found.pop() if len(found) == 1 else None


def _wheels(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # not a folder, for example a zip archive
        for name in os.listdir(folder):  # noqa: PTH208 - Path objects for hundreds of names take long
            if name.startswith(_NVRTC_WHEEL) and (
                match := re.fullmatch(_NVRTC_WHEEL + r"(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info", name)
            ):
                yield match[1]


@lru_cache
def load_cupy() -> ModuleType:
    """Return the ``cupy`` module.

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
