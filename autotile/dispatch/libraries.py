"""The two libraries whose arrays are taken at once: what an array must be, where it lies, which stream it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES


class Slot(NamedTuple):
    """What an array must be to be taken at once, and where its address goes."""

    layouts: Mapping[tuple[int, ...], tuple[int, ...]]
    """Strides of a row-major array, in the library's unit, by shape: as declared, and without leading ones."""
    dtypes: tuple[Any, ...]
    """The library's types; bfloat16 may come as its bits."""
    word: int


class Library(Protocol):
    """Arrays of one library."""

    def slot(self, shapes: Iterable[tuple[int, ...]], element_type: str, word: int) -> Slot:
        """What an array of one of these shapes must be."""

    def stream(self, device_index: int) -> int:
        """Address of the library's current stream."""

    def write(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int, words: memoryview) -> bool:
        """Write the arrays' addresses to their words; False where an array is not just right."""


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

    def slot(self, shapes: Iterable[tuple[int, ...]], element_type: str, word: int) -> Slot:
        """What an array of one of these shapes must be."""
        storage = np.dtype(DTYPES[element_type].storage)
        ml_dtypes = sys.modules.get("ml_dtypes")  # CuPy knows bfloat16 by this package
        own = (np.dtype(ml_dtypes.bfloat16),) if element_type == "bfloat16" and ml_dtypes is not None else ()
        return Slot(_layouts(shapes, storage.itemsize), (storage, *own), word)

    def stream(self, device_index: int) -> int:
        """Address of CuPy's current stream."""
        return int(self._stream().ptr)

    def write(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int, words: memoryview) -> bool:
        """Write the arrays' addresses to their words; False where an array is not just right."""
        try:
            for array, (layouts, dtypes, word) in zip(arrays, slots, strict=True):
                memory = array.data
                if layouts.get(array.shape) != array.strides or array.dtype not in dtypes:
                    return False
                if memory.device_id != device_index:
                    return False
                words[word] = memory.ptr
        except AttributeError:  # another library's array
            return False
        return True


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

    def slot(self, shapes: Iterable[tuple[int, ...]], element_type: str, word: int) -> Slot:
        """What a tensor of one of these shapes must be."""
        names = (element_type, DTYPES[element_type].storage)
        dtypes = tuple(dict.fromkeys(getattr(self._torch, name) for name in names if hasattr(self._torch, name)))
        return Slot(_layouts(shapes, 1), dtypes, word)

    def stream(self, device_index: int) -> int:
        """Address of PyTorch's current stream of a device."""
        if self._raw_stream is not None:
            return self._raw_stream(device_index)
        return int(self._torch.cuda.current_stream(device_index).cuda_stream)

    def write(self, arrays: Sequence[Any], slots: Sequence[Slot], device_index: int, words: memoryview) -> bool:
        """Write the tensors' addresses to their words; False where a tensor is not just right."""
        tensor = self._tensor
        for array, (layouts, dtypes, word) in zip(arrays, slots, strict=True):
            if not isinstance(array, tensor) or array.get_device() != device_index or array.dtype not in dtypes:
                return False
            if array.shape not in layouts or not array.is_contiguous():
                return False
            words[word] = array.data_ptr()
        return True


def _layouts(shapes: Iterable[tuple[int, ...]], unit: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {shape: tuple(unit * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))) for shape in shapes}
