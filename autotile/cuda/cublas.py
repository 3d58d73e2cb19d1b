"""cuBLAS, called without CuPy's wrappers, which refuse to be captured in CUDA graphs.

Matrices are row-major, and cuBLAS's are column-major: it computes the transpose of the result, from the factors in the
other order.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from autotile.core.frozen import dataclass
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError
from autotile.settings import overrides_float32

_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""``CUDA_R_32F``, ``CUDA_R_16F`` and ``CUDA_R_16BF``, library_types.h."""
_COMPUTE_32F = 68
"""``CUBLAS_COMPUTE_32F``, cublas_api.h: products of float32 are IEEE fp32, not TF32."""
_COMPUTE_32F_PEDANTIC = 69
"""The same if the environment asks for TF32 or emulation."""
_ALGORITHM = -1
"""``CUBLAS_GEMM_DEFAULT``: the library's heuristic chooses."""
_MAX_INT32 = 2**31 - 1
WORKSPACE_BYTES = 32 << 20
"""Workspace that NVIDIA recommends for Hopper (cuBLAS, ``cublasSetWorkspace``)."""
_NAMES = ("libcublas.so.13", "libcublas.so.12", "libcublas.so")


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
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.cublasGemmEx.argtypes = [*head, *matrix, *matrix, pointer, *matrix, *tail]
    library.cublasGemmStridedBatchedEx.argtypes = [*head, *strided, *strided, pointer, *strided, number, *tail]
    return library


@lru_cache
def cublas_version() -> str:
    """Return the version of the library, such as ``"13.1.0"``; errors as for `load_cublas`."""
    library, number, parts = load_cublas(), ctypes.c_int(), []
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
        _check(library.cublasGetProperty(part, ctypes.byref(number)), "cublasGetProperty")
        parts.append(str(number.value))
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product ``C = alpha op(A) op(B) + beta C`` of row-major matrices, or a stack of ``batch`` such products.

    ``trans_a`` is whether A is stored as its transpose, (k, m).
    """

    m: int
    n: int
    k: int
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = False
    dtype: str = "float32"
    out_dtype: str = "float32"

    @classmethod
    def of(cls, sizes: Mapping[str, int], dtype: str) -> Gemm:
        """Return the product with the sizes and flags of the operation ``matmul``.

        Raises
        ------
        InputError
            cuBLAS does not compute it.
        """
        m, n, k = (sizes[name] for name in ("M", "N", "K"))
        if max(m, n, k) > _MAX_INT32 or dtype not in _DATA_TYPES:
            raise InputError(f"cuBLAS computes no product of {m} x {n} x {k} {dtype} matrices")
        flags = {name: bool(sizes.get(name, 0)) for name in ("TRANS_A", "TRANS_B", "OUT_FP32")}
        out_dtype = "float32" if flags["OUT_FP32"] else dtype
        batch = sizes.get("BATCH", 1)
        return cls(m, n, k, batch, flags["TRANS_A"], flags["TRANS_B"], dtype, out_dtype)


class Cublas:
    """A handle of cuBLAS in the current context; one thread at a time may call it.

    Parameters
    ----------
    workspace_bytes
        Workspace of its own, so that a captured call allocates nothing; all calls must then be ordered by one stream.
        0: the library's.

    Raises
    ------
    ToolchainError
        The library is not installed, or refuses to start.
    """

    def __init__(self, workspace_bytes: int = 0) -> None:
        self._library = load_cublas()
        self._handle = ctypes.c_void_p()
        _check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        self._workspace: Any = load_cupy().cuda.Memory(workspace_bytes) if workspace_bytes else None
        self._workspace_bytes = workspace_bytes
        self._stream = -1

    def use_stream(self, stream: int) -> None:
        """Queue the next calls on a stream, given by its handle."""
        if stream == self._stream:
            return
        _check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
        if self._workspace is not None:  # a new stream resets it
            status = self._library.cublasSetWorkspace_v2(
                self._handle, ctypes.c_void_p(self._workspace.ptr), ctypes.c_size_t(self._workspace_bytes)
            )
            _check(status, "cublasSetWorkspace")
        self._stream = stream

    def gemm(self, product: Gemm, a: int, b: int, c: int, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Queue a product on the stream in use; ``a``, ``b`` and ``c`` are addresses on the device.

        Raises
        ------
        ToolchainError
            cuBLAS refuses the product.
        """
        self.queue(CublasCall(product), (a, b, c), alpha, beta)

    def queue(self, call: CublasCall, addresses: Sequence[int], alpha: float = 1.0, beta: float = 0.0) -> None:
        """Queue a prepared product, as `gemm` does, on matrices A, B and C at these addresses."""
        a, b, c = addresses
        factors, result = call.types
        lead_a, lead_b, lead_c = call.leading
        scale, add = (_ONE, _ZERO) if alpha == 1.0 and beta == 0.0 else (ctypes.c_float(alpha), ctypes.c_float(beta))
        if call.batch == 1:
            status = self._library.cublasGemmEx(
                self._handle, *call.shape, _byref(scale), b, factors, lead_b, a, factors, lead_a, _byref(add),
                c, result, lead_c, *call.how,
            )  # fmt: skip
        else:
            stride_a, stride_b, stride_c = call.strides
            status = self._library.cublasGemmStridedBatchedEx(
                self._handle, *call.shape, _byref(scale), b, factors, lead_b, stride_b, a, factors, lead_a, stride_a,
                _byref(add), c, result, lead_c, stride_c, call.batch, *call.how,
            )  # fmt: skip
        if status:
            _check(status, "cublasGemmEx")

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and not sys.is_finalizing():  # at the end of the process the driver frees all
            with outside_of_captures():
                self._library.cublasDestroy_v2(self._handle)


