"""Calls and launches without a device: arrays, streams, workspaces, parameters, threads, devices and graphs."""

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cupy
import numpy as np
import pytest
from feature_kernels import copy_kernel

from autotile.core.model import LaunchGeometry
from autotile.cuda import function as functions
from autotile.cuda import toolchain
from autotile.cuda.function import ParameterBlock
from autotile.errors import ArgumentError, InputError
from autotile.kernel.arguments import TensorMap, Workspace
from autotile.serving import arrays as array_module
from autotile.serving import choice, launching
from autotile.serving.arrays import ArraySpec, accepted_pointers, cupy_library
from autotile.serving.bound import BoundKernel, capture
from autotile.serving.choice import RecentCache
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.launching import KernelLauncher, LibraryLauncher, StreamState, StreamWorkspaces

CONFIG = {"THREADS": 256, "WORK": 4}
N = 4096
ADDRESS = 0x7000_0000_0000


def array_at(number: int, shape: tuple[int, ...] = (N,), dtype: type = np.float32, device: int = 0) -> Any:
    """An array on the device that cannot be read, at an address of its own."""
    memory = cupy.cuda.UnownedMemory(ADDRESS + number * (1 << 20), 1 << 20, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


Y = array_at(1)


class Cuda:
    """The part of CuPy that launches use, with two devices: contexts of threads, current device and stream, launches.

    ``launched`` has the device, or the number of the graph, and the stream of each launch; ``launches`` the stream and
    the parameters, or that number.
    """

    ndarray = cupy.ndarray
    CUDADriverError = CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.current, self.devices, self.stream = 0, 2, 7
        self.used: list[int] = []
        self.contexts: set[int] = set()
        self.captured: set[int] = set()
        self.launched: list[tuple[int, int]] = []
        self.launches: list[tuple[int, list[int]]] = []
        self.blocks: dict[int, ParameterBlock] = {}
        self.new_arrays = 0
        self.cuda = self.runtime = self.driver = self
        self.getDevice = lambda: self.current
        self.streamIsCapturing = lambda stream: stream in self.captured
        self.get_current_stream = lambda _=None: SimpleNamespace(ptr=self.stream)

    def setDevice(self, index: int) -> None:  # noqa: N802 - CuPy's name
        self.current = index
        self.contexts.add(threading.get_ident())

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:  # noqa: N802 - CuPy's name
        self.used.append(index)
        before, self.current = self.current, index
        yield
        self.current = before

    def graphLaunch(self, graph: int, stream: int) -> None:  # noqa: N802 - CuPy's name
        self.launched.append((graph, stream))
        self.launches.append((stream, [graph]))

    def launch(self, stream: int, address: int, _: int) -> None:
        if threading.get_ident() not in self.contexts:
            raise self.CUDADriverError("CUDA_ERROR_INVALID_CONTEXT")
        self.launched.append((self.current, stream))
        self.launches.append((stream, list(self.blocks[address].words)))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        self.new_arrays += 1
        return array_at(100 + self.new_arrays, shape, np.dtype(dtype).type, self.current)

    def from_dlpack(self, _: Any) -> Any:
        raise ValueError("CPU arrays cannot be directly imported to CuPy")


@pytest.fixture
def graphs(monkeypatch):
    """Counts the graphs that are asked for and made, which are numbered from 1; none is made if it ``refuses``."""
    counts = SimpleNamespace(asked=0, made=0, refuses=False)

    def make(*_: Any) -> Any:
        counts.asked += 1
        counts.made += not counts.refuses
        return None if counts.refuses else SimpleNamespace(executable=counts.made)

    monkeypatch.setattr(launching, "make_launch_graph", make)
    return counts


@pytest.fixture
def calls(graphs, monkeypatch):
    cuda = Cuda()

    class Block(ParameterBlock):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            cuda.blocks[self.address] = self

    def driver_launch(pointer: int, geometry: LaunchGeometry) -> Any:
        assert (pointer, geometry.block) == (5, (256, 1, 1))
        return cuda.launch

    for module in (array_module, launching, toolchain):
        monkeypatch.setattr(module, "load_cupy", lambda: cuda)
        monkeypatch.setattr(module, "device_count", lambda: cuda.devices, raising=module is not toolchain)
    monkeypatch.setattr(launching, "outside_of_captures", nullcontext)
    monkeypatch.setattr(functions, "driver_launch", driver_launch)
    monkeypatch.setattr(launching, "ParameterBlock", Block)
    function = SimpleNamespace(pointer=5, opt_in=lambda _: None)
    monkeypatch.setattr(functions, "Module", lambda _: SimpleNamespace(function=lambda _: function, pointer=1))
    cubin = SimpleNamespace(path=Path("kernel.cubin"), symbols={}, cubin_hash="0")
    monkeypatch.setattr(choice.KernelCode, "_find_cubin", lambda self, *, may_compile: cubin)
    monkeypatch.setattr(launching, "_loaded", RecentCache(8))
    monkeypatch.setattr(choice, "_absent", RecentCache(8))
    return cuda


@pytest.fixture
def kernel(store, live_gpu, calls, monkeypatch):
    store.put(N, CONFIG)
    kernel: BoundKernel = store.ask(N, device=None)
    return kernel


@pytest.fixture
def launcher_of(kernel, monkeypatch):
    """Return a function that loads the kernel on a device."""

    def load(index: int = 0, *, with_graphs: bool = True) -> KernelLauncher:
        monkeypatch.setenv("AUTOTILE_GRAPHS", "on" if with_graphs else "off")
        return KernelLauncher(kernel._code, index)  # type: ignore[arg-type]

    return load


@pytest.fixture
def state():
    block = ParameterBlock([np.uint64(1)])
    return StreamState(lambda *_: None, block, None, (0,))


def keep(state: StreamState, pointers: Iterable[int], rounds: int = 1) -> None:
    """Launch on arrays in turn, as graphs where there are some."""
    for pointer in [*pointers] * rounds:
        if (pointer,) not in state.graphs:
            state.launch(0, (pointer,), (pointer,))


class TestLaunches:
    def test_tensor_maps_follow_the_addresses(self, monkeypatch):
        made: list[int] = []

        def encode(tensor_map: TensorMap, pointer: int) -> np.ndarray[Any, Any]:
            made.append(pointer)
            return np.full(16, pointer, np.uint64)

        monkeypatch.setattr(launching, "encode_description", encode)
        tensor_map = TensorMap("A_map", "A", "float32", (8, 8), (8, 8), (1, 1), 0, 0)
        block = ParameterBlock([np.uint64(1), encode(tensor_map, 2), np.int32(3)], spare_words=2)
        address, place, number = block.starts
        spare = len(block.words) - 1
        launched: list[tuple[int, int, int]] = []
        maps = ((spare, place, tensor_map),)
        state = StreamState(lambda *launch: launched.append(launch), block, None, (spare, address), maps)
        made.clear()
        for mapped, other in ((64, 128), (64, 256), (32, 256)):
            state.launch(7, (mapped, other))
            assert launched.pop() == (7, block.address, 0)
            assert (block.words[address], list(block.words[place : place + 16])) == (other, [mapped] * 16)
            assert block.words[number] & 0xFFFFFFFF == 3
        assert made == [64, 32]

    def test_parameters_lie_as_the_driver_reads_them(self):
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

    def test_an_output_left_out_is_no_reason_to_leave_the_device(self, launcher_of, calls):
        """On a second device that is not current, the fast path does not apply, and nothing is allocated elsewhere."""
        launcher, x = launcher_of(1, with_graphs=False), array_at(0, device=1)
        assert launcher.launch_fast([x]) is None
        launcher.launch([x], None, {})
        assert launcher.launch_fast([x]) is None
        calls.current = 1
        assert [one.data.device_id for one in launcher.launch_fast([x])] == [1, 1]
        assert calls.launched == [(1, 7)] * 2

    def test_a_thread_without_a_context_gets_one(self, launcher_of, calls):
        """Also if its identifier is that of a thread that has ended."""
        calls.devices = 1
        launcher, x, quick = launcher_of(with_graphs=False), array_at(0), list[bool]()

        def call() -> None:
            calls.contexts.discard(threading.get_ident())
            for _ in range(2):
                quick.append(launcher.launch_fast([x]) is not None)
                if not quick[-1]:
                    launcher.launch([x], None, {})

        for _ in range(3):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        assert (quick, len(calls.launched)) == ([False, True] * 3, 6)

    @pytest.mark.parametrize("devices", [1, 2])
    def test_a_bound_launch_in_another_thread_or_device(self, launcher_of, calls, devices):
        calls.devices, index = devices, devices - 1
        launch = launcher_of(index, with_graphs=False).bind([array_at(i, device=index) for i in range(2)], {})
        calls.current = 0
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launch).result()
        assert calls.launched == [(index, 7)]
        assert calls.current == 0 or devices == 1

    def test_a_launch_that_comes_again_becomes_a_graph(self, launcher_of, calls, graphs):
        """And is launched as one, except while its stream is captured, when graphs are not allowed."""
        calls.devices, direct, graph = 1, (0, 7), (1, 7)
        launcher, arrays = launcher_of(), [array_at(0), Y]
        launcher.launch(arrays[:1], None, {})
        for expected in (direct, direct, graph, graph):
            calls.launched.clear()
            assert launcher.launch_fast(arrays) is arrays
            assert calls.launched == [expected]
            if expected == graph:  # a call with ``stream=``, which leaves the graphs alone
                launcher.launch(arrays[:1], None, {})
        calls.captured.add(7)
        for both in (arrays, arrays[::-1], arrays[::-1], arrays[::-1]):
            calls.launched.clear()
            assert launcher.launch_fast(both) is both
            assert calls.launched == [direct]
        launcher = launcher_of(with_graphs=False)
        launcher.launch(arrays[:1], None, {})
        for _ in range(3):
            assert launcher.launch_fast(arrays) is arrays
        assert graphs.asked == 1

    def test_a_bound_launch_has_graphs_by_stream(self, launcher_of, calls):
        calls.devices, x, views = 1, array_at(0), [array_at(0)]
        calls.asarray, memory = lambda _: views.pop(), weakref.ref(views[0])  # which the view alone may hold
        launch = launcher_of().bind([SimpleNamespace(__cuda_array_interface__={}), Y], {"factor": 4.0})
        assert calls.launches == []
        for calls.stream in (7, 7, 7, 8, 8, 8, 7):
            launch()
        assert calls.launched == [(0, 7), (0, 7), (1, 7), (0, 8), (0, 8), (2, 8), (1, 7)]
        assert [words[:4] for _, words in calls.launches[:3]] == [*[parameters(x, Y, 4.0)] * 2, [1]]
        calls.captured.add(7)
        launch()
        assert (calls.launched[-1], memory() is None) == ((0, 7), False)

    def test_arrays_that_never_come_again_make_no_graphs_and_many_in_turn_few(self, state, graphs):
        """If there are more than can be kept, those that were made stay for a long time."""
        keep(state, range(100, 10_000))
        assert graphs.made == 0
        keep(state, range(40), 50)
        assert graphs.made == len(state.graphs) == 32

    def test_graphs_of_arrays_that_are_gone_give_way(self, state, graphs):
        for start in (0, 100):
            keep(state, range(start, start + 32), 1000)
            assert set(state.graphs) == {(pointer,) for pointer in range(start, start + 32)}
        assert graphs.made == 64

    def test_what_is_refused_is_asked_for_again_after_a_long_time(self, state, graphs):
        graphs.refuses = True
        for _ in range(5000):
            state.launch(0, (1,), (1,))
        assert not state.graphs
        assert graphs.asked == 3
        graphs.refuses = False
        for _ in range(2048):
            state.launch(0, (1,), (1,))
        assert (1,) in state.graphs


