"""`matmul`: what is chosen, and gains of a launch; on a device results, layouts, repeated calls, and `linear`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_models import close
from msgspec import structs
from stored_runs import store_default

import autotile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.errors import ArgumentError, InputError
from autotile.serving.aside import wait_for_compilations
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.gains import RECORDED_US, WRAPPED_US, Gain, find_product, is_transposed, stored_transposed
from autotile.serving.operations import MatmulOptions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gemm_product import Product, emulating_kernels, fitting_kernels

PRODUCT = Product(2048, 2048, 2048)


def best_matmul(product: Product, device: str | None = None, **options: Any) -> BoundKernel:
    return default_dispatcher.serve_product(product.sizes, product.dtype, MatmulOptions(**options), device)


def store_product(name: str, product: Product, time_us: float, database: Path | None = None) -> None:
    store_default(name, fitting_kernels(product)[name], product.dtype, time_us, database)


class TestChoice:
    @pytest.mark.usefixtures("live_gpu")
    @pytest.mark.parametrize("emulate", [True, False])
    def test_what_is_computed_from_parts_is_launched_only_where_that_is_allowed(self, emulate):
        store_product("sgemm_bf16x6", PRODUCT, 2.0)
        store_product("sgemm_ws", PRODUCT, 3.0)
        store_product("sgemm", PRODUCT, 4.0)
        kernel = best_matmul(replace(PRODUCT, emulate=emulate))
        assert (kernel.kernel, kernel.tier) == ("sgemm_bf16x6" if emulate else "sgemm_ws", "exact")

    def test_a_path_names_a_database(self, tmp_path):
        slow, fast = tmp_path / "slow.db", tmp_path / "fast.db"
        store_product("sgemm", PRODUCT, 3.0, slow)
        store_product("sgemm", PRODUCT, 3.0, fast)
        store_product("sgemm_ws", PRODUCT, 2.0, fast)
        for path, name in ((slow, "sgemm"), (fast, "sgemm_ws")):
            kernel = best_matmul(PRODUCT, device="NVIDIA H200", database=path)
            assert (kernel.kernel, kernel.tier) == (name, "exact")


def _assert_right(result: Any, a: Any, b: Any, dtype: str, terms: int) -> None:
    exact = a.double() @ b.double()
    scale = exact.abs().clamp_min(float(exact.square().mean().sqrt()))
    out = str(result.dtype).removeprefix("torch.")
    tolerance = output_tolerance(DTYPES[out], [DTYPES[dtype]], terms)
    assert float(((result.double() - exact).abs() / scale).max()) <= tolerance


@pytest.mark.gpu(shared=True)
class TestProducts:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("shape", [(64, 48, 80), (1, 257, 131), (200, 7, 333), (129, 130, 131)])
    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    def test_every_layout(self, torch, dtype, shape, layout):
        m, n, k = shape
        kind = getattr(torch, dtype)
        a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda").to(kind)
        b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(kind)
        a, b = (a.T if layout[0] == "t" else a), (b.T if layout[1] == "t" else b)
        result = autotile.matmul(a, b)
        assert (result.shape, result.dtype) == ((m, n), kind)
        _assert_right(result, a, b, dtype, k)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_stacks_and_what_is_added_to(self, torch, dtype):
        kind = getattr(torch, dtype)
        a, b = (torch.randn(s, device="cuda").to(kind) for s in ((3, 40, 64), (3, 64, 24)))
        _assert_right(autotile.matmul(a, b), a, b, dtype, 64)
        c = torch.randn((3, 40, 24), device="cuda").to(kind)
        expected = 0.5 * (a.double() @ b.double()) - 2.0 * c.double()
        autotile.matmul(a, b, c, alpha=0.5, beta=-2.0)
        assert torch.allclose(c.double(), expected, rtol=0.02, atol=0.2)

    def test_float32_on_the_cuda_cores_alone(self, torch):
        """The lower bfloat16 parts of elements this small underflow; IEEE fp32 arithmetic keeps full precision."""
        a, b = torch.full((96, 64), 2.0**-126 * (1 + 2.0**-10), device="cuda"), torch.ones((64, 80), device="cuda")
        result = autotile.matmul(a, b, emulate=False)
        expected = a.double() @ b.double()
        assert float(((result.double() - expected) / expected).abs().max()) < 1e-6
        assert torch.equal(autotile.matmul(a, b, emulate=False), result)

    @pytest.mark.parametrize("name", sorted(emulating_kernels()))
    def test_float32_is_as_accurate_from_parts(self, torch, name, only_kernel):
        """For long sums, compared with cuBLAS; the kernel under test is the only one."""
        only_kernel(name)
        a, b = (torch.randn(s, device="cuda") for s in ((256, 8192), (8192, 384)))
        exact = a.double() @ b.double()

        def error(product: Any) -> float:
            return float((product.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

        assert error(autotile.matmul(a, b, library=False)) <= 2.0 * error(torch.mm(a, b))
        with pytest.raises(InputError, match="none is written for it"):
            autotile.matmul(a, b, emulate=False, library=False)

    def test_unaligned_matrices_and_a_float32_result_of_16_bits(self, torch):
        memory = torch.randn(64 * 64 + 1, device="cuda").bfloat16()
        a, b = memory[1:].view(64, 64), torch.randn((64, 64), device="cuda").bfloat16()
        _assert_right(autotile.matmul(a, b), a, b, "bfloat16", 64)
        a, b = (torch.randn((96, 96), device="cuda").bfloat16() for _ in range(2))
        out = torch.empty((96, 96), device="cuda")
        assert autotile.matmul(a, b, out) is out
        _assert_right(out, a, b, "bfloat16", 96)

    def test_what_does_not_fit_together(self, torch):
        a, b = torch.ones((4, 5), device="cuda"), torch.ones((4, 5), device="cuda")
        with pytest.raises(ArgumentError, match="a has 5 columns and b 4 rows"):
            autotile.matmul(a, b)
        with pytest.raises(ArgumentError, match="convert one of them"):
            autotile.matmul(a, b.T.half())
        with pytest.raises(ArgumentError, match="without out"):
            autotile.matmul(a, b.T, beta=1.0)

    @pytest.mark.parametrize("emulate", [True, False])
    def test_as_an_operator_of_pytorch(self, torch, emulate):
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


REPEATED_SHAPES = [(16, 256, 256), (1, 512, 256), (33, 255, 129), (257, 384, 640)]
NAMES = ["float32", "float16", "bfloat16"]
CALLS = 6
"""The third call of the same arrays is a graph."""


def product(a: Any, b: Any) -> Any:
    return autotile.torch.matmul(a, b)


@pytest.mark.gpu(shared=True)
class TestLinear:
    @pytest.mark.parametrize("dtype", NAMES)
    @pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,), (2, 1, 3, 64)])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_it_is_that_of_pytorch(self, torch, dtype, shape, has_bias):
        linear = autotile.torch.linear
        kind = getattr(torch, dtype)
        x, w, b = (torch.randn(s, device="cuda", dtype=kind, requires_grad=True) for s in (shape, (48, 64), (48,)))
        given = (x, w, b) if has_bias else (x, w)
        expected = torch.nn.functional.linear(*(one.double() for one in given))
        for _ in range(CALLS):
            with torch.no_grad():
                assert close(linear(*given), expected)
            result = linear(*given)
            assert close(result, expected)
            found = torch.autograd.grad(result.square().sum(), given)
        for own, true in zip(found, torch.autograd.grad(expected.square().sum(), given), strict=True):
            assert close(own, true.double())

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of PyTorch's own compiler
    @pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
    def test_a_module_has_the_parameters_of_pytorchs(self, torch):
        module, plain = autotile.torch.Linear(64, 32, device="cuda"), torch.nn.Linear(64, 32, device="cuda")
        module.load_state_dict(plain.state_dict())
        x = torch.randn(7, 64, device="cuda")
        assert torch.allclose(module(x), plain(x), rtol=1e-4, atol=1e-4)
        compiled = torch.compile(module, fullgraph=True)
        assert torch.allclose(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
        with torch.autocast("cuda", torch.bfloat16):
            assert module(x).dtype == plain(x).dtype == torch.bfloat16

    def test_transforms_and_modes_see_an_operator(self, torch):
        a, b = torch.randn(4, 8, 16, device="cuda"), torch.randn(16, 8, device="cuda")
        mapped = torch.func.vmap(lambda one: torch.mm(one, b))(a)
        assert close(torch.stack([product(one, b) for one in a]), mapped.double())
        first = a[0].clone()
        with torch._subclasses.FakeTensorMode() as mode:
            fake = product(mode.from_tensor(first), mode.from_tensor(b))
        assert fake.shape == (8, 8)
        torch.library.opcheck(torch.ops.autotile.matmul.default, (first, b.requires_grad_()))


@pytest.mark.gpu(shared=True)
class TestRepeated:
    @pytest.mark.parametrize("dtype", NAMES)
    @pytest.mark.parametrize("shape", REPEATED_SHAPES)
    def test_each_call_has_its_result(self, torch, dtype, shape):
        (m, n, k), kept = shape, []
        for _ in range(CALLS):
            a, b = (torch.randn(one, device="cuda").to(getattr(torch, dtype)) for one in ((m, k), (k, n)))
            product(a, b)
            assert wait_for_compilations(60)  # PyTorch may compute the first
            repeated = [product(a, b) for _ in range(CALLS)]
            assert all(torch.equal(one, repeated[0]) for one in repeated)
            assert close(repeated[0], a.double() @ b.double())
            transposed = product(b.t(), a.t())
            assert close(transposed, b.t().double() @ a.t().double())
            kept.append((a, b, repeated[0]))
        for a, b, result in kept:  # nothing was overwritten by a later call
            assert close(result, a.double() @ b.double())

    @pytest.mark.parametrize("dtype", NAMES)
    def test_each_stream_and_each_capture_is_in_order(self, torch, dtype):
        a, b = (torch.randn(64, 64, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        product(a, b)
        assert wait_for_compilations(60)  # PyTorch may compute the first
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

    def test_arrays_of_another_kind_are_not_taken_for_those_before(self, torch):
        memory = torch.randn(64 * 64 + 8, device="cuda")
        a, b = memory[: 64 * 64].view(64, 64), torch.randn(64, 64, device="cuda")
        for _ in range(CALLS):
            product(a, b)
        shifted = memory[1 : 64 * 64 + 1].view(64, 64)  # aligned to 4 bytes only
        assert close(product(shifted, b), shifted.double() @ b.double())
        strided = torch.randn(64, 128, device="cuda")[:, ::2]
        assert close(product(strided, b), strided.double() @ b.double())
        with pytest.raises(ArgumentError, match="dtype"):
            product(a, b.half())
        with pytest.raises(ArgumentError, match="columns"):
            product(a, b[:63])

    def test_cupy_arrays_that_come_again(self):
        import cupy

        generator = cupy.random.default_rng(0)
        for _ in range(CALLS):
            a, b = (generator.standard_normal((48, 48), dtype="float32") for _ in range(2))
            expected = a.astype("float64") @ b.astype("float64").T
            for _ in range(CALLS):
                result = autotile.matmul(a, b.T)
                assert isinstance(result, cupy.ndarray)
                assert cupy.allclose(result, expected, rtol=1e-4, atol=1e-4)


def served_for(m: int, n: int, k: int, dtype: str) -> BoundKernel:
    return find_product(m, n, k, dtype, trans_b=True, device="h200", keeps=False)


def gain_of(m: int, n: int, k: int, dtype: str) -> Gain:
    return Gain.of(served_for(m, n, k, dtype))


class TestGain:
    def test_cublas_stays_the_programs_own(self):
        gain = gain_of(4096, 4096, 4096, "bfloat16")
        assert (gain.kernel, gain.launches) == ("cublas", 0)
        assert gain.time_us == gain.library_us == gain.total_us(bias=True)
        assert not gain.is_worthwhile()

    @pytest.mark.parametrize(("m", "n", "k"), [(512, 4096, 4096), (16, 256, 252), (4096, 4096, 4096)])
    def test_a_product_of_aligned_rows_is_short_where_cublas_takes_less_than_the_host(self, m, n, k, monkeypatch):
        gain = gain_of(m, n, k, "bfloat16")
        assert gain.is_short == (n % 8 == k % 8 == 0 and gain.library_us < 80.0) == (m == 512)
        monkeypatch.setenv("AUTOTILE_NUMERICS", "same")
        assert not gain_of(m, n, k, "bfloat16").is_short

    def test_what_the_host_takes_longer_for_gains_where_the_library_takes_as_long(self):
        large, small = gain_of(512, 4096, 4096, "float32"), gain_of(1, 4096, 4096, "float32")
        assert all(one.time_us < one.library_us / 1.4 for one in (large, small))
        for bias, host_us in ((False, 0.0), (False, RECORDED_US), (True, 0.0), (True, WRAPPED_US)):
            assert large.is_worthwhile(bias=bias, host_us=host_us)
            assert small.is_worthwhile(bias=bias, host_us=host_us) is (host_us == 0.0)
        middle = replace(small, library_us=100.0)
        assert middle.is_worthwhile(host_us=WRAPPED_US)
        assert not middle.is_worthwhile(host_us=WRAPPED_US, bias=True)
        assert not replace(middle, launches=2).is_worthwhile(host_us=WRAPPED_US)

    def test_a_bias_is_read_and_written_at_the_bandwidth(self):
        small, large = (gain_of(m, 4096, 4096, "float32").bias_us for m in (1024, 4096))
        assert large - small == pytest.approx(1e6 * 2 * 3072 * 4096 * 4 / 4.8e12, rel=0.05)

    def test_what_is_pinned_is_launched_whatever_is_expected(self):
        gain = gain_of(64, 512, 512, "float32")
        pinned = replace(gain, choice=structs.replace(gain.choice, pinned="choices.json"), library_us=None)
        assert not replace(gain, library_us=None).is_worthwhile()
        assert pinned.is_worthwhile(bias=True, host_us=RECORDED_US)

    def test_while_something_stands_in_what_was_chosen_decides(self):
        served, raced = (served_for(512, 4096, 4096, "float32") for _ in range(2))
        chosen, other = Gain.of(served), served_for(4096, 4096, 4096, "bfloat16")
        other.choice = structs.replace(other.choice, awaited="the kernel, which is being compiled")
        raced.find_ways = other.find_ways = other.lookup = None
        assert served.adopt(raced)
        assert replace(Gain.of(served), choice=chosen.choice) == chosen
        assert served.adopt(other)
        now, final = Gain.of(served), Gain.of(served, final=True)
        assert (now.kernel, now.launches) == ("cublas", 0)
        assert (final.kernel, final.time_us, final.library_us) == (chosen.kernel, chosen.time_us, chosen.library_us)
        assert final.is_worthwhile()
        assert served.contenders == other.choice.contenders

    def test_only_looked_at_it_is_not_kept(self):
        served = find_product(3, 5, 7, "float32", device="h200", keeps=False)
        assert served is not None
        assert served is not find_product(3, 5, 7, "float32", device="h200", keeps=False)
        assert find_product(3, 5, 7, "float32", device="h200") is find_product(3, 5, 7, "float32", device="h200")
        assert find_product(0, 5, 7, "float32", device="h200") is None  # no kernel computes it


class TestOrder:
    @pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4, 1), (1, 1), (2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)])
    def test_it_is_that_of_numpy(self, shape):
        array = np.zeros(shape, np.uint8)
        swapped = np.zeros((*shape[:-2], shape[-1], shape[-2]), np.uint8).swapaxes(-1, -2)
        assert stored_transposed(shape, array.strides) is False
        assert stored_transposed(shape, swapped.strides) is (not swapped.flags.c_contiguous)
        if array.ndim == 2:  # of weights
            assert is_transposed(*shape) is stored_transposed(shape[::-1], array.T.strides)

    def test_neither(self):
        assert stored_transposed((3, 4), (8, 2)) is None
        assert stored_transposed((2, 3, 4), (4, 8, 1)) is None
