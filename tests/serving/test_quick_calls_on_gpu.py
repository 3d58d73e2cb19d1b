"""The fast path of calls: same results and errors as a checked call, on every stream and in every thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.cuda import function as launch_graph
from autotile.errors import ArgumentError
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import forget_served, get_best_kernel

pytestmark = pytest.mark.gpu

N = 3000
TEMPLATE = """
// y = factor x, by way of a workspace that holds what this launch's blocks have counted
extern "C" __global__ void tally(const DTYPE* x, DTYPE* y, unsigned int* counted, DTYPE* kept, int n, DTYPE factor) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) kept[i] = factor * x[i];
    if (i < n) y[i] = kept[i];
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(counted, 1u) == gridDim.x - 1) *counted = 0;
}
"""
SPACE = """
[kernel]
name = "tally"
template = "tally.cu"
entry = "tally"
[problem]
sizes = { n = 3000 }
[parameters]
THREADS = [64, 128]
[default]
THREADS = 64
[launch]
block = ["THREADS"]
grid = ["ceil_div(n, THREADS)"]
[arguments]
x = { buffer = "dtype", shape = ["n"], access = "in" }
y = { buffer = "dtype", shape = ["n"], access = "out" }
counted = { workspace = "uint32", shape = ["1"], init = "zeros" }
kept = { workspace = "dtype", shape = ["n"] }
n = { scalar = "int32", value = "n" }
factor = { scalar = "dtype", value = 2.0, check = -0.5 }
[reference]
outputs = { y = "factor * x" }
"""


@pytest.fixture
def tally(tmp_path: Path) -> BoundKernel:
    (tmp_path / "tally.cu").write_text(TEMPLATE)
    (tmp_path / "tally.toml").write_text(SPACE)
    forget_served()
    return get_best_kernel(str(tmp_path / "tally.toml"), n=N)


@pytest.fixture(scope="module")
def cp() -> Any:
    import cupy

    return cupy


def _random(cp: Any, seed: int) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(N, dtype=np.float32))


def test_call_after_call_with_other_arrays(tally: BoundKernel, cp: Any) -> None:
    for seed in range(5):
        x, y = _random(cp, seed), cp.full(N, np.nan, np.float32)
        assert tally(x, y) is y
        np.testing.assert_array_equal(y.get(), 2 * x.get())
    assert tally.calls == 5


def test_outputs_left_out_are_new_ones_of_the_callers_library(tally: BoundKernel, cp: Any) -> None:
    torch = pytest.importorskip("torch")
    x = _random(cp, 0)
    for array, kind in ((x, cp.ndarray), (torch.as_tensor(x, device="cuda"), torch.Tensor)):
        for _ in range(3):
            y = tally(array)
            assert isinstance(y, kind)
            torch.cuda.synchronize()
            np.testing.assert_array_equal(cp.asarray(y).get(), 2 * x.get())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x: x[:-1], r"x has shape \(2999,\)"),
        (lambda x: x.astype("float64"), "x has dtype float64"),
        (lambda x: x.repeat(2)[::2], "x is not C-contiguous"),
        (lambda x: x.get(), "cannot be used on the GPU"),
    ],
)
def test_a_quick_kernel_refuses_as_a_careful_one(
    tally: BoundKernel, cp: Any, spoil: Callable[[Any], Any], said: str
) -> None:
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    tally(x, y)
    tally(x, y)
    with pytest.raises(ArgumentError, match=said):
        tally(spoil(x), y)


def test_scalars_of_one_call_are_forgotten_by_the_next(tally: BoundKernel, cp: Any) -> None:
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    for scalars, factor in (({}, 2), ({"factor": -3}, -3), ({}, 2), ({"factor": 5}, 5)):
        tally(x, y, **scalars)
        np.testing.assert_array_equal(y.get(), np.float32(factor) * x.get())


def test_threads_and_streams_do_not_meet(tally: BoundKernel, cp: Any) -> None:
    def work(seed: int) -> bool:
        x = _random(cp, seed)
        cp.cuda.get_current_stream().synchronize()
        right = True
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                y = cp.full(N, np.nan, np.float32)
                tally(x, y)
                stream.synchronize()
                right = right and bool((y == 2 * x).all())
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_tensors_on_pytorchs_current_stream(tally: BoundKernel) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(N, device="cuda")
    y = torch.zeros_like(x)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                y.zero_()
                torch.cuda._sleep(1_000_000)
                x.fill_(3.0)
                tally(x, y)
                x.fill_(7.0)  # behind the launch, where they are on one stream
            stream.synchronize()
        assert torch.equal(y, torch.full_like(y, 6.0))


def test_a_parameter_of_a_module_is_a_tensor(tally: BoundKernel) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.randn(N, device="cuda"))
    y = torch.empty(N, device="cuda")
    for _ in range(2):
        tally(weights, y)
        assert torch.equal(y, 2 * weights)


@pytest.mark.parametrize("warm", [False, True])
def test_captured_by_cupy(tally: BoundKernel, cp: Any, warm: bool) -> None:
    """Also in the first call, which loads the kernel and allocates its workspaces."""
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    if warm:
        tally(x, y)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        tally(x, y)
        tally(y, x)
        graph = stream.end_capture()
    before = x.get()
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(x.get(), 16 * before)


def test_captured_by_pytorch(tally: BoundKernel) -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tally(x, y)
        tally(y, x)
    before = x.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, 4 * before)


def test_a_stream_is_ready_though_its_first_launch_was_captured(tally: BoundKernel, cp: Any) -> None:
    """The kernel's counter must be zero before a graph is launched that was captured first."""
    x, y, counted = _random(cp, 0), cp.zeros(N, np.float32), []
    rubbish = [cp.full(1 << 16, 0xFF, np.uint8) for _ in range(8)]
    cp.cuda.Device().synchronize()
    del rubbish
    cp.get_default_memory_pool().free_all_blocks()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        tally(x, y)
        graph = stream.end_capture()
        workspaces = tally._launcher.arguments.workspaces.current()  # type: ignore[union-attr]
        counted.append(int(workspaces.arrays[0].get()[0]))
        tally(x, y)
        counted.append(int(workspaces.arrays[0].get()[0]))
        graph.launch(stream)
        counted.append(int(workspaces.arrays[0].get()[0]))
    assert counted == [0, 0, 0]
    np.testing.assert_array_equal(y.get(), 2 * x.get())


