"""Served kernels: a choice, and the launcher that runs it.

`BoundKernel` is what `autotile.get_best_kernel` returns, of a kernel as of an operation. It holds a `Choice` (the
configuration and its origin, see `autotile.serving.choice`), the code that the choice is of, and once it is loaded a
launcher. Code is a kernel in a configuration or a library (`autotile.serving.choice`), each with a launcher of the same
methods (`autotile.serving.launching`). A served kernel adopts another as a whole: choice, code and launcher.

A look-up goes this way. `Dispatcher.get_best_kernel` finds an equal call in a dictionary. Otherwise it makes a
`KernelRequest`, for which `autotile.serving.selection` chooses. An operation (`autotile.serving.operations`) chooses
among its kernels and libraries by measured times, a model of times, or the nearest results. Pins
(`autotile.serving.pinning`) precede all. `Refresher` makes the same look-up again when results were stored, and has the
served kernel adopt what it finds.

Modules, each using those before it only: arrays, choice, selection, launching, bound, racing, operations, refresh,
pinning, dispatcher.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from autotile.core.device import DeviceProperties
from autotile.core.documents import Bytes, Positive, attributes, to_document
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources, config_text
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.kernel.launch import StepLaunch
from autotile.kernel.library import Kernel, KernelName
from autotile.serving.aside import compilations, wait_for_compilations
from autotile.serving.choice import EPOCH, Choice, Code, Contender, KernelCode, Tier
from autotile.serving.choice import explain as explain_choice
from autotile.settings import Numerics, absolute_path, read_settings
from autotile.space.limits import compiled_occupancy

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotile.kernel.operation import Library
    from autotile.serving.launching import Launcher


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """A look-up with its arguments in one form, in which it can be made again.

    ``place`` is a CUDA device index, or the name of a GPU; None if there is no GPU. ``location`` is the path or URL of
    the database, and ``bundle`` an absolute path. ``is_operation`` tells whether the name denotes an operation. The
    rest is as for `Dispatcher.get_best_kernel`.
    """

    name: KernelName
    sizes: Mapping[str, int]
    dtype: str | None
    place: int | str | None
    location: str
    bundle: str | None = None
    library: bool = True
    numerics: Numerics | None = None
    race: bool = False
    wait: bool = False
    is_operation: bool = False


def _serve_again(request: dict[str, Any]) -> BoundKernel:
    """Serve a request, in the process that unpickles it."""
    import autotile

    served: BoundKernel = autotile.get_best_kernel(**request)
    return served


_racing = threading.Lock()
"""Held by the thread that races at the first call of a kernel: another race would disturb it."""


def expect_served(kernel: object, taken_by: str) -> None:
    """Raise if something is no served kernel."""
    if not isinstance(kernel, BoundKernel):
        raise InputError(f"{taken_by} takes a kernel from get_best_kernel, and got {type(kernel).__name__}")


def _forwarded(path: str, doc: str) -> Any:
    """Return a read-only attribute that is one of the choice, or of the code that it is of."""
    return property(attrgetter(path), doc=doc)


class BoundKernel:
    """A served kernel, or a library in its place; ``kernel(A, B, C)`` launches it.

    It is compiled, or its cubin found in the cache, at the first launch. One object may be called from many threads.

    A pickle of it holds the request only (name, sizes, dtype, and the absolute paths of the database and the bundle if
    they were given): unpickling calls `get_best_kernel`, for the current device unless the request named one.

    Attributes
    ----------
    device
        Device that it is served for.
    choice
        The configuration that was chosen, with the reason and with the differences from the request.
    request
        Arguments of `get_best_kernel` that mean this kernel in another process, too; None if it was not served by it.
    operation
        Problem of the operation that it is served for; None if it was asked for as a kernel.
    library_allowed
        Whether a library might be served in its place.
    calls
        Number of launches, except those of a function from `bind` in the ``exact`` tier. With concurrent calls from
        several threads, some may not be counted.

    Raises
    ------
    ArgumentError
        The value of a scalar, computed from the problem sizes, does not fit in its type; of what a model chose, the
        first call raises it.
    """

    kernel: str = _forwarded("_code.name", "Name of the kernel or the library.")
    problem: Problem = _forwarded("_code.asked", "Sizes and dtype; of a library by the names of the operation.")
    definition: Kernel = _forwarded(
        "_code.definition", "Search-space file and template; for a library, of a kernel that declares the same arrays."
    )
    library: Library | None = _forwarded("_code.library", "The library that is served; None for a kernel.")
    config: Config = _forwarded("choice.config", "The configuration that is served; empty for a library.")
    tier: Tier = _forwarded(
        "choice.tier",
        "Origin: ``exact``, ``family``, ``nearest``, ``transferred``, ``default``, ``model`` or ``library``.",
    )
    measurement: Measurement | None = _forwarded(
        "choice.measurement", "Time of the configuration where it was tuned; None for the default."
    )
    source: str = _forwarded(
        "choice.source",
        "Source of the measurement: ``cuda``, ``replayed`` (from a recording), or empty for the default.",
    )
    tuned_on: str = _forwarded("choice.tuned_on", "Name of the GPU that it was tuned on; empty for the default.")
    tuned_at: datetime | None = _forwarded("choice.tuned_at", "Time at which the configuration was tuned (UTC).")

    def __init__(self, code: Code, choice: Choice, device: DeviceProperties, device_index: int | None) -> None:
        self.device = device
        self.choice = choice
        self.calls = 0
        self.request: dict[str, Any] | None = None
        self.find_ways: Callable[[Problem, bool, bool], tuple[Contender, ...]] | None = None
        """Function that returns the best ways to compute a problem of an operation."""
        self.operation: Problem | None = None
        self.library_allowed = True
        self.lookup: Lookup | None = None
        """The look-up of the dispatcher that keeps it."""
        self._code = code
        self._device_index = device_index
        """CUDA device to launch on; None if it can only be inspected."""
        self.first_use: tuple[BoundKernel, Callable[..., None]] | None = None
        """The kernel that is launched until the best few ways have been raced on the arrays of a call, and the function
        that has the fastest adopted then (`autotile.serving.racing`); None without a race."""
        self.find_stand_in: Callable[[], BoundKernel | None] | None = None
        """Function that returns what is served while the kernel is compiled, None for nothing; None if calls wait."""
        self._report_at = sys.maxsize
        self._report: Callable[[int], int] | None = None
        self._outputs = itemgetter(*(i for i, b in enumerate(code.definition.spec.buffers) if b.access != "in"))
        """Function that returns the output buffers of all arrays of a call, an only one by itself."""
        self._launcher: Launcher | None = None
        self._retired: tuple[object, ...] = ()
        """Launchers of earlier choices: their code may still run, or be part of a graph that the caller captured."""
        self._lock = threading.Lock()
        if choice.tier != "model" and isinstance(code, KernelCode):  # a model has checked the configuration
            _ = code.plan

    @property
    def is_library(self) -> bool:
        """Whether it is a library, served for a problem of an operation."""
        return self._code.library is not None

    @property
    def can_launch(self) -> bool:
        """Whether it is served for a CUDA device of this machine, rather than only for inspection."""
        return self._device_index is not None

    @property
    def geometry(self) -> LaunchGeometry:
        """Grid, block and dynamic shared memory of the launch; of the main one if a call launches several kernels.

        A library has none: an `AttributeError`.
        """
        if not isinstance(self._code, KernelCode):
            raise AttributeError(f"{self._code.name} is a library, which has no launch geometry")
        return self._code.plan[0].main.geometry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array, by its name. Shapes may depend on the configuration that is served."""
        spec = self.definition.spec
        names = spec.shaped(self._code.problem, self.config or spec.default).names
        return {buffer.name: buffer.array_shape(names) for buffer in spec.buffers}

    @property
    def launches(self) -> tuple[StepLaunch, ...]:
        """Launches of a call, in order; none of a library."""
        return self._code.plan[0].launches if isinstance(self._code, KernelCode) else ()

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and static shared memory; compiles the kernel if they are unknown, None without NVRTC."""
        code, choice = self._code, self.choice
        if not isinstance(code, KernelCode):
            return None
        if code.packed is not None:
            return code.packed.resources
        if choice.resources is not None and choice.tuned_on == self.device.name:
            return choice.resources
        try:
            main = code.definition.spec.steps[code.plan[0].main.step]
            return code.cubin.functions[main.entry].resources
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
        choice = self.choice
        if len(choice.contenders) < 2 and not (choice.awaited or choice.pinned):  # neither need be the best way
            self.choice = replace(choice, contenders=self.find_contenders() or choice.contenders)
        return self.choice.contenders

    def find_contenders(self, *, kernels: bool = True) -> tuple[Contender, ...]:
        """Return the best ways to compute the problem of an operation, that which was chosen first; none otherwise.

        Without ``kernels``, return the fastest library.
        """
        if self.find_ways is None or self.operation is None:
            return ()
        return self.find_ways(self.operation, self.library_allowed, kernels)

    def explain(self) -> str:
        """Return a short paragraph: the configuration, the reason, the differences, and the age of the result."""
        return explain_choice(self.problem, self.device, replace(self.choice, contenders=self.contenders))

    def to_json(self) -> dict[str, Any]:
        """Return all facts about the served kernel as JSON values; it is compiled if its resources are not known."""
        measurement, choice, resources, occupancy = self.measurement, self.choice, self.resources, self.occupancy
        demands = None
        if resources is not None and occupancy is not None:  # a library has neither
            demands = {
                **attributes(resources, "registers", "spill_bytes", "static_smem_bytes"),
                **attributes(self.geometry, "dynamic_smem_bytes", "threads"),
                **attributes(occupancy, "blocks_per_sm", "occupancy", "limited_by"),
            }
        facts = {
            "kernel": self.kernel,
            "problem": self.problem.sizes,
            "dtype": self.problem.dtype,
            **attributes(self, "tier", "config"),
            "time_us": measurement.time_us if measurement else None,
            "interval_us": [measurement.low_us, measurement.high_us] if measurement else None,
            "device": self.device.identity,
            **attributes(self, "source", "tuned_on", "tuned_at", "contenders"),
            **attributes(choice, "differences", "aged", "shipped"),
            "bundle": choice.packed or None,
            "pinned": choice.pinned or None,
            "estimated": choice.estimated,
            "resources": demands,
            "explain": self.explain(),
            **({"compared": choice.compared} if choice.compared is not None else {}),
            **({"unapplied": choice.unapplied} if choice.unapplied else {}),
        }
        document: dict[str, Any] = to_document(facts)
        return document

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Return the request for a pickle; that the kernel was not returned by `get_best_kernel` is a `TypeError`."""
        if self.request is None:
            raise TypeError(
                f"{self!r} cannot be served again: it was not returned by get_best_kernel, or is of a kernel that is "
                "written in Python; save that one as a search-space file"
            )
        return _serve_again, (self.request,)

    def __repr__(self) -> str:
        from autotile.core.text import source_text

        if self.is_library:
            return f"<BoundKernel {self.kernel} for {self.problem} on {self.device.name}: {self.tier}>"
        where, config = source_text(self.device.name, self.source), config_text(self.config)
        return f"<BoundKernel {self.problem} on {where}: {self.tier}, {config}>"

    def _repr_html_(self) -> str:
        """Return the choice and its reason as HTML, for a notebook; nothing is compiled for it."""
        from autotile.core.text import Facts, html_of

        facts: Facts = [("tier", self.tier), *((name, str(value)) for name, value in self.config.items())]
        if self.config:
            geometry = self.geometry
            grid, block = (" x ".join(map(str, extent)) for extent in (geometry.grid, geometry.block))
            smem = f"{geometry.dynamic_smem_bytes:,} B dynamic smem"
            facts.append(("launch", f"{grid} blocks of {block} threads, {smem}"))
        facts.append(("reason", self.explain()))
        return html_of(f"{self.kernel}: {self.problem} on {self.device.name}", [facts])

    def plot_limits(self, *, dark: bool | None = None) -> go.Figure:
        """Return a Plotly figure of the blocks that each resource of an SM allows, compiling if need be.

        Raise `InputError` if the occupancy is not known, as of a library, `ToolchainError` if Plotly is not installed.
        """
        from autotile.report.theme import block_limits_chart, figure_of

        if self.occupancy is None:
            raise InputError(f"the occupancy of {self!r} is not known: it was not compiled, or is a library")
        return figure_of(block_limits_chart(self.device, self.occupancy), dark=dark)

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
                return self._outputs(launched)
        launcher = launcher or self._load_for(arrays, stream, scalars)
        launched = launcher.launch(arrays, stream, scalars)
        self.count_call()
        return self._outputs(launched)

    def launch_at(self, stream: int, pointers: tuple[int, ...], *, starts: bool = False) -> bool:
        """Launch on arrays at these addresses without a check; return False, and launch nothing, before a call has.

        The addresses are of all buffers in order, and of a bias, which only cuBLAS adds; with the shapes, dtypes,
        layout, alignment and device of an earlier call in this thread and on this stream, or with ``starts`` of those
        that a call requires. Only a call computes by a library but cuBLAS, races, is captured, or changes the device.
        """
        launcher = self._launcher
        if launcher is None:
            if self.first_use is not None:
                return False
            launcher = self._load()
        if not launcher.launch_at(stream, pointers, starts=starts):
            return False
        self.count_call()
        return True

    @property
    def is_direct(self) -> bool:
        """Whether launches by addresses leave out a library's work on the host, as far as is known."""
        return self._launcher is None or self._launcher.is_direct

    def count_call(self) -> None:
        """Count a call, also one that a program makes to the library itself."""
        self.calls = calls = self.calls + 1
        if calls >= self._report_at:
            self._report_calls()

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """Check arrays once, and return a function that launches on them, on the current stream of their library.

        The arrays are all buffers of the kernel, in order; scalars and errors are those of a call. The function may be
        called from any thread and with any device current. It keeps the arrays alive.
        """
        self._wait_for_choice()  # what is returned keeps its configuration
        launcher = self._launcher or self._load_for(arrays, None, scalars)
        launch_bound = launcher.bind(arrays, scalars)
        if self.tier == "exact":
            return launch_bound  # calls are only counted of fallbacks

        def launch() -> None:
            launch_bound()
            self.count_call()

        return launch

    def report_calls(self, report: Callable[[int], int] | None) -> None:
        """Report the number of calls after the next call, and again whenever it reaches what ``report`` returned.

        None ends the reports.
        """
        self._report = report
        self._report_at = self.calls + 1 if report is not None else sys.maxsize

    def _report_calls(self) -> None:
        report = self._report
        self._report_at = report(self.calls) if report is not None else sys.maxsize

    @property
    def is_loaded(self) -> bool:
        """Whether the kernel is compiled and loaded; before a race, what is launched until then."""
        return self._launcher is not None or (self.first_use is not None and self.first_use[0].is_loaded)

    def load(self, *, waits: bool = True) -> None:
        """Compile the kernel and load it; errors are those of a call.

        Unless it ``waits``, something that needs no compiler is loaded, and gives way once the kernel is.
        """
        if waits:
            self._wait_for_choice()
        self._load()

    def _wait_for_choice(self) -> None:
        """Let nothing stand in for the choice, and wait for it to take over where something does."""
        self.find_stand_in = None
        if self.choice.awaited:
            wait_for_compilations()

    def has_shapes_of(self, other: BoundKernel) -> bool:
        """Return True if another kernel takes arrays of the same shapes."""
        return list(self.shapes.values()) == list(other.shapes.values())

    @property
    def _takes(self) -> tuple[object, ...]:
        """Device, shapes and element types of the arrays of a call."""
        problem, buffers = self._code.problem, self.definition.spec.buffers
        types = [buffer.element_type(problem.dtype, problem.sizes) for buffer in buffers]
        return self._device_index, list(self.shapes.values()), types

    def adopt(self, other: BoundKernel) -> bool:
        """Serve the choice of another kernel from the next call on; return whether it was taken over.

        Calls may run in other threads meanwhile: each uses either choice as a whole. The launches and captures before,
        and the functions from `bind`, keep their configuration. The other is not used any further. Nothing changes if
        this one is loaded, and the other is not or is to be raced at its first call. Raise `InputError` if it is no
        served kernel, or one for other arrays or another device.
        """
        expect_served(other, "adopt")
        if other is self:
            return True
        if other.lookup is not None and self._takes != other._takes:  # what a program was served
            raise InputError(f"{self!r} cannot adopt {other!r}: expected one for the same arrays and device")
        first, second = sorted((self, other), key=id)  # in one order, whoever adopts whom
        with first._lock, second._lock:
            ours, theirs = (
                (id(one.definition), one.choice.config, one.library, one.first_use) for one in (self, other)
            )
            if ours != theirs:
                if self.is_loaded:
                    if other._launcher is None:
                        return False
                    self._retired += (self._launcher or self.first_use,)
                self._launcher, self._code, self.first_use = other._launcher, other._code, other.first_use
            self.choice, self.find_ways = other.choice, other.find_ways or self.find_ways
        EPOCH.now = object()
        return True

    def _launch_device(self) -> int:
        if self._device_index is None:
            raise ToolchainError(
                f"{self.kernel} was served for inspection only: for {self.device.name}, not for a CUDA device of this "
                "machine; to launch it, call get_best_kernel on a machine with a CUDA device, and without a device name"
            )
        return self._device_index

    def _load(self) -> Launcher:
        """Make the launcher, once; before a race, return that of what is launched until then."""
        launcher = self._launcher
        if launcher is not None:
            return launcher
        device_index = self._launch_device()
        if self.find_stand_in is not None:
            self._stand_in()
        first_use = self.first_use
        if first_use is not None:
            return first_use[0]._load()
        with self._lock:
            if self._launcher is None:
                from autotile.serving.launching import KernelLauncher, LibraryLauncher

                code, at = self._code, device_index
                self._launcher = KernelLauncher(code, at) if isinstance(code, KernelCode) else LibraryLauncher(code, at)
            return self._launcher

    def _load_for(self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]) -> Launcher:
        """Return the launcher for a call, on whose arrays the best few ways are raced if there was no race yet.

        There is none if the arrays or the stream do not allow it, and the next call tries again.
        """
        launcher = self._load()
        if self.first_use is None or not _racing.acquire(blocking=False):
            return launcher
        try:
            if self.first_use is not None:
                _, race = self.first_use
                race(self, arrays, stream=stream, scalars=scalars)
        finally:
            _racing.release()
        return self._load()

    def _stand_in(self) -> None:
        """Serve something that needs no compiler if the choice does, until that is compiled aside and takes over."""
        with self._lock:
            find, self.find_stand_in = self.find_stand_in, None
            code, choice = self._code, self.choice
        if find is None or self.first_use or choice.pinned:
            return
        if not isinstance(code, KernelCode) or not code.needs_compiler():
            return
        other = find()
        if other is None or not self.has_shapes_of(other):
            return
        chosen = BoundKernel(code, choice, self.device, self._device_index)
        report = self._report
        named = f"{chosen.kernel} {config_text(chosen.config)}"
        awaited = f"{named}, which is being compiled and takes over when it is ready"
        other.choice = replace(other.choice, awaited=awaited)
        self.report_calls(None)  # a miss is of the choice
        self.adopt(other)
        standing_in = self._code

        def take_over() -> None:
            from autotile.cuda.toolchain import open_nvrtc

            try:
                open_nvrtc()
                chosen.load()
                if self._code is standing_in and self.choice.awaited:  # nothing else was chosen or pinned meanwhile
                    self.adopt(chosen)
            except AutotileError as error:
                self.choice = replace(self.choice, awaited=f"{named}, which cannot be loaded: {error}")
            finally:
                self.report_calls(report)

        compilations.add(take_over)


