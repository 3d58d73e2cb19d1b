"""Launch a served kernel: check and complete the arrays of a call, then launch at about the cost of the driver call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotile.core.model import Config, Problem
from autotile.cuda.driver import device_count
from autotile.cuda.function import WORD_BYTES, ParameterBlock, StepFunctions
from autotile.cuda.packing import encode_scalar, pack_launches
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ArgumentError
from autotile.kernel.descriptors import TensorMap, Texture
from autotile.kernel.launch import LaunchData, LaunchPlan
from autotile.kernel.spec import KernelSpec
from autotile.serving.arrays import (
    ArraySpec,
    CupyLibrary,
    Pointers,
    Signature,
    accepted_pointers,
    library_of,
    on_stream,
)
from autotile.serving.call_arrays import CallArrays, CheckedArrays
from autotile.serving.preparation import Preparation
from autotile.serving.stream_state import (
    DriverLaunch,
    ParameterLayout,
    StreamState,
    StreamWorkspaces,
    TensorMapPlace,
    ThreadStates,
)


class CallArguments(CallArrays):
    """Arguments of a kernel's calls, for one problem and configuration.

    Parameters
    ----------
    spec, problem, config, plan
        The kernel, its problem and configuration, and the launches of a call.
    data
        Workspaces and tensor maps of the configuration.
    scalars
        Values of the scalars, as NumPy scalars of the exact types.
    device_index
        CUDA device of the arrays.

    Attributes
    ----------
    plan
        As given.
    workspaces
        Workspaces of each stream.
    """

    def __init__(
        self,
        spec: KernelSpec,
        problem: Problem,
        config: Config,
        plan: LaunchPlan,
        *,
        data: LaunchData,
        scalars: Mapping[str, Any],
        device_index: int,
    ) -> None:
        super().__init__(spec, problem, config, device_index)
        self.plan = plan
        self._scalars = scalars
        self._data = data
        self.workspaces = StreamWorkspaces(data.workspaces)

    def pack(
        self, views: Mapping[str, Any], scalars: Mapping[str, float], workspaces: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """Return the parameters of all launches, in order.

        Raises
        ------
        ArgumentError
            A scalar is unknown, its value does not fit in its type, or a buffer with a tensor map is not aligned.
        ToolchainError
            The driver refuses a tensor map.
        """
        pointers = {name: int(view.data.ptr) for name, view in views.items()}
        values = {**self._scalars, **{name: self._override(name, value) for name, value in scalars.items()}}
        launches = pack_launches(
            self._spec,
            self.plan,
            self._data,
            self._problem.dtype,
            pointers=pointers,
            scalars=values,
            workspaces=workspaces,
        )
        return tuple(value for launch in launches for value in launch)

    def layout(self, starts: Sequence[int], words: int) -> ParameterLayout:
        """Return the places of the array addresses, in structs too, and of the tensor maps in a parameter block.

        Parameters
        ----------
        starts
            First word of each packed parameter.
        words
            Number of words. The last ones, one for each buffer, hold addresses that are not parameters.
        """
        buffers = self._spec.buffers
        passed = [self._spec.argument(name) for launch in self.plan.launches for name in launch.arguments]
        found = list(zip(passed, starts, strict=True))
        spare = {b.name: words - len(buffers) + i for i, b in enumerate(buffers)}
        word = spare | {a.name: start for a, start in reversed(found) if a.is_given}
        maps: dict[str, TensorMap | Texture] = {one.name: one for one in self._data.tensor_maps}
        maps |= {one.name: one for one in self._data.textures}
        map_places = (
            TensorMapPlace(word[a.described_buffer], start, maps[a.name])
            for a, start in found
            if a.name in maps and a.described_buffer in word  # the map of a workspace stays the same
        )
        structs = {struct.name: struct for struct in self._data.structs}
        copies = (
            (word[target], start + offset // WORD_BYTES)
            for a, start in found
            if a.name in structs
            for offset, target in structs[a.name].pointers
            if target in word
        )
        repeated = ((word[a.name], start) for a, start in found if a.is_given and start != word[a.name])
        places = tuple(word[b.name] for b in buffers)
        return ParameterLayout(places, tuple(map_places), (*repeated, *copies))

    def place(self, block: ParameterBlock, views: Mapping[str, Any]) -> tuple[int, ...]:
        """Write the addresses of the buffers to a block with spare words, and return the word of each."""
        words = self.layout(block.starts, len(block.words)).words
        for buffer, word in zip(self._spec.buffers, words, strict=True):
            block.words[word] = int(views[buffer.name].data.ptr)
        return words

    def _override(self, name: str, value: float) -> Any:
        free = {s.name: s for s in self._spec.scalars if s.default is not None}
        scalar = free.get(name)
        if scalar is None:
            known = ", ".join(free) or "none"
            raise ArgumentError(f"{self._spec.name} has no scalar {name!r} to set; scalars with a default: {known}")
        return encode_scalar(scalar, value, self._problem.dtype)


CurrentStream = Callable[[int], int]
ReadSignature = Callable[[Sequence[Any]], Signature]


class Launcher:
    """Launches functions that are loaded on a device.

    Parameters
    ----------
    arguments
        Arguments of the calls.
    functions
        The loaded functions, which are kept alive.
    device_index
        CUDA device.
    with_graphs
        Whether repeated launches may become CUDA graphs.
    preparation
        Work before each launch; None if there is none.

    Attributes
    ----------
    arguments
        As given.
    """

    def __init__(
        self,
        arguments: CallArguments,
        functions: StepFunctions,
        device_index: int,
        *,
        with_graphs: bool,
        preparation: Preparation | None = None,
    ) -> None:
        self.arguments = arguments
        self._functions = functions
        self._device_index = device_index
        self._with_graphs = with_graphs
        self._preparation = preparation
        self._one_device = device_count() == 1
        runtime = load_cupy().cuda.runtime
        self._current_device: Callable[[], int] = runtime.getDevice
        self._launch_graph: Callable[[int, int], None] = runtime.graphLaunch
        self._is_capturing: Callable[[int], bool] = runtime.streamIsCapturing
        """Not to be called with stream 0, which cannot be captured."""
        self._launch = functions.driver_launch(arguments.plan)
        self._cupy = CupyLibrary()
        self._libraries: dict[type, tuple[CurrentStream, ReadSignature, tuple[ArraySpec, ...]]] = {}
        self._states = ThreadStates()

    @property
    def plain(self) -> Launcher:
        """The launcher itself, as for one that also captures calls."""
        return self

    def launch_fast(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Launch on the current stream of the arrays' library, if the fast path applies.

        It does after `launch` has launched on arrays of the same library, in the same thread and on the same stream.

        Parameters
        ----------
        arrays
            Buffers of the kernel, in order; outputs may be left out and are then allocated.

        Returns
        -------
        sequence of arrays or None
            All buffers of the kernel; None if nothing was launched.

        Raises
        ------
        ArgumentError
            There are too few or too many arrays.
        """
        known = self._libraries.get(type(arrays[0])) if arrays else None
        if known is None or not (self._one_device or self._current_device() == self._device_index):
            return None
        current_stream, read_signature, specs = known
        stream = current_stream(self._device_index)
        state = self._states.by_stream.get(stream)
        if state is None:
            return None
        signature = read_signature(arrays)
        is_captured = stream != 0 and self._with_graphs and self._is_capturing(stream)
        graph = state.graphs.get(signature)
        if graph is not None and not is_captured:
            self._launch_graph(graph.executable, stream)
            return arrays
        if len(arrays) != len(specs):
            return self.launch_fast(self.arguments.complete(arrays))
        found = accepted_pointers(signature, specs, self._device_index) if signature else None
        if found is not None:
            self._launch_parameters(state, stream, found, signature, is_captured)
        return arrays if found is not None else None

    def launch(self, arrays: Sequence[Any], stream: Any, scalars: Mapping[str, float]) -> Sequence[Any]:
        """Check arrays, allocate the outputs that were left out, launch, and prepare the fast path for such arrays.

        Parameters
        ----------
        arrays
            Buffers of the kernel, in order; outputs may be left out.
        stream
            As for `autotile.serving.arrays.on_stream`.
        scalars
            Values of scalars that differ from their defaults.

        Returns
        -------
        sequence of arrays
            All buffers of the kernel.

        Raises
        ------
        ArgumentError
            An array has the wrong shape, dtype, layout, alignment or device, there are too few or too many, a scalar is
            unknown, or its value does not fit in its type.
        ToolchainError
            The driver refuses a tensor map.
        """
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays, stream):
            checked = self.arguments.check(arrays)
            self._launch_checked(checked, scalars)
        return checked.arrays

    def capture(
        self, arrays: Sequence[Any], stream: Any, write: Callable[[Mapping[str, Any]], object]
    ) -> Sequence[Any]:
        """Check the arrays of a call, pass them to ``write`` as CuPy arrays, and return all; nothing is launched.

        Raises
        ------
        ArgumentError
            As for `launch`.
        """
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays, stream):
            checked = self.arguments.check(arrays)
            write(checked.views)
        return checked.arrays

    def bind(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that launches on fixed arrays, on the current stream of their library.

        Raises
        ------
        ArgumentError, ToolchainError
            As for `launch`.
        """
        with load_cupy().cuda.Device(self._device_index):
            return self._bind_checked(self.arguments.check(arrays), scalars)

    def _launch_checked(self, checked: CheckedArrays, scalars: Mapping[str, float]) -> None:
        """Launch on CuPy's current stream, and prepare the fast path for such arrays."""
        load_cupy().cuda.runtime.setDevice(self._device_index)  # it makes a context current
        stream = self._cupy.stream(self._device_index)
        workspaces = self.arguments.workspaces.current()
        values = self.arguments.pack(checked.views, scalars, workspaces.pointers)
        block = ParameterBlock(values, spare_words=len(checked.arrays))
        launch = self._launch
        if self._preparation is not None:
            words = self.arguments.place(block, checked.views)
            launch = self._preparation.launch(launch, block, words, stream)
        launch(stream, block.address, 0)
        library = library_of(checked.arrays[0])
        if library is not None and not scalars:
            if stream not in self._states.by_stream:  # an existing state, with its graphs, stays valid
                layout = self.arguments.layout(block.starts, len(block.words))
                self._states.keep(stream, self._new_state(launch, block, layout, workspaces))
            self._libraries.setdefault(
                type(checked.arrays[0]), (library.stream, library.signature, self.arguments.array_specs(library))
            )

    def _bind_checked(self, checked: CheckedArrays, scalars: Mapping[str, float]) -> Callable[[], None]:
        current_stream = (library_of(checked.arrays[0]) or self._cupy).stream
        launch_graph, is_capturing, index = self._launch_graph, self._is_capturing, self._device_index
        with_graphs = self._with_graphs
        states = ThreadStates()

        def new_state(stream: int) -> StreamState:
            load_cupy().cuda.runtime.setDevice(index)  # it makes a context current
            with on_stream(checked.arrays):
                workspaces = self.arguments.workspaces.current()
            values = self.arguments.pack(checked.views, scalars, workspaces.pointers)
            launch, own = self._launch, None
            if self._preparation is None:
                block = ParameterBlock(values)
            else:
                block = ParameterBlock(values, spare_words=len(checked.arrays))
                launch, own = self._preparation.bound_launch(
                    launch, block, self.arguments.place(block, checked.views), stream
                )
            state = self._new_state(launch, block, ParameterLayout((), (), ()), (workspaces, own))
            states.keep(stream, state)
            return state

        def launch() -> None:
            stream = current_stream(index)
            state = states.by_stream.get(stream) or new_state(stream)
            is_captured = stream != 0 and with_graphs and is_capturing(stream)
            graph = state.graphs.get(())
            if graph is not None and not is_captured:
                launch_graph(graph.executable, stream)
            else:
                self._launch_parameters(state, stream, (), (), is_captured)

        def launch_on_device() -> None:
            with load_cupy().cuda.Device(index):
                launch()

        new_state(current_stream(index))  # so that errors are raised here
        return launch if self._one_device else launch_on_device

    def _new_state(
        self, launch: DriverLaunch, block: ParameterBlock, layout: ParameterLayout, memory: object
    ) -> StreamState:
        return StreamState(launch, block, layout, (self._functions, memory))

    def _launch_parameters(
        self, state: StreamState, stream: int, pointers: Pointers, signature: Signature, is_captured: bool
    ) -> None:
        """Launch without a graph, and keep the launch as a graph if it came before."""
        state.launch(stream, pointers)
        if self._with_graphs and not is_captured:
            state.keep_as_graph(stream, signature)
