"""PyTorch: `matmul` as an operator, and the same choices in all ranks of a distributed job.

    import autotile

    c = autotile.torch.matmul(a, b)
    autotile.torch.sync_choices()

The operator is ``torch.ops.autotile.matmul``. ``torch.compile`` traces it without a graph break, and autograd
differentiates it.
"""

from __future__ import annotations

from typing import Any

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    if error.name != "torch":  # PyTorch is there, and broken
        raise
    raise ModuleNotFoundError(
        "autotile.torch needs PyTorch, which is not installed: pip install torch, or as pytorch.org says; "
        "autotile.matmul takes the arrays of other libraries",
        name="torch",
    ) from None

from autotile.errors import PinError
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.dispatcher import matmul as _matmul
from autotile.serving.pinning import MAX_BYTES

__all__ = ["matmul", "sync_choices"]


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


_operator = torch.library.custom_op("autotile::matmul", _multiply, mutates_args=(), device_types=("cuda", "cpu"))
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


class _Group:
    """Ranks of a process group; tensors are on the GPU for NCCL, else on the host."""

    def __init__(self, group: Any) -> None:
        distributed = torch.distributed
        self._group = group
        self._source = 0 if group is None else distributed.get_global_rank(group, 0)
        on_gpu = distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return bool(torch.distributed.get_rank(self._group) == 0)

    def broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        torch.distributed.broadcast(length, self._source, group=self._group)
        size = int(length.item())
        if size > MAX_BYTES:  # in every rank
            raise PinError(f"rank 0 serves too many choices: {size:,} bytes, and at most {MAX_BYTES:,} can be sent")
        own = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.is_first
            else torch.empty(size, dtype=torch.uint8)
        )
        sent = own.to(self._device)
        torch.distributed.broadcast(sent, self._source, group=self._group)
        return bytes(sent.cpu().numpy().tobytes())

    def all_agree(self, agrees: bool) -> bool:
        least = torch.tensor([int(agrees)], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(least.item())


def sync_choices(group: Any = None, *, strict: bool = False) -> None:
    """Serve in all ranks what rank 0 serves: the same kernels and libraries in the same configurations.

    Every rank of the group calls it, after rank 0 has asked for what it will use, such as after a warm-up step. The
    choices are in force in each process from then on, as with `autotile.pin`, and reach kernels that it has already.

    Parameters
    ----------
    group
        Process group of ``torch.distributed``; None for all ranks.
    strict
        Refuse what rank 0 did not serve, rather than serve it as usual with a `PinWarning`.

    Raises
    ------
    PinError
        A rank cannot serve the choices; then nothing is changed in any, and all ranks raise it.
    """
    default_dispatcher.pins.synchronize(_Group(group), strict=strict)
