"""Copies of buffers to the ``__constant__`` variables of a module."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from autotile.core.model import Value
from autotile.cuda.driver import load_driver
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError
from autotile.kernel.spec import KernelSpec

_DEVICE_TO_DEVICE = 3
"""``cudaMemcpyDeviceToDevice``"""


class ConstantCopy(NamedTuple):
    """A copy of a buffer to a variable."""

    buffer: str
    address: int
    """Device address of the variable."""
    size_bytes: int


def constant_copies(spec: KernelSpec, module: int, sizes: Mapping[str, Value], dtype: str) -> tuple[ConstantCopy, ...]:
    """Return the copies that a module needs before a launch.

    A variable that the module does not have, as with another value of a parameter, is left out.

    Parameters
    ----------
    spec, sizes, dtype
        The problem.
    module
        Driver handle of the module.

    Raises
    ------
    InputError
        A buffer is larger than its variable.
    """
    copies = []
    for buffer in spec.buffers:
        if not buffer.constant:
            continue
        found = _variable(module, buffer.constant)
        if found is None:
            continue
        address, variable_bytes = found
        size_bytes = buffer.size_bytes(dtype, sizes)
        if size_bytes > variable_bytes:
            raise InputError(
                f"{spec.source}: {buffer.name} has {size_bytes} bytes, but its __constant__ variable "
                f"{buffer.constant} has {variable_bytes}; declare a larger array in the template"
            )
        copies.append(ConstantCopy(buffer.name, address, size_bytes))
    return tuple(copies)


def copy_constants(copies: tuple[ConstantCopy, ...], pointers: Mapping[str, int], stream: int) -> None:
    """Queue copies of the buffers at the given addresses on a stream."""
    for buffer, address, size_bytes in copies:
        copy_async(address, pointers[buffer], size_bytes, stream)


def copy_async(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy within the device on a stream."""
    load_cupy().cuda.runtime.memcpyAsync(target, source, size_bytes, _DEVICE_TO_DEVICE, stream)


def variable_symbols(name: str) -> tuple[str, ...]:
    """Return the symbols that a variable of a C++ name may have: its own name, or one mangled with its namespaces."""
    parts = name.split("::")
    return (name,) if len(parts) == 1 else (f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E",)


def _variable(module: int, name: str) -> tuple[int, int] | None:
    """Return the device address and the size in bytes of a variable; None if the module has none of that name."""
    address, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    for symbol in variable_symbols(name):
        find = load_driver().cuModuleGetGlobal_v2
        module_handle, text = ctypes.c_void_p(module), ctypes.c_char_p(symbol.encode())
        if find(ctypes.byref(address), ctypes.byref(size_bytes), module_handle, text) == 0:
            return address.value, size_bytes.value
    return None
