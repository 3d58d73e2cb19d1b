"""`matmul`: the product of two matrices by the kernel that was measured to be the fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError, InputError
from autotile.kernel.library import load_kernel
from autotile.kernel.spec import KernelSpec
from autotile.serving.arrays import as_bits, as_cupy, element_type, library_of, new_array, on_stream
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import Dispatcher, default_dispatcher

_FLAGS = ("TRANS_A", "TRANS_B", "OUT_FP32")
"""Flags that select what is computed. A kernel without one of them only computes products for which it is 0."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices, ``C = alpha A B + beta C``.

    Attributes
    ----------
    m, n, k, batch
        Sizes: ``batch`` products of ``m x k`` and ``k x n`` matrices.
    dtype
        dtype of the factors.
    transpose_a, transpose_b
        Whether a factor is stored as the row-major transpose.
    float32_result
        Whether the result of 16-bit factors is float32.
    deterministic
        Whether equal inputs must give bitwise equal results.
    aligned
        Whether every matrix is aligned to 16 bytes.
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
        """Return the product that a kernel computes for its sizes and flags."""
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
        """Number of multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Number of elements of the three matrices, each of which is moved at least once."""
        return 1.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def sizes_for(self, spec: KernelSpec) -> dict[str, int] | None:
        """Return the sizes and flags of the product by a kernel's names; None if the kernel does not compute it."""
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
"""Alignment that 128-bit accesses and tensor maps require (CUDA C++ Programming Guide, tensor maps)."""


class Operand(NamedTuple):
    """A factor of a product as kernels take it: row-major, or the row-major transpose.

    Attributes
    ----------
    array
        CuPy array or PyTorch tensor of shape ``(rows, columns)`` or ``(batch, rows, columns)``.
    transpose
        Whether the factor is the transpose of the stored matrix.
    copy
        Whether it is contiguous in neither order and must be copied first.
    """

    array: Any
    transpose: bool
    copy: bool

    @property
    def batch(self) -> int:
        """Number of stacked matrices."""
        return int(self.array.shape[0]) if len(self.array.shape) == 3 else 1

    def stored(self) -> Any:
        """Return the row-major array that the kernel is given."""
        if self.copy:
            return self.array.contiguous() if hasattr(self.array, "contiguous") else self.array.copy(order="C")
        return self.array.swapaxes(-1, -2) if self.transpose else self.array


def native(array: Any, name: str) -> Any:
    """Return a CuPy array or a PyTorch tensor unchanged, and any other array as a CuPy view.

    Raises
    ------
    ArgumentError
        The object is not an array on a GPU.
    """
    if library_of(array) is not None and device_index(array) >= 0:
        return array
    return as_bits(as_cupy(array, name), element_type(array, name))


def as_operand(array: Any, name: str) -> Operand:
    """Return a matrix or a stack of matrices as an operand, without copying.

    Parameters
    ----------
    array
        CuPy array or PyTorch tensor.
    name
        Name of the argument, for the error message.

    Raises
    ------
    ArgumentError
        The array does not have 2 or 3 axes, or is empty.
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
    """Return the device address of a CuPy array or a PyTorch tensor."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


def device_index(array: Any) -> int:
    """Return the CUDA device of a CuPy array or a PyTorch tensor; -1 for a tensor on the host."""
    return int(array.get_device() if hasattr(array, "get_device") else array.data.device_id)


def are_aligned(*arrays: Any) -> bool:
    """Return whether all arrays are aligned to 16 bytes."""
    return all(address(array) % _ALIGNED_BYTES == 0 for array in arrays)


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous)


KERNELS = ("gemm_wgmma", "gemm_mma", "gemm_small", "sgemm", "sgemm_ws", "sgemm_bf16x6", "sgemm_bf16x6_ws")
"""Kernels of products; if no time is known, the first that computes the product is chosen."""
EMULATED = frozenset({"sgemm_bf16x6", "sgemm_bf16x6_ws"})
"""Kernels that compute a float32 product from bfloat16 parts."""
_TIER_PENALTY = {"exact": 1.0, "family": 1.1, "nearest": 1.15, "transferred": 1.5}
"""Assumed ratio of a configuration's time to its measured time, scaled to the requested sizes."""


