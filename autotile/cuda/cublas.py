"""cuBLAS: products of row-major matrices at given addresses, on any stream, also while it is captured.

It is called by ctypes, as CuPy's wrappers set CuPy's current stream before each call, which resets the workspace, and
refuse to be captured. cuBLAS is column-major: it is asked for the transpose of the result, from the factors in the
other order.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from autotile.core.model import LaunchGeometry
from autotile.cuda.driver import live_device, outside_of_captures
from autotile.cuda.function import Function, Module, ParameterBlock, driver_launch
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.settings import overrides_float32, read_settings

_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""``CUDA_R_32F``, ``CUDA_R_16F`` and ``CUDA_R_16BF``, library_types.h."""
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC = 68, 69
"""cublasComputeType_t, cublas_api.h. By default, products of float32 are IEEE fp32, not TF32; the pedantic type is for
an environment that asks for less."""
_FULL_PRECISION = 16
"""``CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION``: by default, parts of a sum over a long K are rounded to 16 bits
before they are added. Measured on an H200 for a bfloat16 product of 16 x 40 x 76840: an error of 0.063 of the root mean
square of the result, where one rounding of the result is 0.008."""
_FLOAT32 = _DATA_TYPES["float32"]
_ALIGNED_ELEMENTS = 8
_MIN_PRODUCTS, _MIN_K, _MIN_WIDTH = 3e9, 1024, 256
_MAX_SUMS_BYTES = 256 << 20
"""Products of 16-bit matrices whose result is summed in float32 and rounded afterwards, `Layout.rounds_afterwards`. The
limits are measured on an H200, cuBLAS 13: of 118 products, these are up to 8 times faster than with a 16-bit result in
full precision, for which cuBLAS has no good kernel where rows are not aligned to 16 bytes; others up to 2 times slower.
"""
_ROUNDING = Path(__file__).with_name("rounding.cu")
_ROUNDING_THREADS, _ROUNDING_WIDTH = 256, 8
_ALGORITHM = -1
"""``CUBLAS_GEMM_DEFAULT``: the library's heuristic chooses."""
_MAX_INT32 = 2**31 - 1
_NAMES = ("libcublas.so.13", "libcublas.so.12", "libcublas.so")
_PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle that stands for a different stream in each thread."""
_MAX_HANDLES = 64
"""Streams whose handles are kept; beyond that the oldest is destroyed when nothing uses it."""

_VECTOR_BYTES = 16
_byref = ctypes.byref
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@lru_cache
def load_cublas() -> ctypes.CDLL:
    """Return the library; no context is created.

    Raises
    ------
    ToolchainError
        It is not installed.
    """
    try:  # the one that PyTorch or CuPy has loaded, else that of NVIDIA's wheels
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return _declared(ctypes.CDLL(str(load_nvidia_dynamic_lib("cublas").abs_path)))
    except (ImportError, RuntimeError, OSError, TypeError):
        pass
    for name in _NAMES:
        try:
            return _declared(ctypes.CDLL(name))
        except OSError:
            continue
    raise ToolchainError("cuBLAS is not installed; install the wheel nvidia-cublas, or the CUDA toolkit")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the parameters of the functions, so that calls may pass plain integers."""
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int
    matrix, head, tail = [pointer, number, number], [pointer, *(number,) * 5, pointer], [number, number]
    strided = [*matrix, ctypes.c_longlong]
    library.cublasCreate_v2.argtypes = [pointer]
    library.cublasDestroy_v2.argtypes = [pointer]
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetMathMode.argtypes = [pointer, number]
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.cublasGemmEx.argtypes = [*head, *matrix, *matrix, pointer, *matrix, *tail]
    library.cublasGemmStridedBatchedEx.argtypes = [*head, *strided, *strided, pointer, *strided, number, *tail]
    return library


