"""Arrays on a CUDA device, of CuPy, PyTorch, JAX, Numba or any library with DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.cuda.driver import device_count
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError

Facts = tuple[tuple[int, tuple[int, ...], Any, bool, int], ...]
"""Of each array: address, shape, type, whether it is row-major, CUDA device (negative where it is on none)."""

Pointers = tuple[int, ...]


class Slot(NamedTuple):
    """What an array must be to be taken at once; besides, it must be row-major and on the device."""

    shapes: tuple[tuple[int, ...], ...]
    """As declared, and without leading ones."""
    dtypes: tuple[Any, ...]
    """The library's types; bfloat16 may come as its bits."""


class Library(Protocol):
    """Arrays of one library."""

    def slot(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> Slot:
        """What an array of one of these shapes must be."""

    def stream(self, device_index: int) -> int:
        """Address of the library's current stream."""

    def facts(self, arrays: Sequence[Any]) -> Facts:
        """What the arrays are; empty where one is another library's."""


def pointers(facts: Facts, slots: Sequence[Slot], device_index: int) -> Pointers | None:
    """The arrays' addresses; None where an array is not what its slot says, row-major and on the device."""
    for (_, shape, dtype, is_row_major, index), (shapes, dtypes) in zip(facts, slots, strict=True):
        if shape not in shapes or dtype not in dtypes or not is_row_major or index != device_index:
            return None
    return tuple([fact[0] for fact in facts])


def library_of(array: Any) -> Library | None:
    """The library of an array; None for any other than CuPy and PyTorch."""
    if type(array) is load_cupy().ndarray:
        return CupyLibrary()
    torch = sys.modules.get("torch")
    return TorchLibrary(torch) if torch is not None and isinstance(array, torch.Tensor) else None


class CupyLibrary:
    """CuPy's arrays."""

    def __init__(self) -> None:
        self._stream: Callable[[int], Any] = load_cupy().cuda.get_current_stream
        self._many_devices = device_count() > 1

    def slot(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> Slot:
        """What an array of one of these shapes must be."""
        storage = np.dtype(DTYPES[element_type].storage)
        ml_dtypes = sys.modules.get("ml_dtypes")  # CuPy knows bfloat16 by this package
        own = (np.dtype(ml_dtypes.bfloat16),) if element_type == "bfloat16" and ml_dtypes is not None else ()
        return Slot(shapes, (storage, *own))

    def stream(self, device_index: int) -> int:
        """Address of CuPy's current stream."""
        pointer: int = self._stream(device_index).ptr  # without the index, CuPy asks CUDA for it
        return pointer

    def facts(self, arrays: Sequence[Any]) -> Facts:
        """What the arrays are; empty where one is another library's."""
        try:  # CuPy's own name for what flags.c_contiguous says seven times as slowly
            if self._many_devices:
                return tuple([(a.data.ptr, a.shape, a.dtype, a._c_contiguous, a.data.device_id) for a in arrays])
            return tuple([(a.data.ptr, a.shape, a.dtype, a._c_contiguous, 0) for a in arrays])
        except AttributeError:
            return ()


class TorchLibrary:
    """PyTorch's tensors.

    Parameters
    ----------
    torch
        The module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # PyTorch's own compiler asks this way, which costs a fortieth of torch.cuda.current_stream.
        self._raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def slot(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> Slot:
        """What a tensor of one of these shapes must be."""
        names = (element_type, DTYPES[element_type].storage)
        dtypes = tuple(dict.fromkeys(getattr(self._torch, name) for name in names if hasattr(self._torch, name)))
        return Slot(shapes, dtypes)

    def stream(self, device_index: int) -> int:
        """Address of PyTorch's current stream of a device."""
        if self._raw_stream is not None:
            return self._raw_stream(device_index)
        return int(self._torch.cuda.current_stream(device_index).cuda_stream)

    def facts(self, arrays: Sequence[Any]) -> Facts:
        """What the tensors are; empty where one is another library's, or has no memory, as sparse ones."""
        try:
            return tuple([(a.data_ptr(), a.shape, a.dtype, a.is_contiguous(), a.get_device()) for a in arrays])
        except (AttributeError, RuntimeError):
            return ()


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
