"""cuBLAS by ctypes: which product is asked for, without a GPU; the results on one."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest

from autotile.cuda import cublas
from autotile.cuda.compiler import CompileJob, CubinCache, function_attributes
from autotile.cuda.cublas import Gemm, GemmLayout, cublas_version
from autotile.errors import ToolchainError


def test_a_product_has_the_sizes_and_flags_of_the_operation():
    sizes = {"M": 3, "N": 5, "K": 7, "BATCH": 2, "TRANS_A": 1, "TRANS_B": 0, "OUT_FP32": 1, "ALIGNED": 0}
    expected = GemmLayout(3, 5, 7, 2, transpose_a=True, transpose_b=False, factors="bfloat16", result="float32")
    assert GemmLayout.of(sizes, "bfloat16") == expected
    assert GemmLayout.of({"M": 3, "N": 5, "K": 7}, "float16").result == "float16"
    for size, dtype, expected in ((2**31, "float32", False), (8, "int8", False), (8, "float16", True)):
        assert GemmLayout.of({"M": size, "N": 8, "K": 8}, dtype).is_supported is expected


def test_what_is_described_is_destroyed_again_where_a_product_is_refused(monkeypatch):
    alive: set[int] = set()

    class Library:
        """cuBLAS without an algorithm for any product."""

        def __getattr__(self, name: str) -> Any:
            if name.endswith("Create"):
                return self.create
            return alive.remove if name.endswith("Destroy") else lambda *_: 15 * name.endswith("GetHeuristic")

        def create(self, handle: Any, *_: int) -> int:
            handle._obj.value = len(alive) + 1
            alive.add(handle._obj.value)
            return 0

    monkeypatch.setattr(cublas, "load_cublas", Library)
    monkeypatch.setattr(cublas, "_workspace_bytes", lambda: 1 << 20)
    monkeypatch.setattr(cublas, "_handle", lambda _: 0)
    gemm = Gemm(GemmLayout.of({"M": 8, "N": 8, "K": 8}, "float32"), 0)
    with pytest.raises(ToolchainError, match="cublasLtMatmulAlgoGetHeuristic failed with status 15"):
        gemm._prepare(("float32", True, False), 0)
    assert not alive


def test_no_other_product_comes_between_the_launches_of_one(monkeypatch):
    memory, queued = SimpleNamespace(lock=Lock(), workspace=9), list[Any]()
    gemm = Gemm(GemmLayout.of({"M": 8, "N": 8, "K": 8}, "float32"), 0)
    gemm._prepared["float32", True, False] = lambda *given: queued.append((memory.lock.locked(), given))
    gemm(7, (16, 32, 48), memory=memory)
    assert queued == [(True, (7, (16, 32, 48, 0), 9, (1.0, 0.0)))]
    monkeypatch.setattr(cublas, "RelocatableCall", lambda *given: given[-1])
    assert gemm.relocatable(memory, 3) is memory.lock


def _factors(dtype: str, batch: int, trans_a: bool, trans_b: bool) -> tuple[Any, Any, Any]:
    """Return both factors, stored as asked for, and their product in float64."""
    m, n, k = 37, 50, 65
    generator = np.random.default_rng(0)
    a = generator.standard_normal((batch, k, m) if trans_a else (batch, m, k)).astype(dtype)
    b = generator.standard_normal((batch, n, k) if trans_b else (batch, k, n)).astype(dtype)
    left, right = (np.swapaxes(v, 1, 2) if t else v for v, t in ((a, trans_a), (b, trans_b)))
    return a, b, left.astype(np.float64) @ right.astype(np.float64)


@pytest.mark.gpu(shared=True)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_products_are_those_of_numpy_also_in_a_graph(dtype, batch, trans_a, trans_b):
    assert cublas_version().count(".") == 2
    a, b, expected = _factors(dtype, batch, trans_a, trans_b)
    x, y, z = cupy.asarray(a), cupy.asarray(b), cupy.zeros(expected.shape, dtype)
    stream = cupy.cuda.Stream()
    addresses = x.data.ptr, y.data.ptr, z.data.ptr
    gemm = Gemm(GemmLayout(37, 50, 65, batch, trans_a, trans_b, dtype, dtype), 0)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        gemm(stream.ptr, addresses)
        first = z.get()
        assert np.allclose(first, expected, rtol=1e-2, atol=1e-1 if dtype == "float16" else 1e-4)
        for bias in (np.arange(50), np.arange(50)[::-1]):
            added = cupy.asarray(bias.astype(dtype))
            gemm(stream.ptr, (*addresses, added.data.ptr))
            assert np.allclose(z.get(), expected + bias, rtol=1e-2, atol=1e-1 if dtype == "float16" else 1e-4)
        gemm(stream.ptr, addresses)
        stream.begin_capture()
        gemm(stream.ptr, addresses, 2.0, -1.0)
        graph = stream.end_capture()
        graph.launch(stream)
        assert np.allclose(z.get(), expected, rtol=1e-2, atol=2e-1 if dtype == "float16" else 1e-4)


@pytest.mark.gpu(shared=True)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sizes", [(1, 512, 768), (16, 4096, 1024), (128, 1024, 520), (300, 999, 333)])
def test_launches_at_other_addresses_compute_what_a_call_computes(sizes, dtype, has_bias):
    m, n, k = sizes
    generator, stream = cupy.random.default_rng(0), cupy.cuda.Stream(non_blocking=True)
    gemm = Gemm(GemmLayout(m, n, k, 1, False, True, dtype, dtype), 0)
    with stream:
        call = gemm.relocatable(gemm.memory(stream.ptr), 3 + has_bias)
        if call is None:  # more than kernels, as for some sums in parts
            assert (dtype, has_bias) == ("float32", has_bias)
            pytest.skip("cuBLAS does not compute this product by kernels alone")
        for offset in (0, 8, 40):  # of 16 bytes, or more
            x, y, bias, made, expected = (
                generator.standard_normal(offset + size).astype(dtype)[offset:]
                for size in (m * k, n * k, n, m * n, m * n)
            )
            added = (bias.data.ptr,) * has_bias
            call.launch(stream.ptr, (x.data.ptr, y.data.ptr, made.data.ptr, *added))
            gemm(stream.ptr, (x.data.ptr, y.data.ptr, expected.data.ptr, *added))
            assert bool((made == expected).all())


@pytest.mark.gpu(shared=True)
def test_threads_on_one_stream_keep_their_sums_apart():
    stream, generator = cupy.cuda.Stream(non_blocking=True), cupy.random.default_rng(0)

    def product(k: int) -> tuple[Any, Any, Any]:
        gemm = Gemm(GemmLayout(16, 256, k, 1, False, True, "float16", "float16"), 0)
        x, y = (generator.standard_normal((rows, k)).astype("float16") for rows in (16, 256))
        made, expected = (cupy.empty((count, 16, 256), "float16") for count in (300, 1))
        gemm(stream.ptr, (x.data.ptr, y.data.ptr, expected.data.ptr))
        launch = (gemm.relocatable(gemm.memory(stream.ptr), 3) or SimpleNamespace(launch=gemm)).launch

        def compute() -> None:
            cupy.cuda.runtime.setDevice(0)  # it makes a context current in this thread
            for one in made:
                launch(stream.ptr, (x.data.ptr, y.data.ptr, one.data.ptr))

        return compute, made, expected

    with stream:
        products = [product(k) for k in (8192, 12288)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one[0](), products))
    with stream:
        assert all(bool((made == expected).all()) for _, made, expected in products)


@pytest.mark.gpu(shared=True)
def test_float32_is_not_computed_in_tf32():
    a, b = (cupy.full((256, 256), 1 + 2.0**-12, "float32") for _ in range(2))
    c = cupy.empty((256, 256), "float32")
    gemm = Gemm(GemmLayout(256, 256, 256, 1, False, False, "float32", "float32"), 0)
    gemm(cupy.cuda.get_current_stream().ptr, (a.data.ptr, b.data.ptr, c.data.ptr))
    exact = 256 * (1 + 2.0**-12) ** 2  # TF32 would round the factors to 1
    assert float(abs(c - exact).max()) / exact < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_rounding_kernel_compiles(tmp_path, dtype):
    source = (Path(cublas.__file__).with_name("rounding.cu")).read_text(encoding="utf-8")
    options = (f"-DDTYPE_IS_BFLOAT16={int(dtype == 'bfloat16')}",)
    job = CompileJob(source, source, "rounding.cu", "round_sums", "sm_90", options)
    cubin = CubinCache(tmp_path, 1 << 20).get_or_compile(job)
    assert cubin.resources.spill_store_bytes == 0
    assert function_attributes(cubin.path.read_bytes(), "round_sums") == ((8, 8, 8), 256, None)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (GemmLayout(653, 1095, 6711, 1, True, True, "bfloat16", "bfloat16"), True),
        (GemmLayout(653, 1095, 6711, 1, True, True, "bfloat16", "float32"), False),
        (GemmLayout(653, 1095, 6711, 1, True, True, "float32", "float32"), False),
        (GemmLayout(656, 1096, 6712, 1, True, True, "bfloat16", "bfloat16"), False),
        (GemmLayout(65, 109, 6711, 1, True, True, "float16", "float16"), False),
        (GemmLayout(1653, 2095, 1001, 1, False, False, "float16", "float16"), False),
        (GemmLayout(16001, 16001, 2001, 1, False, False, "float16", "float16"), False),
    ],
)
def test_which_products_are_rounded_afterwards(layout, expected):
    assert layout.rounds_afterwards is expected


@pytest.mark.gpu(shared=True)
@pytest.mark.parametrize(("m", "n"), [(1031, 1033), (1032, 1030)])
def test_products_that_are_rounded_afterwards(m, n):
    k = 3001
    layout = GemmLayout(m, n, k, 1, False, False, "float16", "float16")
    assert layout.rounds_afterwards
    generator = cupy.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype("float16") for shape in ((m, k), (k, n)))
    c, gemm, stream = cupy.ones((m, n), "float16"), Gemm(layout, 0), cupy.cuda.get_current_stream()
    addresses = a.data.ptr, b.data.ptr, c.data.ptr
    expected = a.astype("float64") @ b.astype("float64")
    gemm(stream.ptr, addresses)
    assert bool((c == expected.astype("float16")).mean() > 0.99)  # rounded once; sums in fp32 decide ties
    before = c.astype("float64")
    gemm(stream.ptr, addresses, 1.0, 1.0)
    assert cupy.allclose(c, before + expected, rtol=2e-3, atol=0.5)


def test_memory_for_sums_stays_where_graphs_may_refer_to_it(monkeypatch):
    class Memory:
        def __init__(self, size: int) -> None:
            self.size, self.ptr = size, id(self)

    cuda = SimpleNamespace(Memory=Memory, get_current_stream=lambda: SimpleNamespace(ptr=7))
    monkeypatch.setattr(cublas, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cublas, "outside_of_captures", nullcontext)
    monkeypatch.setattr(cublas, "_workspace_bytes", lambda: 1)
    memory = cublas._StreamMemory(7)
    first = memory.sums(100)
    larger = memory.sums(101)
    assert memory.sums(150) == larger  # it has doubled, so that little is kept
    assert [one.ptr for one in memory._sums] == [first, larger]
