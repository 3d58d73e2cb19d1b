"""A kernel bound to a configuration and a problem: call it with arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import numpy as np

from autotile.device.compiler import compile_job
from autotile.device.cubin_cache import CachedCubin, CubinCache
from autotile.device.module import Function, Module
from autotile.device.scalars import encode_scalar, scalar_value
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import as_cupy, foreign_stream
from autotile.dispatch.choose import Choice, Tier
from autotile.dispatch.explain import explain
from autotile.files.library import Kernel
from autotile.files.settings import read_settings
from autotile.ground.dtypes import DTYPES
from autotile.ground.errors import ArgumentError, ToolchainError
from autotile.ground.geometry import launch_geometry
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources
from autotile.ground.resource_gate import compiled_occupancy
from autotile.ground.spec import BufferArgument, ScalarArgument


class BoundKernel:
    """A served kernel: ``kernel(A, B, C)`` launches it.

    It compiles at the first launch, or finds its cubin in the cache. One object may be called from many threads.

    Attributes
    ----------
    kernel
        Name of the kernel.
    problem
        Sizes and dtype that it is bound to.
    config
        The configuration it runs.
    tier
        ``exact``, ``nearest``, ``transferred`` or ``default``; `explain` says why.
    measurement
        Time of the configuration where it was tuned; None for the default.
    device
        The device that it is served for.
    source
        ``cuda`` for a result measured here, ``replayed`` for one from a recording, empty for the default.

    Parameters
    ----------
    kernel, problem, device, choice
        What is served, and for what.
    device_index
        CUDA device to launch on; None where the kernel can only be looked at.

    Raises
    ------
    ArgumentError
        A scalar that the problem binds does not fit in its type.
    """

    def __init__(
        self, kernel: Kernel, problem: Problem, device: DeviceProperties, device_index: int | None, choice: Choice
    ) -> None:
        self.kernel = kernel.name
        self.problem = problem
        self.device = device
        self._kernel = kernel
        self._choice = choice
        self._device_index = device_index
        self._geometry = launch_geometry(kernel.spec, choice.config, problem.sizes, device)
        sizes, dtype = problem.sizes, problem.dtype
        self._shapes = {b.name: b.extents(sizes) for b in kernel.spec.buffers}
        self._dtypes = {b.name: np.dtype(DTYPES[b.element_type(dtype, sizes)].storage) for b in kernel.spec.buffers}
        self._scalars = {s.name: scalar_value(s, sizes, dtype, check=False) for s in kernel.spec.scalars}
        self._cubin: CachedCubin | None = None
        self._function: Function | None = None
        self._lock = threading.Lock()

    @property
    def config(self) -> Config:
        """The configuration that is served."""
        return self._choice.config

    @property
    def tier(self) -> Tier:
        """How well the configuration fits what was asked for."""
        return self._choice.tier

    @property
    def measurement(self) -> Measurement | None:
        """Time of the configuration where it was tuned."""
        return self._choice.measurement

    @property
    def source(self) -> str:
        """Where the measurement comes from."""
        return self._choice.source

    @property
    def tuned_on(self) -> str:
        """Name of the GPU that the configuration was tuned on; empty for the default."""
        return self._choice.tuned_on

    @property
    def tuned_at(self) -> datetime | None:
        """When the configuration was tuned (UTC)."""
        return self._choice.tuned_at

    @property
    def geometry(self) -> LaunchGeometry:
        """Grid, block and dynamic shared memory of the launch."""
        return self._geometry

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and static shared memory; compiled now where they are not known, None without NVRTC."""
        if self._choice.resources is not None and self.tuned_on == self.device.name:
            return self._choice.resources
        try:
            return self._compiled().resources
        except ToolchainError:
            return None

    @property
    def occupancy(self) -> Occupancy | None:
        """Blocks per SM and the limit that binds; None where the resources are unknown."""
        resources = self.resources
        return compiled_occupancy(self._geometry, resources, self.device) if resources is not None else None

    def explain(self) -> str:
        """A short paragraph: what is served, why, what differs, and how old the result is."""
        return explain(self.problem, self.device, self._choice)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of what is served."""
        resources, occupancy, measurement = self.resources, self.occupancy, self.measurement
        return {
            "kernel": self.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "tier": self.tier,
            "config": dict(self.config),
            "time_us": measurement.time_us if measurement else None,
            "interval_us": [measurement.low_us, measurement.high_us] if measurement else None,
            "device": {"name": self.device.name, "source": self.device.source},
            "source": self.source,
            "tuned_on": self.tuned_on,
            "tuned_at": self.tuned_at.isoformat() if self.tuned_at else None,
            "differences": [list(difference) for difference in self._choice.differences],
            "resources": {
                "registers": resources.registers,
                "spill_bytes": resources.spill_bytes,
                "static_smem_bytes": resources.static_smem_bytes,
                "dynamic_smem_bytes": self._geometry.dynamic_smem_bytes,
                "threads": self._geometry.threads,
                "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
                "occupancy": occupancy.occupancy if occupancy else None,
                "limited_by": list(occupancy.limited_by) if occupancy else None,
            }
            if resources is not None
            else None,
            "explain": self.explain(),
        }

    def __repr__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"<BoundKernel {self.problem} on {self.device.name}: {self.tier}, {config}>"

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Launch on the arrays, asynchronously.

        Parameters
        ----------
        *arrays
            The kernel's buffers in order. Outputs may be left out and are then allocated; an in-out buffer left out
            starts as zeros.
        stream
            A ``cupy.cuda.Stream``. None: PyTorch's current stream for PyTorch tensors, else CuPy's current stream.
        **scalars
            Scalars with a default, such as ``alpha``.

        Returns
        -------
        array or tuple of arrays
            The output buffers.

        Raises
        ------
        ArgumentError
            An array has the wrong shape, dtype, layout or device, or a scalar is unknown.
        ToolchainError
            There is no CUDA device, or the toolchain is missing.
        CompileError
            The template does not compile.
        """
        function = self._function or self._load()
        stream = stream or foreign_stream(arrays)
        with load_cupy().cuda.Device(self._device_index), stream if stream is not None else nullcontext():
            given = self._with_outputs(arrays)
            self._launcher(function, given, scalars)()
        outputs = tuple(a for b, a in zip(self._kernel.spec.buffers, given, strict=True) if b.access != "in")
        return outputs[0] if len(outputs) == 1 else outputs

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """A launch on fixed arrays, checked once: each call of what it returns launches on CuPy's current stream.

        Parameters
        ----------
        *arrays
            All of the kernel's buffers, in order. They are kept alive by what is returned.
        **scalars
            Scalars with a default, such as ``alpha``.

        Raises
        ------
        ArgumentError, ToolchainError, CompileError
            As for a call.
        """
        function = self._function or self._load()
        return self._launcher(function, self._with_outputs(arrays), scalars)

    def _launcher(self, function: Function, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        views = [self._checked(b, array) for b, array in zip(self._kernel.spec.buffers, arrays, strict=True)]
        values = self._arguments(views, scalars)
        geometry = self._geometry
        return lambda: function.launch(geometry.grid, geometry.block, values, geometry.dynamic_smem_bytes)

    def _with_outputs(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays in the kernel's order, with the outputs that were left out."""
        buffers = self._kernel.spec.buffers
        for left_out in ((), ("out",), ("out", "inout")):
            if len(arrays) == sum(1 for b in buffers if b.access not in left_out):
                given = iter(arrays)
                return [self._new_output(b) if b.access in left_out else next(given) for b in buffers]
        expected = ", ".join(f"{b.name} ({b.access})" for b in buffers)
        raise ArgumentError(f"{self.kernel} takes the arrays {expected}; got {len(arrays)}. Outputs may be left out")

    def _new_output(self, buffer: BufferArgument) -> Any:
        cupy = load_cupy()
        make = cupy.zeros if buffer.access == "inout" else cupy.empty
        return make(self._shapes[buffer.name], dtype=self._dtypes[buffer.name])

    def _checked(self, buffer: BufferArgument, array: Any) -> Any:
        view = as_cupy(array, buffer.name)
        name, shape, dtype = buffer.name, self._shapes[buffer.name], self._dtypes[buffer.name]
        if view.shape != shape:
            raise ArgumentError(f"{name} has shape {view.shape}, expected {shape} for {self.problem}")
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

    def _arguments(self, views: Sequence[Any], scalars: Mapping[str, float]) -> tuple[Any, ...]:
        values = self._scalars
        if scalars:
            values = {**values, **{name: self._override(name, value) for name, value in scalars.items()}}
        arrays = iter(views)
        return tuple(
            next(arrays) if isinstance(argument, BufferArgument) else values[argument.name]
            for argument in self._kernel.spec.arguments
        )

    def _override(self, name: str, value: float) -> Any:
        free = {s.name: s for s in self._kernel.spec.scalars if isinstance(s.value, int | float)}
        scalar: ScalarArgument | None = free.get(name)
        if scalar is None:
            known = ", ".join(free) or "none"
            raise ArgumentError(f"{self.kernel} has no scalar {name!r} to set; scalars with a default: {known}")
        return encode_scalar(scalar, value, self.problem.dtype)

    def _load(self) -> Function:
        """Compile or find the cubin and load it, once."""
        if self._device_index is None:
            raise ToolchainError(
                f"{self.kernel} was served for a look at {self.device.name}, not for a CUDA device of this machine; "
                "to launch it, call get_best_kernel where there is one, and without the device's name"
            )
        with self._lock:
            if self._function is None:
                with load_cupy().cuda.Device(self._device_index):
                    function = Module(self._compiled().path).function(self._kernel.spec.entry)
                    function.opt_in(self._geometry.dynamic_smem_bytes)
                self._function = function
            return self._function

    def _compiled(self) -> CachedCubin:
        if self._cubin is None:
            settings = read_settings()
            problem = self.problem
            job = compile_job(self._kernel, self.config, problem.dtype, self.device.architecture, problem.sizes)
            self._cubin = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
        return self._cubin
