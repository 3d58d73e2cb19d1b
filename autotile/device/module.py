"""Load a cubin and launch its functions through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotile.device.toolchain import load_cupy
from autotile.ground.frozen import dataclass
from autotile.ground.model import Resources

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cuda.h."""


class Function:
    """An entry function of a loaded module."""

    def __init__(self, function: Any) -> None:
        self._function = function

    @property
    def pointer(self) -> int:
        """The driver's handle."""
        return int(self._function.ptr)

    def opt_in(self, dynamic_smem_bytes: int) -> None:
        """Allow this much dynamic shared memory a block.

        Without it a kernel may have 48 KiB less its static shared memory (CUDA C++ Programming Guide, shared memory of
        compute capability 7.x and later).
        """
        if dynamic_smem_bytes:
            driver = load_cupy().cuda.driver
            driver.funcSetAttribute(self._function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_smem_bytes)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        dynamic_smem_bytes: int,
    ) -> None:
        """Queue a launch on CuPy's current stream; arguments are CuPy arrays or NumPy scalars of the exact type."""
        self._function(grid, block, arguments, dynamic_smem_bytes)

    def blocks_per_sm(self, threads: int, dynamic_smem_bytes: int) -> int:
        """The driver's own occupancy answer, in blocks per SM."""
        driver = load_cupy().cuda.driver
        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self._function.ptr, threads, dynamic_smem_bytes))


@dataclass(frozen=True, slots=True)
class PackedCubin:
    """A cubin that lies inside another file: what it uses, and how its bytes are had."""

    resources: Resources
    read: Callable[[], bytes]


class Module:
    """A cubin, from a file or from memory, loaded into the current context; unloaded when nothing refers to it."""

    def __init__(self, image: Path | bytes) -> None:
        self._module = load_cupy().cuda.function.Module()
        if isinstance(image, bytes):
            self._module.load(image)
        else:
            self._module.load_file(str(image))

    def function(self, name: str) -> Function:
        """An ``extern "C"`` function by name."""
        return Function(self._module.get_function(name))
