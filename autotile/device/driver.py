"""The CUDA driver's own interface, for what CuPy does not offer."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from autotile.device.toolchain import INSTALL_WHEELS
from autotile.ground.errors import ToolchainError


@lru_cache
def load_driver() -> ModuleType:
    """The ``cuda.bindings.driver`` module, initialised.

    Raises
    ------
    ToolchainError
        The bindings are not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainError(f"cuda.bindings is not installed ({error}); {INSTALL_WHEELS}") from None
    driver.cuInit(0)
    module: ModuleType = driver
    return module
