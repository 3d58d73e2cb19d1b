"""`matmul`: from arrays to a problem of the operation ``matmul``, and to the call of what is served for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.operation import load_operation
from autotile.serving.arrays import as_bits, as_cupy, element_type, library_of, new_array, on_stream
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import Dispatcher, default_dispatcher
from autotile.settings import Numerics


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
    def sizes(self) -> dict[str, int]:
        """Sizes, flags and conditions of the operation."""
        return {
            "M": self.m,
            "N": self.n,
            "K": self.k,
            "BATCH": self.batch,
            "TRANS_A": int(self.transpose_a),
            "TRANS_B": int(self.transpose_b),
            "OUT_FP32": int(self.float32_result),
            "NONDETERMINISTIC": int(not self.deterministic),
            "ALIGNED": int(self.aligned),
            "EMULATE": int(self.emulate),
        }


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


OPERATION = "matmul"
"""Name of the operation."""


def emulating_kernels() -> frozenset[str]:
    """Return the kernels that compute a float32 product from bfloat16 parts."""
    members = load_operation(OPERATION).members
    return frozenset(one.name for one in members if one.when is not None and "EMULATE" in one.when.names)


def fitting_kernels(product: Product) -> dict[str, dict[str, int]]:
    """Return the kernels that compute a product, each with the product's sizes by the kernel's names."""
    operation = load_operation(OPERATION)
    problem = operation.resolve(product.sizes, product.dtype)
    return {member.name: sizes for member, sizes in operation.fitting(problem)}


def best_matmul(
    product: Product,
    *,
    device: int | str | None = None,
    database: str | Path | None = None,
    library: bool = True,
    numerics: Numerics | None = None,
    race: bool = False,
    dispatcher: Dispatcher = default_dispatcher,
) -> BoundKernel:
    """Return what is served for a product: a kernel, or a library; see `autotile.serving.operations`.

    Parameters
    ----------
    product
        The product.
    device, database, library, numerics, race
        As for `get_best_kernel`.
    dispatcher
        Dispatcher that it is taken from.

    Raises
    ------
    InputError
        No kernel computes such a product on the device.
    """
    return dispatcher.serve_operation(
        OPERATION,
        product.sizes,
        product.dtype,
        device=device,
        database=database,
        library=library,
        numerics=numerics,
        race=race,
    )


def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    deterministic: bool = True,
    emulate: bool = True,
    library: bool = True,
    numerics: Numerics | None = None,
    race: bool = False,
    database: str | Path | None = None,
    stream: Any = None,
) -> Any:
    """Compute ``alpha a @ b + beta out`` on the GPU with the kernel, or the library, that is the fastest.

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
    library
        Whether cuBLAS may compute the product: where it was measured or is expected to be faster than the kernels, and
        where nothing is known of these. float32 products are then IEEE fp32, too.
    numerics
        ``"same"``: while the program runs, or with `autotile.pin`, only configurations that compute the same bits are
        exchanged; ``"any"``: all are. None for the setting.
    race
        Whether the first call of a product that was not measured races the best few kernels and cuBLAS for up to 20 ms
        of GPU time, on scratch outputs; the times are stored. Nothing is raced while the stream is captured, or if
        ``out`` overlaps a factor.
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
        library=library,
        numerics=numerics,
        race=race,
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
    library: bool,
    numerics: Numerics | None,
    race: bool,
    database: str | Path | None,
    stream: Any,
) -> Any:
    """Compute a product as `matmul` does, with the kernels of a dispatcher."""
    if database is not None:
        database = dispatcher.location(database)  # a relative path means another file in another working directory
    options: dict[str, Any] = {
        "deterministic": deterministic,
        "emulate": emulate,
        "library": library,
        "numerics": numerics,
        "race": race,
        "database": database,
    }
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
    library: bool,
    numerics: Numerics | None,
    race: bool,
    database: str | Path | None,
) -> BoundKernel:
    """Return the kernel for arrays, chosen once for arrays of one kind."""
    x, y, _ = arrays
    aligned, device = are_aligned(*arrays), device_index(x)
    flags = aligned, deterministic, emulate, library, numerics, race
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
        found = best_matmul(
            product,
            device=device,
            database=database,
            library=library,
            numerics=numerics,
            race=race,
            dispatcher=dispatcher,
        )
        kernel = dispatcher.matmul_kernels.keep(key, found)
    return kernel


def _common_dtype(a: Any, b: Any) -> str:
    dtypes = element_type(a, "a"), element_type(b, "b")
    if dtypes[0] != dtypes[1]:
        raise ArgumentError(f"a has dtype {dtypes[0]} and b {dtypes[1]}; convert one of them")
    return dtypes[0]


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
