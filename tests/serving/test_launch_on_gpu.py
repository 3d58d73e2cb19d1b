"""Launches of served kernels on a device: arrays of every library, scalars, streams, errors, and the fast path."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import Outcome
from autotile.cuda import function as launch_graph
from autotile.cuda.driver import device_count, live_device
from autotile.errors import ArgumentError
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions

ROWS, COLUMNS = 37, 130
TEMPLATE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void blend(const DTYPE* x, DTYPE* total, DTYPE* out, int rows, int columns, DTYPE alpha) {
    const long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (i >= (long long)rows * columns) return;
    total[i] = total[i] + x[i];
    out[i] = alpha * x[i];
}
"""
SPACE = """
[kernel]
name = "blend"
template = "blend.cu"
entry = "blend"
summary = "total += x, out = alpha x"
[problem]
sizes = { R = 37, C = 130 }
dtypes = ["float32", "float64", "float16", "bfloat16"]
[parameters]
THREADS = [64, 128]
[default]
THREADS = 64
[rules]
[launch]
block = ["THREADS"]
grid = ["ceil_div(R * C, THREADS)"]
[arguments]
x = { buffer = "dtype", shape = ["R", "C"], access = "in" }
total = { buffer = "dtype", shape = ["R", "C"], access = "inout" }
out = { buffer = "dtype", shape = ["R", "C"], access = "out" }
rows = { scalar = "int32", value = "R" }
columns = { scalar = "int32", value = "C" }
alpha = { scalar = "dtype", value = 1.5, check = -0.25 }
[reference]
outputs = { total = "total + x", out = "alpha * x" }
"""
STAGE_TEMPLATE = """
extern "C" __global__ void stage(const float* x, float* y, int n, float factor) {
    extern __shared__ float tile[];
    __shared__ float factors[STATIC];
    const int base = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < STATIC; i += 256) factors[i] = factor;
    for (int i = threadIdx.x; i < TILE; i += 256) tile[i] = base + i < n ? x[base + i] : 0.0f;
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += 256) {
        const int j = TILE - 1 - i;  // loaded by another thread
        if (base + j < n) y[base + j] = factors[j % STATIC] * tile[j];
    }
}
"""
STAGE_SPACE = """
[kernel]
name = "stage"
template = "stage.cu"
entry = "stage"
summary = "y = factor x, by way of shared memory"
[problem]
sizes = { n = 100000 }
ragged = { n = 12345 }
[parameters]
TILE = [1024, 8192, 16384, 40960]
STATIC = [1, 5120]
[default]
TILE = 1024
STATIC = 1
[rules]
[launch]
block = ["256"]
grid = ["ceil_div(n, TILE)"]
dynamic_smem_bytes = "4 * TILE"
static_smem_bytes = "4 * STATIC"
[arguments]
x = { buffer = "dtype", shape = ["n"], access = "in" }
y = { buffer = "dtype", shape = ["n"], access = "out" }
n = { scalar = "int32", value = "n" }
factor = { scalar = "float32", value = 3.0 }
[reference]
outputs = { y = "factor * x" }
"""


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


def write(folder: Path, name: str, template: str, space: str) -> Path:
    (folder / f"{name}.cu").write_text(template)
    (folder / f"{name}.toml").write_text(space)
    return folder / f"{name}.toml"


@pytest.fixture
def blend_toml(tmp_path: Path) -> Path:
    return write(tmp_path, "blend", TEMPLATE, SPACE)


@pytest.fixture
def stage_toml(tmp_path: Path) -> Path:
    return write(tmp_path, "stage", STAGE_TEMPLATE, STAGE_SPACE)


@pytest.fixture
def blend(blend_toml: Path) -> BoundKernel:
    return get_best_kernel(str(blend_toml), R=ROWS, C=COLUMNS)


@pytest.fixture
def arrays() -> Callable[..., tuple[Any, Any, Any]]:
    """New arrays x and total, and a poisoned out."""

    def make(dtype: Any = np.float32) -> tuple[Any, Any, Any]:
        generator = np.random.default_rng(0)
        x, total = (cp.asarray(generator.standard_normal((ROWS, COLUMNS)).astype(dtype)) for _ in range(2))
        return x, total, cp.full((ROWS, COLUMNS), np.nan, dtype)

    return make


def host(array: Any) -> np.ndarray:
    return np.asarray(array.get(), dtype=np.float64)


