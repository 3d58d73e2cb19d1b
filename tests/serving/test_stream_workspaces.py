"""Workspaces of streams, without a device: allocation, initialization and lifetime."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from autotile.kernel.arguments import Workspace
from autotile.serving import launching as stream_workspaces
from autotile.serving.launching import StreamWorkspaces

COUNTER = Workspace("counter", "uint32", (1,), zeroed=True)
EMPTY = Workspace("empty", "float32", (0, 4), zeroed=False)


class Stream:
    """A stream that records the operations on it."""

    def __init__(self, cuda: "Cuda", pointer: int, *, captured: bool = False) -> None:
        self.cuda, self.ptr, self.captured = cuda, pointer, captured
        self.done: list[str] = []

    def is_capturing(self) -> bool:
        return self.captured

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def __enter__(self) -> "Stream":
        self.before, self.cuda.stream = self.cuda.stream, self
        return self

    def __exit__(self, *_: object) -> None:
        self.cuda.stream = self.before


class Cuda:
    """The part of CuPy that workspaces use."""

    def __init__(self) -> None:
        self.cuda = self
        self.streams: list[Stream] = []
        self.allocated = 0
        self.stream = self.Stream()

    def Stream(self, non_blocking: bool = False, captured: bool = False) -> Stream:  # noqa: N802 - CuPy's name
        self.streams.append(Stream(self, 16 * len(self.streams), captured=captured))
        return self.streams[-1]

    def get_current_stream(self) -> Stream:
        return self.stream

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.stream.done.append("zeros")
        self.allocated += 256
        return SimpleNamespace(data=SimpleNamespace(ptr=self.allocated))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(stream_workspaces, "load_cupy", lambda: cuda)
    monkeypatch.setattr(stream_workspaces, "outside_of_captures", nullcontext)
    return cuda


def test_each_stream_has_its_own_and_keeps_it(cuda: Cuda) -> None:
    workspaces = StreamWorkspaces((COUNTER, EMPTY))
    first, second = cuda.Stream(), cuda.Stream()
    found = []
    for stream in (first, second, first):
        with stream:
            found.append(workspaces.current())
    assert found[0] is found[2]
    assert [one.pointers for one in found[:2]] == [{"counter": 256, "empty": 0}, {"counter": 512, "empty": 0}]
    assert first.done == second.done == ["zeros"]


def test_what_is_filled_for_a_captured_stream_is_no_part_of_its_graph(cuda: Cuda) -> None:
    stream = cuda.Stream(captured=True)
    with stream:
        kept = StreamWorkspaces((COUNTER,)).current()
    assert stream.done == []
    assert cuda.streams[-1].done == ["zeros", "synchronize"]
    assert kept.stream is stream


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_graph_may_use_is_never_given_back(cuda: Cuda, captured: bool) -> None:
    workspaces = StreamWorkspaces((COUNTER,))
    for _ in range(stream_workspaces._MAX_WORKSPACE_SETS + 8):
        with cuda.Stream(captured=captured):
            workspaces.current()
    assert len(workspaces._sets) == stream_workspaces._MAX_WORKSPACE_SETS
    assert len(workspaces._captured) == captured * (stream_workspaces._MAX_WORKSPACE_SETS + 8)