def test_any_librarys_stream_can_be_named(tally: BoundKernel, cp: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(N, device="cuda")
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.null):
        y = tally(x, stream=stream)
        stream.synchronize()
        assert torch.equal(y, 2 * x)
    with pytest.raises(ArgumentError, match="stream is of type int"):
        tally(x, stream=7)


def test_threads_that_make_no_other_call_of_cuda(tally: BoundKernel, cp: Any) -> None:
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    launch = tally.bind(x, y)
    for call in (lambda: tally(x, y), launch):
        for _ in range(3):
            y.fill(0)
            cp.cuda.Device().synchronize()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(call).result()
            cp.cuda.Device().synchronize()
            np.testing.assert_array_equal(y.get(), 2 * x.get())


def test_on_a_device_that_is_not_the_current_one(tally: BoundKernel, cp: Any) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    kernel = get_best_kernel(str(tally.definition.spec.source), n=N, device=1)
    with cp.cuda.Device(1):
        x = _random(cp, 0)
        y = cp.zeros(N, np.float32)
    launch = kernel.bind(x, y)
    launch()
    for _ in range(3):
        z = kernel(x)
        assert z.data.device_id == 1
        np.testing.assert_array_equal(z.get(), 2 * x.get())
    np.testing.assert_array_equal(y.get(), 2 * x.get())


def test_bound_launches_follow_the_current_stream(tally: BoundKernel, cp: Any) -> None:
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    launch = tally.bind(x, y)
    for stream in (cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)):
        with stream:
            y.fill(0)
            launch()
            stream.synchronize()
        np.testing.assert_array_equal(y.get(), 2 * x.get())


