"""What is served for an operation, on a device: cuBLAS in place of a kernel, races at the first call, own libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile.database.database import Database
from autotile.errors import ArgumentError
from autotile.kernel.inputs import read_captured_call, with_captured_call
from autotile.kernel.library import load_kernel
from autotile.serving import operations
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher
from autotile.serving.racing import FirstUseRace
from autotile.settings import read_settings

pytestmark = pytest.mark.gpu

cupy: Any = pytest.importorskip("cupy")
SIZES = {"M": 70, "N": 96, "K": 130}


@pytest.fixture(autouse=True)
def _no_added_libraries() -> Iterator[None]:
    yield
    operations._added.clear()
    default_dispatcher.clear()


def factors(dtype: str = "float32") -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return tuple(cupy.asarray(generator.standard_normal(shape).astype(dtype)) for shape in ((70, 130), (130, 96)))  # type: ignore[return-value]


def is_close(result: Any, a: Any, b: Any, tolerance: float = 1e-4) -> bool:
    expected = a.get().astype(np.float64) @ b.get().astype(np.float64)
    return bool(np.abs(result.get() - expected).max() <= tolerance * np.abs(expected).max())


def served(**options: Any) -> Any:
    return autotile.get_best_kernel("matmul", dtype="float32", **SIZES, **options)


def only_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotile.serving.operations.model_of", lambda *_: None)


class TestCublas:
    @pytest.fixture(autouse=True)
    def _without_a_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        only_cublas(monkeypatch)

    def test_it_is_called_like_a_kernel(self) -> None:
        kernel = served(EMULATE=0)
        assert (kernel.kernel, kernel.tier, kernel.can_launch) == ("cublas", "library", True)
        a, b = factors()
        for _ in range(3):  # the later calls take the fast path
            assert is_close(kernel(a, b), a, b)
        out = cupy.ones((70, 96), "float32")
        assert kernel(a, b, out, alpha=2.0, beta=3.0) is out
        assert is_close((out - 3) / 2, a, b)
        launch = kernel.bind(a, b, out)
        launch()
        assert is_close(out, a, b)
        with pytest.raises(ArgumentError, match="no scalar 'gamma'"):
            kernel(a, b, out, gamma=1.0)
        with pytest.raises(ArgumentError, match="has shape"):
            kernel(b, a)

    def test_every_call_gives_the_same_bits(self) -> None:
        kernel, (a, b) = served(), factors()
        first = kernel(a, b).get()
        for _ in range(10):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                again = kernel(a, b)
                stream.synchronize()
            assert (again.get() == first).all()

    def test_it_can_be_captured(self) -> None:
        a, b = factors()
        out, stream = cupy.zeros((70, 96), "float32"), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        kernel = served()
        with stream:
            stream.begin_capture()
            kernel(a, b, out)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        assert is_close(out, a, b)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_views_and_batches_of_pytorch(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        a = torch.randn((3, 33, 40), device="cuda").to(getattr(torch, dtype))
        b = torch.randn((3, 24, 33), device="cuda").to(getattr(torch, dtype))
        left, right = a.transpose(1, 2), b.transpose(1, 2)
        exact = left.double() @ right.double()
        for stream in (None, torch.cuda.Stream()):
            found = autotile.matmul(left, right, stream=stream)
            torch.cuda.synchronize()
            assert float((found.double() - exact).abs().max() / exact.abs().max()) < 0.02


class TestRace:
    def test_the_first_call_races_and_the_times_are_stored(self) -> None:
        kernel = served(race=True, EMULATE=0)
        assert type(kernel) is BoundKernel
        kernel.load()
        assert isinstance(kernel._launcher, FirstUseRace)
        a, b = factors()
        assert is_close(kernel(a, b), a, b)
        assert not isinstance(kernel._launcher, FirstUseRace)
        assert kernel.tier == "exact"
        assert len(kernel.contenders) >= 2
        assert any(one.is_library for one in kernel.contenders)
        with Database.open(read_settings().database) as database:
            assert {study.key.kernel for study in database.studies()} >= {"matmul:cublas"}
        default_dispatcher.clear()
        assert served(EMULATE=0).kernel == kernel.kernel
        assert served(EMULATE=0).tier == "exact"

    def test_what_is_added_to_is_added_to_once(self) -> None:
        a, b = factors()
        out = cupy.ones((70, 96), "float32")
        autotile.matmul(a, b, out, beta=5.0, race=True)
        assert is_close(out - 5, a, b)

    def test_not_while_the_stream_is_captured(self) -> None:
        a, b = factors()
        out, stream, kernel = cupy.zeros((70, 96), "float32"), cupy.cuda.Stream(non_blocking=True), served(race=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            kernel(a, b, out)
            stream.end_capture().launch(stream)
            stream.synchronize()
        assert is_close(out, a, b)
        assert kernel.tier != "exact"
        kernel(a, b, out)
        assert kernel.tier == "exact"

    def test_not_if_the_output_overlaps_an_input(self) -> None:
        kernel = autotile.get_best_kernel("matmul", dtype="float32", M=64, N=64, K=64, race=True)
        a, b = (cupy.ones((64, 64), "float32") for _ in range(2))
        kernel(a, b, a)
        assert kernel.tier != "exact"

    def test_a_wrong_library_loses(self, only_kernel: Callable[[str], None]) -> None:
        only_kernel("sgemm")
        autotile.add_library("matmul", "wrong", lambda a, b, c, **_: c.fill(0))
        kernel, (a, b) = served(race=True), factors()
        assert is_close(kernel(a, b), a, b)
        assert "wrong" not in {one.kernel for one in kernel.contenders}


def test_a_library_of_ones_own(scale_toml: Path) -> None:
    path = scale_toml.parent / "scaling.toml"
    path.write_text(
        '[operation]\nname = "scaling"\nsizes = { n = 4096 }\ndtypes = ["float32"]\n'
        f'[kernels.scale]\nkernel = "{scale_toml}"\n'
    )
    x = cupy.arange(1000, dtype="float32")
    assert (autotile.get_best_kernel(str(path), n=1000)(x) == 2 * x).all()
    called = []

    def double(x: Any, y: Any) -> None:
        called.append(cupy.cuda.get_current_stream().ptr)
        cupy.multiply(x, 2, out=y)

    autotile.add_library(str(path), "cupy", double)
    kernel = autotile.get_best_kernel(str(path), n=1000)
    stream = cupy.cuda.Stream()
    cupy.cuda.get_current_stream().synchronize()
    result = kernel(x, stream=stream)
    stream.synchronize()
    assert (result == 2 * x).all()
    assert (kernel.kernel, called) == ("cupy", [stream.ptr])


@pytest.mark.parametrize("kind", ["library", "raced", "plain"])
class TestAllKinds:
    """What a kernel can do, a library and a race can."""

    @pytest.fixture
    def kernel(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        if kind == "plain":
            return autotile.get_best_kernel("sgemm", **SIZES)
        if kind == "library":
            only_cublas(monkeypatch)
        return served(EMULATE=0, race=kind == "raced")

    def test_a_call_is_captured(self, kernel: Any, tmp_path: Path) -> None:
        a, b = factors()
        captured = autotile.capture(kernel, tmp_path / "calls", calls=1)
        for stream in (None, cupy.cuda.Stream(non_blocking=True)):
            result = captured(a, b, stream=stream)
            cupy.cuda.Device().synchronize()
            assert is_close(result, a, b)
        (folder,) = (tmp_path / "calls").iterdir()
        call = read_captured_call(folder)
        assert call.dtype == "float32"
        assert set(SIZES.items()) <= set(call.sizes.items())
        np.testing.assert_array_equal(np.load(folder / "A.npy").reshape(a.shape), a.get())
        assert with_captured_call(load_kernel(call.kernel).spec, folder)

    def test_it_adopts_itself_and_others(self, kernel: Any, kind: str) -> None:
        a, b = factors()
        assert kernel.adopt(kernel)
        assert is_close(kernel(a, b), a, b)
        default_dispatcher.clear()
        other = served(EMULATE=0)
        other.load()
        kernel.adopt(other)
        for _ in range(2):
            assert is_close(kernel(a, b), a, b)
        assert kernel.explain()
        del kind

    def test_a_bound_call(self, kernel: Any) -> None:
        a, b = factors()
        out = cupy.zeros((70, 96), "float32")
        kernel.bind(a, b, out)()
        assert is_close(out, a, b)
        with pytest.raises(ArgumentError, match="gamma"):
            kernel.bind(a, b, out, gamma=1.0)


class TestOneClass:
    """What is served is a choice and a launcher, whichever kind it is."""

    def test_a_kernel_takes_the_place_of_a_library_and_a_library_that_of_a_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        only_cublas(monkeypatch)
        library, kernel = served(EMULATE=0), served(EMULATE=0, library=False)
        a, b = factors()
        assert (library.is_library, kernel.is_library) == (True, False)
        for first, second in ((library, kernel), (kernel, served(EMULATE=0, numerics="any"))):
            name = second.kernel
            for one in (first, second):
                assert is_close(one(a, b), a, b)
            bound = first.bind(a, b, out := cupy.zeros((70, 96), "float32"))
            assert first.adopt(second)
            assert (first.kernel, first.is_library) == (name, name == "cublas")
            for _ in range(3):
                assert is_close(first(a, b), a, b)
            assert is_close(first(a, b, cupy.ones((70, 96), "float32"), alpha=0.5, beta=0.0) * 2, a, b)
            bound()  # it keeps what it was bound with
            assert is_close(out, a, b)

    @pytest.mark.parametrize("race", [False, True])
    def test_calls_are_captured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, race: bool) -> None:
        only_cublas(monkeypatch)
        kernel, (a, b) = served(EMULATE=0, race=race), factors()
        assert is_close(autotile.capture(kernel, tmp_path / "calls")(a, b), a, b)
        (call,) = (tmp_path / "calls").iterdir()
        assert {path.name for path in call.glob("*.npy")} == {"A.npy", "B.npy", "C.npy"}  # beta * C is read
        assert (kernel.tier, kernel.calls) == ("exact" if race else "library", 1)

    def test_a_raced_kernel_is_bound_and_counted(self) -> None:
        kernel, (a, b) = served(race=True, EMULATE=0), factors()
        launch = kernel.bind(a, b, out := cupy.zeros((70, 96), "float32"))
        launch()
        assert is_close(out, a, b)
        assert kernel.tier == "exact"
        assert is_close(kernel(a, b), a, b)
        assert kernel.calls == 1
