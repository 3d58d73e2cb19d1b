"""The CUDA driver's own interface, for what CuPy does not offer."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from autotile.ground.errors import ToolchainError


@lru_cache
def load_driver() -> ctypes.CDLL:
    """The driver's library, initialised; its functions return a ``CUresult``, and take what cuda.h says.

    Loading ``cuda.bindings`` would take longer than all the rest of a process's first launch.

    Raises
    ------
    ToolchainError
        There is no driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ToolchainError(f"NVIDIA's driver cannot be loaded ({error}); see `autotile doctor`") from None
    driver.cuInit(0)
    return driver


def result_name(status: int) -> str:
    """Name of a ``CUresult``, such as ``CUDA_ERROR_INVALID_VALUE``."""
    name = ctypes.c_char_p()
    load_driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else str(status)
