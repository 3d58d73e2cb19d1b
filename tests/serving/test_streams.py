"""Streams of all libraries, as arguments of a call."""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from autotile.errors import ArgumentError
from autotile.serving import arrays


class CupyStream:
    def __init__(self, pointer: int) -> None:
        self.ptr = pointer

    @classmethod
    def from_external(cls, stream: Any) -> "CupyStream":
        return cls(stream.__cuda_stream__()[1])

    def __enter__(self) -> None:
        entered.append(self.ptr)

    def __exit__(self, *_: object) -> None:
        entered.append(-self.ptr)


class ExternalStream(CupyStream):
    """CuPy's class of a stream of another library."""


entered: list[object] = []


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    entered.clear()
    cuda = SimpleNamespace(Stream=CupyStream, ExternalStream=ExternalStream)
    monkeypatch.setattr(arrays, "load_cupy", lambda: SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    "stream",
    [CupyStream(8), ExternalStream(8), SimpleNamespace(cuda_stream=8), SimpleNamespace(__cuda_stream__=lambda: (0, 8))],
    ids=["cupy", "external", "pytorch", "protocol"],
)
def test_it_is_current_meanwhile(stream: Any) -> None:
    with arrays.on_stream([], stream):
        assert entered == [8]
    assert entered == [8, -8]


def test_where_none_is_named_cupys_stays() -> None:
    with arrays.on_stream([object()]):
        assert entered == []


@pytest.mark.parametrize("stream", [7, "null", object()])
def test_what_is_no_stream(stream: Any) -> None:
    with (
        pytest.raises(ArgumentError, match=f"stream is of type {type(stream).__name__}, expected"),
        arrays.on_stream([], stream),
    ):
        pass


class Tensor:
    """The part of a PyTorch tensor that streams use."""

    is_cuda, device = True, "cuda:1"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch with the current stream 5; the streams that are made current are recorded."""

    def stream(chosen: str) -> AbstractContextManager[None]:
        entered.append(chosen)
        return nullcontext()

    cuda = SimpleNamespace(
        stream=stream,
        current_stream=lambda _: SimpleNamespace(cuda_stream=5),
        default_stream=lambda device: f"default of {device}",
        ExternalStream=lambda pointer, device: f"{pointer} of {device}",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("stream", "expected"),
    [(None, [5]), (CupyStream(8), ["8 of cuda:1", 8]), (CupyStream(0), ["default of cuda:1", 0])],
    ids=["none", "named", "null"],
)
def test_tensors_are_worked_on_by_both_libraries(stream: Any, expected: list[object]) -> None:
    """PyTorch would treat the handle 0 of the default stream as no handle."""
    with arrays.on_stream([object(), Tensor()], stream):
        assert entered == expected
