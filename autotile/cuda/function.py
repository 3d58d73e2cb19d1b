"""Load cubins and launch their functions, through CuPy, the driver or CUDA graphs.

Measured on H200s (driver 580): 1.4 us in place of 3.5 on a fast host, 2.5 in place of 4.8 on a slow one. The GPU works
through the one as fast as through the other. A graph takes 50 to 80 us to make, and 115 KiB of the GPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import finalize

import numpy as np

from autotile.core.frozen import dataclass
from autotile.core.model import LaunchGeometry, Resources
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.toolchain import load_cupy

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


_WORD_BYTES = 8
_ALIGNMENT_BYTES = 64
"""What the strictest parameter asks for: a tensor map (CUDA driver API, ``CUtensorMap``)."""


class ParameterBlock:
    """A kernel's parameters as cuLaunchKernel takes them: an array of addresses, each of one parameter's value.

    The driver copies the values when it is called, so one block serves launch after launch. It must not be written
    while another thread launches from it.

    Parameters
    ----------
    values
        In the kernel's order: NumPy scalars, or arrays whose bytes are passed by value.
    spare_words
        Words at the end of ``words`` that are no parameter's.

    Attributes
    ----------
    address
        Of the array of addresses.
    words
        The values as 64-bit words, to be exchanged between launches; parameter ``i`` starts at word ``starts[i]``.
    starts
        See ``words``.
    """

    __slots__ = ("_memory", "_pointers", "address", "starts", "words")

    def __init__(self, values: Sequence[Any], spare_words: int = 0) -> None:
        parts = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        offsets, end = [], 0
        for part in parts:
            offsets.append(_aligned(end, _ALIGNMENT_BYTES if part.size > _WORD_BYTES else _WORD_BYTES))
            end = offsets[-1] + part.size
        end = _aligned(end, _WORD_BYTES) + spare_words * _WORD_BYTES
        memory = np.zeros(end + _ALIGNMENT_BYTES, np.uint8)
        start = -int(memory.ctypes.data) % _ALIGNMENT_BYTES
        for part, offset in zip(parts, offsets, strict=True):
            memory[start + offset : start + offset + part.size] = part
        base = int(memory.ctypes.data) + start
        self._memory = memory
        self._pointers = np.array([base + offset for offset in offsets], np.uint64)
        self.address = int(self._pointers.ctypes.data)
        self.starts = tuple(offset // _WORD_BYTES for offset in offsets)
        self.words = memory.data[start : start + end].cast("Q")


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def driver_launch(function_pointer: int, geometry: LaunchGeometry) -> Callable[[int, int, int], None]:
    """What launches a function: called with a stream's address, a parameter block's address and 0.

    It costs what the driver's own call costs; nothing is checked.
    """
    launch: Callable[..., None] = load_cupy().cuda.driver.launchKernel
    return partial(launch, function_pointer, *geometry.grid, *geometry.block, geometry.dynamic_smem_bytes)


_MOST = 256
"""Graphs at a time in a process; they take 30 MB of the GPU's memory."""


class LaunchGraph:
    """A launch with the parameters that a block held when it was made.

    It may be launched again before it has ended, but not from two threads at once. It may be dropped at any time, also
    while a stream is captured: CUDA forbids to destroy a graph then, unless the thread says that it knows better.

    Parameters
    ----------
    graph
        As CuPy captured it.
    kept
        What the launch needs and must stay: the module of the kernel, memory.

    Attributes
    ----------
    executable
        Handle of the graph, as ``cudaGraphLaunch`` takes it.
    """

    __slots__ = ("__weakref__", "executable")

    def __init__(self, graph: Any, kept: object) -> None:
        self.executable = int(graph.graphExec)
        finalize(self, _destroy, [kept, graph], os.getpid()).atexit = False  # CUDA ends with the process


def _destroy(held: list[object], process: int) -> None:
    """Destroy a graph, the last of what is held, and then let go of the rest."""
    if os.getpid() != process:  # this is a forked child
        _of_the_parent.append(held)
        return
    with outside_of_captures():
        held.pop()
    _places.put(None)


_places: SimpleQueue[None] = SimpleQueue()  # which may be put to while it is read, as finalizers need it
for _ in range(_MOST):
    _places.put(None)
_of_the_parent: list[object] = []
"""Graphs that are not this process's to destroy."""


def make_launch_graph(
    launch: Callable[[int, int, int], None], block: ParameterBlock, stream: int, kept: object
) -> LaunchGraph | None:
    """A graph of one launch on the current device; None where there are many already, or CUDA refuses.

    Parameters
    ----------
    launch
        As `autotile.cuda.function.driver_launch` gives it.
    block
        Parameters; they are copied.
    stream
        Where the graph will be launched; its node gets that stream's priority.
    kept
        What the launch needs and must stay.
    """
    try:
        _places.get_nowait()
    except Empty:
        return None
    cuda = load_cupy().cuda
    made = None
    try:
        with outside_of_captures():
            made = LaunchGraph(_captured(launch, block, stream), kept)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError):
        pass  # out of memory, say: a launch will do
    finally:
        if made is None:
            _places.put(None)
    return made


def _captured(launch: Callable[[int, int, int], None], block: ParameterBlock, stream: int) -> Any:
    """Capture a launch on a stream apart."""
    cuda = load_cupy().cuda
    priority = cuda.runtime.streamGetPriority(stream) if stream else 0
    apart = cuda.Stream(non_blocking=True, priority=priority)
    apart.begin_capture()
    try:
        launch(apart.ptr, block.address, 0)
    finally:
        graph = apart.end_capture()
    return graph
