"""State of a served kernel on each stream: workspaces, launch parameters, and graphs of repeated launches.

Threads must not write the same parameters, and streams have workspaces of their own. In a hot loop the same few arrays
come again and again, or memory that was freed and is used again; a launch on them is kept as a graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import local
from typing import Any, NamedTuple

from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.function import LaunchGraph, ParameterBlock, make_launch_graph
from autotile.cuda.packing import encode_tensor_map
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.launch import TensorMap, Workspace
from autotile.serving.arrays import Facts, Pointers

_MOST_STREAMS = 32
"""Sets that are kept; beyond that the one used longest ago is given back, in the order of its own stream."""
_PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle for a stream of each thread."""


@dataclass(frozen=True, slots=True)
class WorkspaceSet:
    """The workspaces of a stream; holding on to it keeps its handle from being given to another stream."""

    stream: Any
    arrays: tuple[Any, ...]
    pointers: Mapping[str, int]


_NONE = WorkspaceSet(None, (), {})


class StreamWorkspaces:
    """Memory that a kernel needs for itself, allocated at the first launch on a stream and kept.

    Parameters
    ----------
    workspaces
        What each stream needs.
    """

    def __init__(self, workspaces: tuple[Workspace, ...]) -> None:
        self._workspaces = workspaces
        self._sets: OrderedDict[tuple[int, int], WorkspaceSet] = OrderedDict()
        self._captured: list[WorkspaceSet] = []
        self._lock = threading.Lock()

    def current(self) -> WorkspaceSet:
        """Those of CuPy's current stream, each at its device address; 0 for one that is empty."""
        if not self._workspaces:
            return _NONE
        stream = load_cupy().cuda.get_current_stream()
        key = (stream.ptr, threading.get_ident() if stream.ptr == _PER_THREAD_STREAM else 0)
        with self._lock:
            kept = self._sets.get(key)
            if kept is None:
                kept = self._sets[key] = self._new(stream)
                if len(self._sets) > _MOST_STREAMS:
                    self._sets.popitem(last=False)
            else:
                self._sets.move_to_end(key)
        return kept

    def _new(self, stream: Any) -> WorkspaceSet:
        """A set for a stream, ready for whatever is launched on it next.

        CuPy's memory pool hands freed memory out again on the stream that it was allocated on, and so in order. Where
        the stream is captured, what fills the memory must not become part of the graph: it would not be filled until
        the graph is launched. Such a set is for good, as the graph may outlive all that could be told of it.
        """
        with outside_of_captures():
            if not stream.is_capturing():
                return self._allocate(stream)
            made = self._allocate_apart(stream)
        self._captured.append(made)
        return made

    def _allocate_apart(self, stream: Any) -> WorkspaceSet:
        with load_cupy().cuda.Stream(non_blocking=True) as apart:
            made = self._allocate(stream)
            apart.synchronize()
        return made

    def _allocate(self, stream: Any) -> WorkspaceSet:
        cupy = load_cupy()
        arrays = {
            w.name: (cupy.zeros if w.zeroed else cupy.empty)(w.shape, DTYPES[w.dtype].storage)
            for w in self._workspaces
            if w.size_bytes
        }
        pointers = {w.name: arrays[w.name].data.ptr if w.size_bytes else 0 for w in self._workspaces}
        return WorkspaceSet(stream, tuple(arrays.values()), pointers)


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
