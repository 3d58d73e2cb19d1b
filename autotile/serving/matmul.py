"""`matmul`: the product of two matrices by the kernel that was measured to be the fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, InputError
from autotile.kernel.library import load_kernel
from autotile.kernel.spec import KernelSpec
from autotile.serving.arrays import as_bits, as_cupy, element_type, library_of, new_array, on_stream
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import find_best_kernel, get_best_kernel
from autotile.settings import read_settings

_FLAGS = ("TRANS_A", "TRANS_B", "OUT_FP32")
"""Flags that say what is computed. A kernel that lacks one computes only products in which it is 0."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices, ``C = alpha A B + beta C``.

    Attributes
    ----------
    m, n, k, batch
        ``batch`` products of ``m x k`` by ``k x n``.
    dtype
        Element type of the factors.
    transpose_a, transpose_b
        Whether a factor is stored as its transpose, row by row.
    float32_result
        Whether the result is float32 where the factors have 16 bits.
    deterministic
        Whether equal inputs must give equal bits, run after run.
    aligned
        Whether every matrix starts on 16 bytes.
    emulate
        Whether a float32 product may be computed from bfloat16 parts.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "float32"
    transpose_a: bool = False
    transpose_b: bool = False
    float32_result: bool = False
    deterministic: bool = True
    aligned: bool = True
    emulate: bool = True

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int], dtype: str) -> Self:
        """The product that a kernel's sizes and flags stand for."""
        return cls(
            sizes["M"],
            sizes["N"],
            sizes["K"],
            sizes.get("BATCH", 1),
            dtype,
            bool(sizes.get("TRANS_A")),
            bool(sizes.get("TRANS_B")),
            bool(sizes.get("OUT_FP32")),
            not sizes.get("NONDETERMINISTIC"),
        )

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Elements of the three matrices, each of which must be moved at least once."""
        return 1.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def sizes_for(self, spec: KernelSpec) -> dict[str, int] | None:
        """Sizes and flags of the product by the names of a kernel; None where the kernel does not compute it."""
        known = {
            "M": self.m,
            "N": self.n,
            "K": self.k,
            "BATCH": self.batch,
            "TRANS_A": int(self.transpose_a),
            "TRANS_B": int(self.transpose_b),
            "OUT_FP32": int(self.float32_result),
            "NONDETERMINISTIC": int(not self.deterministic),
        }
        taken = {name: size for name, size in known.items() if name in spec.sizes or name in spec.flags}
        lacks = any(known[name] and name not in taken for name in _FLAGS) or (self.batch > 1 and "BATCH" not in taken)
        if lacks or self.dtype not in spec.dtypes or (spec.tensor_maps and not self.aligned):
            return None
        return taken


_ALIGNED_BYTES = 16
"""What 128-bit accesses and tensor maps ask of a pointer (CUDA C++ Programming Guide, tensor maps)."""


class Operand(NamedTuple):
    """One factor of a product, as a kernel takes it: row-major, or row-major of its transpose.

    Attributes
    ----------
    array
        CuPy array or PyTorch tensor of shape ``(rows, columns)`` or ``(batch, rows, columns)``.
    transpose
        Whether the factor is the transpose of what is stored.
    copy
        Whether it lies neither way round and must be copied first.
    """

    array: Any
    transpose: bool
    copy: bool

    @property
    def batch(self) -> int:
        """Matrices that lie one after the other."""
        return int(self.array.shape[0]) if len(self.array.shape) == 3 else 1

    def stored(self) -> Any:
        """What the kernel is given: row-major, in the order of the memory."""
        if self.copy:
            return self.array.contiguous() if hasattr(self.array, "contiguous") else self.array.copy(order="C")
        return self.array.swapaxes(-1, -2) if self.transpose else self.array


def native(array: Any, name: str) -> Any:
    """A CuPy array or a PyTorch tensor as it is, and any other array as a CuPy view.

    Raises
    ------
    ArgumentError
        It is no array on a GPU.
    """
    if library_of(array) is not None and device_index(array) >= 0:
        return array
    return as_bits(as_cupy(array, name), element_type(array, name))


def as_operand(array: Any, name: str) -> Operand:
    """Take a matrix or a stack of matrices as it lies.

    Parameters
    ----------
    array
        As `native` gives it.
    name
        For the error.

    Raises
    ------
    ArgumentError
        It has another number of axes than 2 or 3, or is empty.
    """
    shape = tuple(array.shape)
    if len(shape) not in (2, 3):
        raise ArgumentError(f"{name} has shape {shape}, expected a matrix or a stack of matrices (2 or 3 axes)")
    if 0 in shape:
        raise ArgumentError(f"{name} has shape {shape}, expected at least one element")
    if _is_contiguous(array):
        return Operand(array, transpose=False, copy=False)
    transpose = _is_contiguous(array.swapaxes(-1, -2))
    return Operand(array, transpose=transpose, copy=not transpose)


def address(array: Any) -> int:
    """Device address of a CuPy array or a PyTorch tensor."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


