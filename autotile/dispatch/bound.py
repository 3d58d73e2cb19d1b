"""A kernel bound to a configuration and a problem: call it with arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from autotile.device.capture import outside_of_captures
from autotile.device.compiler import compile_job
from autotile.device.cubin_cache import CachedCubin, CubinCache
from autotile.device.module import Module, PackedCubin
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import on_stream
from autotile.dispatch.calling import Caller
from autotile.dispatch.choose import Choice, Tier
from autotile.dispatch.launching import Launching
from autotile.files.library import Kernel
from autotile.files.settings import read_settings
from autotile.ground.errors import ToolchainError
from autotile.ground.geometry import launch_geometry
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources
from autotile.ground.resource_gate import compiled_occupancy


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
    definition
        What the search-space file says.
    choice
        What was chosen and why, with what it differs in.
    calls
        Launches so far, but for bound ones of an exact result; of threads that call at once, one may go uncounted.

    Parameters
    ----------
    kernel, problem, device, choice
        What is served, and for what.
    device_index
        CUDA device to launch on; None where the kernel can only be looked at.
    packed
        The cubin in the bundle that the kernel is served from; None where it is compiled or cached here.

    Raises
    ------
    ArgumentError
        A scalar that the problem binds does not fit in its type.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        device: DeviceProperties,
        device_index: int | None,
        choice: Choice,
        *,
        packed: PackedCubin | None = None,
    ) -> None:
        self.kernel = kernel.name
        self.problem = problem
        self.device = device
        self.calls = 0
        self._packed = packed
        self.definition = kernel
        self.choice = choice
        self._device_index = device_index
        self._geometry = launch_geometry(kernel.spec, choice.config, problem.sizes, device)
        self._caller = Caller(
            kernel.spec, problem, choice.config, geometry=self._geometry, device=device, device_index=device_index
        )
        self._cubin: CachedCubin | None = None
        written = [i for i, b in enumerate(kernel.spec.buffers) if b.access != "in"]
        self._only_output = written[0] if len(written) == 1 else None
        self._launching: Launching | None = None
        self._lock = threading.Lock()

    @property
    def can_launch(self) -> bool:
        """Whether it is served for a CUDA device of this machine, and not only for a look."""
        return self._device_index is not None

    @property
    def config(self) -> Config:
        """The configuration that is served."""
        return self.choice.config

    @property
    def tier(self) -> Tier:
        """How well the configuration fits what was asked for."""
        return self.choice.tier

    @property
    def measurement(self) -> Measurement | None:
        """Time of the configuration where it was tuned."""
        return self.choice.measurement

    @property
    def source(self) -> str:
        """Where the measurement comes from."""
        return self.choice.source

    @property
    def tuned_on(self) -> str:
        """Name of the GPU that the configuration was tuned on; empty for the default."""
        return self.choice.tuned_on

    @property
    def tuned_at(self) -> datetime | None:
        """When the configuration was tuned (UTC)."""
        return self.choice.tuned_at

    @property
    def geometry(self) -> LaunchGeometry:
        """Grid, block and dynamic shared memory of the launch."""
        return self._geometry

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and static shared memory; compiled now where they are not known, None without NVRTC."""
        if self._packed is not None:
            return self._packed.resources
        if self.choice.resources is not None and self.tuned_on == self.device.name:
            return self.choice.resources
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
        from autotile.dispatch.explain import explain  # for who asks

        return explain(self.problem, self.device, self.choice)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of what is served."""
        from autotile.dispatch.document import document  # for who asks

        return document(self)

    def __repr__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"<BoundKernel {self.problem} on {self.device.name}: {self.tier}, {config}>"

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Launch on the arrays, asynchronously.

        Parameters
        ----------
        *arrays
            The kernel's buffers in order. Outputs may be left out and are then allocated; an in-out buffer left out
            starts as zeros. Leading axes of extent 1 may be missing; they are then missing in new outputs, too.
        stream
            Of CuPy or PyTorch, or any object with ``__cuda_stream__``. None: PyTorch's current stream for PyTorch
            tensors, else CuPy's current stream.
        **scalars
            Scalars with a default, such as ``alpha``.

        Returns
        -------
        array or tuple of arrays
            The output buffers.

        Raises
        ------
        ArgumentError
            An array has the wrong shape, dtype, layout, alignment or device, a scalar is unknown, or ``stream`` is
            none.
        ToolchainError
            There is no CUDA device, or the toolchain is missing.
        CompileError
            The template does not compile.
        InputError
            At the first call: a setting is malformed.
        """
        launching = self._launching
        if launching is not None and stream is None and not scalars:
            launched = launching.quickly(arrays)
            if launched is not None:
                self.calls += 1
                return self._returned(launched) if self._only_output is None else launched[self._only_output]
        launching = launching or self._load()
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays, stream):
            given = self._caller.take(arrays)
            launching.carefully(given, scalars)
        self.calls += 1
        return self._returned(given.arrays)

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """A launch on fixed arrays, checked once: what it returns launches on the current stream of their library.

        It may be called from any thread, and with any device current.

        Parameters
        ----------
        *arrays
            All of the kernel's buffers, in order. They are kept alive by what is returned.
        **scalars
            Scalars with a default, such as ``alpha``.

        Raises
        ------
        ArgumentError, ToolchainError, CompileError, InputError
            As for a call.
        """
        launching = self._launching or self._load()
        with load_cupy().cuda.Device(self._device_index):
            go = launching.bound(self._caller.take(arrays), scalars)
        if self.tier == "exact":
            return go  # nobody asks how often

        def launch() -> None:
            self.calls += 1
            go()

        return launch

    def _returned(self, arrays: Sequence[Any]) -> Any:
        """What a call returns of all its arrays."""
        outputs = tuple(
            array for b, array in zip(self.definition.spec.buffers, arrays, strict=True) if b.access != "in"
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def _load(self) -> Launching:
        """Compile or find the cubin and load it, once."""
        if self._device_index is None:
            raise ToolchainError(
                f"{self.kernel} was served for a look at {self.device.name}, not for a CUDA device of this machine; "
                "to launch it, call get_best_kernel where there is one, and without the device's name"
            )
        with_graphs = read_settings().graphs
        with self._lock:
            if self._launching is None:
                with load_cupy().cuda.Device(self._device_index), outside_of_captures():
                    image = self._packed.read() if self._packed is not None else self._compiled().path
                    function = Module(image).function(self.definition.spec.entry)
                    function.opt_in(self._geometry.dynamic_smem_bytes)
                self._launching = Launching(self._caller, function, self._device_index, with_graphs=with_graphs)
            return self._launching

    def _compiled(self) -> CachedCubin:
        if self._cubin is None:
            settings = read_settings()
            problem = self.problem
            job = compile_job(self.definition, self.config, problem.dtype, self.device.architecture, problem.sizes)
            self._cubin = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
        return self._cubin
