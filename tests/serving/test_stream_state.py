"""Launches without a device: their parameters, threads, devices and graphs."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotile.cuda.function import ParameterBlock
from autotile.kernel.arguments import TensorMap
from autotile.serving import launching
from autotile.serving.arrays import ArraySpec, Signature
from autotile.serving.launching import (
    CheckedArrays,
    KernelLauncher,
    ParameterLayout,
    StreamState,
    StreamWorkspaces,
)


def test_tensor_maps_follow_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(tensor_map: TensorMap, pointer: int) -> np.ndarray[Any, Any]:
        made.append(pointer)
        return np.frombuffer(pointer.to_bytes(8, "little") * 16, np.dtype((np.void, 128)))

    words = lambda tensor_map, pointer: encode(tensor_map, pointer).view(np.uint64)  # noqa: E731
    monkeypatch.setattr(launching, "encode_description", words)
    tensor_map = TensorMap("A_map", "A", "float32", (8, 8), (8, 8), (1, 1), 0, 0)
    block = ParameterBlock([np.uint64(1), encode(tensor_map, 2), np.int32(3)], spare_words=2)
    address, place, number = block.starts
    spare = len(block.words) - 1
    launched: list[tuple[int, int, int]] = []
    layout = ParameterLayout((spare, address), ((spare, place, tensor_map),), ())
    state = StreamState(lambda *launch: launched.append(launch), block, layout, None)
    made.clear()
    for mapped, other in ((64, 128), (64, 256), (32, 256)):
        state.launch(7, (mapped, other))
        assert launched.pop() == (7, block.address, 0)
        assert block.words[address] == other
        assert list(block.words[place : place + 16]) == [mapped] * 16
        assert block.words[number] & 0xFFFFFFFF == 3
    assert made == [64, 32]


def test_parameters_lie_as_the_driver_reads_them() -> None:
    """Each address is that of a value, and values wider than a word are aligned to 64 bytes."""
    wide = np.arange(16, dtype=np.uint64)
    block = ParameterBlock([np.float32(1.5), np.uint64(7), wide, np.int32(-2)], spare_words=1)
    addresses = np.frombuffer((ctypes.c_uint64 * 4).from_address(block.address), np.uint64)
    assert ctypes.c_float.from_address(int(addresses[0])).value == 1.5
    assert ctypes.c_uint64.from_address(int(addresses[1])).value == 7
    assert list((ctypes.c_uint64 * 16).from_address(int(addresses[2]))) == list(range(16))
    assert addresses[2] % 64 == 0
    assert ctypes.c_int32.from_address(int(addresses[3])).value == -2
    block.words[block.starts[1]] = 9
    assert ctypes.c_uint64.from_address(int(addresses[1])).value == 9


class Cuda:
    """The part of CuPy that launches use, with two devices: contexts of threads, current device, launches.

    An array is a `SimpleNamespace` whose ``place`` is its device.
    """

    def __init__(self) -> None:
        self.current = 0
        self.devices = 2
        self.context_of: dict[int, int] = {}
        self.launched: list[tuple[int, int]] = []
        self.captured: set[int] = set()
        self.cuda = self.runtime = self.driver = self
        self.CUDADriverError = RuntimeError

    def getDevice(self) -> int:  # noqa: N802 - CuPy's name
        return self.current

    def setDevice(self, index: int) -> None:  # noqa: N802 - CuPy's name
        self.current = self.context_of[threading.get_ident()] = index

    def ctxGetCurrent(self) -> int:  # noqa: N802 - CuPy's name
        return threading.get_ident() in self.context_of

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:  # noqa: N802 - CuPy's name
        before, self.current = self.current, index
        yield
        self.current = before

    def graphLaunch(self, graph: int, stream: int) -> None:  # noqa: N802 - CuPy's name
        self.launched.append((graph, stream))

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802 - CuPy's name
        return stream in self.captured

    def launch(self, stream: int, address: int, _: int) -> None:
        if threading.get_ident() not in self.context_of:
            raise self.CUDADriverError("CUDA_ERROR_INVALID_CONTEXT")
        self.launched.append((self.current, stream))


class Arrays:
    """Library of those arrays, whose current stream is 7."""

    def spec(self, *_: Any) -> ArraySpec:
        return ArraySpec(((),), ("float32",))

    def stream(self, _: int) -> int:
        return 7

    def signature(self, arrays: Sequence[Any]) -> Signature:
        return tuple((id(array), (), "float32", True, array.place) for array in arrays)


class OneIn:
    """`CallArguments` of a kernel that reads one array and writes another."""

    workspaces = StreamWorkspaces(())
    plan = None

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def complete(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return (*arrays, SimpleNamespace(place=self._cuda.current)) if len(arrays) == 1 else tuple(arrays)

    def pack(self, *_: Any) -> tuple[Any, ...]:
        return np.uint64(1), np.uint64(2)

    def array_specs(self, library: Arrays) -> tuple[ArraySpec, ...]:
        return library.spec(), library.spec()

    def layout(self, *_: Any) -> ParameterLayout:
        return ParameterLayout((0, 1), (), ())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name, replaced in {
        "load_cupy": lambda: cuda,
        "device_count": lambda: cuda.devices,
        "CupyLibrary": Arrays,
        "library_of": lambda _: Arrays(),
    }.items():
        monkeypatch.setattr(launching, name, replaced)
    return cuda


def launch_checked(kernel: KernelLauncher, arguments: OneIn, cuda: Cuda, index: int, array: Any) -> None:
    with cuda.Device(index):
        kernel._launch_checked(CheckedArrays({}, arguments.complete([array])), {})


def test_an_output_left_out_is_no_reason_to_leave_the_device(cuda: Cuda) -> None:
    """On a second device that is not current, the fast path does not apply, and nothing is allocated elsewhere."""
    arguments, array = OneIn(cuda), SimpleNamespace(place=1)
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), 1, with_graphs=False)  # type: ignore[arg-type]
    assert kernel.launch_fast([array]) is None
    launch_checked(kernel, arguments, cuda, 1, array)
    cuda.current = 0
    assert kernel.launch_fast([array]) is None
    cuda.current = 1
    launched = kernel.launch_fast([array])
    assert launched is not None
    assert [one.place for one in launched] == [1, 1]
    assert cuda.launched == [(1, 7)] * 2


def test_a_thread_without_a_context_gets_one(cuda: Cuda) -> None:
    """Also if its identifier is that of a thread that has ended."""
    cuda.devices = 1
    arguments, array = OneIn(cuda), SimpleNamespace(place=0)
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=False)  # type: ignore[arg-type]
    quick: list[bool] = []

    def call() -> None:
        cuda.context_of.pop(threading.get_ident(), None)
        for _ in range(2):
            quick.append(kernel.launch_fast([array]) is not None)
            if not quick[-1]:
                launch_checked(kernel, arguments, cuda, 0, array)

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert quick == [False, True] * 3
    assert len(cuda.launched) == 6


@pytest.mark.parametrize("devices", [1, 2])
def test_a_bound_launch_in_another_thread_and_with_another_device_current(cuda: Cuda, devices: int) -> None:
    cuda.devices, index = devices, devices - 1
    arguments = OneIn(cuda)
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), index, with_graphs=False)  # type: ignore[arg-type]
    launch = kernel._bind_checked(CheckedArrays({}, (SimpleNamespace(place=index),) * 2), {})
    cuda.current = 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch).result()
    assert cuda.launched == [(index, 7)]
    assert cuda.current == 0 or devices == 1


def test_an_error_of_the_driver_is_told(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise cuda.CUDADriverError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(cuda, "launch", refuse)
    kernel = KernelLauncher(OneIn(cuda), SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=False)  # type: ignore[arg-type]
    launch = kernel._bind_checked(CheckedArrays({}, (SimpleNamespace(place=0),) * 2), {})
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        launch()


class Graphs:
    """Makes graphs, numbered from 1, unless ``refuses`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.made = 0
        self.refuses = False
        monkeypatch.setattr(launching, "make_launch_graph", self._make)

    def _make(self, *_: Any) -> Any:
        self.asked += 1
        if self.refuses:
            return None
        self.made += 1
        return SimpleNamespace(executable=self.made)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture
def state() -> StreamState:
    block = ParameterBlock([np.uint64(1)])
    return StreamState(lambda *_: None, block, ParameterLayout((0,), (), ()), None)


def test_a_launch_that_comes_again_becomes_a_graph(cuda: Cuda, graphs: Graphs) -> None:
    """And is launched as one, except while its stream is captured, when graphs are not allowed."""
    arguments, arrays = OneIn(cuda), [SimpleNamespace(place=0), SimpleNamespace(place=0)]
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=True)  # type: ignore[arg-type]
    launch_checked(kernel, arguments, cuda, 0, arrays[0])
    cuda.devices, direct, graph = 1, (0, 7), (1, 7)
    for expected in (direct, direct, graph, graph):
        cuda.launched.clear()
        assert kernel.launch_fast(arrays) is arrays
        assert cuda.launched == [expected]
    cuda.captured.add(7)
    for both in (arrays, arrays[::-1], arrays[::-1], arrays[::-1]):
        cuda.launched.clear()
        assert kernel.launch_fast(both) is both
        assert cuda.launched == [direct]
    assert graphs.made == 1


def test_a_bound_launch_becomes_a_graph_of_each_stream(
    cuda: Cuda, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.devices = 1
    kernel = KernelLauncher(OneIn(cuda), SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=True)  # type: ignore[arg-type]
    current = [7]
    monkeypatch.setattr(Arrays, "stream", lambda *_: current[0])
    launch = kernel._bind_checked(CheckedArrays({}, (SimpleNamespace(place=0),) * 2), {})
    for current[0] in (7, 7, 7, 8, 8, 8, 7):
        launch()
    assert cuda.launched == [(0, 7), (0, 7), (1, 7), (0, 8), (0, 8), (2, 8), (1, 7)]
    cuda.captured.add(7)
    launch()
    assert cuda.launched[-1] == (0, 7)


def test_arrays_that_never_come_again_cost_no_graphs(state: StreamState, graphs: Graphs) -> None:
    for pointer in range(10_000):
        state.keep_as_graph(0, (pointer,))
    assert graphs.made == 0


def test_many_arrays_in_turn_make_few_graphs(state: StreamState, graphs: Graphs) -> None:
    """If there are more than can be kept, those that were made stay for a long time."""
    for _ in range(50):
        for pointer in range(40):
            if (pointer,) not in state.graphs:
                state.keep_as_graph(0, (pointer,))
    assert graphs.made == len(state.graphs) == 32


def test_graphs_of_arrays_that_are_gone_give_way(state: StreamState, graphs: Graphs) -> None:
    for start in (0, 100):
        for _ in range(1000):
            for pointer in range(start, start + 32):
                if (pointer,) not in state.graphs:
                    state.keep_as_graph(0, (pointer,))
        assert set(state.graphs) == {(pointer,) for pointer in range(start, start + 32)}
    assert graphs.made == 64


def test_patience_begins_anew_with_each_graph(state: StreamState, graphs: Graphs) -> None:
    """Earlier launches on arrays that never came again do not affect the graphs in use."""
    for pointer in range(2000):
        state.keep_as_graph(0, (-pointer,))
    for _ in range(2):
        for pointer in range(1, 33):
            state.keep_as_graph(0, (pointer,))
    for _ in range(2):
        for pointer in range(100, 150):
            state.keep_as_graph(0, (pointer,))
    assert graphs.made == 32
    assert (1,) in state.graphs


def test_what_is_refused_is_asked_for_again_after_a_long_time(state: StreamState, graphs: Graphs) -> None:
    graphs.refuses = True
    for _ in range(5000):
        state.keep_as_graph(0, (1,))
    assert not state.graphs
    assert graphs.asked == 3
    graphs.refuses = False
    for _ in range(2048):
        state.keep_as_graph(0, (1,))
    assert (1,) in state.graphs


def test_a_careful_launch_leaves_the_graphs_alone(cuda: Cuda, graphs: Graphs) -> None:
    """As calls with ``stream=`` are, which may alternate with fast ones, also while the stream is captured."""
    cuda.devices = 1
    arguments, arrays = OneIn(cuda), [SimpleNamespace(place=0), SimpleNamespace(place=0)]
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=True)  # type: ignore[arg-type]
    for _ in range(4):
        launch_checked(kernel, arguments, cuda, 0, arrays[0])
        for _ in range(3):
            kernel.launch_fast(arrays)
    assert graphs.made == 1
    assert cuda.launched[-3:] == [(1, 7)] * 3


def test_without_graphs_none_is_asked_for(cuda: Cuda, graphs: Graphs) -> None:
    arguments, arrays = OneIn(cuda), [SimpleNamespace(place=0), SimpleNamespace(place=0)]
    kernel = KernelLauncher(arguments, SimpleNamespace(driver_launch=lambda _: cuda.launch), 0, with_graphs=False)  # type: ignore[arg-type]
    launch_checked(kernel, arguments, cuda, 0, arrays[0])
    cuda.devices = 1
    for _ in range(5):
        kernel.launch_fast(arrays)
    assert graphs.asked == 0
