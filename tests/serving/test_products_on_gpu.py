"""Products that come again, which are launched unchecked and as graphs, and `linear`, on a device with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autotile
from autotile.errors import ArgumentError

pytestmark = pytest.mark.gpu

SHAPES = [(16, 256, 256), (1, 512, 256), (33, 255, 129), (257, 384, 640)]
DTYPES = ["float32", "float16", "bfloat16"]
CALLS = 6
"""The third call of the same arrays is a graph."""


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def product(torch: Any) -> Callable[[Any, Any], Any]:
    matmul: Callable[[Any, Any], Any] = autotile.torch.matmul
    return matmul


def close(torch: Any, found: Any, expected: Any) -> bool:
    """Whether a result agrees with one in float64, by the norm of the difference."""
    limit = 1e-5 if found.dtype == torch.float32 else 1e-2
    return bool((found.double() - expected).norm() <= limit * expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_call_computes_its_own_arrays(torch: Any, product: Any, dtype: str, shape: tuple[int, int, int]) -> None:
    (m, n, k), kept = shape, []
    for call in range(CALLS):
        a, b = (torch.randn(one, device="cuda").to(getattr(torch, dtype)) for one in ((m, k), (k, n)))
        repeated = [product(a, b) for _ in range(CALLS)]
        assert all(torch.equal(one, repeated[0]) for one in repeated)
        assert close(torch, repeated[0], a.double() @ b.double())
        transposed = product(b.t(), a.t())
        assert close(torch, transposed, b.t().double() @ a.t().double())
        kept.append((a, b, repeated[0], call))
    for a, b, result, _ in kept:  # nothing was overwritten by a later call
        assert close(torch, result, a.double() @ b.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_stream_and_each_capture_is_in_order(torch: Any, product: Any, dtype: str) -> None:
    a, b = (torch.randn(64, 64, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    expected = product(a, b)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            results = [product(product(a, b), b) for _ in range(CALLS)]
        stream.synchronize()
        assert all(torch.equal(one, results[0]) for one in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(a, b)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_arrays_of_another_kind_are_not_taken_for_those_before(torch: Any, product: Any) -> None:
    memory = torch.randn(64 * 64 + 8, device="cuda")
    a, b = memory[: 64 * 64].view(64, 64), torch.randn(64, 64, device="cuda")
    for _ in range(CALLS):
        product(a, b)
    shifted = memory[1 : 64 * 64 + 1].view(64, 64)  # aligned to 4 bytes only
    assert close(torch, product(shifted, b), shifted.double() @ b.double())
    strided = torch.randn(64, 128, device="cuda")[:, ::2]
    assert close(torch, product(strided, b), strided.double() @ b.double())
    with pytest.raises(ArgumentError, match="dtype"):
        product(a, b.half())
    with pytest.raises(ArgumentError, match="columns"):
        product(a, b[:63])


def test_cupy_arrays_that_come_again() -> None:
    import cupy

    generator = cupy.random.default_rng(0)
    for _ in range(CALLS):
        a, b = (generator.standard_normal((48, 48), dtype="float32") for _ in range(2))
        expected = a.astype("float64") @ b.astype("float64")
        for _ in range(CALLS):
            assert cupy.allclose(autotile.matmul(a, b), expected, rtol=1e-4, atol=1e-4)


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,), (2, 1, 3, 64)])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_it_is_that_of_pytorch(self, torch: Any, dtype: str, shape: tuple[int, ...], has_bias: bool) -> None:
        linear = autotile.torch.linear
        kind = getattr(torch, dtype)
        x, w, b = (torch.randn(s, device="cuda", dtype=kind, requires_grad=True) for s in (shape, (48, 64), (48,)))
        given = (x, w, b) if has_bias else (x, w)
        expected = torch.nn.functional.linear(*(one.double() for one in given))
        for _ in range(CALLS):
            with torch.no_grad():
                assert close(torch, linear(*given), expected)
            result = linear(*given)
            assert close(torch, result, expected)
            found = torch.autograd.grad(result.square().sum(), given)
        for own, true in zip(found, torch.autograd.grad(expected.square().sum(), given), strict=True):
            assert close(torch, own, true.double())

    def test_a_module_has_the_parameters_of_pytorchs(self, torch: Any) -> None:
        module, plain = autotile.torch.Linear(64, 32, device="cuda"), torch.nn.Linear(64, 32, device="cuda")
        module.load_state_dict(plain.state_dict())
        x = torch.randn(7, 64, device="cuda")
        assert torch.allclose(module(x), plain(x), rtol=1e-4, atol=1e-4)
        compiled = torch.compile(module, fullgraph=True)
        assert torch.allclose(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
        with torch.autocast("cuda", torch.bfloat16):
            assert module(x).dtype == plain(x).dtype == torch.bfloat16

    def test_transforms_and_modes_see_an_operator(self, torch: Any, product: Any) -> None:
        a, b = torch.randn(4, 8, 16, device="cuda"), torch.randn(16, 8, device="cuda")
        mapped = torch.func.vmap(lambda one: torch.mm(one, b))(a)
        assert close(torch, torch.stack([product(one, b) for one in a]), mapped.double())
        first = a[0].clone()
        with torch._subclasses.FakeTensorMode() as mode:
            fake = product(mode.from_tensor(first), mode.from_tensor(b))
        assert fake.shape == (8, 8)
        torch.library.opcheck(torch.ops.autotile.matmul.default, (first, b.requires_grad_()))

    def test_wrong_shapes_are_refused(self, torch: Any) -> None:
        linear = autotile.torch.linear
        with pytest.raises(ArgumentError, match=r"\(\.\.\., k\) and \(n, k\)"):
            linear(torch.randn(3, 5, device="cuda"), torch.randn(4, 6, device="cuda"))
