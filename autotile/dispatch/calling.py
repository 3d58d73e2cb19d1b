"""From the arrays of a call to a launch: check them, add what was left out, put the arguments together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotile.device.arguments import pack_arguments
from autotile.device.scalars import encode_scalar, scalar_value
from autotile.dispatch.arrays import as_bits, as_cupy, new_array
from autotile.dispatch.lanes import MapPlace, Places
from autotile.dispatch.libraries import Library, Slot
from autotile.dispatch.stream_workspaces import StreamWorkspaces
from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ArgumentError
from autotile.ground.geometry import known_names
from autotile.ground.hardware import DeviceProperties
from autotile.ground.launch_data import LaunchData
from autotile.ground.model import Config, LaunchGeometry, Problem
from autotile.ground.spec import BufferArgument, KernelSpec, ScalarArgument, TensorMapArgument


class Given(NamedTuple):
    """The arrays of a call, with the outputs that were left out.

    Attributes
    ----------
    views
        Every buffer as a CuPy array of the declared shape, by name.
    arrays
        The same in order: the caller's own arrays, and new ones of the library and the rank of the caller's.
    """

    views: Mapping[str, Any]
    arrays: tuple[Any, ...]


class Caller:
    """How a kernel with a configuration is called for a problem.

    Attributes
    ----------
    geometry
        Of its launches.
    workspaces
        What each stream has of its own.

    Parameters
    ----------
    spec, problem, config, geometry
        What is called.
    device, device_index
        Where.

    Raises
    ------
    ArgumentError
        A scalar that the problem binds does not fit in its type.
    """

    def __init__(
        self,
        spec: KernelSpec,
        problem: Problem,
        config: Config,
        *,
        geometry: LaunchGeometry,
        device: DeviceProperties,
        device_index: int | None,
    ) -> None:
        sizes, dtype = problem.sizes, problem.dtype
        self._spec = spec
        self._problem = problem
        self.geometry = geometry
        self._device_index = device_index
        self._shapes = {b.name: b.extents(sizes) for b in spec.buffers}
        self._element_types = {b.name: b.element_type(dtype, sizes) for b in spec.buffers}
        self._scalars = {s.name: scalar_value(s, sizes, dtype, check=False) for s in spec.scalars}
        self._data = LaunchData.of(spec, dtype, known_names(spec, config, sizes, device))
        self.workspaces = StreamWorkspaces(self._data.workspaces)

    def take(self, arrays: Sequence[Any]) -> Given:
        """Check the arrays and allocate the outputs that are not among them.

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
        return Given({**own, **new}, full)

    def complete(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """All arrays of a call: the given ones, and new ones of their library for the outputs that were left out.

        Leading axes of extent 1 may be missing in the given arrays; they are then missing in the new ones as well. A
        new in-out buffer holds zeros.

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
            len(self._shapes[b.name]) - len(getattr(array, "shape", self._shapes[b.name]))
            for b, array in zip(kept, arrays, strict=True)
        )
        dropped = min(missing, default=0)
        return tuple(
            self._new_output(b, dropped, arrays[0]) if b.access in left_out else next(given) for b in self._spec.buffers
        )

    def pack(
        self, views: Mapping[str, Any], scalars: Mapping[str, float], workspaces: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """The kernel's parameters, in order.

        Raises
        ------
        ArgumentError
            There is no such scalar, its value does not fit, or an array starts where a tensor map cannot.
        ToolchainError
            The driver refuses a tensor map.
        """
        pointers = {name: int(view.data.ptr) for name, view in views.items()}
        values = {**self._scalars, **{name: self._override(name, value) for name, value in scalars.items()}}
        return pack_arguments(self._spec, self._data, pointers=pointers, scalars=values, workspaces=workspaces)

    def slots(self, library: Library) -> tuple[Slot, ...]:
        """What the arrays of a library must be to be taken at once."""
        return tuple(
            library.slot(_with_and_without_ones(self._shapes[b.name]), self._element_types[b.name])
            for b in self._spec.buffers
        )

    def places(self, starts: Sequence[int], words: int) -> Places:
        """Where the addresses of the arrays stand, and the tensor maps.

        Parameters
        ----------
        starts
            Word at which each of the packed parameters starts.
        words
            Words in all; the last ones, as many as there are buffers, are for addresses that are no parameters.
        """
        buffers = self._spec.buffers
        passed = [a for a in self._spec.arguments if not isinstance(a, BufferArgument) or a.passed]
        found = list(zip(passed, starts, strict=True))
        spare = {b.name: words - len(buffers) + i for i, b in enumerate(buffers)}
        word = spare | {a.name: start for a, start in found if isinstance(a, BufferArgument)}
        maps = {tensor_map.name: tensor_map for tensor_map in self._data.tensor_maps}
        map_places = (
            MapPlace(word[a.buffer], start, maps[a.name])
            for a, start in found
            if isinstance(a, TensorMapArgument) and a.name in maps
        )
        return Places(tuple(word[b.name] for b in buffers), tuple(map_places))

    def _left_out(self, count: int) -> tuple[str, ...]:
        """Kinds of buffers that a call with so many arrays leaves out."""
        buffers = self._spec.buffers
        for left_out in ((), ("out",), ("out", "inout")):
            if count == sum(1 for b in buffers if b.access not in left_out):
                return left_out
        expected = ", ".join(f"{b.name} ({b.access})" for b in buffers)
        raise ArgumentError(f"{self._spec.name} takes the arrays {expected}; got {count}. Outputs may be left out")

    def _new_output(self, buffer: BufferArgument, dropped: int, like: Any) -> Any:
        shape, leading = self._shapes[buffer.name], 0
        while leading < min(dropped, len(shape)) and shape[leading] == 1:
            leading += 1
        return new_array(like, shape[leading:], self._element_types[buffer.name], zeroed=buffer.access == "inout")

    def _checked(self, buffer: BufferArgument, array: Any) -> Any:
        name, shape, element_type = buffer.name, self._shapes[buffer.name], self._element_types[buffer.name]
        view, dtype = as_bits(as_cupy(array, name), element_type), np.dtype(DTYPES[element_type].storage)
        if view.shape != shape and (1,) * (len(shape) - view.ndim) + view.shape != shape:
            raise ArgumentError(f"{name} has shape {view.shape}, expected {shape} for {self._problem}")
        if view.dtype != dtype:
            raise ArgumentError(f"{name} has dtype {view.dtype}, expected {dtype}; convert it with astype")
        if not view.flags.c_contiguous:
            raise ArgumentError(f"{name} is not C-contiguous (row-major); pass cupy.ascontiguousarray({name})")
        if view.data.device_id != self._device_index:
            raise ArgumentError(
                f"{name} is on CUDA device {view.data.device_id}, but the kernel serves device {self._device_index}; "
                "ask get_best_kernel with device= of the arrays"
            )
        return view

    def _override(self, name: str, value: float) -> Any:
        free = {s.name: s for s in self._spec.scalars if isinstance(s.value, int | float)}
        scalar: ScalarArgument | None = free.get(name)
        if scalar is None:
            known = ", ".join(free) or "none"
            raise ArgumentError(f"{self._spec.name} has no scalar {name!r} to set; scalars with a default: {known}")
        return encode_scalar(scalar, value, self._problem.dtype)


def _with_and_without_ones(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """A shape, and what is left of it without one or more leading axes of extent 1."""
    shapes = [shape]
    while shapes[-1] and shapes[-1][0] == 1:
        shapes.append(shapes[-1][1:])
    return tuple(shapes)
