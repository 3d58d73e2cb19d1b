"""What is multiplied: all that the choice of a kernel for a product of matrices depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from autotile.ground.spec import KernelSpec

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
