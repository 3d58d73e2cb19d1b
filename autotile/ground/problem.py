"""Turn what the user typed into a checked problem."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ProblemError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem
from autotile.ground.spec import KernelSpec

LARGEST_SIZE = 2**31 - 1
"""Sizes reach kernels as int32 by convention."""
_FLOAT64_BYTES = 8


def resolve_problem(
    spec: KernelSpec, sizes: Mapping[str, int], dtype: str | None = None, *, defaults: bool = False
) -> Problem:
    """Check sizes and dtype against the kernel's own.

    Parameters
    ----------
    spec
        The kernel.
    sizes
        Sizes and flags as given. Flags, and sizes whose default is 1, may be left out; with ``defaults``, all may.
    dtype
        One of the kernel's; None for its first.
    defaults
        Fill in missing sizes from the search-space file.

    Returns
    -------
    Problem
        With every size and flag of the kernel, in the order of its file.

    Raises
    ------
    ProblemError
        A size is missing, unknown, not positive or over 2**31 - 1, a flag is not 0 or 1, an array would be empty, or
        the dtype is not the kernel's.
    """
    expected = " ".join(f"{name}={value}" for name, value in spec.sizes.items())
    unknown = [name for name in sizes if name not in spec.sizes]
    if unknown:
        raise ProblemError(f"{spec.name} has no size {unknown[0]!r}; give its sizes like {expected}")
    missing = [name for name in spec.sizes if name not in sizes and not spec.may_be_left_out(name)]
    if missing and not defaults:
        raise ProblemError(f"{spec.name} needs the size {missing[0]}; give its sizes like {expected}")
    values = {name: _value(spec, name, sizes.get(name, default)) for name, default in spec.sizes.items()}
    if dtype is not None and dtype not in spec.dtypes:
        raise ProblemError(f"{spec.name} is not written for dtype {dtype!r}; it takes {', '.join(spec.dtypes)}")
    problem = Problem(spec.name, values, dtype or spec.dtypes[0])
    for buffer in spec.buffers:
        shape = buffer.extents(values)
        if min(shape) < 1:
            raise ProblemError(f"{problem} is too small: its array {buffer.name} would have the shape {shape}")
    return problem


def _value(spec: KernelSpec, name: str, given: object) -> int:
    """A size or flag as an int; NumPy's integers are taken too, and booleans for flags."""
    is_flag = name in spec.flags
    try:
        if isinstance(given, bool) and not is_flag:
            raise TypeError
        value = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        wanted = "0 or 1" if is_flag else f"a whole number such as {spec.sizes[name]}"
        raise ProblemError(f"{'flag' if is_flag else 'size'} {name} is {given!r}, expected {wanted}") from None
    if is_flag and value not in (0, 1):
        raise ProblemError(f"flag {name} is {value}, expected 0 or 1")
    if not is_flag and not 1 <= value <= LARGEST_SIZE:
        raise ProblemError(f"size {name} is {value}, expected 1 to {LARGEST_SIZE}")
    return value


def size_distance(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[int, float]:
    """How far apart two problems of a kernel are: flags that differ, then doublings over all sizes.

    Names that only one of them has are passed over.
    """
    pairs = [(a[name], b[name]) for name in a.keys() & b.keys() if a[name] != b[name]]
    flags = sum(1 for pair in pairs if 0 in pair)  # a size is at least 1
    return flags, math.fsum(abs(math.log2(first / second)) for first, second in pairs if first and second)


def check_memory(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> None:
    """Refuse a problem that cannot be tuned in the device's memory.

    Tuning holds each buffer once, each input twice (to see that it stays unchanged) and each output in float64.

    Raises
    ------
    ProblemError
        More memory is needed than the device has.
    """
    needed_bytes = device.l2_bytes
    for buffer in spec.buffers:
        elements = math.prod(buffer.extents(problem.sizes))
        element_bytes = DTYPES[buffer.element_type(problem.dtype, problem.sizes)].size_bytes
        needed_bytes += elements * element_bytes * (1 if buffer.access == "out" else 2)
        if buffer.access != "in":
            needed_bytes += elements * _FLOAT64_BYTES
    if needed_bytes > device.memory_bytes:
        raise ProblemError(
            f"{problem} needs {needed_bytes / 2**30:,.1f} GiB of device memory to tune, "
            f"but {device.name} has {device.memory_bytes / 2**30:,.1f} GiB; choose smaller sizes"
        )