class TestLibrary:
    @pytest.mark.parametrize("can_move", [True, False])
    def test_a_product_that_comes_again_is_launched_without_the_librarys_part(self, calls, monkeypatch, can_move):
        class Gemm:
            rounds, seen = 0, list[Any]()

            def __init__(self, *_: Any) -> None:
                self.memory = lambda stream: f"memory of {stream}"
                self.prepare = lambda: self.seen.append(("prepared", calls.current, bool(relaxed)))

            def __call__(self, stream: int, addresses: Any, *, memory: str) -> None:
                if stream == 13:
                    raise calls.CUDARuntimeError
                self.seen.append(("call", stream, addresses, memory))

            def relocatable(self, memory: str, count: int) -> Any:
                self.seen.append(("captured", memory, count))
                return SimpleNamespace(launch=self.launch) if can_move else None

            def launch(self, *given: Any) -> None:
                if threading.get_ident() not in calls.contexts:
                    raise calls.CUDADriverError("CUDA_ERROR_INVALID_CONTEXT")
                self.seen.append(("launch", *given))

        @contextmanager
        def outside_of_captures() -> Iterator[None]:
            relaxed.append(None)
            yield
            relaxed.pop()

        relaxed: list[None] = []
        monkeypatch.setattr(launching, "outside_of_captures", outside_of_captures)
        monkeypatch.setattr(launching, "Gemm", Gemm)
        calls.devices = 1
        asked = SimpleNamespace(sizes={"M": 1, "N": 8, "K": 8, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 1}, dtype="float32")
        code = SimpleNamespace(definition=SimpleNamespace(spec=None), library=SimpleNamespace(call=None), asked=asked)
        launcher, (a, b, c) = LibraryLauncher(code, 0), (16, 32, 48)  # type: ignore[arg-type]
        assert Gemm.seen.pop() == ("prepared", 0, True)  # in a thread of its own, whatever others capture
        assert all(launcher.launch_at(7, (a, b, c)) for _ in range(launching._WORTHWHILE_CALLS))
        call = ("call", 7, (a, b, c), "memory of 7")
        assert Gemm.seen == [*[call] * launching._WORTHWHILE_CALLS, ("captured", "memory of 7", 3)]
        assert launcher.is_direct is can_move
        Gemm.seen.clear()
        calls.captured.add(8)
        for stream, arrays in ((7, (c, b, a)), (7, (a, b, c, 56)), (7, (a, b, 64)), (8, (a, b, c)), (9, (a, b, c, 64))):
            assert launcher.launch_at(stream, arrays)
        kinds = [one[0] for one in Gemm.seen]
        moved = ["launch", "call", "launch", "call", "call"]  # each stream, and each number of arrays, comes again
        assert kinds == (moved if can_move else ["call"] * 5)
        with ThreadPoolExecutor(1) as pool:  # another thread, without a context
            assert pool.submit(launcher.launch_at, 7, (a, b, c)).result()
        assert Gemm.seen[-1][0] == ("launch" if can_move else "call")
        assert launcher.is_direct is can_move
        for stream in range(100, 100 + launching._MAX_STREAMS):
            assert launcher.launch_at(stream, (a, b, c))
        assert len(launcher._calls) <= launching._MAX_STREAMS
        assert not launcher._relocated
        assert launcher.launch_at(13, (a, b, c)) is False
        assert launcher.is_direct is False
        assert launcher.launch_at(launching.PER_THREAD_STREAM, (a, b, c)) is False


