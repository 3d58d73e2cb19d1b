"""NVRTC, CuPy and nvcc as they are installed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from autotile.errors import ToolchainError
from autotile.settings import toolkit_folders, worker_environment

INSTALL_WHEELS = (
    'install the wheels: pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere, with '
    "cuda12 in place of cuda13 for a driver older than 580"
)
_INSTALL_TOOLKIT = (
    'install the CUDA toolkit and set CUDA_HOME to its folder, or add nvcc to PATH; or leave out compiler = "nvcc", so '
    "that the kernel is compiled with NVRTC"
)
_NVRTC_WHEEL = "nvidia_cuda_nvrtc"
_VERSION_TIMEOUT_S = 30.0


@lru_cache
def load_nvrtc() -> ModuleType:
    """Return the ``cuda.bindings.nvrtc`` module, after checking that its library can be loaded.

    Raise `ToolchainError` if the bindings or the library are not installed.
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
def open_nvrtc() -> None:
    """Open the NVRTC library of a wheel without the interpreter's lock, so that no other thread stands still.

    ``cuda.bindings`` opens it with the lock held, which takes up to 0.1 s; a library that is open already takes none.
    """
    paths = [path for folder in filter(None, sys.path) for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    if paths:
        ctypes.CDLL(None).dlopen(os.fsencode(paths[0]), os.RTLD_NOW | os.RTLD_GLOBAL)


@lru_cache
def nvrtc_version() -> str:
    """Return the version of NVRTC, such as ``"13.0"``, which is part of every tuning key and cubin key.

    It is read from the metadata of the installed wheel, if there is exactly one, as loading NVRTC takes longer than the
    rest of serving a cached cubin. The loader prefers a wheel to any other installation (cuda.pathfinder, "Search
    order"). Errors are those of `load_nvrtc`.
    """
    found = set()
    for folder in filter(None, sys.path):
        with contextlib.suppress(OSError):  # not a folder, for example a zip archive
            for name in os.listdir(folder):  # noqa: PTH208 - Path objects for hundreds of names take long
                if name.startswith(_NVRTC_WHEEL) and (
                    match := re.fullmatch(_NVRTC_WHEEL + r"(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info", name)
                ):
                    found.add(match[1])
    if len(found) == 1:
        return found.pop()
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


_FROZEN_BY_A_PROGRAM = 1000
"""Objects out of the garbage collector's reach from which on a program put them there; Python 3.12 begins with 375."""


@lru_cache
def load_cupy() -> ModuleType:
    """Return the ``cupy`` module.

    Raise `ToolchainError` if CuPy is not installed.
    """
    if "cupy" not in sys.modules and gc.get_freeze_count() < _FROZEN_BY_A_PROGRAM:
        # The import makes so many objects that CPython would begin a full collection, of 0.1 s with PyTorch's objects.
        # Once frozen and thawed, all earlier objects are old ones, and its count of collections begins anew.
        gc.freeze()
        gc.unfreeze()
    try:
        import cupy
    except ImportError as error:
        raise ToolchainError(f"CuPy is not installed ({error}); {INSTALL_WHEELS}") from None
    module: ModuleType = cupy
    return module


@lru_cache
def find_nvcc() -> Path:
    """Return the path of nvcc: that of ``CUDA_HOME``, of ``CUDA_PATH``, on ``PATH``, or of the default folder.

    Raise `ToolchainError` if there is none.
    """
    *named, default = (str(folder / "bin") for folder in toolkit_folders())
    for folder in (*named, None, default):
        if found := shutil.which("nvcc", path=folder):
            return Path(found).resolve()
    raise ToolchainError(f"there is no nvcc on this machine; {_INSTALL_TOOLKIT}")


@lru_cache
def nvcc_version() -> str:
    """Return the version of nvcc, such as ``"13.0.88"``, which is part of the key of what it compiles.

    Raise `ToolchainError` if there is no nvcc, or it does not run.
    """
    nvcc = find_nvcc()
    try:
        shown = subprocess.run(
            [str(nvcc), "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=True,
            env=worker_environment(),
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc} --version fails: {error}; {_INSTALL_TOOLKIT}") from None
    match = re.search(r"release (\d+\.\d+), V([\d.]+)", shown)
    if match is None:
        raise ToolchainError(f"{nvcc} --version says {shown.strip()[-200:]!r}, expected a release; {_INSTALL_TOOLKIT}")
    return match[2]


def installed_nvcc() -> str:
    """Return the version of nvcc; "" if there is none."""
    try:
        return nvcc_version()
    except ToolchainError:
        return ""