class CublasCall:
    """The arguments of cuBLAS for a product, except for addresses and factors."""

    __slots__ = ("batch", "how", "leading", "shape", "strides", "types")

    def __init__(self, product: Gemm) -> None:
        m, n, k = product.m, product.n, product.k
        self.batch = product.batch
        self.types = _DATA_TYPES[product.dtype], _DATA_TYPES[product.out_dtype]
        self.shape = int(product.trans_b), int(product.trans_a), n, m, k
        self.leading = (m if product.trans_a else k), (k if product.trans_b else n), n
        self.strides = m * k, k * n, m * n
        is_pedantic = product.dtype == "float32" and overrides_float32()
        self.how = _COMPUTE_32F_PEDANTIC if is_pedantic else _COMPUTE_32F, _ALGORITHM


_byref = ctypes.byref
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle that stands for a different stream in each thread."""
_MAX_HANDLES = 64
"""Streams whose handles are kept; beyond that the oldest is destroyed."""


class StreamHandles:
    """A handle for each stream, with a workspace of its own.

    Equal inputs then give bitwise equal results on GPUs of one model, whatever other streams do (cuBLAS documentation,
    "Results reproducibility"). Threads share the handle of a stream, as its settings never change.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], _StreamHandle] = {}
        self._captured: list[_StreamHandle] = []
        """Those whose workspace a CUDA graph may refer to at any later time."""
        self._lock = threading.Lock()

    def get(self, device_index: int, stream: int) -> Cublas:
        """Return the handle of a stream of the current device."""
        key = device_index, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        found = self._kept.get(key)
        if found is None:
            found = self._make(key, stream)
        if not found.is_captured and stream != 0 and load_cupy().cuda.runtime.streamIsCapturing(stream):
            found.is_captured = True
            self._captured.append(found)
        return found.library

    def _make(self, key: tuple[int, int, int], stream: int) -> _StreamHandle:
        with self._lock, outside_of_captures():
            found = self._kept.get(key)
            if found is None:
                if len(self._kept) >= _MAX_HANDLES:
                    del self._kept[next(iter(self._kept))]
                found = self._kept[key] = _StreamHandle(stream)
            return found


class _StreamHandle:
    def __init__(self, stream: int) -> None:
        current = load_cupy().cuda.get_current_stream()
        self._stream = current if current.ptr == stream else None  # so that its address is not given to another stream
        self.library = Cublas(_workspace_bytes())
        self.library.use_stream(stream)
        self.is_captured = False


stream_handles = StreamHandles()


def _workspace_bytes() -> int:
    """Return the workspace that NVIDIA recommends for the current device (cuBLAS, ``cublasSetWorkspace``)."""
    major = int(load_cupy().cuda.Device().compute_capability[:-1])
    return WORKSPACE_BYTES if major in (9, 10) else 12 << 20 if major == 12 else 4 << 20


def _check(status: int, call: str) -> None:
    if status:
        raise ToolchainError(f"{call} failed with status {status} of cuBLAS; see `autotile doctor`")