def parameters(x: Any, y: Any, factor: float = 2.0) -> list[int]:
    """The words of the kernel's parameters: x, y, n, factor."""
    return [x.data.ptr, y.data.ptr, N, int(np.float32(factor).view(np.uint32))]


class TestCalls:
    def test_outputs_left_out_are_allocated_and_scalars_are_of_one_call(self, kernel, calls):
        x, factors = array_at(0), (2.0, -3.0, 2.0, 5.0)
        made = [kernel(x, **scalars) for scalars in ({}, {"factor": -3.0}, {}, {"factor": 5})]
        assert calls.new_arrays == 4
        expected = [parameters(x, y, factor) for y, factor in zip(made, factors, strict=True)]
        assert [words[:4] for _, words in calls.launches] == expected

    def test_calls_are_captured_before_they_are_launched(self, kernel, calls, monkeypatch, tmp_path):
        written: list[int] = []

        def write(folder: Any, *_: object) -> None:
            written.append(len(calls.launches))
            folder._calls_left -= 1

        monkeypatch.setattr(launching.CaptureFolder, "write", write)
        monkeypatch.setenv("AUTOTILE_CAPTURE", str(tmp_path))
        monkeypatch.setenv("AUTOTILE_CAPTURE_CALLS", "2")
        assert not kernel.launch_at(7, (ADDRESS, Y.data.ptr), starts=True)
        for launch in (*[kernel] * 3, *[capture(kernel, tmp_path / "one")] * 2):
            launch(array_at(0), Y)
        assert written == [0, 1, 3]  # that wrapper captures one call
        assert kernel.launch_at(7, (ADDRESS, Y.data.ptr))
        assert not kernel.launch_at(7, (ADDRESS, Y.data.ptr, ADDRESS)), "a bias is for a library"

    @pytest.mark.parametrize("wrong", [{"calls": 0}, {"calls": -1}, {"calls": 1.5}, {"limit_bytes": -1}])
    def test_limits_of_captured_calls_that_are_none(self, kernel, wrong, tmp_path):
        with pytest.raises(InputError, match=f"{min(wrong)} is {wrong[min(wrong)]}, expected a whole number"):
            capture(kernel, tmp_path, **wrong)

    @pytest.mark.parametrize(
        ("scalars", "said"),
        [
            ({"n": 3}, "scale has no scalar 'n' to set; scalars with a default: factor"),
            ({"offset": 1.0}, "scale has no scalar 'offset' to set"),
            ({"factor": "1"}, "scalar factor is '1', expected a number"),
            ({"factor": 1e39}, "does not fit in float32"),
        ],
    )
    def test_scalars_that_are_refused(self, kernel, calls, scalars, said):
        with pytest.raises(ArgumentError, match=said):
            kernel(array_at(0), Y, **scalars)
        assert calls.launches == []

    def test_launches_on_addresses_need_no_call_before(self, kernel, calls):
        x, y, z = (array_at(i) for i in range(3))
        for out in (y, z, z, z):
            assert kernel.launch_at(7, (x.data.ptr, out.data.ptr), starts=True)
        assert [words[:4] for _, words in calls.launches] == [*(parameters(x, out) for out in (y, z, z)), [1]]
        assert calls.launches[0][0] == 7
        assert kernel.calls == 4
        calls.current = 1
        assert not kernel.launch_at(7, (x.data.ptr, y.data.ptr), starts=True)
        assert (len(calls.launches), kernel.calls) == (4, 4)

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ([array_at(0, (N - 1,)), Y], r"x has shape \(4095,\), expected \(4096,\) for scale n=4096 float32"),
            ([array_at(0, (64, 64)), Y], r"x has shape \(64, 64\), expected \(4096,\)"),
            ([array_at(0, (N,), np.float64), Y], "x has dtype float64, expected float32; convert it with astype"),
            ([array_at(0, (2 * N,))[::2], Y], r"x is not C-contiguous .*pass cupy\.ascontiguousarray\(x\)"),
            ([array_at(0), array_at(1, device=1)], "y is on CUDA device 1, but the kernel is bound to device 0"),
            *(
                ([Y] * count, rf"takes the arrays x \(in\), y \(out\); got {count}\. Outputs may be left out")
                for count in (0, 3, 6)
            ),
            ([np.zeros(N, np.float32), Y], "x: this ndarray cannot be used on the GPU: CPU arrays"),
            ([[1.0, 2.0], Y], "x: expected an array on the GPU .*got list"),
            ([None, Y], "x: expected an array on the GPU .*got NoneType"),
        ],
    )
    @pytest.mark.parametrize("warm", [False, True])
    def test_arrays_that_misfit(self, kernel, calls, arrays, said, warm):
        if warm:
            kernel(array_at(0), array_at(1))
        calls.launches.clear()
        with pytest.raises(ArgumentError, match=said):
            kernel(*arrays)
        assert calls.launches == []


