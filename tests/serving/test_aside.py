"""Standing in for a kernel that is being compiled: what is served meanwhile, and what takes over."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotile.core.device import device_profile
from autotile.cuda import compiler
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving import aside
from autotile.serving.bound import BoundKernel, KernelCode
from autotile.serving.choice import Choice, explain
from autotile.serving.dispatcher import Dispatcher

DEVICE = device_profile("h200")
KERNEL = load_kernel("matmul_tiled")
PROBLEM = resolve_problem(KERNEL.spec, {"M": 64, "N": 64, "K": 64}, None)


class Code(KernelCode):
    """A kernel's code whose compilation is let go on by the test."""

    def __init__(self, tile: int, *, is_compiled: bool, fault: Exception | None = None) -> None:
        super().__init__(KERNEL, PROBLEM, DEVICE, {**KERNEL.spec.default, "TILE": tile})
        self.is_compiled, self.fault, self.may_end = is_compiled, fault, threading.Event()

    @property
    def needs_compiler(self) -> bool:
        return not self.is_compiled

    def load(self, device_index: int) -> Any:
        if not self.is_compiled:
            assert self.may_end.wait(10)
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(launch=lambda arrays, stream, scalars: arrays, launch_fast=lambda arrays: None)


def served(code: Code) -> BoundKernel:
    """A served kernel, as a look-up returns it."""
    return BoundKernel(code, Choice("default", code._config), DEVICE, 0)


@pytest.fixture
def chosen() -> Code:
    return Code(32, is_compiled=False)


def test_a_call_is_served_by_what_is_compiled_until_the_choice_takes_over(chosen: Code) -> None:
    kernel, other = served(chosen), served(Code(16, is_compiled=True))
    kernel.find_stand_in = lambda: other
    kernel("A", "B", "C")
    assert kernel.config["TILE"] == 16
    text = explain(PROBLEM, DEVICE, kernel.choice)
    assert "It stands in for matmul_tiled TILE=32" in text
    assert "takes over when it is ready" in text
    chosen.may_end.set()
    assert aside.wait_for_compilations(10)
    assert kernel.config["TILE"] == 32
    assert kernel.calls == 1
    assert "stands in" not in explain(PROBLEM, DEVICE, kernel.choice)


def test_the_calls_of_a_choice_are_counted_once_it_is_served(chosen: Code) -> None:
    kernel, other, reports = served(chosen), served(Code(16, is_compiled=True)), []
    kernel.find_stand_in = lambda: other
    kernel.report_calls(lambda calls: reports.append(calls) or 10**9)
    kernel("A", "B", "C")
    assert reports == []
    chosen.may_end.set()
    assert aside.wait_for_compilations(10)
    kernel("A", "B", "C")
    assert reports == [2]


@pytest.mark.parametrize("way", ["nothing else", "is compiled", "load", "bind"])
def test_a_call_waits_where_it_must_or_may(chosen: Code, way: str) -> None:
    kernel, other = served(chosen), served(Code(16, is_compiled=True))
    chosen.is_compiled = way == "is compiled"
    kernel.find_stand_in = lambda: None if way == "nothing else" else other
    chosen.may_end.set()
    if way == "load":
        kernel.load()
    elif way == "bind":
        with pytest.raises(AttributeError, match="bind"):  # of the launcher of this test, which has none
            kernel.bind("A", "B", "C")
    else:
        kernel("A", "B", "C")
    assert kernel.config["TILE"] == 32
    assert kernel.is_loaded


def test_a_choice_that_cannot_be_loaded_leaves_what_stands_in_and_says_so() -> None:
    chosen = Code(32, is_compiled=False, fault=InputError("the compiler refused it"))
    kernel, other = served(chosen), served(Code(16, is_compiled=True))
    kernel.find_stand_in = lambda: other
    kernel("A", "B", "C")
    chosen.may_end.set()
    assert aside.wait_for_compilations(10)
    assert kernel.config["TILE"] == 16
    assert "which cannot be loaded: the compiler refused it" in explain(PROBLEM, DEVICE, kernel.choice)


def test_what_was_adopted_meanwhile_stays(chosen: Code) -> None:
    kernel, other, newer = served(chosen), served(Code(16, is_compiled=True)), served(Code(8, is_compiled=True))
    kernel.find_stand_in = lambda: other
    kernel("A", "B", "C")
    newer.load()
    kernel.adopt(newer)
    chosen.may_end.set()
    assert aside.wait_for_compilations(10)
    assert kernel.config["TILE"] == 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_at_new_sizes_need_no_compiler(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path))
    dispatcher = Dispatcher(database=tmp_path / "empty.db")
    torch = pytest.importorskip("torch")
    a, b = (torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in ((210, 331), (331, 171)))
    expected = a.double() @ b.double()

    def error(result: Any) -> float:
        return float((result.double() - expected).norm() / expected.norm())

    compiled_by: list[threading.Thread] = []

    def compile_cubin(job: compiler.CompileJob, compile_as_before: Any = compiler.compile_cubin) -> Any:
        compiled_by.append(threading.current_thread())
        return compile_as_before(job)

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    assert error(dispatcher.matmul(a, b)) < 1e-2
    assert aside.wait_for_compilations(60)
    assert threading.current_thread() not in compiled_by
    assert error(dispatcher.matmul(a, b)) < 1e-2
    waited = Dispatcher(database=tmp_path / "empty.db")
    assert error(waited.matmul(a, b, wait=True)) < 1e-2
    cupy.cuda.get_current_stream().synchronize()
