"""PyTorch: `matmul` and `linear`, and the same choices in all ranks of a distributed job.

    import autotile

    c = autotile.torch.matmul(a, b)
    y = autotile.torch.linear(x, weight, bias)
    autotile.torch.sync_choices()

Called eagerly, they launch what is served without PyTorch's dispatcher. Where PyTorch traces, transforms or intercepts
calls, they are the operator ``torch.ops.autotile.matmul``, which ``torch.compile`` traces without a graph break.
Autograd differentiates them in either case.
"""

from __future__ import annotations

from collections.abc import Callable
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

from autotile.errors import ArgumentError, PinError
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.dispatcher import matmul as _matmul
from autotile.serving.pinning import MAX_BYTES

__all__ = ["Linear", "linear", "matmul", "sync_choices"]


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
    gradient = gradient.contiguous()  # that of a sum is one number with strides of 0
    return (
        matmul(gradient, b.mT, emulate=ctx.emulate).view_as(a) if needs_a else None,
        matmul(a.mT, gradient, emulate=ctx.emulate).view_as(b) if needs_b else None,
        None,
    )


# torch.library.custom_op would add some 30 us to each call, for checks of mutation and aliasing.
_library = torch.library.Library("autotile", "DEF")
_library.define("matmul(Tensor a, Tensor b, bool emulate=True) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("matmul", _multiply, "CUDA")
_library.impl("matmul", _multiply, "CPU")  # which raises what is wrong
torch.library.register_fake("autotile::matmul", _shape_of_result, lib=_library)
torch.library.register_autograd("autotile::matmul", _backward, setup_context=_keep, lib=_library)


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """`matmul` as autograd records it where nothing traces."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, emulate: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.emulate = emulate
        return _launched(a, b, emulate)

    backward = staticmethod(_backward)


def _asked(path: str) -> Callable[[], Any]:
    """Return a function of PyTorch that is not public; in a version without it, one that returns True."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else lambda: True


_PLAIN = (Tensor, torch.nn.Parameter)
_has_dispatch_mode, _has_function_mode = _asked("_len_torch_dispatch_stack"), _asked("_len_torch_function_stack")
_has_transform, _is_traced = _asked("_functorch.peek_interpreter_stack"), _asked("_get_tracing_state")
_allows_tf32 = _asked("_get_cublas_allow_tf32")
_is_grad_enabled, _forward_mode = torch.is_grad_enabled, torch.autograd.forward_ad


def _is_eager(a: Tensor, b: Tensor) -> bool:
    """Whether a call on two tensors may bypass PyTorch's dispatcher: nothing traces, transforms or intercepts it."""
    return (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and _forward_mode._current_level < 0
        and not (_has_dispatch_mode() or _has_function_mode() or _has_transform() or _is_traced())
    )


_OPTIONS = {emulate: (True, emulate, True, None, False, False) for emulate in (False, True)}
"""Options of `autotile.matmul` but the database, in order: all but ``emulate`` have their defaults."""


def _launched(a: Tensor, b: Tensor, emulate: bool) -> Tensor:
    """Launch the product of two tensors, without a gradient."""
    made: Tensor | None = default_dispatcher.products.launch(a, b, _OPTIONS[emulate])
    return made if made is not None else _multiply(a, b, emulate)


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
    if torch.compiler.is_compiling() or not _is_eager(a, b):
        result: Tensor = torch.ops.autotile.matmul(a, b, emulate)
        return result
    if _is_grad_enabled() and (a.requires_grad or b.requires_grad):
        recorded: Tensor = _Differentiable.apply(a, b, emulate)
        return recorded
    return _launched(a, b, emulate)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, emulate: bool = True) -> Tensor:
    """Compute ``input @ weight.T + bias``, as `torch.nn.functional.linear` does, with the fastest product.

    Under autocast, tensors are converted to its dtype, as PyTorch does. Where cuBLAS is served, PyTorch calls it for a
    product with a bias, by PyTorch's settings of precision.

    Parameters
    ----------
    input
        CUDA tensor of shape ``(..., k)``: float32, float16 or bfloat16.
    weight, bias
        Tensors of shape ``(n, k)`` and ``(n,)`` of the same dtype.
    emulate
        As for `matmul`.

    Returns
    -------
    torch.Tensor
        New tensor of shape ``(..., n)``.

    Raises
    ------
    ArgumentError, InputError
        As for `matmul`.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda") or not _is_eager(input, weight):
        return _composed_linear(input, weight, bias, emulate)
    needs = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if needs and _is_grad_enabled():
        recorded: Tensor = _DifferentiableLinear.apply(input, weight, bias, emulate)
        return recorded
    return _launched_linear(input, weight, bias, emulate)


def _composed_linear(input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool) -> Tensor:
    """Compute `linear` by operators that PyTorch traces and differentiates, converted as autocast does."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        input, weight = input.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    if weight.dim() != 2:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}, expected (n, k)")
    product = matmul(input.reshape(-1, input.shape[-1]), weight.t(), emulate=emulate)
    result = product.view(*input.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


def _launched_linear(input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool) -> Tensor:
    """Launch `linear`, without a gradient."""
    products, options = default_dispatcher.products, ("linear", emulate)
    known = products.find(input, weight, options)
    if known is not None and bias is not None and known.kernel.is_library and not _allows_tf32():
        return torch.nn.functional.linear(input, weight, bias)  # cuBLAS adds the bias as it stores the product
    result: Tensor | None = known.launch(input, weight) if known is not None else None
    if result is None:
        if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
            raise ArgumentError(
                f"input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}, expected (..., k) and (n, k)"
            )
        rows, transposed = input.detach().reshape(-1, input.shape[-1]), weight.detach().t()
        result = _launched(rows, transposed, emulate).view(*input.shape[:-1], weight.shape[0])
        served = products.find(rows, transposed, _OPTIONS[emulate])
        if served is not None and input.is_contiguous():
            products.learn(input, weight, options, served.kernel, tuple(result.shape))
    if bias is not None:
        if bias.dtype != result.dtype or bias.shape != result.shape[-1:]:
            raise ArgumentError(
                f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, expected ({result.shape[-1]},) and "
                f"{result.dtype}"
            )
        result.add_(bias.detach())
    return result


class _DifferentiableLinear(torch.autograd.Function):  # type: ignore[misc]
    """`linear` as autograd records it where nothing traces."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.emulate = emulate
        return _launched_linear(input, weight, bias, emulate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of ``Y = X W^T + b``: dX = dY W, dW = dY^T X, and db the sum of the rows of dY."""
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        values = input.reshape(-1, input.shape[-1])
        return (
            matmul(rows, weight, emulate=ctx.emulate).view_as(input) if needs_input else None,
            matmul(rows.t(), values, emulate=ctx.emulate) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


class Linear(torch.nn.Linear):  # type: ignore[misc]
    """`torch.nn.Linear` that computes by `linear`; parameters, initialization and ``state_dict`` are the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        return linear(input, self.weight, self.bias)


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
    ranks = _Group(group)
    default_dispatcher.pins.synchronize(ranks.broadcast, ranks.all_agree, is_first=ranks.is_first, strict=strict)
