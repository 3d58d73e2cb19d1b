"""Launches of served kernels on a device: arrays of every library, scalars, streams, errors, and the fast path."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
import pytest
from feature_kernels import copy_kernel

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import Outcome
from autotile.cuda import function as launch_graph
from autotile.cuda.driver import live_device
from autotile.errors import ArgumentError
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions

ROWS, COLUMNS = 37, 130


class ByInterface:
    """An array with nothing but ``__cuda_array_interface__``, as in Numba."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self._array = array


class ByDLPack:
    """An array with nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def as_tensor(array: Any) -> Any:
    return pytest.importorskip("torch").as_tensor(array, device="cuda")


@pytest.fixture
def blend_toml(tmp_path):
    return copy_kernel(tmp_path, "blend")


@pytest.fixture
def blend(blend_toml):
    return get_best_kernel(str(blend_toml), R=ROWS, C=COLUMNS)


@pytest.fixture
def arrays():
    """New arrays x and total, and a poisoned out."""
    generator = np.random.default_rng(0)
    x, total = (cp.asarray(generator.standard_normal((ROWS, COLUMNS)).astype(np.float32)) for _ in range(2))
    return x, total, cp.full((ROWS, COLUMNS), np.nan, np.float32)


def host(array: Any) -> np.ndarray:
    return np.asarray(array.get(), dtype=np.float64)


@pytest.mark.gpu
class TestArrays:
    @pytest.mark.parametrize(
        "wrap", [lambda array: array, ByInterface, ByDLPack, as_tensor], ids=["cupy", "interface", "dlpack", "torch"]
    )
    def test_arrays_of_cupy_and_others(self, blend, arrays, wrap):
        x, total, out = arrays
        before = host(total)
        given = [wrap(array) for array in (x, total, out)]
        returned = blend(*given)
        assert returned[0] is given[1]
        assert returned[1] is given[2]
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)  # written in place, not into a copy
        np.testing.assert_allclose(host(total), before + host(x), rtol=1e-6, atol=1e-6)

    def test_outputs_left_out(self, blend, arrays):
        assert (blend.device, blend.tier, blend.occupancy is None) == (live_device(), "default", False)
        x, total, _ = arrays
        updated, out = blend(x, total)
        assert updated is total
        assert isinstance(out, cp.ndarray)
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)
        total, out = blend(x)  # what is updated starts as zeros
        np.testing.assert_array_equal(host(total), host(x))
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)

    def test_jax(self, blend):
        jax = pytest.importorskip("jax")
        x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((ROWS, COLUMNS)), dtype="float32")
        if next(iter(x.devices())).platform != "gpu":
            pytest.skip("this JAX has no GPU")
        _, out = blend(x)
        np.testing.assert_allclose(host(out), 1.5 * np.asarray(x, dtype=np.float64), rtol=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
    def test_every_dtype_with_a_scalar_of_that_dtype(self, blend_toml, dtype):
        kernel = get_best_kernel(str(blend_toml), dtype=dtype, R=ROWS, C=COLUMNS)
        element = DTYPES[dtype]
        x = element.encode(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)))
        for alpha, scalars in ((1.5, {}), (-0.25, {"alpha": -0.25})):
            _, out = kernel(cp.asarray(x), **scalars)
            error = np.abs(element.decode(out.get()) - alpha * element.decode(x))
            assert error.max() <= 4 * output_tolerance(element, [element], 1)


@pytest.mark.gpu
class TestSharedMemory:
    def test_more_than_48_kib_is_verified_and_launched(self, tmp_path):
        """All tiles that fit on the device, also if only static and dynamic memory together exceed 48 KiB."""
        toml = copy_kernel(tmp_path, "stage")
        options = TuneOptions(sampler="brute-force", discard=False, finals=0)
        result = autotile.tune(str(toml), N=100_000, options=options)
        limit = live_device().smem_per_block_optin_bytes
        fitting = [(t, s) for t in (1024, 8192, 16384, 40960) for s in (1, 5120) if 4 * (t + s) <= limit]
        assert (8192, 5120) in fitting
        assert result.outcomes == {Outcome.OK: len(fitting)}

        x = cp.asarray(np.random.default_rng(0).standard_normal(100_000), np.float32)
        for tile, static in fitting:
            forget_served()
            copy_kernel(tmp_path, "stage", {"TILE = 1024, STATIC = 1 ": f"TILE = {tile}, STATIC = {static} "})
            kernel = get_best_kernel(str(toml), N=100_000, database=str(tmp_path / "none.db"))
            assert (kernel.tier, kernel.config) == ("default", {"BLOCK": 256, "TILE": tile, "STATIC": static})
            assert kernel.geometry.dynamic_smem_bytes == 4 * tile
            assert kernel.resources.static_smem_bytes >= 4 * static
            np.testing.assert_allclose(host(kernel(x)), 3 * host(x), rtol=1e-6)


N = 3000


@pytest.fixture
def tally(tmp_path):
    forget_served()
    return get_best_kernel(copy_kernel(tmp_path, "tally"), N=N)


def _random(seed: int) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(N, dtype=np.float32))


@pytest.mark.gpu
class TestQuickCalls:
    def test_outputs_left_out_are_new_ones_of_the_callers_library(self, tally, torch):
        x = _random(0)
        tensor = torch.as_tensor(x, device="cuda")
        for array, kind in ((x, cp.ndarray), (tensor, torch.Tensor), (torch.nn.Parameter(tensor), torch.Tensor)):
            for _ in range(3):
                y = tally(array)
                assert isinstance(y, kind)
                torch.cuda.synchronize()
                np.testing.assert_array_equal(cp.asarray(y).get(), 2 * x.get())

    def test_threads_and_streams_do_not_meet(self, tally):
        """Whether they call with the default of a scalar, or with one of their own."""

        def work(seed: int) -> bool:
            x = _random(seed)
            cp.cuda.get_current_stream().synchronize()
            right = True
            with cp.cuda.Stream(non_blocking=True) as stream:
                for scalars, factor in (({}, 2), ({"factor": seed}, seed)) * 25:
                    y = cp.full(N, np.nan, np.float32)
                    tally(x, y, **scalars)
                    stream.synchronize()
                    right = right and bool((y == np.float32(factor) * x).all())
            return right

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(16)))

    def test_tensors_on_pytorchs_current_stream(self, tally, torch):
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

    @pytest.mark.parametrize("warm", [False, True])
    def test_captured_by_cupy(self, tally, warm):
        """Also in the first call, which loads the kernel and allocates its workspaces."""
        x, y = _random(0), cp.zeros(N, np.float32)
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

    def test_captured_by_pytorch(self, tally, torch):
        x, y = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tally(x, y)
            tally(y, x)
        before = x.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, 4 * before)

    def test_a_stream_is_ready_though_its_first_launch_was_captured(self, tally):
        """The kernel's counter must be zero before a graph is launched that was captured first."""
        x, y, counted = _random(0), cp.zeros(N, np.float32), []
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

    def test_any_librarys_stream_can_be_named(self, tally, torch):
        x = torch.randn(N, device="cuda")
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.null):
            y = tally(x, stream=stream)
            stream.synchronize()
            assert torch.equal(y, 2 * x)
        with pytest.raises(ArgumentError, match="stream is of type int"):
            tally(x, stream=7)

    def test_threads_that_make_no_other_call_of_cuda(self, tally):
        x, y = _random(0), cp.zeros(N, np.float32)
        launch = tally.bind(x, y)
        for call in (lambda: tally(x, y), launch):
            for _ in range(3):
                y.fill(0)
                cp.cuda.Device().synchronize()
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(call).result()
                cp.cuda.Device().synchronize()
                np.testing.assert_array_equal(y.get(), 2 * x.get())

    def test_on_a_device_that_is_not_the_current_one(self, tally):
        if cp.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("there is one device")
        kernel = get_best_kernel(str(tally.definition.spec.source), N=N, device=1)
        with cp.cuda.Device(1):
            x = _random(0)
            y = cp.zeros(N, np.float32)
        launch = kernel.bind(x, y)
        launch()
        for _ in range(3):
            z = kernel(x)
            assert z.data.device_id == 1
            np.testing.assert_array_equal(z.get(), 2 * x.get())
        np.testing.assert_array_equal(y.get(), 2 * x.get())

    @pytest.mark.parametrize(("on_null", "graphs"), [(True, "on"), (False, "on"), (True, "off")])
    def test_launches_that_became_graphs(self, tally, monkeypatch, on_null, graphs):
        """They read the current content of the arrays, also if they are captured into another graph."""
        monkeypatch.setenv("AUTOTILE_GRAPHS", graphs)
        stream = cp.cuda.Stream.null if on_null else cp.cuda.Stream(non_blocking=True)
        with stream:
            pairs = [(_random(seed), cp.zeros(N, np.float32)) for seed in range(6)]
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
            assert len(state.graphs) == len(pairs) * (graphs == "on")
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

    def test_launches_let_go_of_while_a_stream_is_captured(self, tally):
        """By the capturing thread or another one, in the strictest capture mode; the capture stays valid."""
        pairs = [(_random(seed), cp.zeros(N, np.float32)) for seed in range(4)]
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
    def test_graphs_keep_the_priority(self, tally, monkeypatch, priority):
        made: list[Any] = []
        capture = launch_graph._captured

        def noted(*arguments: Any) -> Any:
            made.append(capture(*arguments))
            return made[-1]

        monkeypatch.setattr(launch_graph, "_captured", noted)
        x, y = _random(0), cp.zeros(N, np.float32)
        with cp.cuda.Stream(non_blocking=True, priority=priority) as stream:
            for _ in range(3):
                tally(x, y)
            stream.synchronize()
        (graph,) = made
        verbose = 1  # cudaGraphDebugDotFlagsVerbose, driver_types.h
        assert f"{{priority | {priority}}}" in graph.debug_dot_str(verbose)

    def test_threads_with_graphs_of_their_own(self, tally):
        arrays = [(_random(seed), cp.zeros(N, np.float32)) for seed in range(8)]
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
