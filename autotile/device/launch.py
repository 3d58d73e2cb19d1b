"""Launch at the driver's own cost: parameters packed once, in memory as the driver reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from autotile.device.toolchain import load_cupy
from autotile.ground.model import LaunchGeometry

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