@pytest.mark.gpu
class TestArrays:
    @pytest.mark.parametrize("wrap", [lambda array: array, ByInterface, ByDLPack], ids=["cupy", "interface", "dlpack"])
    def test_arrays_of_cupy_and_others(self, blend: BoundKernel, arrays: Any, wrap: Callable[[Any], Any]) -> None:
        x, total, out = arrays()
        before = host(total)
        given = [wrap(array) for array in (x, total, out)]
        returned = blend(*given)
        assert returned[0] is given[1]
        assert returned[1] is given[2]
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)  # written in place, not into a copy
        np.testing.assert_allclose(host(total), before + host(x), rtol=1e-6, atol=1e-6)

    def test_outputs_left_out(self, blend: BoundKernel, arrays: Any) -> None:
        x, total, _ = arrays()
        updated, out = blend(x, total)
        assert updated is total
        assert isinstance(out, cp.ndarray)
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)
        total, out = blend(x)  # what is updated starts as zeros
        np.testing.assert_array_equal(host(total), host(x))
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)

    def test_torch(self, blend: BoundKernel, torch: Any) -> None:
        x = torch.randn(ROWS, COLUMNS, device="cuda")
        total, out = torch.zeros_like(x), torch.full_like(x, float("nan"))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            returned = blend(x, total, out)
            doubled = 2 * out  # ordered after the launch by PyTorch's own stream
        stream.synchronize()
        assert returned[1] is out
        torch.testing.assert_close(total, x)
        torch.testing.assert_close(doubled, 3 * x)
        with pytest.raises(ArgumentError, match="x: this Tensor cannot be used on the GPU"):
            blend(x.cpu(), total, out)

    def test_jax(self, blend: BoundKernel) -> None:
        jax = pytest.importorskip("jax")
        x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((ROWS, COLUMNS)), dtype="float32")
        if next(iter(x.devices())).platform != "gpu":
            pytest.skip("this JAX has no GPU")
        _, out = blend(x)
        np.testing.assert_allclose(host(out), 1.5 * np.asarray(x, dtype=np.float64), rtol=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
    def test_every_dtype_with_a_scalar_of_that_dtype(self, blend_toml: Path, dtype: str) -> None:
        kernel = get_best_kernel(str(blend_toml), dtype=dtype, R=ROWS, C=COLUMNS)
        element = DTYPES[dtype]
        x = element.encode(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)))
        for alpha, scalars in ((1.5, {}), (-0.25, {"alpha": -0.25})):
            _, out = kernel(cp.asarray(x), **scalars)
            error = np.abs(element.decode(out.get()) - alpha * element.decode(x))
            assert error.max() <= 4 * output_tolerance(element, [element], 1)


@pytest.mark.gpu
class TestScalars:
    def test_a_default_may_be_overridden_for_one_call(self, blend: BoundKernel, arrays: Any) -> None:
        x, _, _ = arrays()
        for scalars, alpha in (({"alpha": 0.25}, 0.25), ({}, 1.5), ({"alpha": 3}, 3.0)):
            _, out = blend(x, **scalars)
            np.testing.assert_allclose(host(out), alpha * host(x), rtol=1e-6)

    @pytest.mark.parametrize(
        ("scalars", "said"),
        [
            ({"rows": 3}, "blend has no scalar 'rows' to set; scalars with a default: alpha"),
            ({"beta": 3}, "blend has no scalar 'beta' to set"),
            ({"alpha": "1"}, "scalar alpha is '1', expected a number"),
            ({"alpha": 1e39}, "does not fit in float32"),
        ],
    )
    def test_refusals(self, blend: BoundKernel, arrays: Any, scalars: dict[str, Any], said: str) -> None:
        with pytest.raises(ArgumentError, match=said):
            blend(arrays()[0], **scalars)


@pytest.mark.gpu
class TestRefusals:
    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda x: x[:, :-1].copy(), r"x has shape \(37, 129\), expected \(37, 130\) for blend R=37 C=130 float32"),
            (lambda x: x.ravel(), r"x has shape \(4810,\), expected"),
            (lambda x: x.astype("float64"), "x has dtype float64, expected float32; convert it with astype"),
            (lambda x: x.T.copy().T, r"x is not C-contiguous .*pass cupy\.ascontiguousarray\(x\)"),
            (lambda x: x.get(), "x: this ndarray cannot be used on the GPU"),
            (lambda x: [1.0, 2.0], "x: expected an array on the GPU .*got list"),
            (lambda x: None, "x: expected an array on the GPU .*got NoneType"),
        ],
    )
    def test_an_array_that_does_not_fit(self, blend: BoundKernel, arrays: Any, spoil: Any, said: str) -> None:
        x, total, out = arrays()
        before = host(total)
        with pytest.raises(ArgumentError, match=said):
            blend(spoil(x), total, out)
        np.testing.assert_array_equal(host(total), before)

    @pytest.mark.parametrize("count", [0, 4, 7])
    def test_a_wrong_number_of_arrays(self, blend: BoundKernel, arrays: Any, count: int) -> None:
        said = rf"takes the arrays x \(in\), total \(inout\), out \(out\); got {count}\. Outputs may be left out"
        with pytest.raises(ArgumentError, match=said):
            blend(*[arrays()[0]] * count)

    def test_an_array_on_another_gpu(self, blend: BoundKernel, arrays: Any) -> None:
        if device_count() < 2:
            pytest.skip("one GPU only")
        with cp.cuda.Device(1):
            x, _, _ = arrays()
        with pytest.raises(ArgumentError, match="x is on CUDA device 1, but the kernel is bound to device 0"):
            blend(x)