SPECS = (ArraySpec(((1, 8, 4), (8, 4)), (np.dtype(np.float32),)), ArraySpec(((4,),), (np.dtype(np.float16),)))


def taken(*arrays: Any, device: int = 0) -> tuple[int, ...] | None:
    signature = cupy_library().signature(arrays)
    return accepted_pointers(signature, SPECS, device) if signature else None


class TestSignatures:
    @pytest.mark.parametrize("shape", [(1, 8, 4), (8, 4)])
    def test_only_arrays_that_are_just_right_are_taken_on_their_device(self, shape):
        right, other = array_at(0, shape, np.float32), array_at(1, (4,), np.float16)
        assert taken(right, other) == (ADDRESS, ADDRESS + (1 << 20))
        assert taken(right, other, device=1) is None
        turned = right.reshape(4, 8)
        for wrong in (turned, turned.T, right.view(np.int32), right.reshape(1, 1, 8, 4), np.zeros(shape, np.float32)):
            assert taken(wrong, other) is None


class Stream:
    """A stream of CuPy that records the operations on it, and is the current one within its block."""

    current: ClassVar[list["Stream"]] = []

    def __init__(self, pointer: int, *, captured: bool = False) -> None:
        self.ptr, self.captured = pointer, captured
        self.done: list[str] = []

    @classmethod
    def from_external(cls, stream: Any) -> "Stream":
        return cls(stream.__cuda_stream__()[1])

    def is_capturing(self) -> bool:
        return self.captured

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def __enter__(self) -> "Stream":
        entered.append(self.ptr)
        self.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        entered.append(-self.ptr)
        self.current.pop()


