"""Per-stream state of a served kernel: workspaces, launch parameters, and graphs of repeated launches.

Threads must not write the same parameters, and concurrent streams must not share workspaces. A hot loop passes the same
few arrays again and again, or memory that was freed and reused; a launch that comes again is kept as a CUDA graph.
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
from autotile.cuda.packing import encode_description
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.arguments import Workspace
from autotile.kernel.descriptors import TensorMap, Texture
from autotile.serving.arrays import Pointers, Signature

_MAX_WORKSPACE_SETS = 32
"""Workspace sets of a kernel; beyond that the least recently used is freed, in the order of its stream."""
_PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle that stands for a different stream in each thread."""


@dataclass(frozen=True, slots=True)
class WorkspaceSet:
    """The workspaces of a stream. It refers to the stream, so that CUDA does not reuse its handle meanwhile."""

    stream: Any
    arrays: tuple[Any, ...]
    pointers: Mapping[str, int]


_NONE = WorkspaceSet(None, (), {})


class StreamWorkspaces:
    """Workspaces of a kernel, allocated at its first launch on each stream and kept.

    Parameters
    ----------
    workspaces
        Workspaces that each stream needs.
    """

    def __init__(self, workspaces: tuple[Workspace, ...]) -> None:
        self._workspaces = workspaces
        self._sets: OrderedDict[tuple[int, int], WorkspaceSet] = OrderedDict()
        self._captured: list[WorkspaceSet] = []
        self._lock = threading.Lock()

    def current(self) -> WorkspaceSet:
        """Return the workspaces of CuPy's current stream; the address of an empty one is 0."""
        if not self._workspaces:
            return _NONE
        stream = load_cupy().cuda.get_current_stream()
        key = (stream.ptr, threading.get_ident() if stream.ptr == _PER_THREAD_STREAM else 0)
        with self._lock:
            kept = self._sets.get(key)
            if kept is None:
                kept = self._sets[key] = self._new(stream)
                if len(self._sets) > _MAX_WORKSPACE_SETS:
                    self._sets.popitem(last=False)
            else:
                self._sets.move_to_end(key)
        return kept

    def _new(self, stream: Any) -> WorkspaceSet:
        """Allocate a set that is ready for the next launch on a stream.

        CuPy's memory pool reuses freed memory on the stream that it was allocated on, hence in order. On a captured
        stream, the fill must not be captured too, as it would then run only when the graph is launched; the set is
        filled on a stream of its own. It is never freed, as the graph may be launched at any later time.
        """
        with outside_of_captures():
            if not stream.is_capturing():
                return self._allocate(stream)
            made = self._allocate_outside(stream)
        self._captured.append(made)
        return made

    def _allocate_outside(self, stream: Any) -> WorkspaceSet:
        with load_cupy().cuda.Stream(non_blocking=True) as side_stream:
            made = self._allocate(stream)
            side_stream.synchronize()
        return made

    def _allocate(self, stream: Any) -> WorkspaceSet:
        cupy = load_cupy()
        arrays = {
            w.name: (cupy.zeros if w.zeroed else cupy.empty)(
                DTYPES[w.dtype].array_shape(w.shape), DTYPES[w.dtype].storage
            )
            for w in self._workspaces
            if w.size_bytes
        }
        pointers = {w.name: arrays[w.name].data.ptr if w.size_bytes else 0 for w in self._workspaces}
        return WorkspaceSet(stream, tuple(arrays.values()), pointers)


DriverLaunch = Callable[[int, int, int], None]

_MAX_STREAMS = 64
"""Streams whose state is kept in a thread; beyond that all states of the thread are made anew."""
_MAX_GRAPHS = 32
"""Graphs of a stream state: the layers of a model, each with its own weights."""
_MAX_SEEN = 128
_PATIENCE = 2048
"""Launches without a graph after which the kept graphs are dropped, or a refused graph is tried again; the cost of
making graphs then stays negligible even if every launch is on new arrays."""


class TensorMapPlace(NamedTuple):
    """Place of a tensor map or texture in a parameter block: word of its buffer's address, and its own first word."""

    pointer_word: int
    word: int
    tensor_map: TensorMap | Texture


class ParameterLayout(NamedTuple):
    """Words of the array addresses in a parameter block, places of the tensor maps, and further words of addresses."""

    words: tuple[int, ...]
    maps: tuple[TensorMapPlace, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Pairs of words, of which the second takes the value of the first: the pointers in structs."""


class StreamState:
    """Launch parameters of one thread on one stream.

    Parameters
    ----------
    launch
        Function that launches the kernel.
    block
        Parameters of the kernel.
    layout
        Parameters that differ between launches.
    keep_alive
        Objects that the launches need: the kernel's module, memory that the parameters point to.

    Attributes
    ----------
    graphs
        Graphs of launches that came again, by the signature of their arrays.
    """

    __slots__ = ("_block", "_keep_alive", "_launch", "_layout", "_mapped", "_misses", "_refused", "_seen", "graphs")

    def __init__(
        self, launch: DriverLaunch, block: ParameterBlock, layout: ParameterLayout, keep_alive: object
    ) -> None:
        self._launch = launch
        self._block = block
        self._layout = layout
        self._keep_alive = keep_alive
        self._mapped: dict[int, int] = {}
        """Buffer address of each encoded tensor map, by the map's first word."""
        self._seen: set[int] = set()
        """Hashes of signatures."""
        self._misses = 0
        """Launches without a graph since the last attempt to make one."""
        self._refused = False
        """Whether that attempt failed."""
        self.graphs: dict[Signature, LaunchGraph] = {}

    def launch(self, stream: int, pointers: Pointers) -> None:
        """Launch on arrays at the given addresses."""
        words = self._block.words
        for word, pointer in zip(self._layout.words, pointers, strict=True):
            words[word] = pointer
        if self._layout.maps:
            self._update_maps(self._layout.maps)
        for source, target in self._layout.copies:
            words[target] = words[source]
        self._launch(stream, self._block.address, 0)

    def keep_as_graph(self, stream: int, signature: Signature) -> None:
        """Make a graph of the last launch if its signature came before; the stream must not be capturing."""
        self._misses += 1
        seen = hash(signature)
        if seen not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(seen)
            return
        is_full = len(self.graphs) >= _MAX_GRAPHS
        if (is_full or self._refused) and self._misses < _PATIENCE:
            return
        if is_full:
            self.graphs.clear()
        self._misses = 0
        graph = make_launch_graph(self._launch, self._block, stream, self._keep_alive)
        self._refused = graph is None
        if graph is not None:
            self.graphs[signature] = graph

    def _update_maps(self, maps: Sequence[TensorMapPlace]) -> None:
        """Encode the tensor maps whose buffer has moved."""
        words = self._block.words
        for pointer_word, word, tensor_map in maps:
            pointer = words[pointer_word]
            if self._mapped.get(word) != pointer:
                encoded = encode_description(tensor_map, pointer)
                words[word : word + encoded.size] = encoded.view("u1").data.cast("Q")
                self._mapped[word] = pointer


class ThreadStates(local):
    """Stream states of the calling thread, by stream handle; they are dropped with the thread."""

    def __init__(self) -> None:
        self.by_stream: dict[int, StreamState] = {}

    def keep(self, stream: int, state: StreamState) -> None:
        """Keep the state of a stream."""
        if len(self.by_stream) >= _MAX_STREAMS:
            self.by_stream.clear()
        self.by_stream[stream] = state