def fitting_kernels(product: Product) -> dict[str, dict[str, Any]]:
    """Return the kernels that compute a product, each with the product's sizes by the kernel's names."""
    allowed = (name for name in KERNELS if product.emulate or name not in EMULATED)
    sizes = {name: product.sizes_for(load_kernel(name).spec) for name in allowed}
    return {name: found for name, found in sizes.items() if found is not None}


def best_matmul(
    product: Product,
    *,
    device: int | str | None = None,
    database: str | Path | None = None,
    dispatcher: Dispatcher = default_dispatcher,
) -> BoundKernel:
    """Return the kernel that is expected to compute a product fastest, bound to it.

    Measured times decide. A time measured at other sizes or on another GPU is scaled by the work and multiplied by a
    penalty. If nothing was measured, the first kernel that computes the product is chosen.

    Parameters
    ----------
    product
        The product.
    device, database
        As for `get_best_kernel`.
    dispatcher
        Dispatcher that the kernel is taken from.

    Raises
    ------
    InputError
        No kernel computes such a product on the device.
    """
    found, refusals = [], []
    location = dispatcher.location(database)
    fitting = fitting_kernels(product)
    for name, sizes in fitting.items():
        try:
            found.append(dispatcher.find_best_kernel(name, product.dtype, device, location, sizes))
        except InputError as error:
            refusals.append(f"{name}: {error}")
    if not found:
        raise InputError(f"no kernel computes {product}: {'; '.join(refusals) or 'none is written for it'}")
    best = _fastest(found, product).kernel
    # Looked up again, as only the kernel that is launched may count as a miss.
    return dispatcher.get_best_kernel(best, dtype=product.dtype, device=device, database=database, **fitting[best])


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
    """Compute ``alpha a @ b + beta out`` on the GPU with the kernel that was measured to be the fastest.

    Parameters
    ----------
    a, b
        Arrays on the GPU (CuPy, PyTorch, JAX, Numba) of one dtype: float32, float16 or bfloat16; shapes ``(m, k)``
        and ``(k, n)``, or stacks ``(batch, m, k)`` and ``(batch, k, n)``. A transposed view, such as ``weights.T``, is
        used without a copy.
    out
        Array for the result, shape ``(m, n)`` or ``(batch, m, n)``, C-contiguous, of the dtype of ``a`` or float32.
        None: a new array of the dtype of ``a``, a PyTorch tensor if ``a`` is one, else a CuPy array.
    alpha, beta
        Factors of the product and of the former content of ``out``.
    deterministic
        Whether equal inputs must give bitwise equal results; False allows sums in varying order.
    emulate
        Whether float32 products may be computed from bfloat16 parts on tensor cores, at the same accuracy. False: all
        products and sums are computed on the CUDA cores in IEEE fp32.
    database
        Path or URL; None for the user's own.
    stream
        A stream of CuPy or PyTorch, or any object with ``__cuda_stream__``. None: PyTorch's current stream for PyTorch
        tensors, else CuPy's.

    Returns
    -------
    array
        ``out``, or the new array.

    Raises
    ------
    ArgumentError
        Shapes or dtypes do not match.
    InputError
        No kernel computes such a product.
    """
    return multiply(
        default_dispatcher,
        a,
        b,
        out,
        alpha=alpha,
        beta=beta,
        deterministic=deterministic,
        emulate=emulate,
        database=database,
        stream=stream,
    )


def multiply(
    dispatcher: Dispatcher,
    a: Any,
    b: Any,
    out: Any,
    *,
    alpha: float,
    beta: float,
    deterministic: bool,
    emulate: bool,
    database: str | Path | None,
    stream: Any,
) -> Any:
    """Compute a product as `matmul` does, with the kernels of a dispatcher."""
    if database is not None:
        database = dispatcher.location(database)  # a relative path means another file in another working directory
    options: dict[str, Any] = {"deterministic": deterministic, "emulate": emulate, "database": database}
    if stream is not None:
        with on_stream((a, b), stream):  # copies and allocations are ordered by the stream, too
            return multiply(dispatcher, a, b, out, alpha=alpha, beta=beta, stream=None, **options)
    factor = native(a, "a")
    device = device_index(factor)
    if not dispatcher.is_current(device):
        with load_cupy().cuda.Device(device):
            return multiply(dispatcher, a, b, out, alpha=alpha, beta=beta, stream=None, **options)
    left, right = as_operand(factor, "a"), as_operand(native(b, "b"), "b")
    dtype = _common_dtype(a, b)
    shape = _result_shape(left, right)
    if out is None:
        if beta != 0.0:
            raise ArgumentError("beta is given without out; expected the array to be scaled by beta")
        out = new_array(a, shape, dtype, zeroed=False)
    arrays = left.stored(), right.stored(), native(out, "out")
    types = dtype, element_type(out, "out")
    kernel = _kernel(dispatcher, left, right, arrays, types, **options)
    scalars = {} if alpha == 1.0 and beta == 0.0 else {"alpha": alpha, "beta": beta}
    kernel(*arrays, **scalars)
    return out


