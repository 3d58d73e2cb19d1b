"""cuBLAS: products of row-major matrices at given addresses, on any stream, also while it is captured.

cuBLASLt is called by ctypes, as no declared package wraps it: one handle serves all threads and streams, a workspace is
given to each call, and so a call can be captured into a graph of its own. cuBLAS is column-major: it is asked for the
transpose of the result, from the factors in the other order.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from autotile.core.model import LaunchGeometry, Sizes
from autotile.cuda.driver import PER_THREAD_STREAM, live_device, outside_of_captures
from autotile.cuda.function import Function, Module, ParameterBlock, RelocatableCall, driver_launch
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.settings import overrides_float32, read_settings

_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""``CUDA_R_32F``, ``CUDA_R_16F`` and ``CUDA_R_16BF``, library_types.h."""
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC = 68, 69
"""cublasComputeType_t, cublas_api.h. By default, products of float32 are IEEE fp32, not TF32; the pedantic type is for
an environment that asks for less."""
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTIONS = 1, 3
_ALIGNMENTS = (5, 6, 7, 8)
"""Attributes of a product, of a matrix and of a preference, cublasLt.h."""
_FULL_PRECISION = 2
"""``CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE``: by default, parts of a sum over a long K may be rounded to 16 bits before
they are added. Measured on an H200 for a bfloat16 product of 16 x 40 x 76840: an error of 0.063 of the root mean
square of the result, where one rounding of the result is 0.008."""
_ADD_BIAS = 4
"""``CUBLASLT_EPILOGUE_BIAS``."""
_ALIGNED_ELEMENTS = 8
_MIN_PRODUCTS, _MIN_K, _MIN_WIDTH = 3e9, 1024, 256
_MAX_SUMS_BYTES = 256 << 20
"""Products of 16-bit matrices whose result is summed in float32 and rounded afterwards
(`GemmLayout.rounds_afterwards`). The limits are measured on an H200, cuBLAS 13: of 118 products, these are up to 8
times faster than with a 16-bit result in full precision, for which cuBLAS has no good kernel where rows are not aligned
to 16 bytes; others up to 2 times slower.
"""
_ROUNDING = Path(__file__).with_name("rounding.cu")
_ROUNDING_THREADS, _ROUNDING_WIDTH = 256, 8
_MAX_INT32 = 2**31 - 1
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
_MAX_STREAMS = 64
"""Streams whose memory is kept; beyond that the oldest is freed when nothing uses it."""

_VECTOR_BYTES = 16
_byref = ctypes.byref
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@lru_cache
def load_cublas() -> ctypes.CDLL:
    """Return the library cuBLASLt, or raise `ToolchainError` if it is not installed; no context is created."""
    library: ctypes.CDLL | None = None
    try:  # the one that PyTorch or CuPy has loaded, else that of NVIDIA's wheels
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublasLt").abs_path))
    except (ImportError, RuntimeError, OSError, TypeError):
        for name in _NAMES:
            with suppress(OSError):
                library = ctypes.CDLL(name)
                break
    if library is None:
        raise ToolchainError("cuBLAS is not installed; install the wheel nvidia-cublas, or the CUDA toolkit")
    # the parameters of the functions, so that calls may pass plain integers
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int
    size: Any = ctypes.c_size_t
    library.cublasLtCreate.argtypes = [pointer]
    library.cublasLtMatmulDescCreate.argtypes = [pointer, number, number]
    library.cublasLtMatrixLayoutCreate.argtypes = [pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    library.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    for name in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{name}SetAttribute").argtypes = [pointer, number, pointer, size]
        getattr(library, f"cublasLt{name}Destroy").argtypes = [pointer]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*(pointer,) * 7, number, pointer, pointer]
    library.cublasLtMatmul.argtypes = [*(pointer,) * 14, size, pointer]
    return library