@pytest.mark.gpu
class TestStreams:
    def test_the_stream_that_is_given(self, blend: BoundKernel, arrays: Any) -> None:
        """A launch that is captured on the stream runs with the graph, and not before."""
        x, total, out = arrays()
        blend(x, total, out)  # loads the kernel, which a capture does not allow
        out.fill(np.nan)
        cp.cuda.Device().synchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        blend(x, total, out, stream=stream)
        graph = stream.end_capture()
        cp.cuda.Device().synchronize()
        assert np.isnan(host(out)).all()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)
        with stream:  # CuPy's current one
            _, fresh = blend(x, alpha=2.0)
            stream.synchronize()
        np.testing.assert_allclose(host(fresh), 2 * host(x), rtol=1e-6)

    def test_many_threads(self, blend_toml: Path, arrays: Any) -> None:
        forget_served()
        x, _, _ = arrays()
        cp.cuda.Device().synchronize()

        def work(number: int) -> float:
            kernel = get_best_kernel(str(blend_toml), R=ROWS, C=COLUMNS)
            with cp.cuda.Stream(non_blocking=True) as stream:
                for _ in range(20):
                    _, out = kernel(x, alpha=float(number))
                stream.synchronize()
            return float(np.abs(host(out) - number * host(x)).max())

        with ThreadPoolExecutor(8) as threads:
            assert max(threads.map(work, range(8))) < 1e-5

    def test_bound_once_and_launched_often(self, blend: BoundKernel, arrays: Any) -> None:
        x, total, out = arrays()
        before = host(total)
        launch = blend.bind(x, total, out, alpha=2.0)
        for _ in range(3):
            launch()
        np.testing.assert_allclose(host(out), 2 * host(x), rtol=1e-6)
        np.testing.assert_allclose(host(total), before + 3 * host(x), rtol=1e-5, atol=1e-5)

    def test_whichever_device_is_current(self, blend_toml: Path) -> None:
        if device_count() < 2:
            pytest.skip("one GPU only")
        kernel = get_best_kernel(str(blend_toml), device=1, R=ROWS, C=COLUMNS)
        with cp.cuda.Device(1):
            x = cp.ones((ROWS, COLUMNS), np.float32)
        with cp.cuda.Device(0):
            _, out = kernel(x)
        assert out.device.id == 1
        assert (host(out) == 1.5).all()


@pytest.mark.gpu
class TestSharedMemory:
    def test_more_than_48_kib_is_verified_and_launched(self, stage_toml: Path) -> None:
        """All tiles that fit on the device, also if only static and dynamic memory together exceed 48 KiB."""
        options = TuneOptions(sampler="brute-force", discard=False, finals=0)
        result = autotile.tune(str(stage_toml), n=100_000, options=options)
        limit = live_device().smem_per_block_optin_bytes
        fitting = [(t, s) for t in (1024, 8192, 16384, 40960) for s in (1, 5120) if 4 * (t + s) <= limit]
        assert (8192, 5120) in fitting
        assert result.outcomes == {Outcome.OK: len(fitting)}

        x = cp.asarray(np.random.default_rng(0).standard_normal(100_000), np.float32)
        text = stage_toml.read_text()
        for tile, static in fitting:
            forget_served()
            stage_toml.write_text(
                text.replace("[default]\nTILE = 1024\nSTATIC = 1\n", f"[default]\nTILE = {tile}\nSTATIC = {static}\n")
            )
            kernel = get_best_kernel(str(stage_toml), n=100_000, database=str(stage_toml.with_name("none.db")))
            assert (kernel.tier, kernel.config) == ("default", {"TILE": tile, "STATIC": static})
            assert kernel.geometry.dynamic_smem_bytes == 4 * tile
            assert kernel.resources is not None
            assert kernel.resources.static_smem_bytes >= 4 * static
            np.testing.assert_allclose(host(kernel(x)), 3 * host(x), rtol=1e-6)


@pytest.mark.gpu
class TestServed:
    def test_a_served_kernel_is_the_devices_own(self, blend: BoundKernel) -> None:
        assert blend.device == live_device()
        assert blend.tier == "default"
        assert blend.occupancy is not None


