"""Calls of a bound kernel, without a device: from the arrays of a call to the parameters of its launch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest

from autotile.core.model import LaunchGeometry
from autotile.cuda import driver, toolchain
from autotile.cuda import function as functions
from autotile.cuda.function import ParameterBlock
from autotile.errors import ArgumentError
from autotile.serving import arrays, bound, launching
from autotile.serving.bound import BoundKernel
from autotile.serving.selection import RecentCache

BEST = {"THREADS": 256, "WORK": 4}
N = 4096
ADDRESS = 0x7000_0000_0000


def array(number: int, shape: tuple[int, ...] = (N,), dtype: type = np.float32, device: int = 0) -> Any:
    """An array on the device that cannot be read, at an address of its own."""
    memory = cupy.cuda.UnownedMemory(ADDRESS + number * (1 << 20), 1 << 20, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class Cuda:
    """The part of CuPy that calls use, with two devices; records the parameters of launches, and launched graphs."""

    ndarray = cupy.ndarray
    CUDADriverError = CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.cuda = self.runtime = self.driver = self
        self.devices: list[int] = []
        self.launches: list[tuple[int, list[int]]] = []
        self.new_arrays = 0

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:  # noqa: N802 - CuPy's name
        self.devices.append(index)
        yield

    def setDevice(self, index: int) -> None:  # noqa: N802 - CuPy's name
        assert index == 0

    def getDevice(self) -> int:  # noqa: N802 - CuPy's name
        return 0

    def streamIsCapturing(self, _: int) -> bool:  # noqa: N802 - CuPy's name
        return False

    def graphLaunch(self, graph: int, stream: int) -> None:  # noqa: N802 - CuPy's name
        self.launches.append((stream, [graph]))

    def get_current_stream(self, _: int | None = None) -> Any:
        return SimpleNamespace(ptr=7)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        self.new_arrays += 1
        return array(100 + self.new_arrays, shape, np.dtype(dtype).type)

    def from_dlpack(self, _: Any) -> Any:
        raise ValueError("CPU arrays cannot be directly imported to CuPy")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    blocks: dict[int, ParameterBlock] = {}

    class Block(ParameterBlock):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            blocks[self.address] = self

    def driver_launch(pointer: int, geometry: LaunchGeometry) -> Any:
        assert (pointer, geometry.block) == (5, (256, 1, 1))
        return lambda stream, address, _: cuda.launches.append((stream, list(blocks[address].words)))

    for module in (arrays, launching, toolchain):
        monkeypatch.setattr(module, "load_cupy", lambda: cuda)
    for module in (arrays, launching):
        monkeypatch.setattr(module, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "outside_of_captures", nullcontext)
    monkeypatch.setattr(functions, "driver_launch", driver_launch)
    monkeypatch.setattr(launching, "ParameterBlock", Block)
    monkeypatch.setattr(launching, "make_launch_graph", lambda *_: SimpleNamespace(executable=99))
    function = SimpleNamespace(pointer=5, opt_in=lambda _: None)
    monkeypatch.setattr(functions, "Module", lambda _: SimpleNamespace(function=lambda _: function, pointer=1))
    return cuda


@pytest.fixture
def kernel(store: Any, live_gpu: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> BoundKernel:
    store.put(N, BEST)
    kernel: BoundKernel = store.ask(N, device=None)
    cubin = SimpleNamespace(path=Path("scale.cubin"), symbols={}, cubin_hash="0")
    monkeypatch.setattr(kernel._code, "_find_cubin", lambda *, may_compile: cubin)
    monkeypatch.setattr(bound, "_loaded", RecentCache(8))
    return kernel


def parameters(x: Any, y: Any, factor: float = 2.0) -> list[int]:
    """The words of the kernel's parameters: x, y, n, factor."""
    return [x.data.ptr, y.data.ptr, N, int(np.float32(factor).view(np.uint32))]


def test_parameters_of_first_fast_and_repeated_launches(kernel: BoundKernel, cuda: Cuda) -> None:
    x, y, z = (array(i) for i in range(3))
    for out in (y, y, z):
        assert kernel(x, out) is out
    assert [(stream, words[:4]) for stream, words in cuda.launches] == [(7, parameters(x, out)) for out in (y, y, z)]
    cuda.launches.clear()
    assert kernel(x, z) is z  # the second time on the fast path: this launch becomes a graph
    assert kernel(x, z) is z
    assert [words[:4] for _, words in cuda.launches] == [parameters(x, z), [99]]
    assert (kernel.calls, cuda.devices) == (5, [0, 0])


def test_outputs_that_are_left_out_are_allocated(kernel: BoundKernel, cuda: Cuda) -> None:
    x = array(0)
    first, second = kernel(x), kernel(x)
    assert cuda.new_arrays == 2
    assert [words[:4] for _, words in cuda.launches] == [parameters(x, first), parameters(x, second)]


def test_scalars_of_one_call(kernel: BoundKernel, cuda: Cuda) -> None:
    x, y = array(0), array(1)
    for scalars in ({}, {"factor": -3.0}, {}):
        kernel(x, y, **scalars)
    assert [words[3] for _, words in cuda.launches] == [parameters(x, y, factor)[3] for factor in (2.0, -3.0, 2.0)]
    with pytest.raises(ArgumentError, match="scale has no scalar 'offset' to set; scalars with a default: factor"):
        kernel(x, y, offset=1.0)


def test_a_bound_launch(kernel: BoundKernel, cuda: Cuda) -> None:
    x, y = array(0), array(1)
    launch = kernel.bind(x, y, factor=4.0)
    assert cuda.launches == []
    for _ in range(3):
        launch()
    assert [words[:4] for _, words in cuda.launches] == [parameters(x, y, 4.0), parameters(x, y, 4.0), [99]]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ((array(0, (N - 1,)), array(1)), r"x has shape \(4095,\), expected \(4096,\) for scale n=4096 float32"),
        ((array(0, (N,), np.float64), array(1)), "x has dtype float64, expected float32"),
        ((array(0, (2 * N,))[::2], array(1)), "x is not C-contiguous"),
        ((array(0), array(1, device=1)), "y is on CUDA device 1, but the kernel is bound to device 0"),
        ((), r"scale takes the arrays x \(in\), y \(out\); got 0"),
        ((array(0), array(1), array(2)), r"scale takes the arrays x \(in\), y \(out\); got 3"),
        ((np.zeros(N, np.float32), array(1)), "x: this ndarray cannot be used on the GPU: CPU arrays"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_arrays_that_do_not_match(kernel: BoundKernel, cuda: Cuda, arrays: Any, said: str, warm: bool) -> None:
    if warm:
        kernel(array(0), array(1))
    cuda.launches.clear()
    with pytest.raises(ArgumentError, match=said):
        kernel(*arrays)
    assert cuda.launches == []