@lru_cache
def cublas_version() -> str:
    """Return the version of the library, such as ``"13.1.0"``; errors as for `load_cublas`."""
    library, number, parts = load_cublas(), ctypes.c_int(), []
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
        _check(library.cublasLtGetProperty(part, _byref(number)), "cublasLtGetProperty")
        parts.append(str(number.value))
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """A product ``C = alpha op(A) op(B) + beta C`` of contiguous row-major matrices, ``batch`` times.

    A factor may be stored as its row-major transpose. ``factors`` and ``result`` are element types.
    """

    m: int
    n: int
    k: int
    batch: int
    transpose_a: bool
    transpose_b: bool
    factors: str
    result: str

    @classmethod
    def of(cls, sizes: Sizes, dtype: str) -> GemmLayout:
        """Return the product with the sizes and flags of the operation ``matmul``."""
        return cls(
            sizes["M"],
            sizes["N"],
            sizes["K"],
            sizes.get("BATCH", 1),
            bool(sizes.get("TRANS_A")),
            bool(sizes.get("TRANS_B")),
            dtype,
            "float32" if sizes.get("OUT_FP32") else dtype,
        )

    @property
    def is_supported(self) -> bool:
        """Whether cuBLAS computes it."""
        return self.factors in _DATA_TYPES and max(self.m, self.n, self.k, self.batch) <= _MAX_INT32

    @property
    def leading(self) -> tuple[int, int, int]:
        """Elements from one stored row to the next, of A, B and C."""
        return (self.m if self.transpose_a else self.k), (self.k if self.transpose_b else self.n), self.n

    @property
    def rounds_afterwards(self) -> bool:
        """Whether the result is summed in float32 and rounded to 16 bits by another kernel, as that is faster."""
        return (
            self.result != "float32"
            and self.batch == 1
            and self.k >= _MIN_K
            and min(self.m, self.n) > _MIN_WIDTH
            and self.m * self.n * self.k >= _MIN_PRODUCTS
            and any(elements % _ALIGNED_ELEMENTS for elements in self.leading)
            and self.m * self.n * ctypes.sizeof(ctypes.c_float) <= _MAX_SUMS_BYTES
        )


_HEURISTIC_WORDS = 12
_WORKSPACE_AT, _STATE_AT = 8, 9
"""Words of 64 bits of ``cublasLtMatmulHeuristicResult_t``, cublasLt.h: it begins with the algorithm; the place of the
bytes of workspace that this needs, and of its status, whose other half is the number of waves."""