class ExternalStream(Stream):
    """CuPy's class of a stream of another library."""


entered: list[object] = []


class Tensor:
    """The part of a PyTorch tensor that streams use."""

    is_cuda, device = True, "cuda:1"


@pytest.fixture
def torch(monkeypatch):
    """PyTorch with the current stream 5; the streams that are made current are recorded."""
    cuda = SimpleNamespace(
        stream=lambda chosen: entered.append(chosen) or nullcontext(),
        current_stream=lambda _: SimpleNamespace(cuda_stream=5),
        default_stream=lambda device: f"default of {device}",
        ExternalStream=lambda pointer, device: f"{pointer} of {device}",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))


STREAMS = {
    "cupy": Stream(8),
    "external": ExternalStream(8),
    "pytorch": SimpleNamespace(cuda_stream=8),
    "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, 8)),
}


class TestStreams:
    @pytest.fixture(autouse=True)
    def cupy(self, monkeypatch):
        entered.clear()
        cuda = SimpleNamespace(Stream=Stream, ExternalStream=ExternalStream)
        monkeypatch.setattr(array_module, "load_cupy", lambda: SimpleNamespace(cuda=cuda))

    @pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
    def test_it_is_current_meanwhile(self, stream):
        with array_module.on_stream([], stream):
            assert entered == [8]
        assert entered == [8, -8]

    @pytest.mark.parametrize("stream", [7, "null", object()])
    def test_what_is_no_stream_and_where_none_is_named_cupys_stays(self, stream):
        with array_module.on_stream([object()]):
            assert entered == []
        with (
            pytest.raises(ArgumentError, match=f"stream is of type {type(stream).__name__}, expected"),
            array_module.on_stream([], stream),
        ):
            pass

    @pytest.mark.usefixtures("torch")
    @pytest.mark.parametrize(
        ("stream", "expected"),
        [(None, [5]), (Stream(8), ["8 of cuda:1", 8]), (Stream(0), ["default of cuda:1", 0])],
        ids=["none", "named", "null"],
    )
    def test_tensors_are_worked_on_by_both_libraries(self, stream, expected):
        """PyTorch would treat the handle 0 of the default stream as no handle."""
        with array_module.on_stream([object(), Tensor()], stream):
            assert entered == expected


