"""Graphs of one launch: their number, errors of CUDA, and their destruction."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from autotile.cuda import function as launch_graph
from autotile.cuda.function import make_launch_graph

PLACES = 4


class RefusedError(RuntimeError):
    """Error of CUDA."""


class Cuda:
    """The part of CuPy that makes graphs; it records when graphs and streams are destroyed."""

    def __init__(self) -> None:
        self.cuda = self.runtime = self.driver = self
        self.CUDADriverError = self.CUDARuntimeError = RefusedError
        self.refused = ""
        self.relaxed = False
        self.destroyed: list[tuple[str, bool]] = []
        self.priorities: list[int] = []

    def do(self, step: str) -> None:
        if self.refused == step:
            raise RefusedError(step)

    def streamGetPriority(self, stream: int) -> int:  # noqa: N802 - CuPy's name
        return -stream

    def Stream(self, *, non_blocking: bool, priority: int) -> Any:  # noqa: N802 - CuPy's name
        assert non_blocking
        self.do("stream")
        self.priorities.append(priority)
        return Stream(self)

    @contextmanager
    def outside_of_captures(self) -> Iterator[None]:
        before, self.relaxed = self.relaxed, True
        yield
        self.relaxed = before

    def launch(self, stream: int) -> None:
        assert stream == 77
        self.do("launch")


class Handle:
    """An object that is destroyed with the last reference to it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __del__(self) -> None:
        self._cuda.destroyed.append((type(self).__name__, self._cuda.relaxed))


class Graph(Handle):
    graphExec = 5  # noqa: N815 - CuPy's name


class Module(Handle):
    pass


class Stream(Handle):
    ptr = 77

    def begin_capture(self) -> None:
        self._cuda.do("begin")

    def end_capture(self) -> Graph:
        self._cuda.do("end")
        return Graph(self._cuda)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda, places = Cuda(), SimpleQueue[None]()
    for _ in range(PLACES):
        places.put(None)
    monkeypatch.setattr(launch_graph, "load_cupy", lambda: cuda)
    monkeypatch.setattr(launch_graph, "outside_of_captures", cuda.outside_of_captures)
    monkeypatch.setattr(launch_graph, "_free_places", places)
    return cuda


def make(cuda: Cuda, stream: int = 0) -> Any:
    return make_launch_graph(cuda.launch, stream, None)


def test_a_graph_of_a_launch_has_the_streams_priority(cuda: Cuda) -> None:
    assert make(cuda).executable == 5
    make(cuda, stream=3)
    assert cuda.priorities == [0, -3]


def test_what_is_destroyed_is_so_where_captures_allow_it(cuda: Cuda) -> None:
    made = make(cuda)
    assert cuda.destroyed == [("Stream", True)]
    del made
    assert cuda.destroyed == [("Stream", True), ("Graph", True)]
    assert not cuda.relaxed


@pytest.mark.parametrize("step", ["stream", "begin", "launch", "end"])
def test_where_cuda_refuses_there_is_no_graph_and_no_place_is_lost(cuda: Cuda, step: str) -> None:
    cuda.refused = step
    assert [make(cuda) for _ in range(2 * PLACES)] == [None] * 2 * PLACES
    cuda.refused = ""
    made = [make(cuda) for _ in range(PLACES)]
    assert None not in made


def test_what_a_launch_needs_stays_as_long_as_its_graph(cuda: Cuda) -> None:
    made = make_launch_graph(cuda.launch, 0, Module(cuda))
    gc.collect()
    assert cuda.destroyed == [("Stream", True)]
    del made
    assert cuda.destroyed == [("Stream", True), ("Graph", True), ("Module", False)]


def test_there_are_so_many_at_most_and_what_goes_makes_room(cuda: Cuda) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [graph for graph in pool.map(lambda _: make(cuda), range(50)) if graph is not None]
    assert len(made) == PLACES
    assert make(cuda) is None
    made.pop()
    assert make(cuda) is not None


def test_an_error_that_is_not_cudas_is_told(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "launch", lambda *_: 1 / 0)
    for _ in range(2 * PLACES):
        with pytest.raises(ZeroDivisionError):
            make(cuda)


def test_a_forked_child_leaves_the_graphs_of_its_parent_alone(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(cuda)
    kept: list[Any] = []
    monkeypatch.setattr(launch_graph, "_inherited", kept)
    monkeypatch.setattr(launch_graph, "os", SimpleNamespace(getpid=lambda: -1))
    del made
    gc.collect()
    assert len(kept) == 1
    assert cuda.destroyed == [("Stream", True)]
