"""The two libraries whose arrays are taken at once: what an array must be, where it lies, which stream it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from autotile.device.toolchain import load_cupy

_OF_16_BITS = "bfloat16"


class Expected(NamedTuple):
    """What an array must be to be taken at once."""

    shapes: tuple[tuple[int, ...], ...]
    """As declared, and without leading axes of extent 1."""
    dtypes: tuple[Any, ...]
    """Of the library; bfloat16 may come as its bits."""


class Library(Protocol):
    """Arrays of one library."""

    def dtypes(self, name: str) -> tuple[Any, ...]:
        """The library's types for an element type of autotile; empty where it has none."""

    def stream(self, device_index: int) -> int:
        """Address of the library's current stream."""

    def pointers(self, arrays: Sequence[Any], expected: Iterable[Expected], device_index: int) -> list[int] | None:
        """Addresses of the arrays; None where one of them is not just right."""


def library_of(array: Any) -> Library | None:
    """The library of an array; None for any other than CuPy and PyTorch."""
    if type(array) is load_cupy().ndarray:
        return CupyLibrary()
    torch = sys.modules.get("torch")
    return TorchLibrary(torch) if torch is not None and isinstance(array, torch.Tensor) else None


class CupyLibrary:
    """CuPy's arrays."""

    def __init__(self) -> None:
        cupy = load_cupy()
        self._ndarray = cupy.ndarray
        self._stream: Callable[[], Any] = cupy.cuda.get_current_stream

    def dtypes(self, name: str) -> tuple[Any, ...]:
        """NumPy's types; that of bfloat16 belongs to the package ml_dtypes, which CuPy uses where it is installed."""
        import numpy as np

        if name != _OF_16_BITS:
            return (np.dtype(name),)
        ml_dtypes = sys.modules.get("ml_dtypes")
        return (np.dtype("uint16"), *((np.dtype(ml_dtypes.bfloat16),) if ml_dtypes else ()))

    def stream(self, device_index: int) -> int:
        """Address of CuPy's current stream."""
        return int(self._stream().ptr)

    def pointers(self, arrays: Sequence[Any], expected: Iterable[Expected], device_index: int) -> list[int] | None:
        """Addresses of the arrays; None where one of them is not just right."""
        found, ndarray = [], self._ndarray
        for array, (shapes, dtypes) in zip(arrays, expected, strict=True):
            if type(array) is not ndarray or array.shape not in shapes or array.dtype not in dtypes:
                return None
            memory = array.data
            if memory.device_id != device_index or not array.flags.c_contiguous:
                return None
            found.append(memory.ptr)
        return found


class TorchLibrary:
    """PyTorch's tensors.

    Parameters
    ----------
    torch
        The module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor = torch.Tensor
        # PyTorch's own compiler asks this way, which costs a fortieth of torch.cuda.current_stream.
        self._raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def dtypes(self, name: str) -> tuple[Any, ...]:
        """PyTorch's types of that name."""
        names = (name, "uint16") if name == _OF_16_BITS else (name,)
        return tuple(getattr(self._torch, found) for found in names if hasattr(self._torch, found))

    def stream(self, device_index: int) -> int:
        """Address of PyTorch's current stream of a device."""
        if self._raw_stream is not None:
            return self._raw_stream(device_index)
        return int(self._torch.cuda.current_stream(device_index).cuda_stream)

    def pointers(self, arrays: Sequence[Any], expected: Iterable[Expected], device_index: int) -> list[int] | None:
        """Addresses of the tensors; None where one of them is not just right."""
        found, tensor = [], self._tensor
        for array, (shapes, dtypes) in zip(arrays, expected, strict=True):
            if not isinstance(array, tensor) or array.shape not in shapes or array.dtype not in dtypes:
                return None
            if array.get_device() != device_index or not array.is_contiguous():
                return None
            found.append(array.data_ptr())
        return found