@pytest.mark.parametrize("on_null", [True, False])
def test_launches_that_became_graphs(tally: BoundKernel, cp: Any, on_null: bool) -> None:
    """They read the current content of the arrays, also if they are captured into another graph."""
    stream = cp.cuda.Stream.null if on_null else cp.cuda.Stream(non_blocking=True)
    with stream:
        pairs = [(_random(cp, seed), cp.zeros(N, np.float32)) for seed in range(6)]
        launch = tally.bind(*pairs[0])
        for round_ in range(4):
            for x, y in pairs:
                cp.add(x, np.float32(round_), out=x)
                y.fill(np.nan)
                tally(x, y)
                cp.testing.assert_array_equal(y, 2 * x)
            pairs[0][1].fill(np.nan)
            launch()
            cp.testing.assert_array_equal(pairs[0][1], 2 * pairs[0][0])
        state = tally._launcher._states.by_stream[stream.ptr]  # type: ignore[union-attr]
        assert len(state.graphs) == len(pairs)
        if not on_null:
            (x, y), (_, z) = pairs[0], pairs[1]
            stream.begin_capture()
            tally(x, y)
            launch()
            tally(y, z)
            graph = stream.end_capture()
            x += 1
            graph.launch(stream)
            cp.testing.assert_array_equal(z, 4 * x)


def test_launches_let_go_of_while_a_stream_is_captured(tally: BoundKernel, cp: Any) -> None:
    """By the capturing thread or another one, in the strictest capture mode; the capture stays valid."""
    pairs = [(_random(cp, seed), cp.zeros(N, np.float32)) for seed in range(4)]
    with cp.cuda.Stream(non_blocking=True) as stream:
        for x, y in pairs * 3:
            tally(x, y)
        graphs = tally._launcher._states.by_stream[stream.ptr].graphs  # type: ignore[union-attr]
        stream.synchronize()
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
        tally(*pairs[0])
        graphs.pop(next(iter(graphs)))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(graphs.clear).result()
        graph = stream.end_capture()
        pairs[0][1].fill(np.nan)
        graph.launch(stream)
        cp.testing.assert_array_equal(pairs[0][1], 2 * pairs[0][0])
    assert not graphs


@pytest.mark.parametrize("priority", [0, -1, -5])
def test_a_graph_has_its_streams_priority(
    tally: BoundKernel, cp: Any, monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    made: list[Any] = []
    capture = launch_graph._captured

    def noted(*arguments: Any) -> Any:
        made.append(capture(*arguments))
        return made[-1]

    monkeypatch.setattr(launch_graph, "_captured", noted)
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    with cp.cuda.Stream(non_blocking=True, priority=priority) as stream:
        for _ in range(3):
            tally(x, y)
        stream.synchronize()
    (graph,) = made
    verbose = 1  # cudaGraphDebugDotFlagsVerbose, driver_types.h
    assert f"{{priority | {priority}}}" in graph.debug_dot_str(verbose)


def test_threads_with_graphs_of_their_own(tally: BoundKernel, cp: Any) -> None:
    arrays = [(_random(cp, seed), cp.zeros(N, np.float32)) for seed in range(8)]
    launches = [tally.bind(x, y) for x, y in arrays]
    cp.cuda.Device().synchronize()

    def many(index: int) -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(200):
                tally(*arrays[index])
                launches[index]()
            stream.synchronize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))
    for x, y in arrays:
        np.testing.assert_array_equal(y.get(), 2 * x.get())


def test_launches_without_graphs(tally: BoundKernel, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTILE_GRAPHS", "off")
    x, y = _random(cp, 0), cp.zeros(N, np.float32)
    for _ in range(4):
        tally(x, y)
    assert not tally._launcher._states.by_stream[0].graphs  # type: ignore[union-attr]
    np.testing.assert_array_equal(y.get(), 2 * x.get())
