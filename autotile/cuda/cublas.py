"""cuBLAS, called without CuPy's wrappers, which refuse to be captured in CUDA graphs.

Matrices are row-major, and cuBLAS's are column-major: it computes the transpose of the result, from the factors in the
other order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from autotile.core.frozen import dataclass
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError

_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""``CUDA_R_32F``, ``CUDA_R_16F`` and ``CUDA_R_16BF``, library_types.h."""
_COMPUTE_32F = 68
"""``CUBLAS_COMPUTE_32F``, cublas_api.h: products of float32 are IEEE fp32, not TF32."""
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
    try:  # the wheels of NVIDIA, where CuPy and PyTorch have them from
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublas").abs_path
        return ctypes.CDLL(str(Path(path)))
    except (ImportError, RuntimeError, OSError, TypeError):
        pass
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ToolchainError("cuBLAS is not installed; install the wheel nvidia-cublas, or the CUDA toolkit")


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
        self._workspace: Any = load_cupy().cuda.alloc(workspace_bytes) if workspace_bytes else None
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
        one, void, integer, long = product, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
        factors, results = integer(_DATA_TYPES[one.dtype]), integer(_DATA_TYPES[one.out_dtype])
        lead_a, lead_b = (one.m if one.trans_a else one.k), (one.k if one.trans_b else one.n)
        alphas, betas = ctypes.c_float(alpha), ctypes.c_float(beta)
        shape = (integer(one.trans_b), integer(one.trans_a), integer(one.n), integer(one.m), integer(one.k))
        compute = (integer(_COMPUTE_32F), integer(_ALGORITHM))
        left, right = (void(b), factors, integer(lead_b)), (void(a), factors, integer(lead_a))
        result = (void(c), results, integer(one.n))
        if one.batch == 1:
            status = self._library.cublasGemmEx(
                self._handle, *shape, ctypes.byref(alphas), *left, *right, ctypes.byref(betas), *result, *compute
            )
        else:
            strides = (one.k * one.n, one.m * one.k, one.m * one.n)
            stride_b, stride_a, stride_c = (long(stride) for stride in strides)
            status = self._library.cublasGemmStridedBatchedEx(
                self._handle,
                *shape,
                ctypes.byref(alphas),
                *(*left, stride_b),
                *(*right, stride_a),
                ctypes.byref(betas),
                *(*result, stride_c),
                integer(one.batch),
                *compute,
            )
        _check(status, "cublasGemmEx")


def _check(status: int, call: str) -> None:
    if status:
        raise ToolchainError(f"{call} failed with status {status} of cuBLAS; see `autotile doctor`")
