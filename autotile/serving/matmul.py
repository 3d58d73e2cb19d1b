"""Products of matrices: from arrays to a problem of the operation ``matmul``, and to the call of what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.operation import load_operation
from autotile.serving.arrays import as_bits, as_cupy, element_type, library_of, new_array, on_stream
from autotile.serving.bound import BoundKernel
from autotile.serving.shelf import RecentCache
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


class Options(NamedTuple):
    """Options of `autotile.matmul`, with the database as an absolute path or URL."""

    deterministic: bool = True
    emulate: bool = True
    library: bool = True
    numerics: Numerics | None = None
    race: bool = False
    database: str | None = None


class Server(Protocol):
    """Dispatcher, as far as products need one."""

    matmul_kernels: RecentCache[tuple[object, ...], BoundKernel]

    def is_current(self, device: int) -> bool:
        """Return whether a CUDA device is the current one."""

    @property
    def serve_operation(self) -> Callable[..., BoundKernel]:
        """Function that returns the kernel, or the library, for a problem of an operation."""


def multiply(server: Server, arrays: Sequence[Any], scalars: Mapping[str, float], stream: Any, options: Options) -> Any:
    """Compute a product as `autotile.matmul` does, with the kernels of a dispatcher.

    Parameters
    ----------
    server
        The dispatcher.
    arrays, scalars, stream
        Factors, and the array for the result or None; ``alpha`` and ``beta``, unless they have no effect; the stream.
    options
        Options of the choice.
    """
    a, b, out = arrays
    if stream is not None:
        with on_stream((a, b), stream):  # copies and allocations are ordered by the stream, too
            return multiply(server, arrays, scalars, None, options)
    factor = native(a, "a")
    device = device_index(factor)
    if not server.is_current(device):
        with load_cupy().cuda.Device(device):
            return multiply(server, arrays, scalars, None, options)
    left, right = as_operand(factor, "a"), as_operand(native(b, "b"), "b")
    dtype = _common_dtype(a, b)
    shape = _result_shape(left, right)
    if out is None:
        if scalars.get("beta"):
            raise ArgumentError("beta is given without out; expected the array to be scaled by beta")
        out = new_array(a, shape, dtype, zeroed=False)
    stored = left.stored(), right.stored(), native(out, "out")
    kernel = _kernel(server, (left, right), stored, (dtype, element_type(out, "out")), options)
    kernel(*stored, **scalars)
    return out


def _kernel(
    server: Server,
    factors: tuple[Operand, Operand],
    arrays: tuple[Any, Any, Any],
    types: tuple[str, str],
    options: Options,
) -> BoundKernel:
    """Return the kernel for arrays, chosen once for arrays of one kind."""
    (left, right), (x, y, _) = factors, arrays
    aligned, device = are_aligned(*arrays), device_index(x)
    key = (x.shape, y.shape, types, left.transpose, right.transpose, device, aligned, options)
    kernel = server.matmul_kernels.get(key) or server.matmul_kernels.recall(key)
    if kernel is None:
        dtype, result = types
        if result not in (dtype, "float32"):
            raise ArgumentError(f"out has dtype {result}, expected {dtype} or float32")
        (m, k), n = left.array.shape[-2:], right.array.shape[-1]
        deterministic, emulate, library, numerics, race, database = options
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
        asked = {"device": device, "database": database, "library": library, "numerics": numerics, "race": race}
        found = server.serve_operation(OPERATION, product.sizes, product.dtype, **asked)
        kernel = server.matmul_kernels.keep(key, found)
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
