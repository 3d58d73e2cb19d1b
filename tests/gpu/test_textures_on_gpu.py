"""Textures of one axis and two, tuned and served."""

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
extern "C" __global__ void __launch_bounds__(BLOCK)
look(cudaTextureObject_t image, cudaTextureObject_t row, float* y, int H, int W) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= H * W) return;
    const int r = i / W, c = i % W;
    y[i] = tex2D<float>(image, c + 0.5f, r + 0.5f + 1.0f) + tex1Dfetch<float>(row, c);
}
"""

SPACE = block_space(
    "look",
    """
a = { buffer = "float32", shape = ["H", "W"], access = "in", pass = false }
b = { buffer = "float32", shape = ["W"], access = "in", pass = false }
image = { texture = "a", filter = "linear", address = "border" }
row = { texture = "b" }
y = { buffer = "float32", shape = ["H", "W"], access = "out" }
H = { scalar = "int32", value = "H" }
W = { scalar = "int32", value = "W" }
""",
    'outputs = { y = "shift(a, 1, 0) + b" }',
    problem="sizes = { H = 100, W = 256 }\nragged = { H = 37, W = 40 }",
    grid='"ceil_div(H * W, BLOCK)"',
)


def test_textures(tmp_path: Path, cupy: Any) -> None:
    toml = write_kernel(tmp_path, TEMPLATE, SPACE)
    evaluation = evaluate(toml)
    assert evaluation.outcome is Outcome.OK, evaluation.reason
    kernel = get_best_kernel(str(toml), H=50, W=64)
    for number in range(6):  # other arrays, and the same again, which become graphs
        a = cupy.full((50, 64), number % 2 + 1, cupy.float32)
        b = cupy.arange(64, dtype=cupy.float32)
        expected = np.vstack([a.get()[1:], np.zeros((1, 64), np.float32)]) + b.get()
        for _ in range(2):
            np.testing.assert_array_equal(kernel(a, b).get(), expected)