def device_index(array: Any) -> int:
    """CUDA device of a CuPy array or a PyTorch tensor; -1 for a tensor on the host."""
    return int(array.get_device() if hasattr(array, "get_device") else array.data.device_id)


def is_elsewhere(array: Any) -> bool:
    """Whether a CuPy array or a PyTorch tensor lies on another device than the current one."""
    return _has_several_devices() and int(load_cupy().cuda.runtime.getDevice()) != device_index(array)


def are_aligned(*arrays: Any) -> bool:
    """Whether all arrays start on 16 bytes."""
    return all(address(array) % _ALIGNED_BYTES == 0 for array in arrays)


@cache
def _has_several_devices() -> bool:
    return device_count() > 1


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous)


KERNELS = ("gemm_wgmma", "gemm_mma", "gemm_small", "sgemm", "sgemm_ws", "sgemm_bf16x6", "sgemm_bf16x6_ws")
"""Kernels that may compute a product; of those with no known time, the first that fits is taken."""
EMULATED = frozenset({"sgemm_bf16x6", "sgemm_bf16x6_ws"})
"""Those that compute a float32 product from bfloat16 parts."""
_TIER_PENALTY = {"exact": 1.0, "family": 1.1, "nearest": 1.15, "transferred": 1.5}
"""How much longer a configuration is assumed to take than its measured time says, scaled to the size asked for."""

_chosen: dict[tuple[object, ...], BoundKernel] = {}


def fitting_kernels(product: Product) -> dict[str, dict[str, Any]]:
    """Kernels that are written for a product, with its sizes by their names."""
    allowed = (name for name in KERNELS if product.emulate or name not in EMULATED)
    sizes = {name: product.sizes_for(load_kernel(name).spec) for name in allowed}
    return {name: found for name, found in sizes.items() if found is not None}


def best_matmul(
    product: Product, *, device: int | str | None = None, database: str | Path | None = None
) -> BoundKernel:
    """The kernel that is expected to compute a product fastest, bound to it.

    Measured times decide; a time that was measured at other sizes or on another GPU is scaled by the work and counts
    as somewhat longer. Where nothing was measured, the first kernel that fits is taken.

    Parameters
    ----------
    product
        What is to be computed.
    device, database
        As for `get_best_kernel`.

    Raises
    ------
    InputError
        No kernel takes such a product on the device.
    """
    found, refusals = [], []
    location = str(database or read_settings().database)
    fitting = fitting_kernels(product)
    for name, sizes in fitting.items():
        try:
            found.append(find_best_kernel(name, product.dtype, device, location, sizes))
        except InputError as error:
            refusals.append(f"{name}: {error}")
    if not found:
        raise InputError(f"no kernel computes {product}: {'; '.join(refusals) or 'none is written for it'}")
    best = _fastest(found, product).kernel
    # Asked for again, as only what is launched shall count as a miss.
    return get_best_kernel(best, dtype=product.dtype, device=device, database=database, **fitting[best])


def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    deterministic: bool = True,
    emulate: bool = True,
    database: str | Path | None = None,
    stream: Any = None,
) -> Any:
    """``alpha a @ b + beta out`` on the GPU, by the kernel that was measured to be the fastest.

    Parameters
    ----------
    a, b
        Arrays on the GPU (CuPy, PyTorch, JAX, Numba) of one dtype: float32, float16 or bfloat16; shapes ``(m, k)``
        and ``(k, n)``, or stacks ``(batch, m, k)`` and ``(batch, k, n)``. A transposed view, such as ``weights.T``, is
        used as it lies.
    out
        Where the result goes, shape ``(m, n)`` or ``(batch, m, n)``, C-contiguous, of the dtype of ``a`` or float32;
        None: a new PyTorch tensor where ``a`` is one, else a new CuPy array, of the dtype of ``a``.
    deterministic
        Whether equal inputs must give equal bits; False allows sums whose order varies.
    emulate
        Whether float32 products may be computed from bfloat16 parts on tensor cores, at the same accuracy; False: every
        product and sum on the CUDA cores in IEEE fp32.
    database
        Path or URL; None for the user's own.
    stream
        Of CuPy or PyTorch, or any object with ``__cuda_stream__``; None: PyTorch's current stream for PyTorch tensors,
        else CuPy's.

    Returns
    -------
    array
        ``out``, or the new array.

    Raises
    ------
    ArgumentError
        Shapes or dtypes do not fit together.
    InputError
        No kernel takes such matrices.
    """
    if stream is not None:
        with on_stream((a, b), stream):  # what is copied or allocated is so in the stream's order, too
            return matmul(
                a, b, out, alpha=alpha, beta=beta, deterministic=deterministic, emulate=emulate, database=database
            )
    factor = native(a, "a")
    if is_elsewhere(factor):
        with load_cupy().cuda.Device(device_index(factor)):
            return matmul(
                a, b, out, alpha=alpha, beta=beta, deterministic=deterministic, emulate=emulate, database=database
            )
    left, right = as_operand(factor, "a"), as_operand(native(b, "b"), "b")
    dtype = _common_dtype(a, b)
    shape = _result_shape(left, right)
    if out is None:
        if beta != 0.0:
            raise ArgumentError("beta is given without out; expected the array that is to be added to")
        out = new_array(a, shape, dtype, zeroed=False)
    arrays = left.stored(), right.stored(), native(out, "out")
    types = dtype, element_type(out, "out")
    kernel = _kernel(left, right, arrays, types, deterministic=deterministic, emulate=emulate, database=database)
    scalars = {} if alpha == 1.0 and beta == 0.0 else {"alpha": alpha, "beta": beta}
    kernel(*arrays, **scalars)
    return out