def _kernel(
    dispatcher: Dispatcher,
    left: Operand,
    right: Operand,
    arrays: tuple[Any, Any, Any],
    types: tuple[str, str],
    *,
    deterministic: bool,
    emulate: bool,
    database: str | Path | None,
) -> BoundKernel:
    """Return the kernel for arrays, chosen once for arrays of one kind."""
    x, y, _ = arrays
    aligned, device = are_aligned(*arrays), device_index(x)
    flags = aligned, deterministic, emulate
    key = (x.shape, y.shape, types, left.transpose, right.transpose, device, flags, database)
    kernel = dispatcher.matmul_kernels.get(key) or dispatcher.matmul_kernels.recall(key)
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
        choose = partial(best_matmul, product, device=device, database=database, dispatcher=dispatcher)
        cache = dispatcher.matmul_kernels
        kernel = cache.keep(key, choose())
        dispatcher.refresher.add_operation(dispatcher.location(database), cache, key, lambda _: choose())
    return kernel


def _common_dtype(a: Any, b: Any) -> str:
    dtypes = element_type(a, "a"), element_type(b, "b")
    if dtypes[0] != dtypes[1]:
        raise ArgumentError(f"a has dtype {dtypes[0]} and b {dtypes[1]}; convert one of them")
    return dtypes[0]


def _fastest(kernels: Sequence[BoundKernel], product: Product) -> BoundKernel:
    """Return the kernel that is expected to be fastest; the first if no time is known."""
    measured = any(_is_measured(kernel) for kernel in kernels)
    return min(kernels, key=lambda kernel: _expected_us(kernel, product, min_scale=1.0 if measured else 0.0))


def _is_measured(kernel: BoundKernel) -> bool:
    """Return whether a kernel's time was measured for this very problem on this GPU."""
    return kernel.tier != "transferred" and kernel.choice.tuned_sizes == kernel.problem.sizes


def _expected_us(kernel: BoundKernel, product: Product, *, min_scale: float) -> float:
    """Return the expected time of a kernel in microseconds; infinity if no time is known.

    A smaller product uses less of the device rather than finishing sooner, so the time shrinks with the square root of
    the work; or, next to a kernel that was measured for this product, not at all (``min_scale``).
    """
    tuned_sizes = kernel.choice.tuned_sizes
    if kernel.measurement is None or tuned_sizes is None:
        return math.inf
    if kernel.tier == "transferred" and kernel.kernel in EMULATED:
        return math.inf  # the ratio of tensor cores to CUDA cores differs between GPUs
    if _is_measured(kernel):
        return kernel.measurement.time_us
    tuned = Product.of_sizes(tuned_sizes, kernel.problem.dtype)
    work = max(product.flops / tuned.flops, product.elements / tuned.elements)
    return _TIER_PENALTY[kernel.tier] * max(work, math.sqrt(work), min_scale) * kernel.measurement.time_us


def _result_shape(left: Operand, right: Operand) -> tuple[int, ...]:
    a, b = tuple(left.array.shape), tuple(right.array.shape)
    if a[-1] != b[-2]:
        raise ArgumentError(f"a has {a[-1]} columns and b {b[-2]} rows, expected equal numbers; a is {a}, b is {b}")
    if left.batch != right.batch:
        raise ArgumentError(
            f"a is a stack of {left.batch} matrices and b one of {right.batch}, expected stacks of equal length"
        )
    stacked = len(a) == 3 or len(b) == 3
    return (left.batch, a[-2], b[-1]) if stacked else (a[-2], b[-1])
