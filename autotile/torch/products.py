"""`matmul`, `linear` and `Linear`, eager and traced, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autotile.serving.arrays import VECTOR_BYTES, torch_library
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import EPOCH
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.dispatcher import matmul as _matmul
from autotile.serving.gains import RECORDED_US, Gain, find_product, is_transposed, stored_transposed
from autotile.serving.operations import KnownProduct, MatmulOptions
from autotile.settings import read_settings

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _multiply(a: Tensor, b: Tensor, emulate: bool = True) -> Tensor:
    if a.is_cuda and b.is_cuda and not (a.numel() and b.numel()):
        return torch.matmul(a.detach(), b.detach())
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
        made = _launched_at_once(a, b, emulate)
        return made if made is not None else _launched(a, b, emulate)

    backward = staticmethod(_backward)


def _asked(path: str) -> Callable[..., Any]:
    """Return a function of PyTorch that is not public; in a version without it, one that returns True."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else lambda *_: True


PLAIN = (Tensor, torch.nn.Parameter)
_tensor_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_has_dispatch_mode, _has_function_mode = _asked("_len_torch_dispatch_stack"), _asked("_len_torch_function_stack")
_has_transform, _is_traced = _asked("_are_functorch_transforms_active"), _asked("_get_tracing_state")
allows_tf32 = torch_library(torch).allows_tf32
_hooks_of_saved = _asked("_autograd._top_saved_tensors_default_hooks")
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_autocast, _forward_mode = torch.is_autocast_enabled, torch.autograd.forward_ad
_torch_linear, _torch_matmul = torch.nn.functional.linear, torch.matmul


def _is_eager(a: Tensor, b: Tensor) -> bool:
    """Whether a call on two tensors may bypass PyTorch's dispatcher: nothing traces, transforms or intercepts it."""
    return (
        type(a) in PLAIN
        and type(b) in PLAIN
        and _forward_mode._current_level < 0
        and not (_has_dispatch_mode() or _has_function_mode() or _has_transform() or _is_traced())
    )


def _join_traced() -> bool:
    """Join Inductor as a graph is traced: an eager program need not wait for its import.

    Return True if the graph is for ``torch.export``, which PyTorch 2.11 asserts of any graph that it traces.
    """
    from autotile.torch.inductor import join_traced

    join_traced()
    return bool(getattr(torch.compiler, "is_exporting", lambda: False)())  # since PyTorch 2.7


# All that `torch.compiler.assume_constant_result` does, which would import the compiler: seconds for an eager program.
_join_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


_products = default_dispatcher.products
_notes = _products.notes
"""Calls that are left to PyTorch, by kind: the kernel that is served while that is so, its choice, and PyTorch's
function, or one of `_guard`. Such a call looks it up, and does no more. Also the `Gain` of each served kernel, and by
kind, what autograd records."""
_OPTIONS = {emulate: (True, emulate, True, None, False, False) for emulate in (False, True)}
"""Options of `autotile.matmul` but the database, in order: all but ``emulate`` have their defaults."""


_UNSERVED = SimpleNamespace(choice=None, is_library=True, count_call=lambda: None)
"""Stands for what is served where no kernel computes a product."""


