"""The two libraries whose arrays are taken at once: what an array is and must be, which stream it uses.

What arrays are is read in one go, as a key by which a launch on them is found again: what was right once needs no other
check. Reading it is most of what a quick call costs beside the driver's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from autotile.device.properties import device_count
from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES

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
