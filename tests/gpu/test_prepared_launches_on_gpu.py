"""Constant memory and outputs with a content: in tuning, and served on streams, in graphs and bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import evaluate
from feature_kernels import block_space, write_kernel

from autotile.core.model import Outcome
from autotile.serving.dispatcher import get_best_kernel

pytestmark = pytest.mark.gpu

TEMPLATE = """
namespace weights { __constant__ float filter[3]; }
extern "C" __global__ void __launch_bounds__(BLOCK) blur(const float* x, float* y, int N) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= N) return;
    float sum = 0.0f;
    for (int d = -1; d <= 1; ++d)
        if (i + d >= 0 && i + d < N) sum += weights::filter[d + 1] * x[i + d];
    y[i] = sum;
}
"""

SPACE = block_space(
    "blur",
    """
filter = { buffer = "float32", shape = [3], access = "in", init = 0.25, constant = "weights::filter" }
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
N = { scalar = "int32", value = "N" }
""",
    'outputs = { y = "(shift(x, -1) + x + shift(x, 1)) * mean(filter, 0)" }',
)


@pytest.fixture
def blur(tmp_path: Path) -> Path:
    return write_kernel(tmp_path, TEMPLATE, SPACE)


def convolved(f: Any, x: Any) -> Any:
    return np.convolve(x.get(), f.get()[::-1], "same")


def test_constant_memory_in_tuning(blur: Path) -> None:
    evaluation = evaluate(blur)
    assert evaluation.outcome is Outcome.OK, evaluation.reason


def test_constant_memory_served(blur: Path, cupy: Any) -> None:
    kernel = get_best_kernel(str(blur), N=1000)
    x = cupy.random.default_rng(0).standard_normal(1000, dtype=cupy.float32)
    f = cupy.asarray([1.0, 2.0, 3.0], cupy.float32)
    for number in range(6):  # the same address with another content, also where the launch has become a graph
        f += number
        np.testing.assert_allclose(kernel(f, x).get(), convolved(f, x), rtol=1e-5, atol=1e-4)
    y = cupy.empty_like(x)
    for number in range(6):
        f += number
        np.testing.assert_allclose(kernel(f, x, y).get(), convolved(f, x), rtol=1e-5, atol=1e-4)


def test_two_streams_have_constants_of_their_own(blur: Path, cupy: Any) -> None:
    kernel = get_best_kernel(str(blur), N=1000)
    x = cupy.ones(1000, cupy.float32)
    filters = [cupy.full(3, value, cupy.float32) for value in (1.0, 2.0)]
    outputs = [cupy.empty_like(x) for _ in filters]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in filters]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        for f, y, stream in zip(filters, outputs, streams, strict=True):
            with stream:
                kernel(f, x, y)
    cupy.cuda.Device().synchronize()
    assert [float(y[500]) for y in outputs] == [3.0, 6.0]


def test_a_bound_function_keeps_its_constants(blur: Path, cupy: Any) -> None:
    kernel = get_best_kernel(str(blur), N=1000)
    x, y = cupy.ones(1000, cupy.float32), cupy.empty(1000, cupy.float32)
    f = cupy.full(3, 2.0, cupy.float32)
    launch = kernel.bind(f, x, y)
    f.fill(5.0)
    kernel(f, x)
    for _ in range(3):
        launch()
        assert float(y[500]) == 6.0


HISTOGRAM_TEMPLATE = """
extern "C" __global__ void __launch_bounds__(BLOCK) histogram(const int* x, unsigned* counts, const int* one, int N) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < N) atomicAdd(counts + x[i], 1u);
}
"""

HISTOGRAM = block_space(
    "histogram",
    """
x = { buffer = "int32", shape = ["N"], access = "in", init = "integers(0, 1)" }
counts = { buffer = "uint32", shape = [1], access = "out", init = "zeros", restore = true }
one = { buffer = "int32", shape = [1], access = "in" }
N = { scalar = "int32", value = "N" }
""",
    'outputs = { counts = "N + 0 * one" }',
)


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    return write_kernel(tmp_path, HISTOGRAM_TEMPLATE, HISTOGRAM)


def test_atomics_add_into_zeros_in_tuning(histogram: Path) -> None:
    evaluation = evaluate(histogram)
    assert evaluation.outcome is Outcome.OK, evaluation.reason


def test_atomics_add_into_zeros_when_served(histogram: Path, cupy: Any) -> None:
    kernel = get_best_kernel(str(histogram), N=1000)
    x, counts, one = cupy.zeros(1000, cupy.int32), cupy.full(1, 77, cupy.uint32), cupy.zeros(1, cupy.int32)
    for _ in range(5):
        assert int(kernel(x, counts, one)[0]) == 1000
    launch = kernel.bind(x, counts, one)
    for _ in range(3):
        launch()
        assert int(counts[0]) == 1000
