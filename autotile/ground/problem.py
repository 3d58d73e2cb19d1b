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

_LARGEST_SIZE = 2**31 - 1
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
        As given; each of the kernel's sizes exactly once, unless ``defaults``.
    dtype
        One of the kernel's; None for its first.
    defaults
        Fill in missing sizes from the search-space file.

    Raises
    ------
    ProblemError
        A size is missing, unknown, not positive or over 2**31 - 1, an array would be empty, or the dtype is not the
        kernel's.
    """
    expected = " ".join(f"{name}={value}" for name, value in spec.sizes.items())
    unknown = [name for name in sizes if name not in spec.sizes]
    if unknown:
        raise ProblemError(f"{spec.name} has no size {unknown[0]!r}; give its sizes like {expected}")
    missing = [name for name in spec.sizes if name not in sizes]
    if missing and not defaults:
        raise ProblemError(f"{spec.name} needs the size {missing[0]}; give its sizes like {expected}")
    values = {name: _whole(name, sizes.get(name, default), default) for name, default in spec.sizes.items()}
    for name, value in values.items():
        if not 1 <= value <= _LARGEST_SIZE:
            raise ProblemError(f"size {name} is {value}, expected 1 to {_LARGEST_SIZE}")
    if dtype is not None and dtype not in spec.dtypes:
        raise ProblemError(f"{spec.name} is not written for dtype {dtype!r}; it takes {', '.join(spec.dtypes)}")
    problem = Problem(spec.name, values, dtype or spec.dtypes[0])
    for buffer in spec.buffers:
        shape = buffer.extents(values)
        if min(shape) < 1:
            raise ProblemError(f"{problem} is too small: its array {buffer.name} would have the shape {shape}")
    return problem


def _whole(name: str, value: object, example: int) -> int:
    """A size as an int, NumPy's integers too."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemError(f"size {name} is {value!r}, expected a whole number such as {example}") from None


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
        element_bytes = DTYPES[buffer.element_type(problem.dtype)].size_bytes
        needed_bytes += elements * element_bytes * (1 if buffer.access == "out" else 2)
        if buffer.access != "in":
            needed_bytes += elements * _FLOAT64_BYTES
    if needed_bytes > device.memory_bytes:
        raise ProblemError(
            f"{problem} needs {needed_bytes / 2**30:,.1f} GiB of device memory to tune, "
            f"but {device.name} has {device.memory_bytes / 2**30:,.1f} GiB; choose smaller sizes"
        )
