"""Launch a served kernel: check and complete the arrays of a call, then launch at close to the driver's cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.model import Config, LaunchGeometry, Problem
from autotile.cuda.driver import device_count
from autotile.cuda.function import Function, ParameterBlock, driver_launch
from autotile.cuda.packing import encode_scalar, pack_arguments, scalar_value
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.launch import LaunchData, known_names
from autotile.kernel.spec import BufferArgument, KernelSpec, ScalarArgument, TensorMapArgument
from autotile.serving.arrays import (
    CupyLibrary,
    Facts,
    Library,
    Pointers,
    Slot,
    as_bits,
    as_cupy,
    library_of,
    new_array,
    on_stream,
    pointers,
)
from autotile.serving.stream_state import Lane, MapPlace, OfThread, Places, StreamWorkspaces, WorkspaceSet


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


Stream = Callable[[int], int]
ReadFacts = Callable[[Sequence[Any]], Facts]


class Launching:
    """Launches a function that is loaded on a device.

    Parameters
    ----------
    caller
        What the kernel takes.
    function
        The loaded function; it is kept.
    device_index
        CUDA device.
    with_graphs
        Whether launches that come again may become CUDA graphs.
    """

    def __init__(self, caller: Caller, function: Function, device_index: int, *, with_graphs: bool) -> None:
        self._caller = caller
        self._function = function
        self._device_index = device_index
        self._with_graphs = with_graphs
        self._one_device = device_count() == 1
        runtime = load_cupy().cuda.runtime
        self._current_device: Callable[[], int] = runtime.getDevice
        self._launch_graph: Callable[[int, int], None] = runtime.graphLaunch
        self._is_captured: Callable[[int], bool] = runtime.streamIsCapturing
        """Not to be asked of stream 0, which cannot be captured; what is, gets launches of its own."""
        self._launch = driver_launch(function.pointer, caller.geometry)
        self._cupy = CupyLibrary()
        self._libraries: dict[type, tuple[Stream, ReadFacts, tuple[Slot, ...]]] = {}
        self._lanes = OfThread()

    def quickly(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Launch on the current stream of the arrays' library, if nothing keeps it from being quick.

        Parameters
        ----------
        arrays
            The kernel's buffers in order; outputs may be left out and are then allocated.

        Returns
        -------
        sequence of arrays or None
            All of the kernel's buffers; None where nothing was launched.

        Raises
        ------
        ArgumentError
            There are too few or too many.
        """
        known = self._libraries.get(type(arrays[0])) if arrays else None
        if known is None or not (self._one_device or self._current_device() == self._device_index):
            return None
        stream_of, facts_of, slots = known
        stream = stream_of(self._device_index)
        lane: Lane | None = self._lanes.by_stream.get(stream)
        if lane is None:
            return None
        facts = facts_of(arrays)
        is_captured = stream != 0 and self._with_graphs and self._is_captured(stream)
        graph = lane.graphs.get(facts)
        if graph is not None and not is_captured:
            self._launch_graph(graph.executable, stream)
            return arrays
        if len(arrays) != len(slots):
            return self.quickly(self._caller.complete(arrays))
        found = pointers(facts, slots, self._device_index) if facts else None
        if found is not None:
            self._launch_anew(lane, stream, found, facts, is_captured)
        return arrays if found is not None else None

    def carefully(self, given: Given, scalars: Mapping[str, float]) -> None:
        """Launch on CuPy's current stream, and be quick with such arrays from now on.

        Parameters
        ----------
        given
            Arrays that `Caller.take` has checked.
        scalars
            Scalars other than their defaults.

        Raises
        ------
        ArgumentError
            There is no such scalar, its value does not fit, or an array starts where a tensor map cannot.
        ToolchainError
            The driver refuses a tensor map.
        """
        load_cupy().cuda.runtime.setDevice(self._device_index)  # it makes a context current
        stream = self._cupy.stream(self._device_index)
        workspaces = self._caller.workspaces.current()
        values = self._caller.pack(given.views, scalars, workspaces.pointers)
        block = ParameterBlock(values, spare_words=len(given.arrays))
        self._launch(stream, block.address, 0)
        library = library_of(given.arrays[0])
        if library is not None and not scalars:
            if stream not in self._lanes.by_stream:  # else the lane and its graphs are as good as new
                places = self._caller.places(block.starts, len(block.words))
                self._lanes.keep(stream, self._lane(block, places, workspaces))
            self._libraries.setdefault(
                type(given.arrays[0]), (library.stream, library.facts, self._caller.slots(library))
            )

    def bound(self, given: Given, scalars: Mapping[str, float]) -> Callable[[], None]:
        """What launches on arrays that need no more checks, on the current stream of their library; it keeps them.

        Raises
        ------
        ArgumentError, ToolchainError
            As for `carefully`.
        """
        current = (library_of(given.arrays[0]) or self._cupy).stream
        launch_graph, is_captured, index = self._launch_graph, self._is_captured, self._device_index
        with_graphs = self._with_graphs
        lanes = OfThread()

        def new_lane(stream: int) -> Lane:
            load_cupy().cuda.runtime.setDevice(index)  # it makes a context current
            with on_stream(given.arrays):
                workspaces = self._caller.workspaces.current()
            block = ParameterBlock(self._caller.pack(given.views, scalars, workspaces.pointers))
            lane = self._lane(block, Places((), ()), workspaces)
            lanes.keep(stream, lane)
            return lane

        def go() -> None:
            stream = current(index)
            lane: Lane = lanes.by_stream.get(stream) or new_lane(stream)
            captured = stream != 0 and with_graphs and is_captured(stream)
            graph = lane.graphs.get(())
            if graph is not None and not captured:
                launch_graph(graph.executable, stream)
            else:
                self._launch_anew(lane, stream, (), (), captured)

        def go_there() -> None:
            with load_cupy().cuda.Device(index):
                go()

        new_lane(current(index))  # what is wrong is said now
        return go if self._one_device else go_there

    def _lane(self, block: ParameterBlock, places: Places, workspaces: WorkspaceSet) -> Lane:
        return Lane(self._launch, block, places, (self._function, workspaces))

    def _launch_anew(self, lane: Lane, stream: int, found: Pointers, facts: Facts, is_captured: bool) -> None:
        """Launch on arrays without a graph, and keep the launch as one if it may come again."""
        lane.launch(stream, found)
        if self._with_graphs and not is_captured:
            lane.keep_as_graph(stream, facts)
