"""The arrays of a call: check them, and allocate the outputs that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotile.core.dtypes import DTYPES
from autotile.core.model import Config, Problem
from autotile.errors import ArgumentError
from autotile.kernel.arguments import BufferArgument
from autotile.kernel.spec import KernelSpec
from autotile.serving.arrays import ArraySpec, Library, as_bits, as_cupy, new_array


class CheckedArrays(NamedTuple):
    """The arrays of a call, including the outputs that were left out.

    Attributes
    ----------
    views
        Every buffer as a CuPy array, by name.
    arrays
        The same in order: the caller's own arrays, and new ones of the caller's library and number of axes.
    """

    views: Mapping[str, Any]
    arrays: tuple[Any, ...]


class CallArrays:
    """What the arrays of calls must be, for one problem and configuration.

    Parameters
    ----------
    spec, problem, config
        The kernel, its problem and configuration.
    device_index
        CUDA device of the arrays.

    Attributes
    ----------
    shapes
        Shape of each buffer, by its name.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, config: Config, device_index: int) -> None:
        sizes, dtype = problem.sizes, problem.dtype
        shaped = spec.shaped_sizes(sizes, config)
        self._spec = spec
        self._problem = problem
        self._shaping = {name: config[name] for name in spec.shaping}
        self._device_index = device_index
        self.shapes = {b.name: b.array_shape(shaped) for b in spec.buffers}
        self._element_types = {b.name: b.element_type(dtype, sizes) for b in spec.buffers}

    def check(self, arrays: Sequence[Any]) -> CheckedArrays:
        """Check the arrays of a call, and allocate the outputs that were left out.

        Raises
        ------
        ArgumentError
            There are too few or too many, or one has the wrong shape, dtype, layout or device.
        """
        left_out = self._left_out(len(arrays))
        buffers = self._spec.buffers
        given = iter(arrays)
        own = {b.name: self._checked(b, next(given)) for b in buffers if b.access not in left_out}
        full = self.complete(arrays)
        new = {b.name: self._checked(b, array) for b, array in zip(buffers, full, strict=True) if b.name not in own}
        return CheckedArrays({**own, **new}, full)

    def complete(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arrays of a call: the given ones, and new ones of their library for outputs that were left out.

        Leading axes of extent 1 that the given arrays lack are also left out of the new ones. New in-out buffers are
        zeroed.

        Raises
        ------
        ArgumentError
            There are too few or too many.
        """
        left_out = self._left_out(len(arrays))
        if not left_out:
            return tuple(arrays)
        given = iter(arrays)
        kept = [b for b in self._spec.buffers if b.access not in left_out]
        missing = (
            len(self.shapes[b.name]) - len(getattr(array, "shape", self.shapes[b.name]))
            for b, array in zip(kept, arrays, strict=True)
        )
        dropped = min(missing, default=0)
        return tuple(
            self._new_output(b, dropped, arrays[0]) if b.access in left_out else next(given) for b in self._spec.buffers
        )

    def array_specs(self, library: Library) -> tuple[ArraySpec, ...]:
        """Return what a library's arrays must be to be accepted on the fast path."""
        return tuple(
            library.spec(_with_and_without_ones(self.shapes[b.name]), self._element_types[b.name])
            for b in self._spec.buffers
        )

    def _left_out(self, count: int) -> tuple[str, ...]:
        """Return the kinds of buffers that a call with ``count`` arrays leaves out."""
        buffers = self._spec.buffers
        for left_out in ((), ("out",), ("out", "inout")):
            if count == sum(1 for b in buffers if b.access not in left_out):
                return left_out
        expected = ", ".join(f"{b.name} ({b.access})" for b in buffers)
        raise ArgumentError(f"{self._spec.name} takes the arrays {expected}; got {count}. Outputs may be left out")

    def _new_output(self, buffer: BufferArgument, dropped: int, like: Any) -> Any:
        shape, leading = self.shapes[buffer.name], 0
        while leading < min(dropped, len(shape)) and shape[leading] == 1:
            leading += 1
        return new_array(like, shape[leading:], self._element_types[buffer.name], zeroed=buffer.access == "inout")

    def _checked(self, buffer: BufferArgument, array: Any) -> Any:
        name, shape, element_type = buffer.name, self.shapes[buffer.name], self._element_types[buffer.name]
        view, dtype = as_bits(as_cupy(array, name), element_type), np.dtype(DTYPES[element_type].storage)
        if view.shape != shape and (1,) * (len(shape) - view.ndim) + view.shape != shape:
            with_values = " ".join(f"{name}={value}" for name, value in self._shaping.items())
            served = f" with {with_values}; see the kernel's attribute shapes" if with_values else ""
            raise ArgumentError(f"{name} has shape {view.shape}, expected {shape} for {self._problem}{served}")
        if view.dtype != dtype:
            raise ArgumentError(f"{name} has dtype {view.dtype}, expected {dtype}; convert it with astype")
        if not view.flags.c_contiguous:
            raise ArgumentError(f"{name} is not C-contiguous (row-major); pass cupy.ascontiguousarray({name})")
        if view.data.device_id != self._device_index:
            raise ArgumentError(
                f"{name} is on CUDA device {view.data.device_id}, but the kernel is bound to device "
                f"{self._device_index}; call get_best_kernel with device= of the arrays"
            )
        return view


def _with_and_without_ones(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a shape, and the same without one or more of its leading axes of extent 1."""
    shapes = [shape]
    while shapes[-1] and shapes[-1][0] == 1:
        shapes.append(shapes[-1][1:])
    return tuple(shapes)
