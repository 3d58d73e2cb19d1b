"""Workspaces of a served kernel: one set for each stream, as launches on different streams may run at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from autotile.device.capture import outside_of_captures
from autotile.device.toolchain import load_cupy
from autotile.ground.dtypes import DTYPES
from autotile.ground.frozen import dataclass
from autotile.ground.launch_data import Workspace

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