COUNTER = Workspace("counter", "uint32", (1,), zeroed=True)
EMPTY = Workspace("empty", "float32", (0, 4), zeroed=False)


@pytest.fixture
def streams(monkeypatch):
    made, addresses = list[Stream](), count(256, 256)

    def stream(*, non_blocking: bool) -> Stream:
        made.append(Stream(-1))
        return made[-1]

    def zeros(*_: Any) -> Any:
        Stream.current[-1].done.append("zeros")
        return SimpleNamespace(data=SimpleNamespace(ptr=next(addresses)))

    cuda = SimpleNamespace(Stream=stream, get_current_stream=lambda: Stream.current[-1])
    monkeypatch.setattr(launching, "load_cupy", lambda: SimpleNamespace(cuda=cuda, zeros=zeros))
    monkeypatch.setattr(launching, "outside_of_captures", nullcontext)
    return made


class TestWorkspaces:
    def test_each_stream_has_its_own_and_keeps_it(self, streams):
        workspaces = StreamWorkspaces((COUNTER, EMPTY))
        first, second, captured = Stream(16), Stream(32), Stream(48, captured=True)
        found = []
        for stream in (first, second, first):
            with stream:
                found.append(workspaces.current())
        assert found[0] is found[2]
        assert [one.pointers for one in found[:2]] == [{"counter": 256, "empty": 0}, {"counter": 512, "empty": 0}]
        assert first.done == second.done == ["zeros"]
        with captured:
            kept = StreamWorkspaces((COUNTER,)).current()
        assert captured.done == []  # what is filled for a captured stream is no part of its graph
        assert [one.done for one in streams] == [["zeros", "synchronize"]]
        assert kept.stream is captured

    @pytest.mark.parametrize("captured", [False, True])
    @pytest.mark.usefixtures("streams")
    def test_what_a_graph_may_use_is_never_given_back(self, captured):
        workspaces = StreamWorkspaces((COUNTER,))
        for number in range(launching._MAX_WORKSPACE_SETS + 8):
            with Stream(16 * number, captured=captured):
                workspaces.current()
        assert len(workspaces._sets) == launching._MAX_WORKSPACE_SETS
        assert len(workspaces._captured) == captured * (launching._MAX_WORKSPACE_SETS + 8)


@pytest.mark.usefixtures("live_gpu")
@pytest.mark.parametrize("dtype", ["dtype", "float32", "bfloat16"])
def test_a_member_that_declares_other_arrays_is_not_launched(calls, only_kernel, tmp_path, monkeypatch, dtype):
    copy_kernel(tmp_path, "mine", {'C = { buffer = "dtype"': f'C = {{ buffer = "{dtype}"'})
    monkeypatch.setenv("AUTOTILE_KERNELS", str(tmp_path))
    only_kernel("mine")
    a, b = array_at(0, (64, 32), np.float16), array_at(1, (32, 48), np.float16)
    fits = dtype == "dtype"
    with nullcontext() if fits else pytest.raises(ArgumentError, match=f"C has dtype float16, expected {dtype}"):
        default_dispatcher.matmul(a, b, library=False)
    assert len(calls.launches) == fits
