"""Device buffers between guard bands."""

from __future__ import annotations

import math
from typing import Any

from autotile.core.dtypes import Array, Dtype
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy

_ALIGNMENT_BYTES = 512
"""Alignment of memory that CuPy allocates, and of textures; a guarded buffer has the same."""
_MIN_GUARD_BYTES = 4096
_MAX_GUARD_BYTES = 1 << 20
_WORD_BYTES = 4
_NAN_WORD = 0xFFFF_FFFF
"""A NaN in every floating-point type."""
_INTEGER_WORD = 0xA5A5_A5A5


class GuardedBuffer:
    """A device array between two poisoned guard bands.

    A band is two rows of the array wide (4 KiB to 1 MiB), so that a tile that extends beyond the last row writes into
    it. A read from a band returns NaN, which makes the result wrong and is detected that way.

    Parameters
    ----------
    shape, dtype
        Number of elements along each axis, and their type; a vector is an element.
    support
        Support kernels of the worker.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Dtype, support: SupportKernels) -> None:
        cupy = load_cupy()
        shape = dtype.array_shape(shape)
        self.elements = math.prod(shape)
        self._support = support
        self._words = -(-self.elements * dtype.component_bytes // _WORD_BYTES)
        self._pattern = _INTEGER_WORD if dtype.is_integer else _NAN_WORD
        self._guard_bytes = _guard_bytes(shape[-1] * dtype.component_bytes)
        body_bytes = self._words * _WORD_BYTES
        memory = cupy.cuda.alloc(2 * self._guard_bytes + body_bytes)
        self._bands = (memory.ptr, memory.ptr + self._guard_bytes + body_bytes)
        self.array: Any = cupy.ndarray(shape, dtype.storage, memptr=memory + self._guard_bytes)
        self.poison()
        for band in self._bands:
            support.fill_words(band, self._guard_bytes // _WORD_BYTES, self._pattern)

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return int(self.array.data.ptr)

    def poison(self) -> None:
        """Overwrite the array, so that elements that are never written are detected."""
        self._support.fill_words(self.pointer, self._words, self._pattern)

    def clear(self) -> None:
        """Overwrite the array with zeros."""
        self._support.fill_words(self.pointer, self._words, 0)

    def nonzero_words(self) -> int:
        """Return the number of words of the array that are not zero."""
        return self._support.count_unlike_pattern(self.pointer, self._words, 0)

    def write(self, stored: Array) -> None:
        """Copy host data of the array's shape and storage dtype to the device."""
        self.array.set(stored)

    def copy_from(self, other: GuardedBuffer) -> None:
        """Copy another buffer's array."""
        self.array.data.copy_from_device_async(other.array.data, self.array.nbytes)

    def broken_guard_words(self) -> int:
        """Return the number of words of the guard bands that were overwritten, and restore the bands."""
        words = self._guard_bytes // _WORD_BYTES
        broken = 0
        for band in self._bands:
            unlike = self._support.count_unlike_pattern(band, words, self._pattern)
            if unlike:
                self._support.fill_words(band, words, self._pattern)
            broken += unlike
        return broken

    def differs_from(self, other: GuardedBuffer) -> bool:
        """Return whether the arrays differ in any word."""
        return self._support.count_unlike(self.pointer, other.pointer, self._words) > 0


def _guard_bytes(row_bytes: int) -> int:
    guard = min(max(_MIN_GUARD_BYTES, 2 * row_bytes), _MAX_GUARD_BYTES)
    return -(-guard // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
