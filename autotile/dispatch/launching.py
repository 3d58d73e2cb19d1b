"""Launch a served kernel; arrays that are just right cost little more than the driver's own call.

A call in a hot loop passes arrays of CuPy or PyTorch of the right shape and type, on the right device. All that is left
to do then is to see that they are, to write their addresses where the driver reads them, and to launch. The parameters
to write to are kept for each thread and stream: threads must not write the same ones, and streams have workspaces of
their own. Whatever is out of the ordinary goes through `Caller`, which also says what is wrong. A thread's first launch
on a stream goes that way, too, and sees to it that a CUDA context is current.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import local
from typing import Any

from autotile.device.launch import ParameterBlock, driver_launch
from autotile.device.module import Function
from autotile.device.properties import device_count
from autotile.device.tensor_maps import encode_tensor_map
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import on_stream
from autotile.dispatch.calling import Caller, Given, MapPlace
from autotile.dispatch.libraries import CupyLibrary, Library, Slot, library_of

Stream = Callable[[int], int]
Write = Callable[[Sequence[Any], Sequence[Slot], int, memoryview], bool]

_MAP_WORDS = 16
_MOST_LANES = 64
"""Streams whose parameters are kept for a thread; beyond that they are made anew."""


class _Lane:
    """Parameters that one thread launches from on one stream."""

    __slots__ = ("_kept", "_mapped", "address", "words")

    def __init__(self, block: ParameterBlock, kept: object) -> None:
        self.address = block.address
        self.words = block.words
        self._mapped: dict[int, int] = {}
        """Address that the tensor map at a place was made for."""
        self._kept = (block, kept)

    def renew(self, maps: Sequence[MapPlace]) -> None:
        """Make those tensor maps anew whose buffer has another address than before."""
        words = self.words
        for pointer_word, word, tensor_map in maps:
            pointer = words[pointer_word]
            if self._mapped.get(word) != pointer:
                encoded = encode_tensor_map(tensor_map, pointer)
                words[word : word + _MAP_WORDS] = encoded.view("u1").data.cast("Q")
                self._mapped[word] = pointer


class _OfThread(local):
    """What the thread that asks keeps for each stream, by the stream's address; it goes with the thread."""

    def __init__(self) -> None:
        self.by_stream: dict[int, Any] = {}

    def keep(self, stream: int, kept: Any) -> None:
        """Keep something for a stream."""
        if len(self.by_stream) >= _MOST_LANES:
            self.by_stream.clear()
        self.by_stream[stream] = kept


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
    """

    def __init__(self, caller: Caller, function: Function, device_index: int) -> None:
        self._caller = caller
        self._function = function
        self._device_index = device_index
        self._one_device = device_count() == 1
        self._current_device: Callable[[], int] = load_cupy().cuda.runtime.getDevice
        self._launch = driver_launch(function.pointer, caller.geometry)
        self._cupy = CupyLibrary()
        self._libraries: dict[type, tuple[Stream, Write, tuple[Slot, ...]]] = {}
        self._maps: tuple[MapPlace, ...] = ()
        self._lanes = _OfThread()

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
        stream_of, write, slots = known
        stream = stream_of(self._device_index)
        lane: _Lane | None = self._lanes.by_stream.get(stream)
        if lane is None:
            return None
        if len(arrays) != len(slots):
            arrays = self._caller.complete(arrays)
        if not write(arrays, slots, self._device_index, lane.words):
            return None
        if self._maps:
            lane.renew(self._maps)
        self._launch(stream, lane.address, 0)
        return arrays

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
            self._remember(library, type(given.arrays[0]), _Lane(block, workspaces), block, stream)

    def bound(self, given: Given, scalars: Mapping[str, float]) -> Callable[[], None]:
        """What launches on arrays that need no more checks, on the current stream of their library; it keeps them.

        Raises
        ------
        ArgumentError, ToolchainError
            As for `carefully`.
        """
        current = (library_of(given.arrays[0]) or self._cupy).stream
        launch, index = self._launch, self._device_index
        driver_error: type[Exception] = load_cupy().cuda.driver.CUDADriverError
        block_for = self._blocks(given, scalars)
        block = block_for(current(index))  # what is wrong is said now
        fixed = None if self._caller.workspaces else block

        def go() -> None:
            stream = current(index)
            block = fixed or block_for(stream)
            try:
                launch(stream, block.address, 0)
            except driver_error as error:
                self._launch_again(stream, block, error)

        def go_there() -> None:
            with load_cupy().cuda.Device(index):
                go()

        return go if self._one_device else go_there

    def _blocks(self, given: Given, scalars: Mapping[str, float]) -> Callable[[int], ParameterBlock]:
        """What gives the thread's parameters for a stream, with the stream's workspaces; it keeps the arrays."""
        blocks = _OfThread()

        def block_for(stream: int) -> ParameterBlock:
            known: tuple[ParameterBlock, object] | None = blocks.by_stream.get(stream)
            if known is None:
                with on_stream(given.arrays):
                    workspaces = self._caller.workspaces.current()
                values = self._caller.pack(given.views, scalars, workspaces.pointers)
                known = ParameterBlock(values), workspaces
                blocks.keep(stream, known)
            return known[0]

        return block_for

    def _launch_again(self, stream: int, block: ParameterBlock, error: Exception) -> None:
        """Launch in a thread in which no CUDA context was current; any other error is raised again."""
        cuda = load_cupy().cuda
        if cuda.driver.ctxGetCurrent():
            raise error
        cuda.runtime.setDevice(self._device_index)
        self._launch(stream, block.address, 0)

    def _remember(self, library: Library, kind: type, lane: _Lane, block: ParameterBlock, stream: int) -> None:
        """Be quick from the next call on."""
        self._lanes.keep(stream, lane)
        if kind not in self._libraries:
            slots, self._maps = self._caller.places(library, block.starts, len(block.words))
            self._libraries[kind] = library.stream, library.write, slots
