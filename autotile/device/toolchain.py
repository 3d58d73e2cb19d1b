"""Load NVRTC and find the toolkit's headers, wherever they were installed from."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from autotile.ground.errors import ToolchainError

INSTALL_WHEELS = (
    'install the wheels: pip install -e ".[cuda13]" in a checkout, pip install "autotile[cuda13]" elsewhere, with '
    "cuda12 in place of cuda13 for a driver older than 580"
)


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
    """Version of NVRTC, such as ``"13.0"``; part of every tuning key and cubin key."""
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


@lru_cache
def include_folders() -> tuple[str, ...]:
    """Folders with the toolkit's headers, such as ``cuda_fp16.h`` and ``cuda/std``; empty where there are none."""
    from cuda.pathfinder import find_nvidia_header_directory

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
