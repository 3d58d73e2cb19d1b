"""Support kernels of the GPU worker (``support.cu``), and device buffers between guard bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from autotile.core.dtypes import DTYPES, Array, Dtype, Shape
from autotile.cuda.compiler import CubinCache, support_job
from autotile.cuda.function import Function, Module
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.arguments import Workspace
from autotile.kernel.spec import Tolerance

_THREADS = 256
_WARP_THREADS = 32
_MAX_BLOCKS = 2048
_MATMUL_TILE = 64
_MATMUL_THREADS = 256
_MAX_BATCH_BLOCKS = 65_535
"""Maximum grid size along z on any device (CUDA C++ Programming Guide, technical specifications)."""
_RESULT_WORDS = 3
_READ_AS = {"bool": "unsigned char", "float8_e4m3fn": "unsigned char", "float8_e5m2": "unsigned char"}
"""C types of the bits of element types that are decoded by the kernel, or that may hold bits without a meaning."""


Queued = Callable[[np.uint64], object]
"""Queues a kernel, given the address of the words that its result is added to."""


def compared(words: Array) -> tuple[int, int, float]:
    """Return the number of wrong elements, the first of them, and the largest error from the words of a comparison.

    The error is relative to the larger of the expected magnitude and the scale.
    """
    return int(words[0]), int(~words[1]), float(words[2].view(np.float64))


class SupportKernels:
    """Kernels that fill, compare, reduce, multiply and spin on the device."""

    def __init__(self, cache: CubinCache, architecture: str) -> None:
        self._cache = cache
        self._architecture = architecture
        self._functions: dict[tuple[str, str], Function] = {}
        self._modules: dict[str, Module] = {}
        self._sink = load_cupy().empty(1, dtype=np.float32)

    def results(self, queued: Sequence[Queued]) -> Array:
        """Queue kernels that add to three words each, which are zero before, and return them, shape (kernels, 3).

        All of them are waited for once, as a wait takes longer than most of these kernels.
        """
        words = load_cupy().zeros((len(queued), _RESULT_WORDS), np.uint64)
        for number, queue in enumerate(queued):
            queue(np.uint64(words.data.ptr + number * words.strides[0]))
        found: Array = words.get()
        return found

    def fill_words(self, pointer: int, words: int, pattern: int) -> None:
        """Write a 32-bit pattern to ``words`` words."""
        self.launch("fill_words", words, np.uint64(pointer), np.uint64(words), np.uint32(pattern))

    def count_unlike_pattern(self, pointer: int, words: int, pattern: int, result: np.uint64) -> None:
        """Add how many of ``words`` 32-bit words differ from a pattern to the first word of a result."""
        self.launch("count_unlike_pattern", words, np.uint64(pointer), np.uint64(words), np.uint32(pattern), result)

    def comparison(
        self, got: int, want: Any, elements: int, dtype: Dtype, *, tolerance: Tolerance, scale: float
    ) -> Queued:
        """Return the comparison of an output, given by its address, with its expected values by `Tolerance`.

        Its result is read by `compared`.

        Expected values are float64, complex128 if ``dtype`` is complex, or of the storage of ``dtype`` if it is an
        integer type. Integers without a tolerance are compared exactly. Of vectors, ``elements`` counts the components.
        """
        dtype = dtype.component
        if want.dtype.kind in "biu" and not tolerance.relative and not tolerance.absolute:
            name, numbers = "compare_exactly", list[float]()
        else:
            want = want.astype(np.complex128 if dtype.is_complex else np.float64, copy=False)
            floor = 0.0 if tolerance.is_elementwise else scale
            name, numbers = "compare_elements", [tolerance.relative, tolerance.absolute, floor, scale]

        def queue(result: np.uint64) -> None:
            arguments = np.uint64(got), np.uint64(want.data.ptr), np.uint64(elements), *map(np.float64, numbers), result
            self.launch(name, elements, *arguments, dtype=dtype)

        return queue

    def matmul(self, a: Any, b: Any) -> Any:
        """Multiply two float64 device arrays of shapes (..., M, K) and (..., K, N).

        Leading axes are broadcast as in NumPy. Raise `ValueError` if the leading axes cannot be broadcast.
        """
        cupy = load_cupy()
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        (left, step_a), (right, step_b) = _stack(a, leading), _stack(b, leading)
        (m, k), n = a.shape[-2:], b.shape[-1]
        product = cupy.empty((*leading, m, n), dtype=np.float64)
        batches = math.prod(leading)
        grid = (-(-n // _MATMUL_TILE), -(-m // _MATMUL_TILE), min(batches, _MAX_BATCH_BLOCKS))
        pointers = [np.uint64(array.data.ptr) for array in (left, right, product)]
        numbers = [*map(np.int32, (m, n, k, batches)), np.int64(step_a), np.int64(step_b)]
        self._function("matmul_float64").launch(grid, (_MATMUL_THREADS, 1, 1), (*pointers, *numbers), 0)
        return product

    def summarise(self, pointer: int, elements: int) -> tuple[int, float]:
        """Return how many of ``elements`` float64 values are not finite, and the sum of the squares of the others."""
        squares = load_cupy().empty(_blocks(elements) * _THREADS // _WARP_THREADS)  # one sum per warp

        def queue(result: np.uint64) -> None:
            arguments = np.uint64(pointer), np.uint64(elements), result, np.uint64(squares.data.ptr)
            self.launch("summarise", elements, *arguments)

        return int(self.results([queue])[0, 0]), float(squares.get().sum())

    def hashes(self, arrays: Sequence[Any]) -> list[tuple[int, int]]:
        """Return a hash of the bits of each device array, which differs if they do, but for one in 2**64 cases.

        Of an array whose bytes are no multiple of four, those up to the next one count, which its memory has.
        """

        def queued(array: Any) -> Queued:
            words = -(-array.nbytes // _WORD_BYTES)
            return partial(self.launch, "hash_words", words, np.uint64(array.data.ptr), np.uint64(words))

        return [(int(first), int(second)) for first, second, _ in self.results([queued(array) for array in arrays])]

    def spin(self, blocks: int, iterations: int) -> None:
        """Launch blocks that each take a fixed number of clock cycles, on CuPy's current stream."""
        sink = np.uint64(self._sink.data.ptr)
        self._function("spin").launch((blocks, 1, 1), (_THREADS, 1, 1), (np.int32(iterations), sink), 0)

    def launch(self, name: str, elements: int, *arguments: Any, dtype: Dtype = DTYPES["float32"]) -> None:
        """Launch a kernel over a number of elements; its arguments are NumPy scalars of the exact types."""
        self._function(name, dtype).launch((_blocks(elements), 1, 1), (_THREADS, 1, 1), arguments, 0)

    def _function(self, name: str, dtype: Dtype = DTYPES["float32"]) -> Function:
        """Return a kernel from the module of a dtype, all of whose kernels are compiled together."""
        function = self._functions.get((name, dtype.name))
        if function is None:
            module = self._modules.get(dtype.name)
            if module is None:
                job = support_job(self._architecture, _options(dtype))
                module = self._modules[dtype.name] = Module(self._cache.get_or_compile(job).path)
            function = self._functions[name, dtype.name] = module.function(name)
        return function


