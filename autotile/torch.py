"""`matmul` as a PyTorch operator, which ``torch.compile`` traces without a graph break and autograd differentiates.

    import autotile.torch

    c = autotile.torch.matmul(a, b)

The operator is ``torch.ops.autotile.matmul``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotile.serving.matmul import matmul as _matmul

__all__ = ["matmul"]


def _multiply(a: Tensor, b: Tensor, emulate: bool = True) -> Tensor:
    result: Tensor = _matmul(a.detach(), b.detach(), emulate=emulate)
    return result


def _shape_of_result(a: Tensor, b: Tensor, emulate: bool = True) -> Tensor:
    torch._check(
        a.dim() in {2, 3} and b.dim() in {2, 3}, lambda: "autotile.torch.matmul expects tensors with 2 or 3 axes"
    )
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not match")
    return a.new_empty((*max(a.shape[:-2], b.shape[:-2], key=len), a.shape[-2], b.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    """Save the inputs for the gradient; PyTorch passes the arguments by these names."""
    a, b, ctx.emulate = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Return the gradients of ``C = A B``: dA = dC B^T and dB = A^T dC."""
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]  # PyTorch's dispatcher drops arguments that equal their defaults
    return (
        matmul(gradient, b.mT, emulate=ctx.emulate).view_as(a) if needs_a else None,
        matmul(a.mT, gradient, emulate=ctx.emulate).view_as(b) if needs_b else None,
        None,
    )


_operator = torch.library.custom_op("autotile::matmul", _multiply, mutates_args=(), device_types="cuda")
_operator.register_fake(_shape_of_result)
_operator.register_autograd(_backward, setup_context=_keep)


def matmul(a: Tensor, b: Tensor, *, emulate: bool = True) -> Tensor:
    """Compute ``a @ b`` on PyTorch's current stream, with the kernel that was measured to be the fastest.

    Parameters
    ----------
    a, b
        CUDA tensors of one dtype: float32, float16 or bfloat16; shapes ``(m, k)`` and ``(k, n)``, or stacks
        ``(batch, m, k)`` and ``(batch, k, n)``. Transposed views are used without a copy.
    emulate
        As for `autotile.matmul`; it also applies to the gradients.

    Returns
    -------
    torch.Tensor
        New tensor of the same dtype, shape ``(m, n)`` or ``(batch, m, n)``.

    Raises
    ------
    ArgumentError
        Shapes or dtypes do not match.
    InputError
        No kernel computes such a product.
    """
    result: Tensor = torch.ops.autotile.matmul(a, b, emulate)
    return result
