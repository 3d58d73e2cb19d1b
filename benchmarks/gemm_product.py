"""Products of matrices as problems of the operation ``matmul``, and the kernels that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from autotile.kernel.operation import load_operation


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


def emulating_kernels() -> frozenset[str]:
    """Return the kernels that compute a float32 product from bfloat16 parts."""
    members = load_operation("matmul").members
    return frozenset(one.name for one in members if one.when is not None and "EMULATE" in one.when.names)


def fitting_kernels(product: Product) -> dict[str, dict[str, int]]:
    """Return the kernels that compute a product, each with the product's sizes by the kernel's names."""
    operation = load_operation("matmul")
    problem = operation.resolve(product.sizes, product.dtype)
    return {member.name: sizes for member, sizes in operation.fitting(problem)}
