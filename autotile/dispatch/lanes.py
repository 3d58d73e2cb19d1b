"""What a thread launches from on a stream: parameters of its own, and graphs of the launches that come again.

Threads must not write the same parameters, and streams have workspaces of their own. In a hot loop the same few arrays
come again and again, or memory that was freed and is used again; a launch on them is kept as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local
from typing import Any, NamedTuple

from autotile.device.launch import ParameterBlock
from autotile.device.launch_graph import LaunchGraph, make_launch_graph
from autotile.device.tensor_maps import encode_tensor_map
from autotile.dispatch.libraries import Facts, Pointers
from autotile.ground.tensor_maps import TensorMap

DriverLaunch = Callable[[int, int, int], None]

_MAP_WORDS = 16
_MOST_LANES = 64
"""Streams whose parameters are kept for a thread; beyond that they are made anew."""
_MOST_GRAPHS = 32
"""Of a lane: the layers of a model, each with weights of its own."""
_MOST_SEEN = 128
_PATIENCE = 2048
"""Launches without a graph after which those that are kept give way, and what was refused is asked for again: so making
graphs costs next to nothing even where new arrays come all the time."""


class MapPlace(NamedTuple):
    """A tensor map among a kernel's parameters: the words at which its buffer's address and it itself stand."""

    pointer_word: int
    word: int
    tensor_map: TensorMap


class Places(NamedTuple):
    """Where the arrays' addresses stand among a kernel's parameters, and where tensor maps do."""

    words: tuple[int, ...]
    maps: tuple[MapPlace, ...]


class Lane:
    """Parameters that one thread launches from on one stream.

    Parameters
    ----------
    launch
        Launches the kernel.
    block
        Its parameters.
    places
        What is exchanged in them.
    kept
        What the launches need and must stay: the kernel's module, what the parameters point to.

    Attributes
    ----------
    graphs
        Launches on arrays that came again, by what these are.
    """

    __slots__ = ("_block", "_kept", "_launch", "_mapped", "_missed", "_places", "_refused", "_seen", "graphs")

    def __init__(self, launch: DriverLaunch, block: ParameterBlock, places: Places, kept: object) -> None:
        self._launch = launch
        self._block = block
        self._places = places
        self._kept = kept
        self._mapped: dict[int, int] = {}
        """Address that the tensor map at a place was made for."""
        self._seen: set[int] = set()
        """Hashes of what arrays were."""
        self._missed = 0
        """Launches without a graph since one was asked for."""
        self._refused = False
        """Whether that was refused."""
        self.graphs: dict[Facts, LaunchGraph] = {}

    def launch(self, stream: int, pointers: Pointers) -> None:
        """Launch on arrays at other addresses than before."""
        words = self._block.words
        for word, pointer in zip(self._places.words, pointers, strict=True):
            words[word] = pointer
        if self._places.maps:
            self._renew(self._places.maps)
        self._launch(stream, self._block.address, 0)

    def keep_as_graph(self, stream: int, facts: Facts) -> None:
        """After a launch: keep it as a graph, if it came before. The stream must not be captured."""
        self._missed += 1
        seen = hash(facts)
        if seen not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(seen)
            return
        is_full = len(self.graphs) >= _MOST_GRAPHS
        if (is_full or self._refused) and self._missed < _PATIENCE:
            return
        if is_full:
            self.graphs.clear()
        self._missed = 0
        graph = make_launch_graph(self._launch, self._block, stream, self._kept)
        self._refused = graph is None
        if graph is not None:
            self.graphs[facts] = graph

    def _renew(self, maps: Sequence[MapPlace]) -> None:
        """Make those tensor maps anew whose buffer has another address than before."""
        words = self._block.words
        for pointer_word, word, tensor_map in maps:
            pointer = words[pointer_word]
            if self._mapped.get(word) != pointer:
                encoded = encode_tensor_map(tensor_map, pointer)
                words[word : word + _MAP_WORDS] = encoded.view("u1").data.cast("Q")
                self._mapped[word] = pointer


class OfThread(local):
    """What the thread that asks keeps for each stream, by the stream's address; it goes with the thread."""

    def __init__(self) -> None:
        self.by_stream: dict[int, Any] = {}

    def keep(self, stream: int, kept: Any) -> None:
        """Keep something for a stream."""
        if len(self.by_stream) >= _MOST_LANES:
            self.by_stream.clear()
        self.by_stream[stream] = kept