N = 3000
TALLY_TEMPLATE = """
// y = factor x, by way of a workspace that holds what this launch's blocks have counted
extern "C" __global__ void tally(const DTYPE* x, DTYPE* y, unsigned int* counted, DTYPE* kept, int n, DTYPE factor) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) kept[i] = factor * x[i];
    if (i < n) y[i] = kept[i];
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(counted, 1u) == gridDim.x - 1) *counted = 0;
}
"""
TALLY_SPACE = """
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
    forget_served()
    return get_best_kernel(write(tmp_path, "tally", TALLY_TEMPLATE, TALLY_SPACE), n=N)


def _random(seed: int) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(N, dtype=np.float32))


@pytest.mark.gpu
class TestQuickCalls:
    def test_call_after_call_with_other_arrays(self, tally: BoundKernel) -> None:
        for seed in range(5):
            x, y = _random(seed), cp.full(N, np.nan, np.float32)
            assert tally(x, y) is y
            np.testing.assert_array_equal(y.get(), 2 * x.get())
        assert tally.calls == 5

    def test_outputs_left_out_are_new_ones_of_the_callers_library(self, tally: BoundKernel, torch: Any) -> None:
        x = _random(0)
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
    def test_a_quick_kernel_refuses_the_same(self, tally: BoundKernel, spoil: Callable[[Any], Any], said: str) -> None:
        x, y = _random(0), cp.zeros(N, np.float32)
        tally(x, y)
        tally(x, y)
        with pytest.raises(ArgumentError, match=said):
            tally(spoil(x), y)

    def test_scalars_of_one_call_are_forgotten_by_the_next(self, tally: BoundKernel) -> None:
        x, y = _random(0), cp.zeros(N, np.float32)
        for scalars, factor in (({}, 2), ({"factor": -3}, -3), ({}, 2), ({"factor": 5}, 5)):
            tally(x, y, **scalars)
            np.testing.assert_array_equal(y.get(), np.float32(factor) * x.get())

    def test_threads_and_streams_do_not_meet(self, tally: BoundKernel) -> None:
        def work(seed: int) -> bool:
            x = _random(seed)
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

    def test_tensors_on_pytorchs_current_stream(self, tally: BoundKernel, torch: Any) -> None:
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

    def test_a_parameter_of_a_module_is_a_tensor(self, tally: BoundKernel, torch: Any) -> None:
        weights = torch.nn.Parameter(torch.randn(N, device="cuda"))
        y = torch.empty(N, device="cuda")
        for _ in range(2):
            tally(weights, y)
            assert torch.equal(y, 2 * weights)

    @pytest.mark.parametrize("warm", [False, True])
    def test_captured_by_cupy(self, tally: BoundKernel, warm: bool) -> None:
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

    def test_captured_by_pytorch(self, tally: BoundKernel, torch: Any) -> None:
        x, y = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tally(x, y)
            tally(y, x)
        before = x.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, 4 * before)

    def test_a_stream_is_ready_though_its_first_launch_was_captured(self, tally: BoundKernel) -> None:
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

    def test_any_librarys_stream_can_be_named(self, tally: BoundKernel, torch: Any) -> None:
        x = torch.randn(N, device="cuda")
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True), cp.cuda.Stream.null):
            y = tally(x, stream=stream)
            stream.synchronize()
            assert torch.equal(y, 2 * x)
        with pytest.raises(ArgumentError, match="stream is of type int"):
            tally(x, stream=7)

    def test_threads_that_make_no_other_call_of_cuda(self, tally: BoundKernel) -> None:
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

    def test_on_a_device_that_is_not_the_current_one(self, tally: BoundKernel) -> None:
        if cp.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("there is one device")
        kernel = get_best_kernel(str(tally.definition.spec.source), n=N, device=1)
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

    def test_bound_launches_follow_the_current_stream(self, tally: BoundKernel) -> None:
        x, y = _random(0), cp.zeros(N, np.float32)
        launch = tally.bind(x, y)
        for stream in (cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)):
            with stream:
                y.fill(0)
                launch()
                stream.synchronize()
            np.testing.assert_array_equal(y.get(), 2 * x.get())

    @pytest.mark.parametrize("on_null", [True, False])
    def test_launches_that_became_graphs(self, tally: BoundKernel, on_null: bool) -> None:
        """They read the current content of the arrays, also if they are captured into another graph."""
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

    def test_launches_let_go_of_while_a_stream_is_captured(self, tally: BoundKernel) -> None:
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
    def test_graphs_keep_the_priority(self, tally: BoundKernel, monkeypatch: pytest.MonkeyPatch, priority: int) -> None:
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

    def test_threads_with_graphs_of_their_own(self, tally: BoundKernel) -> None:
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

    def test_launches_without_graphs(self, tally: BoundKernel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTILE_GRAPHS", "off")
        x, y = _random(0), cp.zeros(N, np.float32)
        for _ in range(4):
            tally(x, y)
        assert not tally._launcher._states.by_stream[0].graphs  # type: ignore[union-attr]
        np.testing.assert_array_equal(y.get(), 2 * x.get())
