"""The templates of bf16 limbs are right on a device: layouts, edges, splits, accuracy of fp32, infinities."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autotile import get_best_kernel
from autotile.core.model import Config
from autotile.cuda.driver import live_device
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.library import load_kernel

pytestmark = pytest.mark.gpu(shared=True)
NAMES = ("sgemm_bf16x6", "sgemm_bf16x6_ws")
SPEC, HOPPER = (load_kernel(name).spec for name in NAMES)
LAYOUTS = list(product((0, 1), repeat=2))
SHAPES = [(1, 1, 1, 1), (251, 241, 1019, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)]
NARROW = {"BM": 64, "BN": 64, "WM": 32, "WN": 32, "STAGES": 4}
CONFIGS: dict[str, Config] = {
    "default": {},
    "two_blocks": {"UNROLL": 1, "MIN_BLOCKS": 2},
    "wide": {"BN": 256, "WN": 64},
    "tall": {"BM": 256, "BN": 64, "BK": 16, "UNROLL": 1},
    "uneven": {**NARROW, "BN": 96},
    "sliver": {"BM": 16, "BN": 64, "BK": 64, "WM": 16, "WN": 16, "STAGES": 6},
    "flat": {"BM": 128, "BN": 16, "BK": 64, "WM": 32, "WN": 16, "STAGES": 4, "K_WARPS": 2, "SPLIT_K": 3},
    "deep": {**NARROW, "BK": 64, "K_WARPS": 2},
    "split": {**NARROW, "SPLIT_K": 7},
    "deep_split": {**NARROW, "BK": 64, "K_WARPS": 2, "SPLIT_K": 3},
    "split_cluster": {**NARROW, "SPLIT_K": 8, "CLUSTER_SPLIT": 1},
    "deep_split_cluster": {**NARROW, "BK": 64, "K_WARPS": 4, "UNROLL": 1, "SPLIT_K": 5, "CLUSTER_SPLIT": 1},
}

HOPPER_SHAPES = [(1, 4, 4, 1), (251, 244, 1020, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)]
HOPPER_CONFIGS: dict[str, Config] = {
    "default": {},
    "narrow": {"BN": 64, "STAGES": 6, "LIMB_STAGES": 4},
    "one_consumer": {"CONSUMERS": 1, "STAGES": 2, "LIMB_STAGES": 2},
    "split": {"SPLIT_K": 3, "GROUP": 1},
    "small_split": {"CONSUMERS": 1, "BN": 64, "SPLIT_K": 8},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_right_at_every_shape(name, layout, on_device):
    config = {**SPEC.default, **CONFIGS[name]}
    if config["CLUSTER_SPLIT"] and live_device().compute_capability != "9.0":
        pytest.skip("clusters need compute capability 9.0")
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "NONDETERMINISTIC": layout[0]}
    on_device(NAMES[0]).expect_right_at_shapes(config, "float32", flags, SHAPES)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("name", HOPPER_CONFIGS)
def test_right_on_hopper_at_every_shape(name, transposed, on_device):
    config = {**HOPPER.default, **HOPPER_CONFIGS[name]}
    # The one rule here that keeps out what never ends, and not only what is slow: no part of K is empty.
    shapes = [shape for shape in HOPPER_SHAPES if config["SPLIT_K"] <= -(-shape[2] // 32)]
    assert len(shapes) >= 4
    flags = {"TRANS_B": transposed, "NONDETERMINISTIC": transposed}
    on_device(NAMES[1]).expect_right_at_shapes(config, "float32", flags, shapes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_errors_are_those_of_fp32_arithmetic_or_smaller(low, name):
    """Of numbers with both signs, and of positive ones, where errors that all point one way would show."""
    cp = load_cupy()
    m, n, k = 192, 160, 20_000
    rng = cp.random.default_rng(0)
    a, b = (rng.uniform(low, 1.0, shape).astype(cp.float32) for shape in ((m, k), (k, n)))
    exact = a.astype(cp.float64) @ b.astype(cp.float64)
    scale = cp.abs(a.astype(cp.float64)) @ cp.abs(b.astype(cp.float64))

    def error_of(kernel: str) -> float:
        c = cp.empty((m, n), cp.float32)
        get_best_kernel(kernel, M=m, N=n, K=k)(a, b, c)
        return float((cp.abs(c - exact) / scale).max())

    assert error_of(name) <= 1.05 * error_of("matmul_naive")


@pytest.mark.parametrize("name", NAMES)
def test_infinities_and_nan_are_those_of_fp32_arithmetic(name):
    cp = load_cupy()
    m, n, k = 70, 92, 52
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    a[3, 4], a[10, 0], a[11, 7], a[20, 1] = np.inf, -np.inf, np.nan, np.finfo(np.float32).max
    b[5, 6], b[0, 8] = np.inf, 0.0
    c = cp.empty((m, n), cp.float32)
    get_best_kernel(name, M=m, N=n, K=k)(cp.asarray(a), cp.asarray(b), c)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(c.get(), expected, rtol=2e-5, atol=2e-5)