def _torch_product(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return PyTorch's function for two factors; `matmul`, which takes any, takes 4 us more of the host for stacks."""
    if _is_stacked(a, b):
        return _torch_matmul  # type: ignore[no-any-return]
    return torch.mm if a.dim() == 2 else torch.bmm  # type: ignore[no-any-return]


def _leave(key: object, kernel: BoundKernel, function: Callable[..., Tensor | None]) -> None:
    """Leave calls of a kind to a function, mostly of PyTorch, as long as what is served does not change.

    What stands in for something else is about to change; calls that are to be captured are launched by autotile. In a
    capture of CUDA, all is left to PyTorch, whose memory is of the graph's pool, and that means nothing for later.
    """
    may_change = kernel.choice.awaited or read_settings().capture or torch.cuda.is_current_stream_capturing()
    if key is not None and not may_change:
        _products.note(key, (kernel, kernel.choice, function))


_MAX_GUARDS = 4
"""Kinds of tensors of a kind of calls: dtypes, layouts, and those of inference mode."""


def _guard(key: object, known: KnownProduct, tensors: tuple[Tensor, ...]) -> None:
    """Launch calls of a kind on tensors like these at once, as long as what is served does not change.

    PyTorch compares all of the tensors in one call, with what traces, transforms or intercepts them, as it does before
    it runs compiled code: a microsecond in place of five. The function that is noted returns None for others.
    """
    note, guards = _notes.get(key), list[tuple[Callable[..., bool], KnownProduct, object]]()
    if note is not None and note[0].choice is note[1]:
        guards = _notes.get(("guards", key), guards)
        guards[:] = [one for one in guards if one[1].kernel.choice is one[2]]
    if _tensor_guards is None or len(guards) == _MAX_GUARDS or any(accepts(*tensors) for accepts, *_ in guards):
        return
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    try:
        accepts = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (RuntimeError, SystemError, TypeError):  # of a version of PyTorch that takes other arguments
        return
    if not accepts(*tensors):  # one tensor twice
        return
    guards.append((accepts, known, known.kernel.choice))
    if len(guards) > 1:
        return

    has_bias = len(tensors) > 2

    def launch(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if has_bias is (bias is None):  # of a layer that was given one meanwhile, or none
            return None
        for accepts, own, choice in guards:
            if not (accepts(a, b) if bias is None else accepts(a, b, bias)):
                continue
            kernel = own.kernel
            if (
                _has_function_mode()
                or _forward_mode._current_level >= 0
                or (a.data_ptr() | b.data_ptr()) % VECTOR_BYTES
                or kernel.choice is not choice
                or (a.dtype is torch.float32 and allows_tf32())
            ):
                break
            if not kernel.is_library:
                made: Tensor | None = own.launch(a, b)
                return made if made is None or bias is None else made.add_(bias)
            if kernel.is_direct and not torch.cuda.is_current_stream_capturing():
                return own.launch(a, b, bias=bias)
            break
        return None

    _products.note(("guards", key), guards)
    _leave(key, known.kernel, launch)


def _launched_at_once(a: Tensor, b: Tensor, emulate: bool) -> Tensor | None:
    """Compute a product that `_guard` knows, whether or not autograd is on; None for another."""
    note = _notes.get(("at once", a.shape, b.shape, emulate, _is_grad_enabled()))
    return note[2](a, b) if note is not None and note[0].choice is note[1] else None


def _gain_of(kernel: BoundKernel) -> Gain:
    """Return the gain of what is served, which is found once for each choice."""
    gain = _notes.get(kernel)
    if gain is None or gain.choice is not kernel.choice:
        gain = _products.note(kernel, Gain.of(kernel))
    return gain  # type: ignore[no-any-return]


def _is_short(library: BoundKernel) -> bool:
    """Whether the host's part of PyTorch's own call of the library may show, and a direct launch leaves it out."""
    return _gain_of(library).is_short and library.is_direct and not torch.cuda.is_current_stream_capturing()


def _launched(a: Tensor, b: Tensor, emulate: bool) -> Tensor:
    """Compute the product of two tensors, without a gradient.

    Where cuBLAS is served, PyTorch calls it, unless the product is so short that the host's part of the call may show.
    """
    options, at_once = _OPTIONS[emulate], ("at once", a.shape, b.shape, emulate, _is_grad_enabled())
    key = a.shape, b.shape, a.stride(), b.stride(), a.dtype, emulate
    by_torch, is_plain = _torch_product(a, b), _is_plain(a)
    known = _products.find(a, b, options)
    if known is None and is_plain and (problem := _product_of(a, b, emulate)) is not None:
        known = _chosen((a, b), options, (key, by_torch), problem, (*a.shape[:-1], b.shape[-1]))
        if known is None:
            return by_torch(a, b)
    if known is None:
        return _multiply(a, b, emulate) if not _is_stacked(a, b) else _of_stacks(a, b, emulate)
    kernel = known.kernel
    if not kernel.is_library or _is_short(kernel):
        made: Tensor | None = known.launch(a, b)
        if made is not None:
            _guard(at_once, known, (a, b))
            return made
    if kernel.is_library and is_plain and not read_settings().capture:
        _leave(key, kernel, by_torch)
        _notes.pop(at_once, None)
        kernel.count_call()
        return by_torch(a, b)
    if (made := known.launch(a, b)) is None:
        made = kernel(*(one.detach() if one.is_contiguous() else one.detach().mT for one in (a, b)))
    return made


def matmul(a: Tensor, b: Tensor, *, emulate: bool = True) -> Tensor:
    """Compute ``a @ b`` on PyTorch's current stream, with the kernel that was measured to be the fastest.

    Where cuBLAS is served, PyTorch calls it, unless PyTorch's settings would round float32 to TF32, or the product
    takes less time than the host's part of PyTorch's call. Under ``torch.compile`` and where calls are intercepted, it
    is the operator ``torch.ops.autotile.matmul``. In transforms of ``torch.func``, in forward-mode differentiation and
    on the CPU it is PyTorch's own product, by its settings.

    Parameters
    ----------
    a, b
        Tensors of one dtype: float32, float16 or bfloat16; shapes ``(m, k)`` and ``(k, n)``, stacks of such, whose
        leading axes are broadcast, or vectors, as for `torch.matmul`. Transposed views are used without a copy.
    emulate
        As for `autotile.matmul`; it also applies to the gradients.

    Returns
    -------
    torch.Tensor
        New tensor of the same dtype, shape ``(..., m, n)``; without the axis of a factor that is a vector.

    Raises
    ------
    ArgumentError
        Shapes, dtypes or devices do not match.
    InputError
        No kernel computes such a product.
    RuntimeError, TypeError
        By PyTorch: leading axes cannot be broadcast, a factor has no axis or is no tensor, or the first is on the CPU.
    """
    if getattr(a, "is_cuda", False) is not True:  # nor what stands for a tensor while torch.fx traces
        return _torch_matmul(a, b)
    is_compiling = _is_compiling()
    if not is_compiling and type(a) in PLAIN and type(b) in PLAIN:
        made = _launched_at_once(a, b, emulate)
        if made is not None:
            return made
    if is_compiling or not _is_eager(a, b):
        # An operator would lose a derivative.
        if _has_transform() or _forward_mode._current_level >= 0 or not getattr(b, "is_cuda", False):
            return _torch_matmul(a, b)
        if _is_stacked(a, b):
            return _of_stacks(a, b, emulate)
        result: Tensor = torch.ops.autotile.matmul(a, b, emulate)
        return result
    key = a.shape, b.shape, a.stride(), b.stride(), a.dtype, emulate
    if _is_grad_enabled() and (a.requires_grad or b.requires_grad):
        by_torch = _decision(key, lambda: _product_of(a, b, emulate), lambda kernel: kernel.is_library)
        if by_torch and _is_plain(a):
            return _torch_product(a, b)(a, b)
        if _is_stacked(a, b):
            return _of_stacks(a, b, emulate)
        recorded: Tensor = _Differentiable.apply(a, b, emulate)
        return recorded
    left = _notes.get(key)
    if left is not None and left[0].choice is left[1] and _is_plain(a):
        left[0].count_call()
        return left[2](a, b)
    return _launched(a, b, emulate)


def _is_stacked(a: Tensor, b: Tensor) -> bool:
    """Whether two factors are other than two matrices, or two stacks of as many."""
    x, y = a.shape, b.shape
    return x[:-2] != y[:-2] or not 2 <= len(x) <= 3 or len(y) < 2


def _of_stacks(a: Tensor, b: Tensor, emulate: bool) -> Tensor:
    """Compute `matmul` of such factors: views of matrices or stacks, and copies of what is broadcast."""
    if not (a.dim() and b.dim()):
        return _torch_matmul(a, b)  # which raises an error
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1), emulate=emulate).squeeze(-1)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b, emulate=emulate).squeeze(-2)
    if b.dim() == 2:
        return matmul(a.flatten(0, -2), b, emulate=emulate).unflatten(0, a.shape[:-1])
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (one.expand(*leading, *one.shape[-2:]).flatten(0, -3) for one in (a, b))
    return matmul(left, right, emulate=emulate).unflatten(0, leading)


