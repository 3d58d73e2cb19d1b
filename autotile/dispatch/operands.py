"""Matrices as they lie in memory: which way round, how many, how aligned."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from autotile.device.properties import device_count
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import as_bits, as_cupy, element_type
from autotile.dispatch.libraries import library_of
from autotile.ground.errors import ArgumentError

_ALIGNED_BYTES = 16
"""What 128-bit accesses and tensor maps ask of a pointer (CUDA C++ Programming Guide, tensor maps)."""


class Operand(NamedTuple):
    """One factor of a product, as a kernel takes it: row-major, or row-major of its transpose.

    Attributes
    ----------
    array
        CuPy array or PyTorch tensor of shape ``(rows, columns)`` or ``(batch, rows, columns)``.
    transpose
        Whether the factor is the transpose of what is stored.
    copy
        Whether it lies neither way round and must be copied first.
    """

    array: Any
    transpose: bool
    copy: bool

    @property
    def batch(self) -> int:
        """Matrices that lie one after the other."""
        return int(self.array.shape[0]) if len(self.array.shape) == 3 else 1

    def stored(self) -> Any:
        """What the kernel is given: row-major, in the order of the memory."""
        if self.copy:
            return self.array.contiguous() if hasattr(self.array, "contiguous") else self.array.copy(order="C")
        return self.array.swapaxes(-1, -2) if self.transpose else self.array


def native(array: Any, name: str) -> Any:
    """A CuPy array or a PyTorch tensor as it is, and any other array as a CuPy view.

    Raises
    ------
    ArgumentError
        It is no array on a GPU.
    """
    if library_of(array) is not None and device_index(array) >= 0:
        return array
    return as_bits(as_cupy(array, name), element_type(array, name))


def as_operand(array: Any, name: str) -> Operand:
    """Take a matrix or a stack of matrices as it lies.

    Parameters
    ----------
    array
        As `native` gives it.
    name
        For the error.

    Raises
    ------
    ArgumentError
        It has another number of axes than 2 or 3, or is empty.
    """
    shape = tuple(array.shape)
    if len(shape) not in (2, 3):
        raise ArgumentError(f"{name} has shape {shape}, expected a matrix or a stack of matrices (2 or 3 axes)")
    if 0 in shape:
        raise ArgumentError(f"{name} has shape {shape}, expected at least one element")
    if _is_contiguous(array):
        return Operand(array, transpose=False, copy=False)
    transpose = _is_contiguous(array.swapaxes(-1, -2))
    return Operand(array, transpose=transpose, copy=not transpose)


def address(array: Any) -> int:
    """Device address of a CuPy array or a PyTorch tensor."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


def device_index(array: Any) -> int:
    """CUDA device of a CuPy array or a PyTorch tensor; -1 for a tensor on the host."""
    return int(array.get_device() if hasattr(array, "get_device") else array.data.device_id)


def is_elsewhere(array: Any) -> bool:
    """Whether a CuPy array or a PyTorch tensor lies on another device than the current one."""
    return _has_several_devices() and int(load_cupy().cuda.runtime.getDevice()) != device_index(array)


def are_aligned(*arrays: Any) -> bool:
    """Whether all arrays start on 16 bytes."""
    return all(address(array) % _ALIGNED_BYTES == 0 for array in arrays)


@cache
def _has_several_devices() -> bool:
    return device_count() > 1


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous)
