"""cuBLAS: products of row-major matrices at given addresses, on any stream, also while it is captured.

The library is the one that is loaded already, such as PyTorch's, else that of NVIDIA's wheels or of the toolkit. The
binding is by ctypes, since CuPy's sets CuPy's current stream before each call, which resets the workspace.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from autotile.cuda.driver import outside_of_captures
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.settings import overrides_float32

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""cudaDataType (library_types.h)."""
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC = 68, 69
"""cublasComputeType_t (cublas_api.h)."""
_DEFAULT_ALGORITHM = -1
_MAX_INT32 = 2**31 - 1
_PER_THREAD_STREAM = 2
_MAX_HANDLES = 64
"""Streams whose handles are kept; the oldest handle is destroyed beyond that."""
_WORKSPACE_BYTES = {9: 32 << 20, 10: 32 << 20, 12: 12 << 20}
"""Recommended workspace by major compute capability; 4 MiB for others (cuBLAS documentation, cublasSetWorkspace)."""


class Layout(NamedTuple):
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

    @property
    def is_supported(self) -> bool:
        """Whether cuBLAS computes it: its sizes are int32, and the result is of the factors' type or float32."""
        return (
            self.factors in _TYPES
            and self.result in (self.factors, "float32")
            and max(self.m, self.n, self.k, self.batch) <= _MAX_INT32
        )


class Gemm:
    """A product by cuBLAS.

    float32 products are computed in IEEE fp32, without TF32 and without emulation. Equal inputs give bitwise equal
    results on GPUs of one model: each stream has a handle and a workspace of its own (cuBLAS documentation, "Results
    reproducibility").

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
        self._is_capturing = load_cupy().cuda.runtime.streamIsCapturing
        self._device_index = device_index
        self._handles: dict[int, _Handle] = {}
        """Handles that this object has used, by stream."""
        m, n, k = layout.m, layout.n, layout.k
        # cuBLAS is column-major, hence it is asked for the transpose: op(B)^T op(A)^T.
        self._head = int(layout.transpose_b), int(layout.transpose_a), n, m, k
        self._types = _TYPES[layout.factors], _TYPES[layout.result]
        self._leading = k if layout.transpose_b else n, m if layout.transpose_a else k, n
        self._strides = k * n, m * k, m * n
        self._batch = layout.batch
        pedantic = layout.factors == "float32" and overrides_float32()
        self._tail = _COMPUTE_32F_PEDANTIC if pedantic else _COMPUTE_32F, _DEFAULT_ALGORITHM

    def __call__(self, stream: int, addresses: Sequence[int], alpha: float = 1.0, beta: float = 0.0) -> None:
        """Launch the product on a stream of the device, which must be the current one.

        Parameters
        ----------
        stream
            Handle of the stream.
        addresses
            Addresses of A, B and C.
        """
        a, b, c = addresses
        held = self._handles.get(stream)
        if held is None:
            held = _handle(self._device_index, stream)
            if stream != _PER_THREAD_STREAM:  # whose meaning depends on the thread
                self._handles[stream] = held
        if not held.is_captured and stream != 0 and self._is_capturing(stream):
            held.keep_for_graphs()
        factors, result = self._types
        lda, ldb, ldc = self._leading
        scale, add = (_ONE, _ZERO) if alpha == 1.0 and beta == 0.0 else (_Float(alpha), _Float(beta))
        if self._batch == 1:
            status = self._library.cublasGemmEx(
                held.handle, *self._head, _byref(scale), b, factors, lda, a, factors, ldb, _byref(add),
                c, result, ldc, *self._tail,
            )  # fmt: skip
        else:
            stride_b, stride_a, stride_c = self._strides
            status = self._library.cublasGemmStridedBatchedEx(
                held.handle, *self._head, _byref(scale), b, factors, lda, stride_b, a, factors, ldb, stride_a,
                _byref(add), c, result, ldc, stride_c, self._batch, *self._tail,
            )  # fmt: skip
        if status:
            raise ToolchainError(f"cuBLAS failed with status {status}; run with library=False to do without it")


_Float, _byref = ctypes.c_float, ctypes.byref
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Handle:
    """A cuBLAS handle of one stream, with a workspace of its own."""

    def __init__(self, stream: int) -> None:
        self.is_captured = False
        cupy, self._library = load_cupy(), load_cublas()
        current = cupy.cuda.get_current_stream()
        self._stream = current if current.ptr == stream else None  # its address must not be given to another stream
        made = ctypes.c_void_p()
        _check(self._library.cublasCreate_v2(_byref(made)), "cublasCreate")
        self.handle = made.value
        major = int(cupy.cuda.Device().compute_capability[:-1])
        size_bytes = _WORKSPACE_BYTES.get(major, 4 << 20)
        self._workspace = cupy.cuda.Memory(size_bytes)  # not from a pool, whose memory is ordered by a stream
        _check(self._library.cublasSetStream_v2(self.handle, stream), "cublasSetStream")
        _check(self._library.cublasSetWorkspace_v2(self.handle, self._workspace.ptr, size_bytes), "cublasSetWorkspace")

    def keep_for_graphs(self) -> None:
        """Never free the workspace: a CUDA graph may refer to it at any later time."""
        self.is_captured = True
        _captured.append(self)

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None and not sys.is_finalizing():  # at the end of the process, the driver frees everything
            with outside_of_captures():
                self._library.cublasDestroy_v2(handle)


_kept: dict[tuple[int, int, int], _Handle] = {}
_captured: list[_Handle] = []
_lock = threading.Lock()


def _handle(device_index: int, stream: int) -> _Handle:
    """Return the handle of a stream, which threads share, except of the per-thread stream."""
    key = device_index, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
    with _lock, outside_of_captures():
        found = _kept.get(key)
        if found is None:
            if len(_kept) >= _MAX_HANDLES:
                del _kept[next(iter(_kept))]
            found = _kept[key] = _Handle(stream)
        return found


def cublas_version() -> str:
    """Return the version of cuBLAS, such as ``"13.1.0"``; no device is needed.

    Raises
    ------
    ToolchainError
        cuBLAS is not installed.
    """
    return _version(load_cublas())


@lru_cache
def load_cublas() -> Any:
    """Load cuBLAS.

    Raises
    ------
    ToolchainError
        It is not installed.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except Exception as error:  # the loader's own errors share no base class
        reason = str(error).partition("\n")[0]
        raise ToolchainError(f"cuBLAS cannot be loaded ({reason}); install it with the CUDA toolkit") from None
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    library.cublasCreate_v2.argtypes = [pointer]
    library.cublasDestroy_v2.argtypes = [pointer]
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    matrix = [pointer, number, number]
    head, tail = [pointer, *(number,) * 5, pointer], [number, number]
    library.cublasGemmEx.argtypes = [*head, *matrix, *matrix, pointer, *matrix, *tail]
    strided = [*matrix, long]
    library.cublasGemmStridedBatchedEx.argtypes = [*head, *strided, *strided, pointer, *strided, number, *tail]
    return library


@lru_cache
def _version(library: Any) -> str:
    value, parts = ctypes.c_int(), []
    for part in range(3):  # major, minor and patch of libraryPropertyType
        _check(library.cublasGetProperty(part, _byref(value)), "cublasGetProperty")
        parts.append(str(value.value))
    return ".".join(parts)


def _check(status: int, function: str) -> None:
    if status:
        raise ToolchainError(f"{function} failed with status {status}; run with library=False to do without cuBLAS")
