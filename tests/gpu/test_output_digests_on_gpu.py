"""Digests of outputs: equal for equal bits, different for another order of the sum, none where the bits vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import evaluate
from feature_kernels import block_space, write_kernel

import autotile
from autotile.core.dtypes import DTYPES
from autotile.core.model import OUTPUT_DIGEST, VARYING_OUTPUTS, Outcome
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.support import GuardedBuffer, SupportKernels
from autotile.serving.dispatcher import default_dispatcher

pytestmark = pytest.mark.gpu

TEMPLATE = """
extern "C" __global__ void row_sums(const float* x, float* y, int R, int C) {
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= R) return;
    const int share = (C + PARTS - 1) / PARTS;
#if ATOMIC
    const int part = blockIdx.y;
    float sum = 0.0f;
    for (int c = part * share; c < min(C, (part + 1) * share); ++c) sum += x[(long long)row * C + c];
    atomicAdd(y + row, sum);
#else
    float total = 0.0f;
    for (int part = 0; part < PARTS; ++part) {
        float sum = 0.0f;
        for (int c = part * share; c < min(C, (part + 1) * share); ++c) sum += x[(long long)row * C + c];
        total += sum;
    }
    y[row] += total;
#endif
}
"""

SPACE = block_space(
    "row_sums",
    """
x = { buffer = "float32", shape = ["R", "C"], access = "in" }
y = { buffer = "float32", shape = ["R"], access = "inout" }
R = { scalar = "int32", value = "R" }
C = { scalar = "int32", value = "C" }
""",
    """
outputs = { y = "y + sum(x, 1)" }
tolerance = 1e-3
""",
    problem="sizes = { R = 3000, C = 1200 }",
    parameters={"BLOCK": (64, 128), "PARTS": (1, 100), "ATOMIC": (0, 1)},
    default={"BLOCK": 64, "PARTS": 1, "ATOMIC": 0},
    grid='"ceil_div(R, BLOCK)", "PARTS if ATOMIC != 0 else 1"',
)


def test_what_determines_the_bits(tmp_path: Path) -> None:
    toml = write_kernel(tmp_path, TEMPLATE, SPACE)

    def digest(**values: int) -> Any:
        evaluation = evaluate(toml, **values)
        assert evaluation.outcome is Outcome.OK, evaluation.reason
        return evaluation.telemetry[OUTPUT_DIGEST]

    default = digest()
    assert digest() == default
    assert digest(BLOCK=128) == default
    other = digest(PARTS=100)
    assert other != default
    assert other.split(":")[0] == default.split(":")[0]
    assert digest(PARTS=100, ATOMIC=1) == VARYING_OUTPUTS


def test_a_running_program_keeps_its_bits(tmp_path: Path, cupy: Any) -> None:
    toml = write_kernel(tmp_path, TEMPLATE, SPACE)
    sizes = {"R": 3000, "C": 1200}
    kernels = {numerics: autotile.get_best_kernel(toml, **sizes, numerics=numerics) for numerics in ("same", "any")}
    x = cupy.asarray(np.random.default_rng(1).standard_normal((3000, 1200)).astype(np.float32))

    def computed() -> bytes:
        y = cupy.zeros(3000, np.float32)
        kernels["same"](x, y)
        return bytes(y.get().tobytes())

    before = computed()
    options = autotile.TuneOptions(sampler="brute-force")
    winner = autotile.tune(toml, **sizes, options=options, progress=False).winner
    default_dispatcher.refresher.poll()
    assert winner is not None
    assert kernels["any"].config == winner.config
    assert kernels["same"].config["PARTS"] == 1
    assert computed() == before


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@pytest.mark.parametrize("elements", [1, 1001, 600_000])
def test_the_hash_is_that_of_the_words_and_their_places(tmp_path: Path, elements: int) -> None:
    support = SupportKernels(CubinCache(tmp_path, 1 << 30), live_device().architecture)
    buffer = GuardedBuffer((elements,), DTYPES["float32"], support)
    values = np.random.default_rng(1).standard_normal(elements).astype(np.float32)
    buffer.write(values)
    words = values.view(np.uint32).astype(np.uint64)
    place = _mixed(np.arange(1, elements + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    expected = (int(_mixed(place ^ words).sum()), int(_mixed(~place + words).sum()))
    assert buffer.content_hash() == expected
    values[0] = -values[0]
    buffer.write(values)
    assert buffer.content_hash() != expected
