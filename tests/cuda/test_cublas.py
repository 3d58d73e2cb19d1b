"""cuBLAS by ctypes: which product is asked for, without a GPU; the results on one."""

import pytest

from autotile.cuda.cublas import Gemm
from autotile.errors import InputError


def test_a_product_has_the_sizes_and_flags_of_the_operation() -> None:
    sizes = {"M": 3, "N": 5, "K": 7, "BATCH": 2, "TRANS_A": 1, "TRANS_B": 0, "OUT_FP32": 1, "ALIGNED": 0}
    expected = Gemm(3, 5, 7, batch=2, trans_a=True, trans_b=False, dtype="bfloat16", out_dtype="float32")
    assert Gemm.of(sizes, "bfloat16") == expected
    assert Gemm.of({"M": 3, "N": 5, "K": 7}, "float16") == Gemm(3, 5, 7, dtype="float16", out_dtype="float16")


@pytest.mark.parametrize(("size", "dtype"), [(2**31, "float32"), (8, "int8")])
def test_what_cublas_does_not_compute_is_an_error(size: int, dtype: str) -> None:
    with pytest.raises(InputError, match="cuBLAS computes no product"):
        Gemm.of({"M": size, "N": 8, "K": 8}, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_products_are_those_of_numpy_also_in_a_graph(dtype: str, batch: int, trans_a: bool, trans_b: bool) -> None:
    import cupy
    import numpy as np

    from autotile.cuda.cublas import WORKSPACE_BYTES, Cublas, cublas_version

    assert cublas_version().count(".") == 2
    m, n, k = 37, 50, 65
    generator = np.random.default_rng(0)
    a = generator.standard_normal((batch, k, m) if trans_a else (batch, m, k)).astype(dtype)
    b = generator.standard_normal((batch, n, k) if trans_b else (batch, k, n)).astype(dtype)
    x, y, z = cupy.asarray(a), cupy.asarray(b), cupy.zeros((batch, m, n), dtype)
    stream, library = cupy.cuda.Stream(), Cublas(WORKSPACE_BYTES)
    library.use_stream(stream.ptr)
    product = Gemm(m, n, k, batch, trans_a, trans_b, dtype, dtype)
    left, right = (np.swapaxes(v, 1, 2) if t else v for v, t in ((a, trans_a), (b, trans_b)))
    expected = left.astype(np.float64) @ right.astype(np.float64)
    with stream:
        library.gemm(product, x.data.ptr, y.data.ptr, z.data.ptr)
        assert np.allclose(z.get(), expected, rtol=1e-2, atol=1e-1 if dtype == "float16" else 1e-4)
        stream.begin_capture()
        library.gemm(product, x.data.ptr, y.data.ptr, z.data.ptr, alpha=2.0)
        graph = stream.end_capture()
        graph.launch(stream)
        assert np.allclose(z.get(), 2 * expected, rtol=1e-2, atol=2e-1 if dtype == "float16" else 1e-4)
