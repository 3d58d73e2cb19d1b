"""Kernel Tuner's interface on a GPU."""

import json
from typing import Any

import numpy as np
import pytest
from autotile.kernel_tuner.observers.nvml import NVMLObserver
from autotile.kernel_tuner.observers.register import RegisterObserver

from autotile.kernel_tuner import run_kernel, tune_kernel
from autotile.kernel_tuner.accuracy import AccuracyObserver, TunablePrecision
from autotile.kernel_tuner.kernelbuilder import PythonKernel

pytestmark = pytest.mark.gpu

ADD = """
__global__ void add(float* c, const float* a, const float* b, int n) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""
N = 100_000
SIZES = {"block_size_x": [64, 128, 256]}


@pytest.fixture(autouse=True)
def _own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "tuned.db"))


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    a, b = rng.random(N, np.float32), rng.random(N, np.float32)
    return [np.zeros(N, np.float32), a, b, np.int32(N)]


def tune_add(given: list[Any], source: str = ADD, **more: Any) -> Any:
    return tune_kernel("add", source, N, given, SIZES, quiet=True, **more)


def test_every_configuration_has_a_result(capsys):
    given = arguments()
    results, env = tune_kernel(
        "add",
        ADD,
        N,
        given,
        SIZES,
        answer=[given[1] + given[2], None, None, None],
        metrics={"GB/s": f"{N} * 12 / 1e9 / (time / 1e3)", "twice": lambda p: 2 * p["GB/s"]},
        observers=[NVMLObserver(["core_freq"]), RegisterObserver()],
    )
    assert {result["block_size_x"] for result in results} == {64, 128, 256}
    for result in results:
        assert result["time"] > 0
        assert result["times"]
        assert result["twice"] == 2 * result["GB/s"]
        assert result["num_regs"] > 0
    assert env["best_config"]["block_size_x"] in (64, 128, 256)
    assert json.loads(json.dumps(env))["device_name"]
    assert "time=" in capsys.readouterr().out


def test_a_wrong_configuration_is_marked_and_a_function_verifies():
    given, seen = arguments(), []
    source = ADD.replace("a[i] + b[i]", "a[i] + (block_size_x == 128 ? 2 : 1) * b[i]")
    results, _ = tune_add(given, source=source, answer=[given[1] + given[2], None, None, None])
    assert {result["block_size_x"]: "__error__" in result for result in results} == {64: False, 128: True, 256: False}

    def verify(answer: Any, outputs: Any, atol: float) -> bool:
        seen.append((atol, outputs[1]))
        return bool(np.isclose(answer[0], outputs[0].sum(), rtol=1e-3))

    expected = [np.float64((given[1] + given[2]).sum()), None, None, None]
    results, _ = tune_add(given, answer=expected, verify=verify, atol=0.5)
    assert all("__error__" not in result for result in results)
    assert seen[0] == (0.5, None)


def test_one_configuration_runs_and_returns_its_arguments():
    given = arguments()
    c, a, _, n = run_kernel("add", ADD, N, given, {"block_size_x": 128})
    np.testing.assert_array_equal(c, given[1] + given[2])
    np.testing.assert_array_equal(a, given[1])
    assert n == N
    assert not given[0].any()


def python_add(c: Any, a: Any, b: Any, source: str = ADD, **more: Any) -> PythonKernel:
    return PythonKernel("add", source, N, [c, a, b, np.int32(N)], {"block_size_x": 128}, **more)


class TestArraysOnTheGpu:
    """They are used in place, as Kernel Tuner's CuPy backend does."""

    @pytest.fixture
    def arrays(self, cp):
        a, b = (cp.random.random(N, dtype=cp.float32) for _ in range(2))
        return cp.zeros_like(a), a, b

    def test_a_python_kernel(self, arrays):
        c, a, b = arrays
        before = a.get(), b.get()
        add = python_add(c, a, b, source=ADD.replace("const ", ""), lang="cupy")
        assert add(c, a, b, np.int32(N)) == []
        np.testing.assert_array_equal(c.get(), before[0] + before[1])
        np.testing.assert_array_equal(a.get(), before[0])
        add(a, c, b, np.int32(N))
        np.testing.assert_array_equal(a.get(), c.get() + before[1])

    def test_arrays_of_both_kinds_and_an_output_that_is_no_input_of_the_call(self, arrays):
        c, a, b = arrays
        (returned,) = python_add(c, a, b)(np.zeros(N, np.float32), a, b, np.int32(N))
        np.testing.assert_array_equal(returned, (a + b).get())
        python_add(c, a, b, inputs=[False, True, True, True])(None, a, b, np.int32(N))
        np.testing.assert_array_equal(c.get(), (a + b).get())

    @pytest.mark.parametrize("step", [1, 2])
    def test_one_run(self, arrays, step):
        c, a, b = arrays
        spread = c.repeat(step)[::step]
        returned = run_kernel("add", ADD, N, [spread, a, b, np.int32(N)], {"block_size_x": 128})
        np.testing.assert_array_equal(spread.get(), (a + b).get())
        np.testing.assert_array_equal(returned[0], spread.get())

    def test_an_array_that_is_two_arguments_and_tuning_leaves_them_as_they_are(self, arrays):
        c, a, b = arrays
        tune_add([*arrays, np.int32(N)])
        assert not c.any()
        expected = (a + b).get()
        run_kernel("add", ADD.replace("const ", ""), N, [a, a, b, np.int32(N)], {"block_size_x": 128})
        np.testing.assert_array_equal(a.get(), expected)

    def test_tensors(self, arrays):
        torch = pytest.importorskip("torch")
        c, a, b = (torch.as_tensor(array, device="cuda") for array in arrays)
        python_add(c, a, b)(c, a, b, np.int32(N))
        assert torch.equal(c, a + b)


def test_constants_templates_and_generated_source():
    source = """
    __constant__ float factor[2];
    template <typename T, int B> __global__ void scale(T* y) { y[blockIdx.x * B + threadIdx.x] *= factor[1]; }
    """
    y = np.arange(1024, dtype=np.float32)
    (scaled,) = run_kernel(
        "scale<float, block_size_x>",
        lambda params: source,
        1024,
        [y],
        {"block_size_x": 256},
        cmem_args={"factor": np.array([1, 3], np.float32)},
        lang="CUDA",
        defines={},
    )
    np.testing.assert_array_equal(scaled, 3 * y)


def test_precision_is_a_parameter():
    source = """
    #include <cuda_fp16.h>
    template <typename T> __global__ void copy(const T* x, T* y) {
        y[blockIdx.x * block_size_x + threadIdx.x] = x[blockIdx.x * block_size_x + threadIdx.x] * T(0.1);
    }
    """
    x = np.random.default_rng(0).random(4096)
    results, _ = tune_kernel(
        "copy<T_>",
        source,
        4096,
        [TunablePrecision("T_", x), TunablePrecision("T_", np.zeros_like(x))],
        {"block_size_x": [128, 256], "T_": ["float", "double"]},
        answer=[None, x * 0.1],
        observers=[AccuracyObserver("RMSE", "error_rmse")],
        quiet=True,
    )
    errors = {result["T_"]: result["error_rmse"] for result in results}
    assert len(results) == 4
    assert errors["double"] < 1e-15 < errors["float"] < 1e-6
