"""`matmul` as an operator of PyTorch: ``torch.compile`` traces it without a graph break, and gradients flow through it.

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
    torch._check(a.dim() in {2, 3} and b.dim() in {2, 3}, lambda: "autotile.torch.matmul takes 2 or 3 axes")
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")
    return a.new_empty((*max(a.shape[:-2], b.shape[:-2], key=len), a.shape[-2], b.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    """PyTorch passes the three by these names."""
    a, b, ctx.emulate = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """For ``C = A B``: the gradient of A is that of C times B transposed, and of B, A transposed times that of C."""
    a, b = ctx.saved_tensors
    for_a, for_b = ctx.needs_input_grad[:2]  # the dispatcher drops arguments that are as by default
    return (
        matmul(gradient, b.mT, emulate=ctx.emulate).view_as(a) if for_a else None,
        matmul(a.mT, gradient, emulate=ctx.emulate).view_as(b) if for_b else None,
        None,
    )


_operator = torch.library.custom_op("autotile::matmul", _multiply, mutates_args=(), device_types="cuda")
_operator.register_fake(_shape_of_result)
_operator.register_autograd(_backward, setup_context=_keep)


def matmul(a: Tensor, b: Tensor, *, emulate: bool = True) -> Tensor:
    """``a @ b`` by the kernel that was measured to be the fastest, on PyTorch's current stream.

    Parameters
    ----------
    a, b
        CUDA tensors of one dtype: float32, float16 or bfloat16; shapes ``(m, k)`` and ``(k, n)``, or stacks
        ``(batch, m, k)`` and ``(batch, k, n)``. Transposed views are used as they lie.
    emulate
        As for `autotile.matmul`; holds for the gradients as well.

    Returns
    -------
    torch.Tensor
        A new tensor of that dtype, shape ``(m, n)`` or ``(batch, m, n)``.

    Raises
    ------
    ArgumentError
        Shapes or dtypes do not fit together.
    InputError
        No kernel takes such matrices.
    """
    result: Tensor = torch.ops.autotile.matmul(a, b, emulate)
    return result