def _is_plain(a: Tensor) -> bool:
    """Whether PyTorch's own product is in the dtype of a tensor, and not rounded to TF32."""
    return not (_is_autocast() or (a.dtype is torch.float32 and allows_tf32()))


def _product_of(a: Tensor, b: Tensor, emulate: bool) -> dict[str, Any] | None:
    """Return a product as arguments of `find_product`; None for what is copied first, or refused."""
    x, y = tuple(a.shape), tuple(b.shape)
    kinds = a.dtype == b.dtype in DTYPES and a.is_cuda and a.get_device() == b.get_device()
    if not kinds or len(x) != len(y) or len(x) not in {2, 3} or x[:-2] != y[:-2] or x[-1] != y[-2] or 0 in (*x, *y):
        return None
    orders = stored_transposed(x, a.stride()), stored_transposed(y, b.stride())
    if None in orders:
        return None
    own = {"m": x[-2], "n": y[-1], "k": x[-1], "dtype": DTYPES[a.dtype], "batch": x[0] if len(x) == 3 else 1}
    aligned = not (a.data_ptr() | b.data_ptr()) % VECTOR_BYTES
    rest = {"aligned": aligned, "emulate": emulate, "device": a.get_device()}
    return {**own, "trans_a": orders[0], "trans_b": orders[1], **rest}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, emulate: bool = True) -> Tensor:
    """Compute ``input @ weight.T + bias`` as `torch.nn.functional.linear` does, or faster.

    A kernel is launched where it is known or expected to be faster than PyTorch's own function, with the addition of
    the bias; if autograd records it, PyTorch's must also run for long enough to hide the host's part of that. A product
    of cuBLAS that takes less time than the host needs around it is launched, too, with its bias. All else is left
    to PyTorch: the first call of a size, while the choice is made aside, other dtypes and devices, empty tensors,
    whatever is traced, transformed or under autocast (which keeps converted weights), and float32 where PyTorch may
    round it to TF32. In graphs of ``torch.compile`` and ``torch.export`` it is PyTorch's operator; see `join_inductor`.
    In those of ``torch.compile`` for inference in half precision, factors with rows of an odd length are padded first.

    Parameters
    ----------
    input
        Tensor of shape ``(..., k)``.
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
    RuntimeError
        By PyTorch: shapes, dtypes or devices do not match.
    """
    return _known_linear(input, weight, bias, emulate)


