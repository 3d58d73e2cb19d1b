"""Device buffers between guard bands, and input data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from autotile.core.dtypes import DTYPES, Array, Dtype
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.arguments import BufferArgument
from autotile.settings import available_cores

_ALIGNMENT_BYTES = 256
"""Alignment that cudaMalloc guarantees; a guarded buffer has the same."""
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


_SEED = 20_240_601
_INTEGER_SPAN = 8
"""Random integers lie in [-8, 8] (unsigned: [0, 8]), so that sums of products stay exact in float64."""
_INTEGER_RANGES = {
    "bool": (0, 1),
    **{f"uint{bits}": (0, _INTEGER_SPAN) for bits in (8, 16, 32, 64)},
}
_CHUNK = 1 << 20
"""Number of values from one generator, which take a few milliseconds."""


def make_input(buffer: BufferArgument, shape: tuple[int, ...], dtype_name: str, seed: int = 0) -> Array:
    """Return the values of an input buffer, rounded to its dtype, in the storage dtype.

    They depend only on the buffer's name, shape, dtype and distribution, and on the seed if they are random, not on the
    process or the machine.

    Parameters
    ----------
    buffer, dtype_name
        The buffer and the name of its element type.
    shape
        Shape of the array; see `BufferArgument.array_shape`.
    seed
        Seed of random values.
    """
    dtype = DTYPES[dtype_name].component
    if dtype.is_complex and buffer.init in ("normal", "uniform"):
        return _random_complex(buffer, shape, dtype, seed)
    random = partial(_random, buffer.name, shape, seed)
    match buffer.init:
        case "zeros":
            values: Array = np.zeros(shape)
        case "ones":
            values = np.ones(shape)
        case "arange":
            values = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        case "uniform":
            values = random(lambda generator, chunk: generator.random(out=chunk, dtype=np.float32))
        case "normal" if dtype.is_integer:
            values = random(partial(_fill_integers, *_INTEGER_RANGES.get(dtype.name, (-_INTEGER_SPAN, _INTEGER_SPAN))))
        case "normal":
            values = random(lambda generator, chunk: generator.standard_normal(out=chunk, dtype=np.float32))
    return np.ascontiguousarray(dtype.encode(values))


def _random_complex(buffer: BufferArgument, shape: tuple[int, ...], dtype: Dtype, seed: int) -> Array:
    """Return random values whose real and imaginary parts are drawn as a last axis."""
    parts = make_input(buffer, (*shape, 2), "float32", seed)
    return np.ascontiguousarray(dtype.encode(parts.view(np.complex64)[..., 0]))


def _fill_integers(low: int, high: int, generator: np.random.Generator, chunk: Array) -> None:
    chunk[:] = generator.integers(low, high, chunk.shape, np.int8, endpoint=True)


def _random(
    name: str, shape: tuple[int, ...], seed: int, fill: Callable[[np.random.Generator, Array], object]
) -> Array:
    """Return random float32 values of a generator that depends on seed, name and shape.

    Each chunk of a fixed size has its own generator, so the values do not depend on the number of cores that draw them.
    """
    values = np.empty(math.prod(shape), np.float32)
    chunks = [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]
    seeds = np.random.SeedSequence([_SEED + seed, zlib.crc32(name.encode()), *shape]).spawn(len(chunks))
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in seeds]
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(fill, generators, chunks))
    return values.reshape(shape)
