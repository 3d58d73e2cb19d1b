"""Streams of any library, as a call takes them."""

from types import SimpleNamespace
from typing import Any

import pytest

from autotile.dispatch import arrays
from autotile.ground.errors import ArgumentError


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
    """CuPy's own name for a stream of somebody else."""


entered: list[int] = []


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