def capture(
    kernel: BoundKernel, folder: str | Path | None = None, *, calls: int = 1, limit_bytes: int = 4 << 30
) -> Callable[..., Any]:
    """Return a kernel whose next calls are written to a folder, as inputs of `autotile tune --captured FOLDER`.

    Parameters
    ----------
    kernel
        A served kernel, from `get_best_kernel`.
    folder
        Folder of the calls; None for that of the setting ``AUTOTILE_CAPTURE``.
    calls, limit_bytes
        Maximum number of calls, and of their bytes.

    Returns
    -------
    callable
        It is called like the kernel.

    Raises
    ------
    InputError
        There is no folder, ``kernel`` is no served kernel, or a maximum is not a positive number.

    Examples
    --------
    >>> capture(kernel, "calls")(x, y)  # doctest: +SKIP
    """
    from autotile.core.argument_types import check_value
    from autotile.serving.launching import CaptureFolder

    check_value("folder", folder, str | Path | None)
    check_value("calls", calls, Positive)
    check_value("limit_bytes", limit_bytes, Bytes)
    expect_served(kernel, "capture")
    chosen = absolute_path(folder, "a folder of captured calls") if folder is not None else read_settings().capture
    if chosen is None:
        raise InputError("no folder is given for captured calls; give folder, or set AUTOTILE_CAPTURE")
    into = CaptureFolder(chosen, calls, limit_bytes)

    def captured(*arrays: Any, stream: Any = None, **scalars: float) -> Any:
        launcher = kernel._load_for(arrays, stream, scalars)
        launched = launcher.launch(arrays, stream, scalars, into if not into.is_full else None)
        kernel.count_call()
        return kernel._outputs(launched)

    return captured
