"""Whatever is served, a kernel, a library or a race, every public name works or is refused in words."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest
from made_models import Model, expect

import autotile
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.serving import operations
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher

KINDS = ["plain", "library", "raced", "raced library"]
SIZES = {"M": 2048, "N": 1024, "K": 512}
"""A product at which no other configuration is looked for beside the default."""
WITHOUT_GPU = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)


MODEL = Model(expect("sgemm", 10.0), expect("sgemm_ws", 11.0))


@pytest.fixture(autouse=True)
def _only_what_is_added(monkeypatch):
    """No other library and model than those of `serve`."""
    monkeypatch.setattr(operations, "model_of", lambda *_: MODEL if "mine" not in _added() else None)
    yield
    operations._added.clear()
    default_dispatcher.clear()


def _added() -> Mapping[str, Any]:
    return operations._added.get("matmul", {})


def serve(kind: str, device: str | None = None, **options: Any) -> BoundKernel:
    """Serve one of the kinds anew: on this machine's GPU, or for inspection only."""
    if ("library" in kind) != bool(_added()):  # else what is known of the operation stays
        operations._added.clear()
        for name in ("mine", "other") if "library" in kind else ():
            autotile.add_library("matmul", name, lambda a, b, c, **_: None)
        default_dispatcher.clear()
    default_dispatcher.served.clear()
    if kind == "plain":
        return autotile.get_best_kernel("sgemm", **SIZES, device=device, **options)
    options |= {"race": True} if kind.startswith("raced") else {}
    return autotile.get_best_kernel("matmul", **SIZES, EMULATE=0, dtype="float32", device=device, **options)


def public_names() -> list[str]:
    """Return the public names of the class, and those that its instances get."""
    named = set(vars(serve("plain", "h200"))) | {name for each in BoundKernel.__mro__ for name in vars(each)}
    return sorted(name for name in named if not name.startswith("_"))


def array(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


ARRAYS = (array(2048, 512), array(512, 1024))
ARGUMENTS: dict[str, Callable[[BoundKernel, Path], tuple[Any, ...]]] = {
    "bind": lambda kernel, _: (*ARRAYS, array(2048, 1024)),
    "has_shapes_of": lambda kernel, _: (kernel,),
    "adopt": lambda kernel, _: (kernel,),
    "launch_at": lambda kernel, _: (0, ()),
    "report_calls": lambda kernel, _: (None,),
    "find_ways": lambda kernel, _: (kernel.operation, True, True),
}
"""Arguments of the methods that take some."""


@pytest.mark.usefixtures("live_gpu")
@pytest.mark.parametrize("inspected", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_public_name(kind, inspected, tmp_path):
    names, untouched = public_names(), None
    assert {"adopt", "bind", "explain", "geometry", "load", "occupancy", "to_json"} <= set(names)
    for name in names:
        kernel = untouched = untouched or serve(kind, "h200" if inspected else None)
        error: Exception | None = None
        try:  # an error of Python's own is raised
            value = getattr(kernel, name)
            if inspect.ismethod(value):
                untouched = None
                value(*ARGUMENTS.get(name, lambda *_: ())(kernel, tmp_path))
        except (AutotileError, AttributeError, *WITHOUT_GPU) as caught:
            error = caught
        if isinstance(error, AttributeError):
            assert (name, kernel.is_library) == ("geometry", True), f"{name}: {error}"
            assert "is a library, which has no launch geometry" in str(error)
        elif isinstance(error, WITHOUT_GPU):
            assert (name, inspected) in {(each, False) for each in ("bind", "launch_at", "load")}, name
        else:
            assert error is None or str(error)


@pytest.mark.usefixtures("live_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_shown_forms_copies_and_pickles(kind):
    """A copy is served anew; what was not returned by `get_best_kernel` is refused in words."""
    kernel = serve(kind)
    assert (type(kernel), kernel.is_library, kernel.library is not None) == (BoundKernel, *["library" in kind] * 2)
    assert "Bound" in repr(kernel)
    assert "matmul" in kernel.explain() or "sgemm" in kernel.explain()
    assert kernel.to_json()["kernel"] == kernel.kernel
    assert kernel._repr_html_()
    assert list(kernel.shapes) == ["A", "B", "C"]
    assert kernel.shapes["C"] == (1, 2048, 1024)
    if kernel.is_library:
        with pytest.raises(InputError, match="is a library"):
            kernel.plot_limits()
    for copied in (pickle.loads(pickle.dumps(kernel)), copy.copy(kernel), copy.deepcopy(kernel)):
        assert copied.problem.kernel == kernel.problem.kernel
        assert copied.problem.sizes == kernel.problem.sizes
    kernel.request = None
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be served again: it was not returned by get_best_kernel"):
            attempt(kernel)


@pytest.mark.parametrize("kind", ["plain", "library"])
@pytest.mark.parametrize("call", ["call", "bind", "capture"])
def test_a_launch_of_what_is_served_for_inspection(kind, call, tmp_path):
    kernel = serve(kind, "h200")
    launch = {"call": kernel, "bind": kernel.bind, "capture": autotile.capture(kernel, tmp_path)}[call]
    with pytest.raises(ToolchainError, match="served for inspection only"):
        launch(*ARRAYS)
    assert not list(tmp_path.iterdir())


class TestAdopting:
    @pytest.mark.usefixtures("live_gpu")
    def test_one_for_other_arrays_or_another_device_is_refused(self):
        asked = {**SIZES, "dtype": "float16", "device": 0}
        kernel = autotile.get_best_kernel("matmul", **asked)
        for other in ({"M": 1024}, {"dtype": "bfloat16"}, {"OUT_FP32": 1}, {"device": 1}, {"device": "h200"}):
            with pytest.raises(InputError, match="expected one for the same arrays and device"):
                kernel.adopt(autotile.get_best_kernel("matmul", **{**asked, **other}))
        assert (kernel.problem.sizes["M"], kernel.problem.dtype) == (2048, "float16")

    def test_each_other(self):
        """Two threads that do so wait for each other in no case."""
        first, second = serve("plain", "h200"), serve("plain", "h200", numerics="same")

        def repeat(one: BoundKernel, other: BoundKernel) -> None:
            for _ in range(2000):
                one.adopt(other)

        pairs = (first, second), (second, first)
        threads = [threading.Thread(target=repeat, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("live_gpu")
@pytest.mark.parametrize("given", [None, "sgemm", 5, np.zeros(3), BoundKernel])
def test_what_is_no_kernel_is_neither_captured_nor_adopted(given, tmp_path):
    said = f"takes a kernel from get_best_kernel, and got {type(given).__name__}"
    with pytest.raises(InputError, match=f"capture {said}"):
        autotile.capture(given, tmp_path)
    for kind in KINDS:
        with pytest.raises(InputError, match=f"adopt {said}"):
            serve(kind).adopt(given)