def _options(dtype: Dtype) -> tuple[str, ...]:
    """Return the macros of an element type; none of float32, which the worker compiles before it has loaded NumPy."""
    if dtype.name == "float32":
        return ()
    named = {"HALF": "float16", "BFLOAT16": "bfloat16", "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
    return (
        f"-DDTYPE={_READ_AS.get(dtype.name, dtype.c_type)}",
        *(f"-DDTYPE_IS_{macro}={int(dtype.name == name)}" for macro, name in named.items()),
        f"-DDTYPE_IS_COMPLEX={int(dtype.is_complex)}",
        f"-DDTYPE_IS_INTEGER={int(dtype.is_integer)}",
        *([f"-DLARGEST={dtype.largest!r}"] if math.isfinite(dtype.largest) else []),
    )


def _blocks(elements: int) -> int:
    return max(1, min(_MAX_BLOCKS, -(-elements // _THREADS)))


def _stack(array: Any, leading: Shape) -> tuple[Any, int]:
    """Return contiguous matrices, and the elements from one to the next; 0 if all share one matrix."""
    cupy = load_cupy()
    own = array.shape[:-2]
    if math.prod(own) == 1:
        return cupy.ascontiguousarray(array), 0
    stacked = array if own == leading else cupy.broadcast_to(array, (*leading, *array.shape[-2:]))
    return cupy.ascontiguousarray(stacked), math.prod(array.shape[-2:])


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
    it. A read from a band returns NaN, which makes the result wrong and is detected that way. An element of ``shape``
    may be a vector.
    """

    def __init__(self, shape: Shape, dtype: Dtype, support: SupportKernels) -> None:
        cupy = load_cupy()
        shape = dtype.array_shape(shape)
        self.elements = math.prod(shape)
        self._support = support
        self._words = -(-self.elements * dtype.component_bytes // _WORD_BYTES)
        self._pattern = _INTEGER_WORD if dtype.is_integer else _NAN_WORD
        guard = min(max(_MIN_GUARD_BYTES, 2 * shape[-1] * dtype.component_bytes), _MAX_GUARD_BYTES)
        self._guard_bytes = -(-guard // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        body_bytes = self._words * _WORD_BYTES
        memory = cupy.cuda.alloc(2 * self._guard_bytes + body_bytes)
        self._bands = (memory.ptr, memory.ptr + self._guard_bytes + body_bytes)
        self.array: Any = cupy.ndarray(shape, dtype.storage, memptr=memory + self._guard_bytes)
        self.pointer = int(self.array.data.ptr)
        """Device address of the first element."""
        self.poison()
        self.restore_guards()

    def poison(self) -> None:
        """Overwrite the array, so that elements that are never written are detected."""
        self._support.fill_words(self.pointer, self._words, self._pattern)

    def clear(self) -> None:
        """Overwrite the array with zeros."""
        self._support.fill_words(self.pointer, self._words, 0)

    def count_nonzero(self, result: np.uint64) -> None:
        """Add the number of words of the array that are not zero to a result of `SupportKernels.results`."""
        self._support.count_unlike_pattern(self.pointer, self._words, 0, result)

    def copy_from(self, other: GuardedBuffer) -> None:
        """Copy another buffer's array."""
        self.array.data.copy_from_device_async(other.array.data, self.array.nbytes)

    def count_broken(self, result: np.uint64) -> None:
        """Add the number of words of the guard bands that were overwritten to a result."""
        for band in self._bands:
            self._support.count_unlike_pattern(band, self._guard_bytes // _WORD_BYTES, self._pattern, result)

    def restore_guards(self) -> None:
        """Write the guard bands."""
        for band in self._bands:
            self._support.fill_words(band, self._guard_bytes // _WORD_BYTES, self._pattern)

    def count_unlike(self, other: GuardedBuffer, result: np.uint64) -> None:
        """Add the number of words in which the arrays differ to a result."""
        pointers = np.uint64(self.pointer), np.uint64(other.pointer)
        self._support.launch("count_unlike", self._words, *pointers, np.uint64(self._words), result)


def workspace_buffer(workspace: Workspace, support: SupportKernels) -> GuardedBuffer:
    """Return a buffer for a workspace that is not empty."""
    buffer = GuardedBuffer(workspace.shape, DTYPES[workspace.dtype], support)
    if workspace.zeroed:
        buffer.clear()
    return buffer