def _known_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool = True, layer: Linear | None = None
) -> Tensor:
    """Compute `linear` as an earlier call of its kind found it; a ``layer`` notes that."""
    if _is_compiling():
        is_exported = _join_traced()
        is_recorded = _is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        is_padded = input.is_cuda and not (is_recorded or is_exported) and _gains_by_padding(input, weight, bias)
        return _padded_linear(input, weight, bias) if is_padded else _torch_linear(input, weight, bias)
    now = EPOCH.now
    try:
        key = (input.shape, weight.shape, input.dtype, emulate, bias is None, _is_grad_enabled())
        left = _notes.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, symbolic sizes, or nested tensors, which have none
        return _torch_linear(input, weight, bias)
    if left is None or left[0].choice is not left[1]:
        return _decided_linear(input, weight, bias, emulate, key)
    kernel, _, function = left
    if layer is not None:
        layer.note(now, (input.numel(), key[-1]), (kernel, function))
    if function is _torch_linear:
        kernel.count_call()
    made: Tensor | None = function(input, weight, bias)
    return made if made is not None else _decided_linear(input, weight, bias, emulate, key)


_LEAST_PADDED = 512
"""Rows, and features of both kinds, from which on a padded product takes less time although what is padded is copied;
with fewer, copies take most of the time. Measured in bfloat16 on an H200 with 777 and 2,047 rows, 512 to 6,149
features."""


