"""Triton launches of a kernel with three pointers and three sizes: plain, and through its autotuner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def tiny(a, b, c, m, n, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917 - as in a GEMM
    """Touch one element of each array."""
    if m < 0:
        offsets = tl.arange(0, BLOCK)
        tl.store(c + offsets, tl.load(a + offsets) * tl.load(b + offsets) * n * k)


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["m", "n", "k"])
@triton.jit
def tuned(a, b, c, m, n, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917 - as in a GEMM
    """Do the same, with two configurations to choose from."""
    if m < 0:
        offsets = tl.arange(0, BLOCK)
        tl.store(c + offsets, tl.load(a + offsets) * tl.load(b + offsets) * n * k)


def triton_calls(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return both launches as callables without arguments."""
    m, n = a.shape
    k = b.shape[1]
    return {
        "Triton JIT": lambda: tiny[(1,)](a, b, c, m, n, k, BLOCK=32),
        "Triton autotuned": lambda: tuned[(1,)](a, b, c, m, n, k),
    }