@lru_cache
def cublas_version() -> str:
    """Return the version of the library, such as ``"13.1.0"``; errors as for `load_cublas`."""
    library, number, parts = load_cublas(), ctypes.c_int(), []
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
        _check(library.cublasGetProperty(part, _byref(number)), "cublasGetProperty")
        parts.append(str(number.value))
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """A product ``C = alpha op(A) op(B) + beta C`` of contiguous row-major matrices.

    Attributes
    ----------
    m, n, k, batch
        ``batch`` products of ``m x k`` and ``k x n`` matrices.
    transpose_a, transpose_b
        Whether a factor is stored as its row-major transpose.
    factors, result
        Element types.
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
    def of(cls, sizes: Mapping[str, int], dtype: str) -> Layout:
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


class Gemm:
    """A product by cuBLAS.

    float32 products are computed in IEEE fp32 on the CUDA cores, without TF32 and without emulation. Equal inputs give
    bitwise equal results on GPUs of one model, whatever other streams do: each stream has a handle and a workspace of
    its own (cuBLAS documentation, "Results reproducibility").

    Parameters
    ----------
    layout
        The product.
    device_index
        CUDA device.

    Raises
    ------
    ToolchainError
        cuBLAS is not installed.
    """

    def __init__(self, layout: Layout, device_index: int) -> None:
        self._library = load_cublas()
        self._device_index = device_index
        m, n, k = layout.m, layout.n, layout.k
        self._batch = layout.batch
        self._types = _DATA_TYPES[layout.factors], _DATA_TYPES[layout.result]
        self._shape = int(layout.transpose_b), int(layout.transpose_a), n, m, k
        self._leading = layout.leading
        self._strides = m * k, k * n, m * n
        is_pedantic = layout.factors == "float32" and overrides_float32()
        self._how = _COMPUTE_32F_PEDANTIC if is_pedantic else _COMPUTE_32F, _ALGORITHM
        self._sums_bytes = m * n * ctypes.sizeof(ctypes.c_float) if layout.rounds_afterwards else 0
        self._rounding = _rounding(layout.result, device_index, m * n) if layout.rounds_afterwards else None

    def __call__(self, stream: int, addresses: Sequence[int], alpha: float = 1.0, beta: float = 0.0) -> None:
        """Queue the product on a stream of the device, which must be the current one.

        Parameters
        ----------
        stream
            Handle of the stream.
        addresses
            Addresses of A, B and C.

        Raises
        ------
        ToolchainError
            cuBLAS refuses the product.
        """
        handle = _handles.get(self._device_index, stream)
        a, b, c = addresses
        factors, result = self._types
        rounding = self._rounding if beta == 0.0 and not c % _VECTOR_BYTES else None
        if rounding is not None:
            rounded, c, result = c, handle.sums(self._sums_bytes), _FLOAT32
        lead_a, lead_b, lead_c = self._leading
        scale, add = (_ONE, _ZERO) if alpha == 1.0 and beta == 0.0 else (ctypes.c_float(alpha), ctypes.c_float(beta))
        if self._batch == 1:
            status = self._library.cublasGemmEx(
                handle.pointer, *self._shape, _byref(scale), b, factors, lead_b, a, factors, lead_a, _byref(add),
                c, result, lead_c, *self._how,
            )  # fmt: skip
        else:
            stride_a, stride_b, stride_c = self._strides
            status = self._library.cublasGemmStridedBatchedEx(
                handle.pointer, *self._shape, _byref(scale), b, factors, lead_b, stride_b, a, factors, lead_a, stride_a,
                _byref(add), c, result, lead_c, stride_c, self._batch, *self._how,
            )  # fmt: skip
        if status:
            _check(status, "cublasGemmEx")
        if rounding is not None:
            rounding(stream, c, rounded)


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


class _StreamHandle:
    """A handle of one stream of the current device, with a workspace of its own."""

    def __init__(self, stream: int) -> None:
        self.is_captured = False
        self._library, handle = load_cublas(), ctypes.c_void_p()
        current = load_cupy().cuda.get_current_stream()
        self._stream = current if current.ptr == stream else None  # so that its address is not given to another stream
        size_bytes = _workspace_bytes()
        self._workspace = load_cupy().cuda.Memory(size_bytes)  # not of a pool, whose memory is ordered by a stream
        _check(self._library.cublasCreate_v2(_byref(handle)), "cublasCreate")
        self.pointer = handle.value
        _check(self._library.cublasSetStream_v2(handle, stream), "cublasSetStream")
        _check(self._library.cublasSetMathMode(handle, _FULL_PRECISION), "cublasSetMathMode")
        _check(self._library.cublasSetWorkspace_v2(handle, self._workspace.ptr, size_bytes), "cublasSetWorkspace")
        self._sums: list[Any] = []
        """Memory for sums, the largest last; the others are kept for the CUDA graphs that may refer to them."""

    def sums(self, size_bytes: int) -> int:
        """Return the address of memory for sums, which the next product on the stream overwrites."""
        if not self._sums or self._sums[-1].size < size_bytes:
            with outside_of_captures():
                larger = load_cupy().cuda.Memory(size_bytes)  # of no pool, as the workspace
                self._sums = [*(self._sums if self.is_captured else ()), larger]
        return int(self._sums[-1].ptr)

    def __del__(self) -> None:
        if getattr(self, "pointer", None) and not sys.is_finalizing():  # at the end of the process the driver frees all
            with outside_of_captures():
                self._library.cublasDestroy_v2(self.pointer)


class _StreamHandles:
    """The handle of each stream. Threads share it, as its settings never change."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], _StreamHandle] = {}
        self._captured: list[_StreamHandle] = []
        """Those whose workspace a CUDA graph may refer to at any later time."""
        self._lock = threading.Lock()

    def get(self, device_index: int, stream: int) -> _StreamHandle:
        """Return the handle of a stream of the current device."""
        key = device_index, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        found = self._kept.get(key) or self._make(key, stream)
        if not found.is_captured and stream != 0 and load_cupy().cuda.runtime.streamIsCapturing(stream):
            found.is_captured = True
            self._captured.append(found)
        return found

    def _make(self, key: tuple[int, int, int], stream: int) -> _StreamHandle:
        with self._lock, outside_of_captures():
            found = self._kept.get(key)
            if found is None:
                if len(self._kept) >= _MAX_HANDLES:
                    del self._kept[next(iter(self._kept))]
                found = self._kept[key] = _StreamHandle(stream)
            return found


_handles = _StreamHandles()


def _workspace_bytes() -> int:
    """Return the workspace that NVIDIA recommends for the current device (cuBLAS, ``cublasSetWorkspace``)."""
    major = int(load_cupy().cuda.Device().compute_capability[:-1])
    return 32 << 20 if major in (9, 10) else 12 << 20 if major == 12 else 4 << 20


def _check(status: int, call: str) -> None:
    if status:
        raise ToolchainError(f"{call} failed with status {status} of cuBLAS; library=False does without it")