def forget_chosen() -> None:
    """Forget which kernels were chosen, so that new tuning results are seen."""
    _chosen.clear()


def _kernel(
    left: Operand,
    right: Operand,
    arrays: tuple[Any, Any, Any],
    types: tuple[str, str],
    *,
    deterministic: bool,
    emulate: bool,
    database: str | Path | None,
) -> BoundKernel:
    """The kernel for arrays as they lie; what was chosen once is remembered."""
    x, y, _ = arrays
    aligned, device = are_aligned(*arrays), device_index(x)
    asked = aligned, deterministic, emulate
    key = (x.shape, y.shape, types, left.transpose, right.transpose, device, asked, database)
    kernel = _chosen.get(key)
    if kernel is None:
        dtype, result = types
        if result not in (dtype, "float32"):
            raise ArgumentError(f"out has dtype {result}, expected {dtype} or float32")
        (m, k), n = left.array.shape[-2:], right.array.shape[-1]
        product = Product(
            int(m),
            int(n),
            int(k),
            left.batch,
            dtype,
            transpose_a=left.transpose,
            transpose_b=right.transpose,
            float32_result=result != dtype,
            deterministic=deterministic,
            aligned=aligned,
            emulate=emulate,
        )
        kernel = _chosen.setdefault(key, best_matmul(product, device=device, database=database))
    return kernel


def _common_dtype(a: Any, b: Any) -> str:
    dtypes = element_type(a, "a"), element_type(b, "b")
    if dtypes[0] != dtypes[1]:
        raise ArgumentError(f"a has dtype {dtypes[0]} and b {dtypes[1]}; convert one of them")
    return dtypes[0]


def _fastest(kernels: Sequence[BoundKernel], product: Product) -> BoundKernel:
    """The one that is expected to be fastest; the first where nothing is known."""
    measured = any(_is_measured(kernel) for kernel in kernels)
    return min(kernels, key=lambda kernel: _expected_us(kernel, product, least_scale=1.0 if measured else 0.0))


def _is_measured(kernel: BoundKernel) -> bool:
    """Whether its time is one of this very problem on this GPU."""
    return kernel.tier != "transferred" and kernel.choice.tuned_sizes == kernel.problem.sizes


def _expected_us(kernel: BoundKernel, product: Product, *, least_scale: float) -> float:
    """Time that a kernel is expected to take; infinite where nothing is known.

    A smaller product leaves the device emptier rather than done sooner, so time shrinks with the square root of the
    work; or, beside a kernel that was measured at this product, not at all.
    """
    tuned_sizes = kernel.choice.tuned_sizes
    if kernel.measurement is None or tuned_sizes is None:
        return math.inf
    if kernel.tier == "transferred" and kernel.kernel in EMULATED:
        return math.inf  # how tensor cores compare with CUDA cores is each GPU's own
    if _is_measured(kernel):
        return kernel.measurement.time_us
    tuned = Product.of_sizes(tuned_sizes, kernel.problem.dtype)
    work = max(product.flops / tuned.flops, product.elements / tuned.elements)
    return _TIER_PENALTY[kernel.tier] * max(work, math.sqrt(work), least_scale) * kernel.measurement.time_us


def _result_shape(left: Operand, right: Operand) -> tuple[int, ...]:
    a, b = tuple(left.array.shape), tuple(right.array.shape)
    if a[-1] != b[-2]:
        raise ArgumentError(f"a has {a[-1]} columns and b {b[-2]} rows, expected as many; a is {a}, b is {b}")
    if left.batch != right.batch:
        raise ArgumentError(f"a is a stack of {left.batch} matrices and b one of {right.batch}, expected as many")
    stacked = len(a) == 3 or len(b) == 3
    return (left.batch, a[-2], b[-1]) if stacked else (a[-2], b[-1])
