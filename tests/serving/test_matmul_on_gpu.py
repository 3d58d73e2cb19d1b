"""`matmul` on a device: all layouts, batches and dtypes against float64, with CuPy and PyTorch arrays."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.errors import ArgumentError, InputError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gemm_product import emulating_kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def _assert_right(result: Any, a: Any, b: Any, dtype: str, terms: int) -> None:
    exact = a.double() @ b.double()
    scale = exact.abs().clamp_min(float(exact.square().mean().sqrt()))
    out = str(result.dtype).removeprefix("torch.")
    tolerance = output_tolerance(DTYPES[out], [DTYPES[dtype]], terms)
    assert float(((result.double() - exact).abs() / scale).max()) <= tolerance


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 48, 80), (1, 257, 131), (200, 7, 333), (129, 130, 131)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_layout(torch: Any, dtype: str, shape: tuple[int, int, int], layout: str) -> None:
    m, n, k = shape
    kind = getattr(torch, dtype)
    a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda").to(kind)
    b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(kind)
    a, b = (a.T if layout[0] == "t" else a), (b.T if layout[1] == "t" else b)
    result = autotile.matmul(a, b)
    assert (result.shape, result.dtype) == ((m, n), kind)
    _assert_right(result, a, b, dtype, k)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stacks_and_what_is_added_to(torch: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    a, b = (torch.randn(s, device="cuda").to(kind) for s in ((3, 40, 64), (3, 64, 24)))
    _assert_right(autotile.matmul(a, b), a, b, dtype, 64)
    c = torch.randn((3, 40, 24), device="cuda").to(kind)
    expected = 0.5 * (a.double() @ b.double()) - 2.0 * c.double()
    autotile.matmul(a, b, c, alpha=0.5, beta=-2.0)
    assert torch.allclose(c.double(), expected, rtol=0.02, atol=0.2)


def test_float32_on_the_cuda_cores_alone(torch: Any) -> None:
    """The lower bfloat16 parts of elements this small underflow; IEEE fp32 arithmetic keeps full precision."""
    a, b = torch.full((96, 64), 2.0**-126 * (1 + 2.0**-10), device="cuda"), torch.ones((64, 80), device="cuda")
    result = autotile.matmul(a, b, emulate=False)
    expected = a.double() @ b.double()
    assert float(((result.double() - expected) / expected).abs().max()) < 1e-6
    assert torch.equal(autotile.matmul(a, b, emulate=False), result)


@pytest.mark.parametrize("name", sorted(emulating_kernels()))
def test_float32_is_as_accurate_from_parts(torch: Any, name: str, only_kernel: Callable[[str], None]) -> None:
    """For long sums, compared with cuBLAS; the kernel under test is the only one."""
    only_kernel(name)
    a, b = (torch.randn(s, device="cuda") for s in ((256, 8192), (8192, 384)))
    exact = a.double() @ b.double()

    def error(product: Any) -> float:
        return float((product.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert error(autotile.matmul(a, b, library=False)) <= 2.0 * error(torch.mm(a, b))
    with pytest.raises(InputError, match="none is written for it"):
        autotile.matmul(a, b, emulate=False, library=False)


def test_unaligned_matrices(torch: Any) -> None:
    memory = torch.randn(64 * 64 + 1, device="cuda").bfloat16()
    a = memory[1:].view(64, 64)
    b = torch.randn((64, 64), device="cuda").bfloat16()
    _assert_right(autotile.matmul(a, b), a, b, "bfloat16", 64)


def test_a_float32_result_of_16_bits(torch: Any) -> None:
    a, b = (torch.randn((96, 96), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty((96, 96), device="cuda")
    assert autotile.matmul(a, b, out) is out
    _assert_right(out, a, b, "bfloat16", 96)


def test_cupys_arrays() -> None:
    import cupy

    a, b = (cupy.asarray(np.random.default_rng(i).standard_normal((50, 50), dtype=np.float32)) for i in range(2))
    result = autotile.matmul(a, b.T)
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_allclose(result.get(), a.get() @ b.get().T, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_together(torch: Any) -> None:
    a, b = torch.ones((4, 5), device="cuda"), torch.ones((4, 5), device="cuda")
    with pytest.raises(ArgumentError, match="a has 5 columns and b 4 rows"):
        autotile.matmul(a, b)
    with pytest.raises(ArgumentError, match="convert one of them"):
        autotile.matmul(a, b.T.half())
    with pytest.raises(ArgumentError, match="without out"):
        autotile.matmul(a, b.T, beta=1.0)


@pytest.mark.parametrize("emulate", [True, False])
def test_as_an_operator_of_pytorch(torch: Any, emulate: bool) -> None:
    """With gradients, and without a graph break."""
    import autotile.torch

    a, b = (torch.randn((24, 24), device="cuda", requires_grad=True) for _ in range(2))

    def loss(a: Any, b: Any) -> Any:
        return autotile.torch.matmul(a, b, emulate=emulate).square().sum()

    torch.library.opcheck(torch.ops.autotile.matmul.default, (a.detach(), b.detach(), emulate))
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        got = torch.autograd.grad(function(a, b), (a, b))
        want = torch.autograd.grad((a @ b).square().sum(), (a, b))
        for x, y in zip(got, want, strict=True):
            assert torch.allclose(x, y, rtol=1e-3, atol=1e-3)
