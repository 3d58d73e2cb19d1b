"""Cooperative launches and clusters from parameters, tuned and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import evaluate
from feature_kernels import block_space, write_kernel

from autotile.core.model import Outcome
from autotile.cuda.driver import live_device
from autotile.serving.dispatcher import get_best_kernel

pytestmark = pytest.mark.gpu

TEMPLATE = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __launch_bounds__(BLOCK) reverse(const float* x, float* between, float* y, int N) {
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) between[i] = 2.0f * x[i];
    cg::this_grid().sync();
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK) y[i] = between[(i + 7) % N];
}
"""

CLUSTER_TEMPLATE = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __launch_bounds__(BLOCK) reverse(const float* x, float* between, float* y, int N) {
    const unsigned size = cg::this_cluster().num_blocks();
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < N; i += gridDim.x * BLOCK)
        y[i] = size == CLUSTER ? 2.0f * x[(i + 7) % N] : -1.0f;
}
"""

SPACE = block_space(
    "reverse",
    """
x = { buffer = "float32", shape = ["N"], access = "in" }
between = { workspace = "float32", shape = ["N"] }
y = { buffer = "float32", shape = ["N"], access = "out" }
N = { scalar = "int32", value = "N" }
""",
    'outputs = { y = "2 * roll(x, -7)" }',
    problem="sizes = { N = 100000 }",
    parameters={"BLOCK": (128, 256), "CLUSTER": (1, 2, 4)},
    default={"BLOCK": 256, "CLUSTER": 2},
    grid='"device.sm_count // 4 * 4"',
    launch="@launch",
)


def kernel_of(folder: Path, template: str, launch: str) -> Path:
    return write_kernel(folder, template, SPACE.replace("@launch", launch))


def expect_right(toml: Path, cupy: Any, **config: int) -> None:
    evaluation = evaluate(toml, **config)
    assert evaluation.outcome is Outcome.OK, evaluation.reason
    kernel = get_best_kernel(str(toml), N=5000)
    x = cupy.arange(5000, dtype=cupy.float32)
    for _ in range(4):
        np.testing.assert_array_equal(kernel(x).get(), 2 * np.roll(x.get(), -7))


def test_a_cooperative_launch(tmp_path: Path, cupy: Any) -> None:
    toml = kernel_of(tmp_path, TEMPLATE, "cooperative = true")
    expect_right(toml, cupy)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_cluster_from_a_parameter(tmp_path: Path, blocks: int, cupy: Any) -> None:
    if live_device().compute_capability < "9.0":
        pytest.skip("needs compute capability 9.0")
    toml = kernel_of(tmp_path, CLUSTER_TEMPLATE, 'cluster = ["CLUSTER"]')
    expect_right(toml, cupy, CLUSTER=blocks)
