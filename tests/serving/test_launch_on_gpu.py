"""Launches of served kernels: arrays of every library, outputs, scalars, streams, and errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import Outcome
from autotile.cuda.driver import device_count, live_device
from autotile.errors import ArgumentError
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions

pytestmark = pytest.mark.gpu
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


@pytest.fixture(scope="module")
def cp() -> Any:
    import cupy

    return cupy


@pytest.fixture
def blend_toml(tmp_path: Path) -> Path:
    (tmp_path / "blend.cu").write_text(TEMPLATE)
    (tmp_path / "blend.toml").write_text(SPACE)
    return tmp_path / "blend.toml"


@pytest.fixture
def stage_toml(tmp_path: Path) -> Path:
    (tmp_path / "stage.cu").write_text(STAGE_TEMPLATE)
    (tmp_path / "stage.toml").write_text(STAGE_SPACE)
    return tmp_path / "stage.toml"


@pytest.fixture
def blend(blend_toml: Path) -> BoundKernel:
    return get_best_kernel(str(blend_toml), R=ROWS, C=COLUMNS)


@pytest.fixture
def arrays(cp: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """New arrays x and total, and a poisoned out."""

    def make(dtype: Any = np.float32) -> tuple[Any, Any, Any]:
        generator = np.random.default_rng(0)
        x, total = (cp.asarray(generator.standard_normal((ROWS, COLUMNS)).astype(dtype)) for _ in range(2))
        return x, total, cp.full((ROWS, COLUMNS), np.nan, dtype)

    return make


def host(array: Any) -> np.ndarray:
    return np.asarray(array.get(), dtype=np.float64)


class TestArrays:
    def test_cupy(self, blend: BoundKernel, arrays: Any) -> None:
        x, total, out = arrays()
        before = host(total)
        returned = blend(x, total, out)
        assert returned[0] is total
        assert returned[1] is out
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)
        np.testing.assert_allclose(host(total), before + host(x), rtol=1e-6, atol=1e-6)

    def test_outputs_left_out(self, blend: BoundKernel, arrays: Any, cp: Any) -> None:
        x, total, _ = arrays()
        updated, out = blend(x, total)
        assert updated is total
        assert isinstance(out, cp.ndarray)
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)

    def test_what_is_updated_starts_as_zeros_when_left_out(self, blend: BoundKernel, arrays: Any) -> None:
        x, _, _ = arrays()
        total, out = blend(x)
        np.testing.assert_array_equal(host(total), host(x))
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)

    @pytest.mark.parametrize("wrap", [ByInterface, ByDLPack])
    def test_arrays_of_other_libraries(self, blend: BoundKernel, arrays: Any, wrap: type) -> None:
        x, total, out = arrays()
        before = host(total)
        given = [wrap(array) for array in (x, total, out)]
        returned = blend(*given)
        assert returned[0] is given[1]
        assert returned[1] is given[2]
        np.testing.assert_allclose(host(out), 1.5 * host(x), rtol=1e-6)  # written in place, not into a copy
        np.testing.assert_allclose(host(total), before + host(x), rtol=1e-6, atol=1e-6)

    def test_torch(self, blend: BoundKernel) -> None:
        torch = pytest.importorskip("torch")
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
    def test_every_dtype_with_a_scalar_of_that_dtype(self, blend_toml: Path, cp: Any, dtype: str) -> None:
        kernel = get_best_kernel(str(blend_toml), dtype=dtype, R=ROWS, C=COLUMNS)
        element = DTYPES[dtype]
        x = element.encode(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)))
        for alpha, scalars in ((1.5, {}), (-0.25, {"alpha": -0.25})):
            _, out = kernel(cp.asarray(x), **scalars)
            error = np.abs(element.decode(out.get()) - alpha * element.decode(x))
            assert error.max() <= 4 * output_tolerance(element, [element], 1)


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

    def test_an_array_on_another_gpu(self, blend: BoundKernel, arrays: Any, cp: Any) -> None:
        if device_count() < 2:
            pytest.skip("one GPU only")
        with cp.cuda.Device(1):
            x, _, _ = arrays()
        with pytest.raises(ArgumentError, match="x is on CUDA device 1, but the kernel is bound to device 0"):
            blend(x)


class TestStreams:
    def test_the_stream_that_is_given(self, blend: BoundKernel, arrays: Any, cp: Any) -> None:
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

    def test_cupys_current_stream(self, blend: BoundKernel, arrays: Any, cp: Any) -> None:
        x, total, out = arrays()
        blend(x, total, out)
        cp.cuda.Device().synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            _, fresh = blend(x, alpha=2.0)
            stream.synchronize()
        np.testing.assert_allclose(host(fresh), 2 * host(x), rtol=1e-6)

    def test_many_threads(self, blend_toml: Path, arrays: Any, cp: Any) -> None:
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

    def test_whichever_device_is_current(self, blend_toml: Path, cp: Any) -> None:
        if device_count() < 2:
            pytest.skip("one GPU only")
        kernel = get_best_kernel(str(blend_toml), device=1, R=ROWS, C=COLUMNS)
        with cp.cuda.Device(1):
            x = cp.ones((ROWS, COLUMNS), np.float32)
        with cp.cuda.Device(0):
            _, out = kernel(x)
        assert out.device.id == 1
        assert (host(out) == 1.5).all()


class TestSharedMemory:
    def test_more_than_48_kib_is_verified_and_launched(self, stage_toml: Path, cp: Any) -> None:
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


def test_a_served_kernel_is_the_devices_own(blend: BoundKernel) -> None:
    assert blend.device == live_device()
    assert blend.tier == "default"
    assert blend.occupancy is not None