def _gains_by_padding(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether rows of an odd length keep a product of a graph from the tensor cores' fast kernels, and its size pays.

    A number of rows that is a symbol does only if its least value is known to. A bias that is broadcast, and factors
    that do not match, are left to PyTorch, whose errors state the sizes.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    is_half = input.dtype == weight.dtype and weight.itemsize == torch.half.itemsize
    if not is_half or type(weight) not in PLAIN or weight.dim() != 2:
        return False
    n, k = weight.shape
    is_odd = bool((n | k) * weight.itemsize % VECTOR_BYTES)
    is_large = min(n, k) >= _LEAST_PADDED and statically_known_true(input.numel() >= _LEAST_PADDED * k)
    return is_odd and is_large and input.shape[-1] == k and (bias is None or bias.shape == weight.shape[:1])


def _padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` in a graph with rows padded by zeros to whole vectors.

    Inductor itself pads some of these products, and copies both factors and the result. As a part of the graph, the
    input is padded by the kernel that computes it, and the result is cut by the one that reads it.
    """
    n, k = weight.shape
    own_n, own_k = (-size % (VECTOR_BYTES // weight.itemsize) for size in (n, k))
    pad = torch.nn.functional.pad
    own_bias = None if bias is None else pad(bias, (0, own_n))
    made = _torch_linear(pad(input, (0, own_k)), pad(weight, (0, own_k, 0, own_n)), own_bias)
    return made.narrow(-1, 0, n).contiguous()


def _decided_linear(input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool, key: tuple[Any, ...]) -> Tensor:
    """Compute `linear` where a kernel may be faster than PyTorch."""
    if not _is_eager(input, weight):  # sizes may be symbols
        return _torch_linear(input, weight, bias)
    dtype, shape = input.dtype, weight.shape
    if not input.numel():  # of an expert, for example, that no token is sent to
        _products.note(key, (_UNSERVED, None, _torch_linear))
    if not (
        input.is_cuda
        and dtype in DTYPES
        and dtype == weight.dtype
        and input.get_device() == weight.get_device()
        and len(shape) == 2
        and input.shape[-1:] == shape[1:]
        and input.numel() > 0
        and shape[0] > 0
        and input.is_contiguous()
        and weight.is_contiguous()
        and (
            bias is None
            or (
                type(bias) in PLAIN
                and bias.dtype == dtype
                and bias.shape == shape[:1]
                and bias.is_contiguous()
                and bias.get_device() == input.get_device()
            )
        )
        and _is_plain(input)
    ):
        return _torch_linear(input, weight, bias)
    needs_grad = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if not (_is_grad_enabled() and needs_grad):
        return _launched_linear(input, weight, bias, emulate, key)

    def gains(kernel: BoundKernel) -> bool:
        is_worthwhile = Gain.of(kernel, final=True).is_worthwhile(bias=bias is not None, host_us=RECORDED_US)
        if not is_worthwhile:
            _leave(key, kernel, _torch_linear)
        return is_worthwhile

    if not _decision(key, lambda: _problem(input, weight, emulate), gains):
        return _torch_linear(input, weight, bias)
    result: Tensor = _RecordedLinear.apply(input, weight, bias, emulate, key)
    return result


def _decision(
    key: object, find_problem: Callable[[], dict[str, Any] | None], decide: Callable[[BoundKernel], bool]
) -> bool:
    """Return the decision on a kind of recorded product, by the kernel that serves it; False if nothing does.

    It stays within checkpoints, which compare what a repeated forward pass saves with what the first one did.
    """
    known = _notes.get(("recorded", key))
    if known is None or (known[0].choice is not known[1] and _hooks_of_saved(True) is None):
        problem = find_problem()
        kernel = find_product(**problem) if problem is not None else None
        decided = kernel is not None and decide(kernel)
        by = kernel if kernel is not None else _UNSERVED
        known = _products.note(("recorded", key), (by, by.choice, decided))
    return bool(known[2])


def _problem(input: Tensor, weight: Tensor, emulate: bool) -> dict[str, Any]:
    """Return the product of a linear layer of contiguous tensors, as arguments of `find_product`."""
    (n, k), aligned = weight.shape, not (input.data_ptr() | weight.data_ptr()) % VECTOR_BYTES
    own = {"m": input.numel() // k, "n": n, "k": k, "dtype": DTYPES[input.dtype], "trans_b": is_transposed(n, k)}
    return own | {"aligned": aligned, "emulate": emulate, "device": input.get_device()}


def _launched_linear(input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool, key: object) -> Tensor:
    """Compute `linear` of contiguous tensors without a gradient, by a kernel if it gains; ``key`` is the kind noted."""
    options = ("linear", emulate)
    known = _products.find(input, weight, options)
    if known is None:
        shape = (*input.shape[:-1], weight.shape[0])
        known = _chosen((input, weight), options, (key, _torch_linear), _problem(input, weight, emulate), shape)
    if known is None:
        return _torch_linear(input, weight, bias)
    kernel = known.kernel
    is_short = kernel.is_library and _is_short(kernel)
    gains = is_short or _gain_of(kernel).is_worthwhile(bias=bias is not None) or read_settings().capture is not None
    result: Tensor | None = known.launch(input, weight, bias=bias if is_short else None) if gains else None
    if result is not None and key is not None:
        _guard(key, known, (input, weight) if bias is None else (input, weight, bias))
    if is_short and result is not None:
        return result
    # A library launches on the current device only.
    if not gains or (result is None and kernel.is_library and not read_settings().capture):
        _leave(key, kernel, _torch_linear)
        kernel.count_call()
        return _torch_linear(input, weight, bias)
    if result is None:
        n, k = weight.shape
        factor = weight.detach() if is_transposed(n, k) else weight.detach().t()
        result = kernel(input.detach().view(-1, k), factor).view(*input.shape[:-1], n)
    return result if bias is None else result.add_(bias.detach())


def _chosen(
    factors: tuple[Tensor, Tensor],
    options: object,
    left: tuple[object, Callable[..., Tensor]],
    problem: dict[str, Any],
    shape: tuple[int, ...],
) -> KnownProduct | None:
    """Choose what computes a new kind of product: aside, and return None, unless the choice must not vary.

    ``left`` is the kind, as a key of the notes, and the function of PyTorch that computes it where no kernel does.
    """
    key, function = left
    keep = _products.keeper(*factors, options, shape)
    if keep is None:
        return None
    always = options in _OPTIONS.values()  # of `matmul`, whose kernels are launched in any case

    def serve() -> BoundKernel | None:  # holds no tensor
        kernel = find_product(**problem)
        if kernel is None:
            _products.note(key, (_UNSERVED, None, function))
        return kernel

    def loads(kernel: BoundKernel) -> bool:
        gain = Gain.of(kernel, final=True)
        return gain.is_short if kernel.is_library else always or gain.is_worthwhile()

    if default_dispatcher.may_defer(MatmulOptions(emulate=problem["emulate"])):
        _products.choose_aside((options, *problem.values()), serve, keep, loads)
        return None
    kernel = serve()
    return keep(kernel) if kernel is not None else None


class _RecordedLinear(torch.autograd.Function):  # type: ignore[misc]
    """`linear` as autograd records it where a kernel gains by being launched."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as autograd passes them
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, emulate: bool, key: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.emulate = emulate
        return _launched_linear(input, weight, bias, emulate, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
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
            None,
        )


_MAX_NOTES = 64
"""Kinds of inputs that a layer notes."""


class Linear(torch.nn.Linear):  # type: ignore[misc]
    """`torch.nn.Linear` that computes by `linear`; parameters, initialization and ``state_dict`` are the same."""

    _noted: tuple[object, dict[tuple[int, bool], tuple[BoundKernel, Callable[..., Tensor | None]]]] | None = None
    """The `EPOCH`, and by the elements of the input and whether autograd is on, the kernel that is served in it and the
    function that computes, as in the notes of all products; a look-up there, by shapes and dtypes, takes 3 us."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        try:  # an attribute that is a parameter takes a call of Python's
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # FSDP and parametrizations keep them elsewhere
            weight, bias = self.weight, self.bias
        # Of other classes, the number of elements may be a symbol.
        if (
            not _is_compiling()
            and type(input) is Tensor
            and (noted := self._noted) is not None
            and noted[0] is EPOCH.now
            and (known := noted[1].get((input.numel(), _is_grad_enabled()))) is not None
        ):
            kernel, function = known
            if function is _torch_linear:
                kernel.count_call()
                return _torch_linear(input, weight, bias)
            if (made := function(input, weight, bias)) is not None:
                return made
        return _known_linear(input, weight, bias, layer=self)

    def note(
        self, epoch: object, kind: tuple[int, bool], known: tuple[BoundKernel, Callable[..., Tensor | None]]
    ) -> None:
        """Compute inputs of a kind alike until the choices in force change."""
        noted = self._noted
        if noted is None or noted[0] is not epoch or len(noted[1]) == _MAX_NOTES:
            self._noted = noted = (epoch, {})
        noted[1][kind] = known

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        self._noted = None  # the parameters may get another dtype or device
        made: Linear = super()._apply(fn, recurse)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_noted"}

    def __prepare_scriptable__(self) -> torch.nn.Linear:  # for torch.jit.script, which puts it in this one's place
        plain = torch.nn.Linear.__new__(torch.nn.Linear)
        vars(plain).update(self.__getstate__())
        return plain
