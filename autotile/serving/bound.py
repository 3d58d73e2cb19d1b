"""A kernel bound to a configuration and a problem, to be called with arrays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources
from autotile.core.text import source_text
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.packing import problem_scalars
from autotile.cuda.toolchain import load_cupy
from autotile.errors import InputError, ToolchainError
from autotile.kernel.launch import LaunchData, LaunchPlan, StepLaunch, known_names
from autotile.kernel.library import Kernel
from autotile.serving.choice import Choice, Contender, Tier
from autotile.serving.description import document, explain, html, limits_figure
from autotile.serving.requests import Request
from autotile.settings import read_settings
from autotile.space.limits import compiled_occupancy

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotile.cuda.cubin_cache import CachedCubin
    from autotile.cuda.function import PackedCubin
    from autotile.serving.capture import CaptureFolder, CapturingLauncher
    from autotile.serving.launching import Launcher


class _Planned(NamedTuple):
    """What is launched: the launches, the scalars that the problem determines, and workspaces and tensor maps."""

    launches: LaunchPlan
    scalars: Mapping[str, Any]
    data: LaunchData


def _serve_again(request: Request) -> BoundKernel:
    """Return the kernel of a request, in the process that unpickles it."""
    from autotile.serving.dispatcher import get_best_kernel

    named = request._asdict()
    return get_best_kernel(named.pop("name"), **named.pop("sizes"), **named)


def expect_served(kernel: object, taken_by: str) -> None:
    """Raise if something is no served kernel."""
    if not isinstance(kernel, BoundKernel):
        raise InputError(f"{taken_by} takes a kernel from get_best_kernel, and got {type(kernel).__name__}")


class BoundKernel:
    """A served kernel; ``kernel(A, B, C)`` launches it.

    It is compiled, or its cubin found in the cache, at the first launch. One object may be called from many threads.

    A pickle of it holds the request only (name, sizes, dtype, and the absolute paths of the database and the bundle if
    they were given): unpickling calls `get_best_kernel`, for the current device unless the request named one.

    Attributes
    ----------
    kernel
        Name of the kernel.
    problem
        Sizes and dtype that it is bound to.
    device
        Device that it is served for.
    definition
        Search-space file and template of the kernel.
    choice
        The configuration that was chosen, with the reason and with what differs from the request.
    request
        Call of `get_best_kernel` that returns this kernel; None if it was not served by it.
    find_contenders
        Function that returns the best ways to compute the problem of an operation; None otherwise.
    operation
        Problem of the operation that it is served for; None if it was asked for as a kernel.
    library_allowed
        Whether a library might be served in its place.
    calls
        Number of launches, except those of a function from `bind` in the ``exact`` tier. With concurrent calls from
        several threads, some may not be counted.

    Parameters
    ----------
    kernel, problem, device, choice
        As the attributes ``definition``, ``problem``, ``device`` and ``choice``.
    device_index
        CUDA device to launch on; None if the kernel can only be inspected.
    packed
        Cubin in the bundle that the kernel is served from; None if it is compiled or cached on this machine.

    Raises
    ------
    ArgumentError
        The value of a scalar, computed from the problem sizes, does not fit in its type; of what a model chose, the
        first call raises it.
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
        self._hold(kernel, problem, device, device_index, choice)
        self._packed: PackedCubin | None = packed
        self._planned: _Planned | None = None
        if choice.tier != "model":  # a model has checked the configuration, which is planned when it is needed
            self._planned = self._plans()

    def _hold(
        self, kernel: Kernel, problem: Problem, device: DeviceProperties, device_index: int | None, choice: Choice
    ) -> None:
        """Keep what a kernel and a library have in common."""
        self.kernel = kernel.name
        self.problem = problem
        self.device = device
        self.definition = kernel
        self.choice = choice
        self.calls = 0
        self.request: Request | None = None
        self.find_contenders: Callable[[], tuple[Contender, ...]] | None = None
        self.operation: Problem | None = None
        self.library_allowed = True
        self._device_index = device_index
        self._report_at = sys.maxsize
        self._report: Callable[[int], int] | None = None
        outputs = [i for i, b in enumerate(kernel.spec.buffers) if b.access != "in"]
        self._only_output = outputs[0] if len(outputs) == 1 else None
        self._packed = None
        self._planned = None
        self._cubin: CachedCubin | None = None
        self._launcher: Launcher | CapturingLauncher | None = None
        self._retired: list[object] = []
        """Launchers of earlier choices: their code may still run, or be part of a graph that the caller captured."""
        self._lock = threading.Lock()

    def _plans(self) -> _Planned:
        spec, problem, config = self.definition.spec, self.problem, self.choice.config
        names = known_names(spec, config, problem.sizes, self.device)
        return _Planned(
            LaunchPlan.of(spec, config, problem.sizes, self.device),
            problem_scalars(spec, problem.sizes, problem.dtype, check=False),
            LaunchData.of(spec, problem.dtype, names),
        )

    @property
    def _plan(self) -> LaunchPlan:
        """Launches of a call."""
        if self._planned is None:
            self._planned = self._plans()
        return self._planned.launches

    @property
    def is_library(self) -> bool:
        """Whether it is a library, served for a problem of an operation."""
        return False

    @property
    def _is_plain(self) -> bool:
        """Whether it launches a kernel itself, so that another one can take its launcher over."""
        return True

    @property
    def can_launch(self) -> bool:
        """Whether it is served for a CUDA device of this machine, rather than only for inspection."""
        return self._device_index is not None

    @property
    def config(self) -> Config:
        """The configuration that is served."""
        return self.choice.config

    @property
    def tier(self) -> Tier:
        """How the configuration was found: ``exact``, ``family``, ``nearest``, ``transferred`` or ``default``."""
        return self.choice.tier

    @property
    def measurement(self) -> Measurement | None:
        """Time of the configuration where it was tuned; None for the default."""
        return self.choice.measurement

    @property
    def source(self) -> str:
        """Source of the measurement: ``cuda``, ``replayed`` (from a recording), or empty for the default."""
        return self.choice.source

    @property
    def tuned_on(self) -> str:
        """Name of the GPU that the configuration was tuned on; empty for the default."""
        return self.choice.tuned_on

    @property
    def tuned_at(self) -> datetime | None:
        """Time at which the configuration was tuned (UTC)."""
        return self.choice.tuned_at

    @property
    def geometry(self) -> LaunchGeometry:
        """Grid, block and dynamic shared memory of the launch; of the main one if a call launches several kernels."""
        return self._plan.main.geometry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array, by its name. Shapes may depend on the configuration that is served."""
        spec = self.definition.spec
        names = spec.shaped_sizes(self.problem.sizes, self.config)
        return {buffer.name: buffer.array_shape(names) for buffer in spec.buffers}

    @property
    def launches(self) -> tuple[StepLaunch, ...]:
        """Launches of a call, in order."""
        return self._plan.launches

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and static shared memory; compiles the kernel if they are unknown, None without NVRTC."""
        if self._packed is not None:
            return self._packed.resources
        if self.choice.resources is not None and self.tuned_on == self.device.name:
            return self.choice.resources
        try:
            return self._compiled().functions[self.definition.spec.steps[self._plan.main.step].entry].resources
        except ToolchainError:
            return None

    @property
    def occupancy(self) -> Occupancy | None:
        """Blocks per SM and the limit that binds; None if the resources are unknown."""
        resources = self.resources
        return compiled_occupancy(self.geometry, resources, self.device) if resources is not None else None

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """For an operation: the best ways to compute the problem, that which is served first."""
        if self.find_contenders is not None and len(self.choice.contenders) < 2:
            self.choice = replace(self.choice, contenders=self.find_contenders())
        return self.choice.contenders

    def explain(self) -> str:
        """Return a short paragraph: the configuration, the reason, the differences, and the age of the result."""
        return explain(self.problem, self.device, replace(self.choice, contenders=self.contenders))

    def to_json(self) -> dict[str, Any]:
        """Return all facts about the served kernel as JSON values."""
        return document(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Request]]:
        """Pickle the request: a process that unpickles it serves it anew, for its own device and from what it can read.

        Raises
        ------
        TypeError
            The kernel was not returned by `get_best_kernel`.
        """
        if self.request is None:
            raise TypeError(
                f"{self!r} cannot be served again: it was not returned by get_best_kernel, or is of a kernel that is "
                "written in Python; save that one as a search-space file"
            )
        return _serve_again, (self.request,)

    def __repr__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"<BoundKernel {self.problem} on {source_text(self.device.name, self.source)}: {self.tier}, {config}>"

    def _repr_html_(self) -> str:
        """Return what is served and why as HTML, for a notebook; nothing is compiled for it."""
        return html(self)

    def plot_limits(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the blocks that each resource of an SM allows, compiling if need be."""
        return limits_figure(self, dark=dark)

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Launch on arrays, asynchronously.

        Parameters
        ----------
        *arrays
            Buffers of the kernel, in order. Outputs may be left out and are then allocated; in-out buffers that are
            left out start as zeros. Leading axes of extent 1 may be left out, and are then left out of new outputs too.
        stream
            A stream of CuPy or PyTorch, or any object with ``__cuda_stream__``. None: PyTorch's current stream for
            PyTorch tensors, else CuPy's current stream.
        **scalars
            Scalars with a default, such as ``alpha``.

        Returns
        -------
        array or tuple of arrays
            The output buffers.

        Raises
        ------
        ArgumentError
            An array has the wrong shape, dtype, layout, alignment or device, a scalar is unknown, or ``stream`` is not
            a stream.
        ToolchainError
            There is no CUDA device, or the toolchain is missing.
        CompileError
            The template does not compile.
        InputError
            At the first call: a setting is malformed.
        """
        launcher = self._launcher
        if launcher is not None and stream is None and not scalars:
            launched = launcher.launch_fast(arrays)
            if launched is not None:
                self.calls = calls = self.calls + 1
                if calls >= self._report_at:
                    self._report_calls()
                index = self._only_output
                return launched[index] if index is not None else self._outputs(launched)
        launcher = launcher or self._load()
        launched = launcher.launch(arrays, stream, scalars)
        self._count_call()
        return self._outputs(launched)

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """Check arrays once, and return a function that launches on them, on the current stream of their library.

        The function may be called from any thread and with any device current. It keeps the arrays alive.

        Parameters
        ----------
        *arrays
            All buffers of the kernel, in order.
        **scalars
            Scalars with a default, such as ``alpha``.

        Raises
        ------
        ArgumentError, ToolchainError, CompileError, InputError
            As for a call.
        """
        launcher = self._launcher or self._load()
        launch_bound = launcher.bind(arrays, scalars)
        if self.tier == "exact":
            return launch_bound  # calls are only counted of fallbacks

        def launch() -> None:
            self.calls = calls = self.calls + 1
            launch_bound()
            if calls >= self._report_at:
                self._report_calls()

        return launch

    def report_calls(self, report: Callable[[int], int] | None) -> None:
        """Report the number of calls after the next call, and again whenever it reaches what ``report`` returned.

        None ends the reports.
        """
        self._report = report
        self._report_at = self.calls + 1 if report is not None else sys.maxsize

    def _count_call(self) -> None:
        self.calls += 1
        if self.calls >= self._report_at:
            self._report_calls()

    def _report_calls(self) -> None:
        report = self._report
        self._report_at = report(self.calls) if report is not None else sys.maxsize

    def _outputs(self, arrays: Sequence[Any]) -> Any:
        """Return the outputs among all buffers of a call."""
        outputs = tuple(
            array for b, array in zip(self.definition.spec.buffers, arrays, strict=True) if b.access != "in"
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def call_captured(
        self, folder: CaptureFolder, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]
    ) -> Any:
        """Write the arguments of a call to a folder, and launch; see `autotile.capture`."""
        from autotile.serving.capture import CapturingLauncher

        launcher = CapturingLauncher((self._launcher or self._load()).plain, self, folder)
        self.calls += 1
        return self._outputs(launcher.launch(arrays, stream, scalars))

    @property
    def is_loaded(self) -> bool:
        """Whether the kernel is compiled and loaded."""
        return self._launcher is not None

    def load(self) -> None:
        """Compile the kernel and load it, as the first call does.

        Raises
        ------
        ToolchainError, CompileError, InputError
            As for a call.
        """
        if self._launcher is None:
            self._load()

    def has_shapes_of(self, other: BoundKernel) -> bool:
        """Return whether another kernel takes arrays of the same shapes."""
        return list(self.shapes.values()) == list(other.shapes.values())

    def adopt(self, other: BoundKernel) -> bool:
        """Serve the choice of another kernel from the next call on; return whether it was taken over.

        Calls may run in other threads meanwhile: each uses either choice as a whole. What was launched or captured
        before, and the functions from `bind`, keep their configuration.

        Parameters
        ----------
        other
            A kernel for the same arrays and device. It is not used any further. Nothing changes if it is a library, if
            it is raced at its first call, or if this one is loaded and the other is not.

        Raises
        ------
        InputError
            It is no served kernel.
        """
        expect_served(other, "adopt")
        if other is self:
            return True
        if not other._is_plain:
            return False
        first, second = sorted((self, other), key=id)  # in one order, whoever adopts whom
        with first._lock, second._lock:
            if other.definition is not self.definition or other.choice.config != self.choice.config:
                if self._launcher is not None:
                    if other._launcher is None:
                        return False
                    self._retired.append(self._launcher)
                self.kernel, self.definition, self.problem = other.kernel, other.definition, other.problem
                self._planned = other._planned or other._plans()
                self._packed, self._cubin, self._launcher = other._packed, other._cubin, other._launcher
            self.choice, self.find_contenders = other.choice, other.find_contenders
        return True

    def _launch_device(self) -> int:
        if self._device_index is None:
            raise ToolchainError(
                f"{self.kernel} was served for inspection only: for {self.device.name}, not for a CUDA device of this "
                "machine; to launch it, call get_best_kernel on a machine with a CUDA device, and without a device name"
            )
        return self._device_index

    def _load(self) -> Launcher | CapturingLauncher:
        """Compile the kernel or find its cubin, and load it; once."""
        device_index = self._launch_device()
        from autotile.cuda.function import StepFunctions
        from autotile.serving.launching import CallArguments, Launcher, Preparation

        settings, spec = read_settings(), self.definition.spec

        def load() -> StepFunctions:
            packed = self._packed
            image = packed.read() if packed is not None else self._compiled().path
            symbols = packed.symbols if packed is not None else self._compiled().symbols
            functions = StepFunctions(spec.steps, image, symbols)
            functions.opt_in(self._plan)
            return functions

        with self._lock:
            if self._launcher is None:
                with load_cupy().cuda.Device(device_index), outside_of_captures():
                    functions = load()
                planned = self._planned or self._plans()
                arguments = CallArguments(
                    spec,
                    self.problem,
                    self.config,
                    planned.launches,
                    data=planned.data,
                    scalars=planned.scalars,
                    device_index=device_index,
                )
                launcher = Launcher(
                    arguments,
                    functions,
                    device_index,
                    with_graphs=settings.graphs,
                    preparation=Preparation.of(spec, self.problem, self._plan, load),
                )
                self._launcher = launcher if settings.capture is None else self._capturing(launcher)
            return self._launcher

    def _capturing(self, launcher: Launcher) -> Launcher | CapturingLauncher:
        from autotile.serving.capture import CapturingLauncher, configured_folder

        folder = configured_folder()
        return launcher if folder is None else CapturingLauncher(launcher, self, folder)

    def _compiled(self) -> CachedCubin:
        from autotile.cuda.compiler import compile_job
        from autotile.cuda.cubin_cache import CubinCache, check_signatures

        if self._cubin is None:
            settings = read_settings()
            problem = self.problem
            job = compile_job(self.definition, self.config, problem.dtype, self.device.architecture, problem.sizes)
            cubin = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
            check_signatures(self.definition, problem.dtype, cubin)
            self._cubin = cubin
        return self._cubin
