"""From the arrays of a call to a launch: check them, add what was left out, put the arguments together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotile.device.arguments import pack_arguments
from autotile.device.module import Function
from autotile.device.scalars import encode_scalar, scalar_value
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import as_cupy
from autotile.dispatch.stream_workspaces import StreamWorkspaces
from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ArgumentError
from autotile.ground.geometry import known_names
from autotile.ground.hardware import DeviceProperties
from autotile.ground.launch_data import LaunchData
from autotile.ground.model import Config, LaunchGeometry, Problem
from autotile.ground.spec import BufferArgument, KernelSpec, ScalarArgument


class Given(NamedTuple):
    """The arrays of a call, with the outputs that were left out.

    Attributes
    ----------
    views
        Every buffer as a CuPy array of the declared shape, by name.
    outputs
        What the call returns: the caller's own arrays, and new ones in the rank of the caller's.
    """

    views: Mapping[str, Any]
    outputs: tuple[Any, ...]


class Caller:
    """How a kernel with a configuration is called for a problem.

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
        self._geometry = geometry
        self._device_index = device_index
        self._shapes = {b.name: b.extents(sizes) for b in spec.buffers}
        self._dtypes = {b.name: np.dtype(DTYPES[b.element_type(dtype, sizes)].storage) for b in spec.buffers}
        self._scalars = {s.name: scalar_value(s, sizes, dtype, check=False) for s in spec.scalars}
        self._data = LaunchData.of(spec, dtype, known_names(spec, config, sizes, device))
        self._workspaces = StreamWorkspaces(self._data.workspaces)

    def take(self, arrays: Sequence[Any]) -> Given:
        """Check the arrays and allocate the outputs that are not among them.

        Leading axes of extent 1 may be missing; they are then missing in new outputs as well.

        Raises
        ------
        ArgumentError
            There are too few or too many, or one has the wrong shape, dtype, layout or device.
        """
        buffers = self._spec.buffers
        for left_out in ((), ("out",), ("out", "inout")):
            if len(arrays) == sum(1 for b in buffers if b.access not in left_out):
                break
        else:
            expected = ", ".join(f"{b.name} ({b.access})" for b in buffers)
            raise ArgumentError(
                f"{self._spec.name} takes the arrays {expected}; got {len(arrays)}. Outputs may be left out"
            )
        own = {b.name: array for b, array in zip((b for b in buffers if b.access not in left_out), arrays, strict=True)}
        views = {b.name: self._checked(b, own[b.name]) for b in buffers if b.name in own}
        dropped = min((len(self._shapes[name]) - len(array.shape) for name, array in own.items()), default=0)
        new = {b.name: self._new_output(b) for b in buffers if b.name not in own}
        outputs = tuple(
            own[b.name] if b.name in own else _without_leading_ones(new[b.name], dropped)
            for b in buffers
            if b.access != "in"
        )
        return Given({**views, **new}, outputs)

    def launcher(
        self, function: Function, views: Mapping[str, Any], scalars: Mapping[str, float]
    ) -> Callable[[], None]:
        """What launches on CuPy's current stream; it keeps the arrays alive.

        Raises
        ------
        ArgumentError
            There is no such scalar, its value does not fit, or an array starts where a tensor map cannot.
        ToolchainError
            The driver refuses a tensor map.
        """
        pointers = {name: int(view.data.ptr) for name, view in views.items()}
        values = {**self._scalars, **{name: self._override(name, value) for name, value in scalars.items()}}
        grid, block, smem_bytes = self._geometry.grid, self._geometry.block, self._geometry.dynamic_smem_bytes

        def pack(workspaces: Mapping[str, int]) -> tuple[Any, ...]:
            return pack_arguments(self._spec, self._data, pointers=pointers, scalars=values, workspaces=workspaces)

        packed = None if self._workspaces else pack({})

        def launch(kept_alive: Mapping[str, Any] = views) -> None:
            arguments = packed if packed is not None else pack(self._workspaces.pointers())
            function.launch(grid, block, arguments, smem_bytes)

        return launch

    def _new_output(self, buffer: BufferArgument) -> Any:
        cupy = load_cupy()
        make = cupy.zeros if buffer.access == "inout" else cupy.empty
        return make(self._shapes[buffer.name], dtype=self._dtypes[buffer.name])

    def _checked(self, buffer: BufferArgument, array: Any) -> Any:
        view = as_cupy(array, buffer.name)
        name, shape, dtype = buffer.name, self._shapes[buffer.name], self._dtypes[buffer.name]
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


def _without_leading_ones(array: Any, most: int) -> Any:
    """An array without up to ``most`` leading axes of extent 1."""
    shape = array.shape
    while most > 0 and shape and shape[0] == 1:
        shape, most = shape[1:], most - 1
    return array.reshape(shape)
