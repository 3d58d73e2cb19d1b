"""The two libraries whose arrays are taken at once: what an array must be, where it lies, which stream it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from autotile.device.properties import device_count
from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES


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

    def pointers(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int) -> tuple[int, ...] | None:
        """The arrays' addresses; None where an array is not just right. There is a slot for each array."""


def library_of(array: Any) -> Library | None:
    """The library of an array; None for any other than CuPy and PyTorch."""
    if type(array) is load_cupy().ndarray:
        return CupyLibrary()
    torch = sys.modules.get("torch")
    return TorchLibrary(torch) if torch is not None and isinstance(array, torch.Tensor) else None


class CupyLibrary:
    """CuPy's arrays."""

    def __init__(self) -> None:
        self._stream: Callable[[], Any] = load_cupy().cuda.get_current_stream
        self._many_devices = device_count() > 1

    def slot(self, shapes: tuple[tuple[int, ...], ...], element_type: str) -> Slot:
        """What an array of one of these shapes must be."""
        storage = np.dtype(DTYPES[element_type].storage)
        ml_dtypes = sys.modules.get("ml_dtypes")  # CuPy knows bfloat16 by this package
        own = (np.dtype(ml_dtypes.bfloat16),) if element_type == "bfloat16" and ml_dtypes is not None else ()
        return Slot(shapes, (storage, *own))

    def stream(self, device_index: int) -> int:
        """Address of CuPy's current stream."""
        pointer: int = self._stream().ptr
        return pointer

    def pointers(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int) -> tuple[int, ...] | None:
        """The arrays' addresses; None where an array is not just right. There is a slot for each array."""
        many, found = self._many_devices, []
        try:
            for array, (shapes, dtypes) in zip(arrays, slots):  # noqa: B905 - they were counted
                # CuPy's own name for what flags.c_contiguous says seven times as slowly.
                if array.shape not in shapes or array.dtype not in dtypes or not array._c_contiguous:
                    return None
                memory = array.data
                if many and memory.device_id != device_index:
                    return None
                found.append(memory.ptr)
        except AttributeError:  # another library's array
            return None
        return tuple(found)


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

    def pointers(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int) -> tuple[int, ...] | None:
        """The tensors' addresses; None where a tensor is not just right. There is a slot for each tensor."""
        tensor, found = self._tensor, []
        for array, (shapes, dtypes) in zip(arrays, slots):  # noqa: B905 - they were counted
            if not isinstance(array, tensor) or array.get_device() != device_index or array.dtype not in dtypes:
                return None
            if array.shape not in shapes or not array.is_contiguous():
                return None
            found.append(array.data_ptr())
        return tuple(found)
