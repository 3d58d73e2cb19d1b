"""Launch a served kernel; arrays that are just right cost little more than the driver's own call.

A call in a hot loop passes arrays of CuPy or PyTorch of the right shape and type, on the right device. All that is left
to do then is to see that they are, to write their addresses where the driver reads them, and to launch. The parameters
to write to are kept for each thread and stream: threads must not write the same ones, and streams have workspaces of
their own. Whatever is out of the ordinary goes through `Caller`, which also says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any

from autotile.device.launch import ParameterBlock, driver_launch
from autotile.device.module import Function
from autotile.device.properties import device_count
from autotile.device.tensor_maps import encode_tensor_map
from autotile.device.toolchain import load_cupy
from autotile.dispatch.arrays import foreign_stream
from autotile.dispatch.calling import Caller, Given, Places
from autotile.dispatch.libraries import CupyLibrary, Expected, Library, library_of

_MAP_WORDS = 16
_MOST_LANES = 256
"""Threads times streams whose parameters are kept; beyond that they are made anew."""


class _Lane:
    """Parameters that one thread launches from on one stream."""

    __slots__ = ("_kept", "_mapped", "_places", "_words", "address")

    def __init__(self, block: ParameterBlock, places: Places, kept: object) -> None:
        self.address = block.address
        self._words = block.words
        self._places = places
        self._mapped: dict[int, int] = {}
        """Address that the tensor map at a place was made for."""
        self._kept = (block, kept)

    def write(self, pointers: Sequence[int]) -> None:
        """Put the addresses of a call's arrays where the driver reads them."""
        words = self._words
        for buffer, word in self._places.addresses:
            words[word] = pointers[buffer]
        for buffer, word, tensor_map in self._places.maps:
            if self._mapped.get(word) != pointers[buffer]:
                encoded = encode_tensor_map(tensor_map, pointers[buffer])
                words[word : word + _MAP_WORDS] = encoded.view("u1").data.cast("Q")
                self._mapped[word] = pointers[buffer]


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
        self._libraries: dict[type, tuple[Library, tuple[Expected, ...]]] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}

    def knows(self, arrays: Sequence[Any]) -> bool:
        """Whether such arrays have been launched on before, so that it is worth trying to be quick."""
        return bool(arrays) and type(arrays[0]) in self._libraries

    def quickly(self, arrays: Sequence[Any]) -> bool:
        """Launch on the current stream of the arrays' library; False where something keeps it from being quick.

        Parameters
        ----------
        arrays
            All of the kernel's buffers; `knows` them.
        """
        if not (self._one_device or self._current_device() == self._device_index):
            return False
        library, expected = self._libraries[type(arrays[0])]
        stream = library.stream(self._device_index)
        lane = self._lanes.get((get_ident(), stream))
        pointers = library.pointers(arrays, expected, self._device_index)
        if lane is None or pointers is None:
            return False
        lane.write(pointers)
        self._launch(stream, lane.address, 0)
        return True

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
        stream = self._cupy.stream(self._device_index)
        workspaces = self._caller.workspaces.current()
        block = ParameterBlock(self._caller.pack(given.views, scalars, workspaces.pointers))
        self._launch(stream, block.address, 0)
        if not scalars:
            self._remember(given, _Lane(block, self._caller.places(block.starts), workspaces), stream)

    def bound(self, given: Given, scalars: Mapping[str, float]) -> Callable[[], None]:
        """What launches on arrays that need no more checks, on the current stream of their library; it keeps them.

        Raises
        ------
        ArgumentError, ToolchainError
            As for `carefully`.
        """
        current = (library_of(given.arrays[0]) or self._cupy).stream
        launch, index = self._launch, self._device_index
        blocks: dict[tuple[int, int], tuple[ParameterBlock, object]] = {}

        def block_for(stream: int) -> ParameterBlock:
            """Of a kernel with workspaces: parameters with those of the stream."""
            key = (get_ident(), stream)
            if key not in blocks:
                with foreign_stream(given.arrays) or nullcontext():
                    workspaces = self._caller.workspaces.current()
                blocks[key] = ParameterBlock(self._caller.pack(given.views, scalars, workspaces.pointers)), workspaces
            return blocks[key][0]

        if self._caller.workspaces:
            block_for(current(index))  # what is wrong is said now

            def go_with_workspaces() -> None:
                stream = current(index)
                launch(stream, block_for(stream).address, 0)

            return go_with_workspaces
        block = ParameterBlock(self._caller.pack(given.views, scalars, {}))
        address = block.address

        def go(_kept: object = (block, given)) -> None:
            launch(current(index), address, 0)

        return go

    def _remember(self, given: Given, lane: _Lane, stream: int) -> None:
        """Be quick from the next call on, where the arrays are of a library that can be."""
        library = library_of(given.arrays[0])
        if library is None:
            return
        if len(self._lanes) >= _MOST_LANES:
            self._lanes.clear()
        self._lanes[get_ident(), stream] = lane
        self._libraries[type(given.arrays[0])] = library, self._caller.expected(library)
