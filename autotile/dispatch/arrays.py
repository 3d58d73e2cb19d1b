"""Take any array that lives on a CUDA device: CuPy, PyTorch, JAX, Numba."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ArgumentError
from autotile.ground.frozen import dataclass


def as_cupy(array: Any, name: str) -> Any:
    """A CuPy view of an array, without a copy.

    Parameters
    ----------
    array
        A CuPy array, or anything with ``__cuda_array_interface__`` or ``__dlpack__``.
    name
        The argument's name, for the error.

    Raises
    ------
    ArgumentError
        It is none of these, or does not lie on a CUDA device.
    """
    cupy = load_cupy()
    if isinstance(array, cupy.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach()  # of one that requires gradients, PyTorch hands nothing over
    try:
        if hasattr(array, "__cuda_array_interface__"):
            return cupy.asarray(array)
        if hasattr(array, "__dlpack__"):
            return cupy.from_dlpack(array)
    except (RuntimeError, TypeError, ValueError, BufferError, AttributeError) as error:
        raise ArgumentError(f"{name}: this {type(array).__name__} cannot be used on the GPU: {error}") from None
    raise ArgumentError(
        f"{name}: expected an array on the GPU (CuPy, PyTorch, JAX, Numba, or anything with __cuda_array_interface__ "
        f"or DLPack), got {type(array).__name__}; cupy.asarray moves a NumPy array there"
    )


def as_bits(view: Any, element_type: str) -> Any:
    """A CuPy array of bfloat16 as autotile holds it, in uint16; any other as it is.

    Libraries hand bfloat16 over as a type of their own, or as two bytes of no type.
    """
    if element_type == "bfloat16" and view.dtype.itemsize == 2 and view.dtype.kind in "V":
        return view.view(np.uint16)
    return view


def element_type(array: Any, name: str) -> str:
    """Element type of an array of any library by autotile's name, such as ``bfloat16``.

    Raises
    ------
    ArgumentError
        It is none of those that kernels can be written for.
    """
    found = str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
    if found not in DTYPES:
        raise ArgumentError(f"{name} has dtype {found}, expected one of {', '.join(DTYPES)}")
    return found


def new_array(like: Any, shape: tuple[int, ...], element_type: str, *, zeroed: bool) -> Any:
    """An array on the current device: a PyTorch tensor where ``like`` is one, else a CuPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        make = torch.zeros if zeroed else torch.empty
        return make(shape, dtype=getattr(torch, element_type), device=like.device)
    cupy = load_cupy()
    same = getattr(like, "dtype", None) if element_type == "bfloat16" else None
    dtype = same if isinstance(same, np.dtype) and same.name == element_type else DTYPES[element_type].storage
    return (cupy.zeros if zeroed else cupy.empty)(shape, dtype)


@contextmanager
def on_stream(arrays: Sequence[Any], stream: Any = None) -> Iterator[None]:
    """Work on a stream: it is CuPy's current one, and PyTorch's where a tensor is among the arrays.

    What is allocated meanwhile is then given out in the stream's order by either library.

    Parameters
    ----------
    arrays
        Of the call.
    stream
        Of CuPy, of PyTorch, or of any library that knows the CUDA stream protocol (``__cuda_stream__``). None:
        PyTorch's current stream where a tensor is among the arrays, as its users expect a launch on their tensors to be
        ordered by it; else CuPy's.

    Raises
    ------
    ArgumentError
        It is no stream.
    """
    torch = sys.modules.get("torch")
    tensors = (array for array in arrays if torch is not None and isinstance(array, torch.Tensor) and array.is_cuda)
    tensor = next(tensors, None)
    with ExitStack() as entered:
        if stream is not None:
            pointer = _pointer(stream)
            if tensor is not None and torch is not None:
                entered.enter_context(torch.cuda.stream(_as_torch_stream(torch, pointer, tensor.device)))
            entered.enter_context(_as_cupy_stream(stream, pointer))
        elif tensor is not None and torch is not None:
            pointer = torch.cuda.current_stream(tensor.device).cuda_stream
            entered.enter_context(_as_cupy_stream(None, pointer))
        yield


def _pointer(stream: Any) -> int:
    """A stream's address."""
    for attribute in ("ptr", "cuda_stream"):  # CuPy's and PyTorch's
        found = getattr(stream, attribute, None)
        if isinstance(found, int):
            return found
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise ArgumentError(
        f"stream is of type {type(stream).__name__}, expected a stream of CuPy or PyTorch, or any object with "
        "__cuda_stream__"
    )


def _as_cupy_stream(stream: Any, pointer: int) -> Any:
    cuda = load_cupy().cuda
    if isinstance(stream, cuda.Stream | cuda.ExternalStream):
        return stream
    return cuda.Stream.from_external(_StreamPointer(pointer, stream))


def _as_torch_stream(torch: Any, pointer: int, device: Any) -> Any:
    """PyTorch takes the address 0 for no address, and gives some other stream for it."""
    return torch.cuda.ExternalStream(pointer, device=device) if pointer else torch.cuda.default_stream(device)


@dataclass(frozen=True, slots=True)
class _StreamPointer:
    """A CUDA stream by its address, in the protocol that CuPy takes streams by; it keeps the stream it is of."""

    pointer: int
    kept: Any

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer
