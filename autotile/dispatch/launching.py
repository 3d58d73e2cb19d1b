"""Launch a served kernel; arrays that are just right cost little more than the driver's own call.

A call in a hot loop passes arrays of CuPy or PyTorch of the right shape and type, on the right device. All that is left
to do then is to see that they are, and to launch: what was launched on the same memory before as a graph, other arrays
by writing their addresses where the driver reads them. Whatever is out of the ordinary goes through `Caller`, which
also says what is wrong. A thread's first launch on a stream goes that way, too, and sees to it that a CUDA context is
current.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotile.device.launch import ParameterBlock, driver_launch
from autotile.device.module import Function
from autotile.device.properties import device_count
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import on_stream
from autotile.dispatch.calling import Caller, Given
from autotile.dispatch.lanes import Lane, OfThread, Places
from autotile.dispatch.libraries import CupyLibrary, Facts, Pointers, Slot, library_of, pointers
from autotile.dispatch.stream_workspaces import WorkspaceSet

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
