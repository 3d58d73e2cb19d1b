"""Kernels as choices of Inductor, the compiler of ``torch.compile``, for the products in its graphs.

Inductor asks one object for the choices of each product, which a setting replaces (``inductor_choices_class``). It is
part of the key of Inductor's cache, so that a graph whose code calls autotile is found only where autotile has joined.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autotile.errors import InputError
from autotile.serving.arrays import VECTOR_BYTES
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.gains import WRAPPED_US, Gain, find_product, stored_transposed
from autotile.torch.products import DTYPES, allows_tf32

_KERNELS_ONLY = (True, True, False, None, False, True)
"""Options of `autotile.matmul` in order: no library, as Inductor has its own, and calls wait for the compiler."""
_NAMES = ("mm", "addmm", "bmm")
_products = default_dispatcher.products


def autotile_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Compute a product, or those of stacks, into a tensor; generated code calls it by this name."""
    is_direct = out.is_contiguous() and not out.data_ptr() % VECTOR_BYTES
    known = _products.find(a, b, _KERNELS_ONLY) if is_direct else None
    if known is not None and known.launch(a, b, out) is not None:
        return out
    made = default_dispatcher.matmul(a, b, out if is_direct else None, library=False, wait=True)
    return out if is_direct else out.copy_(made)


def autotile_addmm(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Compute a product and add a bias, in two kernels; generated code calls it by this name."""
    return autotile_mm(a, b, out=out).add_(bias)


@functools.cache
def _external(name: str) -> Any:
    """Return a kernel that Inductor's code may call, under a name that it looks up when it runs."""
    from torch._inductor.select_algorithm import ExternKernelChoice

    return ExternKernelChoice(autotile_addmm if name == "addmm" else autotile_mm, name=f"autotile_{name}")


def choices_of_inductor() -> Any:
    """Return the object that Inductor asks for the choices of a product; its cache knows this function by name."""
    from torch._inductor.choices import InductorChoices

    class KernelChoices(InductorChoices):  # type: ignore[misc]
        def uuid(self) -> str:  # its part of the key of Inductor's cache since PyTorch 2.13, which requires it
            return f"{choices_of_inductor.__module__}.{choices_of_inductor.__name__}"

        def get_template_configs(
            self, kernel_inputs: Any, templates: Any, op_name: str, *rest: Any, **named: Any
        ) -> Any:
            found = super().get_template_configs(kernel_inputs, templates, op_name, *rest, **named)
            try:
                return _joined(found, kernel_inputs, op_name)
            except Exception:  # whatever it is, the graph is compiled as it would be without autotile
                return found

    return KernelChoices()


def _joined(found: list[Any], inputs: Any, name: str) -> list[Any]:
    """Return the choices for a product with a kernel: raced by max-autotune, else alone, where it gains."""
    from torch._inductor import config
    from torch._inductor.autotune_process import use_pipelined_autotuning
    from torch._inductor.virtualized import V

    races = config.max_autotune or config.max_autotune_gemm
    if (
        not found
        or name not in _NAMES
        or config.inductor_choices_class is not choices_of_inductor
        or V.graph.cpp_wrapper
        or V.graph.aot_mode
        or (races and use_pipelined_autotuning())  # in processes that have not imported autotile
        or any(value != 1 for value in (inputs._scalars or {}).values())
        or any(dtype != inputs.out_dtype() for dtype in inputs.dtypes())
    ):
        return found
    product = _product(*inputs.mat1mat2())
    if product is None:
        return found
    if not races:
        chosen = find_product(**product)
        host_us = 0.0 if config.triton.cudagraphs else WRAPPED_US
        if chosen is None or not Gain.of(chosen, final=True).is_worthwhile(bias=name == "addmm", host_us=host_us):
            return found
    kernel = find_product(**product, library=False, wait=True)
    if kernel is None:
        return found
    kernel.load()  # so that nothing is compiled when the graph runs or is captured
    own = _external(name).bind(inputs.nodes(), inputs.output_layout(flexible=False))
    return [*found, own] if races else [own]


def _product(a: Any, b: Any) -> dict[str, Any] | None:
    """Return the product of two nodes of a graph, as arguments of `find_product`; None if it is left to Inductor."""
    from torch._inductor.virtualized import V

    device, dtype = a.get_device(), a.get_dtype()
    if device.type != "cuda" or dtype not in DTYPES or (dtype is torch.float32 and allows_tf32()):
        return None
    try:
        x, y = ([int(size) for size in one.get_size()] for one in (a, b))
        orders = [
            stored_transposed(shape, [int(stride) for stride in one.get_stride()]) for one, shape in ((a, x), (b, y))
        ]
        offsets = [int(one.get_layout().offset) for one in (a, b)]
    except TypeError:  # a size is a symbol
        return None
    if None in orders or 0 in (*x, *y):
        return None
    aligned = not any(offset * dtype.itemsize % VECTOR_BYTES for offset in offsets)
    aligned = aligned and not any(one.get_name() in V.graph.unaligned_buffers for one in (a, b))
    own = {"m": x[-2], "n": y[-1], "k": x[-1], "batch": x[0] if len(x) == 3 else 1, "dtype": DTYPES[dtype]}
    return {**own, "trans_a": orders[0], "trans_b": orders[1], "aligned": aligned, "device": device.index}


def join_inductor(joins: bool = True) -> None:
    """Let Inductor choose autotile's kernels for the products in graphs that are compiled from now on.

    With ``mode="max-autotune"``, the kernel is one of the choices that Inductor times for a product of two matrices,
    with or without a bias, and of stacks. In other modes it takes the place of cuBLAS where it is known or expected to
    be faster. Inductor's own are: products of sizes that are not known when the graph is compiled, those of other
    dtypes than float32, float16 and bfloat16, float32 where PyTorch may round it to TF32, and code that is compiled
    ahead of time (AOTInductor). A graph with `linear`, or a layer of it, joins by itself, unless ``joins`` was False.

    Parameters
    ----------
    joins
        Whether autotile takes part.

    Raises
    ------
    InputError
        The choices are another program's already.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    current = config.inductor_choices_class
    if current not in (None, choices_of_inductor):
        setting = "torch._inductor.config.inductor_choices_class"
        raise InputError(f"{setting} is {current!r:.80}, expected None; reset it to let autotile join")
    for name in _NAMES:
        _external(name)  # code from Inductor's cache may call it
    config.inductor_choices_class = choices_of_inductor if joins else None
    V.set_choices_handler(choices_of_inductor() if joins else InductorChoices())  # this thread may have one already
    _asked.append(joins)


_asked: list[bool] = []
"""Arguments of the calls of `join_inductor`."""


def join_traced() -> None:
    """Join, unless the program has decided: called while a graph is traced, before Inductor compiles it."""
    if not _asked:
        try:
            join_inductor()
        except InputError:
            _asked.append(False)