class Gemm:
    """A product by cuBLAS on the current device, with the algorithm that its heuristic proposes first.

    float32 products are computed in IEEE fp32 on the CUDA cores, without TF32 and without emulation. Equal inputs give
    bitwise equal results on GPUs of one model, whatever other streams do: each stream has a workspace of its own, and
    parts of a sum are added in a fixed order. Raise `ToolchainError` if cuBLAS is not installed, or has no algorithm
    for the product.
    """

    def __init__(self, layout: GemmLayout, device_index: int) -> None:
        self._layout, self._device_index = layout, device_index
        self._sums_bytes = layout.m * layout.n * ctypes.sizeof(ctypes.c_float) if layout.rounds_afterwards else 0
        self._rounding = _rounding(layout.result, device_index, layout.m * layout.n) if self._sums_bytes else None
        self._prepared: dict[tuple[str, bool, bool], _Queue] = {}

    def prepare(self) -> None:
        """Ask cuBLAS for the algorithm for aligned arrays, which the first product would wait for."""
        key = "float32" if self._rounding is not None else self._layout.result, True, False
        if key not in self._prepared:
            self._prepare(key, 0)

    def memory(self, stream: int) -> _StreamMemory:
        """Return the memory that products on a stream of the device, which must be the current one, use."""
        key = self._device_index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0
        found = _kept.get(key)
        if found is None:
            with _lock, outside_of_captures():
                found = _kept.get(key)
                if found is None:
                    if len(_kept) >= _MAX_STREAMS:
                        del _kept[next(iter(_kept))]
                    found = _kept[key] = _StreamMemory(stream)
        if not found.is_captured and stream != 0 and load_cupy().cuda.runtime.streamIsCapturing(stream):
            found.is_captured = True
            _captured.append(found)
        return found

    def __call__(
        self,
        stream: int,
        addresses: Sequence[int],
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        memory: _StreamMemory | None = None,
    ) -> None:
        """Queue the product on a stream of the device, which must be the current one.

        Raise `ToolchainError` if cuBLAS refuses the product.
        ``addresses`` are those of A, B and C, and of a bias of ``n`` elements that is added to each row, if there is
        one; without ``memory``, that of the stream is used.
        """
        memory = memory or self.memory(stream)
        a, b, c, *biases = addresses
        bias = biases[0] if biases else 0
        is_aligned = not (a | b | c | bias) % _VECTOR_BYTES
        is_rounded = self._rounding is not None and beta == 0.0 and not (bias or c % _VECTOR_BYTES)
        key = "float32" if is_rounded else self._layout.result, is_aligned, bias != 0
        queue = self._prepared.get(key) or self._prepare(key, bias)
        with memory.lock:
            target = memory.sums(self._sums_bytes) if is_rounded else c
            queue(stream, (a, b, target, bias), memory.workspace, (alpha, beta))
            if is_rounded and self._rounding is not None:
                self._rounding(stream, target, c)

    def relocatable(self, memory: _StreamMemory, count: int) -> RelocatableCall | None:
        """Return the launches of the product for any aligned arrays, without or with a bias as the last of ``count``.

        They are for the stream of ``memory``, on the current device. None where the product is computed otherwise.
        """
        if self._rounding is not None:
            return None  # the memory for sums may still grow
        try:
            return RelocatableCall(partial(self, memory=memory), count, _VECTOR_BYTES, memory.lock)
        except ToolchainError:
            return None

    def _prepare(self, key: tuple[str, bool, bool], bias: int) -> _Queue:
        """Describe the product to cuBLAS and ask for an algorithm; kept for all calls with arrays aligned like these.

        cuBLAS takes it that matrices are aligned to 256 bytes unless it is told otherwise.
        """
        library, layout, described = load_cublas(), self._layout, list[tuple[Callable[[int], int], int]]()
        result, is_aligned, _ = key

        def create(kind: str, *given: int) -> int:
            handle = ctypes.c_void_p()
            _check(getattr(library, f"cublasLt{kind}Create")(_byref(handle), *given), f"cublasLt{kind}Create")
            assert handle.value is not None
            described.append((getattr(library, f"cublasLt{kind}Destroy"), handle.value))
            return handle.value

        def matrix(rows: int, columns: int, leading: int, dtype: str, stride: int) -> int:
            handle = create("MatrixLayout", _DATA_TYPES[dtype], rows, columns, leading)
            if layout.batch > 1:
                _assign("MatrixLayout", handle, _BATCH_COUNT, ctypes.c_int32(layout.batch))
                _assign("MatrixLayout", handle, _BATCH_STRIDE, ctypes.c_int64(stride))
            return handle

        try:
            m, n, k = layout.m, layout.n, layout.k
            is_pedantic = layout.factors == "float32" and overrides_float32()
            product = create(
                "MatmulDesc", _COMPUTE_32F_PEDANTIC if is_pedantic else _COMPUTE_32F, _DATA_TYPES["float32"]
            )
            _assign("MatmulDesc", product, _TRANSPOSE_FIRST, ctypes.c_int32(layout.transpose_b))
            _assign("MatmulDesc", product, _TRANSPOSE_SECOND, ctypes.c_int32(layout.transpose_a))
            if bias:
                _assign("MatmulDesc", product, _EPILOGUE, ctypes.c_int32(_ADD_BIAS))
                _assign("MatmulDesc", product, _BIAS_POINTER, ctypes.c_void_p(bias))
            lead_a, lead_b, lead_c = layout.leading
            second = matrix(*((m, k) if layout.transpose_a else (k, m)), lead_a, layout.factors, m * k)
            first = matrix(*((k, n) if layout.transpose_b else (n, k)), lead_b, layout.factors, k * n)
            output = matrix(n, m, lead_c, result, m * n)
            preference = create("MatmulPreference")
            _assign("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(_workspace_bytes()))
            _assign("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_FULL_PRECISION))
            alignment = _VECTOR_BYTES if is_aligned else 4 if layout.factors == "float32" else 2
            for attribute in _ALIGNMENTS:
                _assign("MatmulPreference", preference, attribute, ctypes.c_uint32(alignment))
            found, count = (ctypes.c_uint64 * _HEURISTIC_WORDS)(), ctypes.c_int()
            handle = _handle(self._device_index)
            status = library.cublasLtMatmulAlgoGetHeuristic(
                handle, product, first, second, output, output, preference, 1, _byref(found), _byref(count)
            )
            _check(status or found[_STATE_AT] & 0xFFFFFFFF, "cublasLtMatmulAlgoGetHeuristic")
        except BaseException:
            _destroy(described)
            raise
        finalize(self, _destroy, described).atexit = False
        algorithm, workspace_bytes = _byref(found), found[_WORKSPACE_AT]

        prepared = library.cublasLtMatmul, handle, product, first, second, output, algorithm, workspace_bytes
        return self._prepared.setdefault(key, partial(_queue, prepared))


def _assign(kind: str, handle: int, attribute: int, value: Any) -> None:
    name = f"cublasLt{kind}SetAttribute"
    _check(getattr(load_cublas(), name)(handle, attribute, _byref(value), ctypes.sizeof(value)), name)


def _destroy(described: list[tuple[Callable[[int], int], int]]) -> None:
    """Destroy descriptions of a product, each by its function."""
    for destroy, handle in described:
        destroy(handle)


def _queue(
    prepared: tuple[Any, ...],
    stream: int,
    addresses: tuple[int, int, int, int],
    workspace: int,
    factors: tuple[float, float],
) -> None:
    """Queue a product; a closure would be a dozen objects for the garbage collector, of each size of a program."""
    call, handle, product, first, second, output, algorithm, workspace_bytes = prepared
    a, b, c, bias = addresses
    scale, add = (_ONE, _ZERO) if factors == (1.0, 0.0) else map(ctypes.c_float, factors)
    with _describing if bias else nullcontext():
        if bias:
            _assign("MatmulDesc", product, _BIAS_POINTER, ctypes.c_void_p(bias))
        status = call(
            handle, product, _byref(scale), b, first, a, second, _byref(add), c, output, c, output, algorithm,
            workspace, workspace_bytes, stream,
        )  # fmt: skip
    if status:
        _check(status, "cublasLtMatmul")


_Queue = Callable[[int, tuple[int, int, int, int], int, tuple[float, float]], None]
"""Queues a product: stream, addresses of A, B, C and the bias, 0 for none, and of the workspace, alpha and beta."""


@lru_cache
def _handle(device_index: int) -> int:
    """Return cuBLAS's handle of the current device, which all threads and streams may use at once."""
    handle = ctypes.c_void_p()
    with outside_of_captures():
        _check(load_cublas().cublasLtCreate(_byref(handle)), "cublasLtCreate")
    assert handle.value is not None
    return handle.value


@lru_cache
def _rounding_function(dtype: str, device_index: int) -> Function:
    """Return the kernel that rounds sums to a type, loaded into the context of a device."""
    from autotile.cuda.compiler import CompileJob, CubinCache

    source = _ROUNDING.read_text(encoding="utf-8")
    options = (f"-DDTYPE_IS_BFLOAT16={int(dtype == 'bfloat16')}",)
    with load_cupy().cuda.Device(device_index), outside_of_captures():
        job = CompileJob(source, source, str(_ROUNDING), "round_sums", live_device(device_index).architecture, options)
        settings = read_settings()
        cubin = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
        return Module(cubin.path).function("round_sums")


def _rounding(dtype: str, device_index: int, elements: int) -> Callable[[int, int, int], None]:
    """Return a function of a stream and the addresses of sums and result, which queues the rounding."""
    function = _rounding_function(dtype, device_index)
    blocks = -(-elements // (_ROUNDING_THREADS * _ROUNDING_WIDTH))
    launch = driver_launch(function.pointer, LaunchGeometry((blocks, 1, 1), (_ROUNDING_THREADS, 1, 1), 0))
    count = np.uint64(elements)

    def queue(stream: int, sums: int, result: int) -> None:
        block = ParameterBlock((np.uint64(sums), np.uint64(result), count))  # threads may call at once
        launch(stream, block.address, 0)

    return queue


class _StreamMemory:
    """Memory of the products on one stream of the current device."""

    def __init__(self, stream: int) -> None:
        self.is_captured = False
        self.lock = threading.Lock()
        """Held while a product is queued: it may be two kernels, the second of which reads what the first has stored in
        this memory, and another thread may queue a product on the same stream between them."""
        current = load_cupy().cuda.get_current_stream()
        self._stream = current if current.ptr == stream else None  # so that its address is not given to another stream
        self._held = load_cupy().cuda.Memory(_workspace_bytes())  # not of a pool, whose memory is ordered by a stream
        self.workspace = int(self._held.ptr)
        self._sums: list[Any] = []
        """Memory for sums, the largest last; the others are kept for the CUDA graphs that may refer to them."""

    def sums(self, size_bytes: int) -> int:
        """Return the address of memory for sums, which the next product on the stream overwrites."""
        if not self._sums or self._sums[-1].size < size_bytes:
            doubled = min(2 * self._sums[-1].size, _MAX_SUMS_BYTES) if self._sums else 0  # so that little is kept
            with outside_of_captures():
                self._sums.append(load_cupy().cuda.Memory(max(size_bytes, doubled)))  # of no pool, as the workspace
        return int(self._sums[-1].ptr)


_kept: dict[tuple[int, int, int], _StreamMemory] = {}
"""The memory of each stream, by device, stream, and the thread of a stream of each thread."""
_captured: list[_StreamMemory] = []  # memory that a CUDA graph may refer to at any later time
_lock = threading.Lock()
_describing = threading.Lock()
"""Held while a product is queued with a bias, whose address is part of the description."""


def _workspace_bytes() -> int:
    """Return the workspace that NVIDIA recommends for the current device (cuBLAS, ``cublasSetWorkspace``)."""
    major = int(load_cupy().cuda.Device().compute_capability[:-1])
    return 32 << 20 if major in (9, 10) else 12 << 20 if major == 12 else 4 << 20


def _check(status: int, call: str) -> None:
    if status:
        raise ToolchainError(f"{call} failed with status {status} of cuBLAS; library=False does without it")
