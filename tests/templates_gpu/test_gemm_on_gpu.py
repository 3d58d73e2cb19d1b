"""The templates of matrix products are right on a device: layouts, edges, batches, beta, splits, alignment, sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from autotile.core.model import Config
from autotile.cuda.driver import live_device
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.space.search_space import feasible_space

pytestmark = pytest.mark.gpu(shared=True)
LAYOUTS = list(product((0, 1), repeat=2))
LIMBS = ("sgemm_bf16x6", "sgemm_bf16x6_ws")
SPECS = {name: load_kernel(name).spec for name in ("gemm_mma", "gemm_small", "gemm_wgmma", "gemm_wgmma_padded", *LIMBS)}
NARROW = {"BM": 64, "BN": 64, "WM": 32, "WN": 32, "STAGES": 4}
DEEP = {**NARROW, "BK": 128, "K_WARPS": 2, "STAGES": 3}
MMA: dict[str, Config] = {
    "default": {},
    "one_fragment": {"WN": 32, "FRAGMENTS": 1, "MIN_BLOCKS": 2},
    "wide": {"BM": 256, "STAGES": 4, "BK": 32},
    "uneven": {**NARROW, "BN": 96, "BK": 64},
    "sliver": {"BM": 16, "BN": 64, "BK": 128, "WM": 16, "WN": 16, "STAGES": 6},
    "flat": {"BM": 128, "BN": 16, "BK": 128, "WM": 32, "WN": 16, "STAGES": 4, "K_WARPS": 2, "SPLIT_K": 3},
    "many_stages": {**NARROW, "BK": 32, "STAGES": 10},
    "deep": {**DEEP, "K_WARPS": 4, "WM": 64},
    "split": {**NARROW, "BK": 64, "SPLIT_K": 7},
    "deep_split": {**DEEP, "SPLIT_K": 3},
    "split_cluster": {**NARROW, "BK": 64, "SPLIT_K": 8, "CLUSTER_SPLIT": 1},
    "deep_split_cluster": {**DEEP, "SPLIT_K": 5, "CLUSTER_SPLIT": 1, "WM": 64, "K_WARPS": 4},
}
SMALL_SIDE: dict[str, Config] = {
    "default": {},
    "rows_of_16": {"R": 16, "K_LANES": 8, "THREADS": 128, "LOADS": 2, "UNROLL": 1, "MIN_BLOCKS": 1},
    "wide_vectors": {"R": 4, "VEC": 8, "LOADS": 1},
    "single_elements": {"R": 2, "VEC": 1, "LOADS": 4, "K_LANES": 32, "THREADS": 256},
    "pairs_split": {"R": 8, "VEC": 2, "THREADS": 256, "SPLIT_K": 4, "MIN_BLOCKS": 1},
    "split": {"K_LANES": 16, "THREADS": 256, "SPLIT_K": 33, "UNROLL": 1},
    "rows_split": {"R": 16, "THREADS": 256, "K_LANES": 16, "LOADS": 1, "SPLIT_K": 8, "SMALL_KIB": 32, "MIN_BLOCKS": 1},
    "large_block": {"THREADS": 1024, "K_LANES": 128, "UNROLL": 1, "MIN_BLOCKS": 1},
}
SMALL = {"BM": 64, "BN": 64, "STAGES": 8, "CONSUMERS": 1, "STORE_STAGES": 1}
CLUSTER = {"CLUSTER_SPLIT": 1, "TMA_STORE": 0, "STORE_STAGES": 1}
WGMMA: dict[str, Config] = {
    "default": {},
    "one_consumer": SMALL,
    "narrow": {**SMALL, "BN": 16},
    "deep_stages": {**SMALL, "BN": 48, "BK": 128, "STAGES": 4},
    "pair_along_m": {"CLUSTER_M": 2},
    "pair_along_n": {"CLUSTER_N": 2, "ALONG_N": 1, "GROUP": 4},
    "ping_pong": {"BN": 128, "PINGPONG": 1, "STAGES": 6},
    "ping_pong_of_three": {"BM": 64, "BN": 96, "CONSUMERS": 3, "PINGPONG": 1, "STAGES": 8, "CLUSTER_M": 2},
    "three_consumers": {"BM": 192, "BN": 160, "CONSUMERS": 3, "STAGES": 4, "STORE_STAGES": 1},
    "wide_strips": {"BM": 256, "BN": 192, "STAGES": 3, "STORE_STAGES": 1},
    "split": {"BM": 128, "BN": 64, "STAGES": 8, "SPLIT_K": 3},
    "split_pair": {"BM": 256, "BN": 128, "STAGES": 3, "SPLIT_K": 2, "CLUSTER_M": 2},
    "split_cluster": {**SMALL, **CLUSTER, "SPLIT_K": 3},
    "split_cluster_narrow": {**SMALL, **CLUSTER, "BN": 16, "SPLIT_K": 5},
    "split_cluster_of_two_consumers": {"BM": 128, "BN": 96, "STAGES": 6, **CLUSTER, "SPLIT_K": 4},
    "split_cluster_of_two_strips": {**SMALL, **CLUSTER, "BM": 128, "STAGES": 6, "SPLIT_K": 2},
    "split_cluster_of_three_consumers": {"BM": 192, "BN": 160, "STAGES": 3, "CONSUMERS": 3, **CLUSTER, "SPLIT_K": 5},
    "split_cluster_of_eight": {"BM": 128, "BN": 160, "STAGES": 4, **CLUSTER, "SPLIT_K": 8},
    "by_threads": {"BN": 128, "STAGES": 6, "STORE_STAGES": 1, "TMA_STORE": 0},
}
PADDED: dict[str, Config] = {
    "default": {},
    "rows_of_8": {"ROW_UNIT": 8, "BN": 128},
    "ping_pong_pairs": {"BN": 128, "PINGPONG": 1, "STAGES": 6, "CLUSTER_M": 2},
    "pair_along_n": {"CLUSTER_N": 2, "ROW_UNIT": 8},
    "split": {"BN": 64, "STAGES": 8, "SPLIT_K": 3},
    "split_cluster": {"BM": 64, "BN": 64, "STAGES": 8, "CONSUMERS": 1, "CLUSTER_SPLIT": 1, "SPLIT_K": 5},
}
OF_LIMBS: dict[str, Config] = {
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
LIMBS_ON_HOPPER: dict[str, Config] = {
    "default": {},
    "narrow": {"BN": 64, "STAGES": 6, "LIMB_STAGES": 4},
    "one_consumer": {"CONSUMERS": 1, "STAGES": 2, "LIMB_STAGES": 2},
    "split": {"SPLIT_K": 3, "GROUP": 1},
    "small_split": {"CONSUMERS": 1, "BN": 64, "SPLIT_K": 8},
}
CONFIGS = {
    **{"gemm_mma": MMA, "gemm_small": SMALL_SIDE, "gemm_wgmma": WGMMA, "gemm_wgmma_padded": PADDED},
    **dict(zip(LIMBS, (OF_LIMBS, LIMBS_ON_HOPPER), strict=True)),
}
SHAPES = {
    "gemm_mma": [(1, 1, 1, 1), (251, 241, 1019, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)],
    # Of the small side, the large side, K and the batch.
    "gemm_small": [(1, 1, 1, 1), (1, 4096, 1024, 1), (13, 277, 2501, 2), (16, 512, 8192, 1), (5, 1000, 149, 3)],
    "gemm_wgmma": [(8, 8, 8, 1), (200, 136, 264, 2), (1000, 520, 1032, 1), (2048, 1024, 512, 3)],
    "gemm_wgmma_padded": [(1, 1, 1, 1), (7, 9, 701, 1), (201, 137, 1003, 2), (1001, 515, 1035, 1)],
    LIMBS[0]: [(1, 1, 1, 1), (251, 241, 1019, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)],
    LIMBS[1]: [(1, 4, 4, 1), (251, 244, 1020, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)],
}
SPLIT_PADDED_SHAPES = [(7, 9, 701, 1), (201, 137, 1003, 2), (333, 131, 2047, 1)]
IN_ALL_LAYOUTS = {"gemm_mma": ("default",), "gemm_wgmma": ("default", "split_cluster")}
# A few in all layouts, the others in one for each element type; of a small side, each as A and as B.
CASES = [
    *(
        (kernel, name, dtype, layout, 0)
        for kernel, whole in IN_ALL_LAYOUTS.items()
        for at, name in enumerate(CONFIGS[kernel])
        for second, dtype in enumerate(SPECS[kernel].dtypes)
        for layout in (LAYOUTS if name in whole else [LAYOUTS[(at + 2 * second) % 4]])
    ),
    *(
        ("gemm_small", name, dtype, LAYOUTS[(at // 2 + second) % 4], (at + 2 * second) % 2)
        for at, name in enumerate([name for name in SMALL_SIDE for _ in range(2)])
        for second, dtype in enumerate(SPECS["gemm_small"].dtypes)
    ),
    *(
        ("gemm_wgmma_padded", name, dtype, layout, 0)
        for at, name in enumerate(PADDED)
        for half, dtype in enumerate(SPECS["gemm_wgmma_padded"].dtypes)
        for layout in (LAYOUTS if name == "default" else [LAYOUTS[at % 4]] if at % 2 == half else [])
    ),
    *((LIMBS[0], name, "float32", layout, 0) for name in OF_LIMBS for layout in LAYOUTS),
    *((LIMBS[1], name, "float32", layout, 0) for name in LIMBS_ON_HOPPER for layout in ((0, 0), (1, 1))),
]


def chosen(kernel: str, name: str) -> Config:
    config = {**SPECS[kernel].default, **CONFIGS[kernel][name]}
    of_hopper = kernel in ("gemm_wgmma", "gemm_wgmma_padded", LIMBS[1]) or config.get("CLUSTER_SPLIT")
    if of_hopper and live_device().compute_capability != "9.0":
        pytest.skip("clusters and wgmma need compute capability 9.0")
    return config


def flags_of(kernel: str, layout: tuple[int, int], out_fp32: int = 0) -> dict[str, int]:
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": out_fp32}
    flags["NONDETERMINISTIC"] = layout[0] if kernel in LIMBS else out_fp32
    return {name: flags[name] for name in SPECS[kernel].flags}


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(case, on_device):
    """Over workspaces of NaN: what a padded copy leaves out, or lies behind a row of it, makes the product NaN."""
    kernel, name, dtype, layout, small_a = case
    config, shapes = chosen(kernel, name), SHAPES[kernel]
    if kernel == "gemm_small":
        config = {**config, "SMALL_A": small_a}
        shapes = shapes if small_a else [(large, small, k, batch) for small, large, k, batch in shapes]
    elif kernel == "gemm_wgmma_padded" and config["SPLIT_K"] > 1:
        shapes = SPLIT_PADDED_SHAPES
    elif kernel in ("gemm_wgmma", LIMBS[1]):
        # No part of K is empty: the one rule here that keeps out what is wrong or never ends, not only what is slow.
        shapes = [shape for shape in shapes if config["SPLIT_K"] <= -(-shape[2] // config.get("BK", 32))]
        assert len(shapes) >= (2 if kernel == "gemm_wgmma" else 4)
    flags = flags_of(kernel, layout, int(dtype == "float16"))
    on_device(kernel).expect_right_at_shapes(config, dtype, flags, shapes)


@pytest.mark.parametrize("name", ["default", "sliver", "deep_split_cluster"])
@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 2, 4), (100, 148, 132)), ((1, 3, 5), (96, 128, 200)), ((4, 8, 2), (61, 90, 77))]
)
def test_any_alignment(name, offsets, shape, on_device):
    for layout in LAYOUTS[1:3]:
        sizes = {**dict(zip("MNK", shape, strict=True)), "BATCH": 1, **flags_of("gemm_mma", layout)}
        on_device("gemm_mma").expect_right_at_offsets(chosen("gemm_mma", name), sizes, offsets)


@pytest.mark.parametrize("name", ["default", "wide_vectors", "rows_split"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_alignment_of_a_small_side(name, layout, on_device):
    config, flags = chosen("gemm_small", name), flags_of("gemm_small", layout)
    for (m, n, k), offsets in (((3, 333, 517), (1, 3, 5)), ((8, 336, 512), (4, 8, 2))):
        sizes = {"M": m, "N": n, "K": k, "BATCH": 1, **flags}
        on_device("gemm_small").expect_right_at_offsets(config, sizes, offsets)


@pytest.mark.parametrize("name", ["by_threads", "split_cluster"])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_rows_of_c_of_any_length_and_address(offset, name, on_device):
    sizes = {**SPECS["gemm_wgmma"].sizes, "M": 333, "N": 277 + offset % 2, "K": 200, "BATCH": 1, "TRANS_B": 1}
    on_device("gemm_wgmma").expect_right_at_offsets(chosen("gemm_wgmma", name), sizes, (0, 0, offset))


def test_long_sums_keep_fp32_accuracy(on_device):
    flags = {**flags_of("gemm_mma", (0, 0)), "OUT_FP32": 1}
    config = dict(SPECS["gemm_mma"].default)
    on_device("gemm_mma").expect_right_at_shapes(config, "bfloat16", flags, [(64, 64, 200_000, 1)])


@pytest.mark.usefixtures("hopper")
class TestServed:
    """The product over padded copies, as it is served."""

    M, N, K = 333, 277, 203

    @pytest.fixture
    def kernel(self, tmp_path):
        forget_served()
        return get_best_kernel(
            "gemm_wgmma_padded", dtype="float16", M=self.M, N=self.N, K=self.K, database=tmp_path / "empty.db"
        )

    def behind(self, cp: Any, offset: int, *shape: int) -> Any:
        """Random numbers that start so many elements behind an aligned address; NaN around them."""
        count = shape[0] * shape[1]
        room = cp.full(count + 64, cp.nan, cp.float16)
        view = room[offset : offset + count].reshape(shape)
        view[...] = cp.random.standard_normal(shape, dtype=cp.float32)
        return view

    def test_addresses_of_any_element(self, kernel, cp):
        """Each again and again on the same arrays, as a graph too, and in turn: the maps stay those of the stream."""
        sets = [
            (
                self.behind(cp, at, self.M, self.K),
                self.behind(cp, 2 * at + 1, self.K, self.N),
                self.behind(cp, at + 3, self.M, self.N),
            )
            for at in range(8)
        ]
        for a, b, c in sets * 4:
            c.fill(cp.nan)
            kernel(a, b, c)
            expected = a.astype(cp.float32) @ b.astype(cp.float32)
            assert float(cp.abs(c.astype(cp.float32) - expected).max()) < 0.1

    def test_streams_and_a_bound_launch(self, kernel, cp):
        a, b, c = (self.behind(cp, 1, *shape) for shape in ((self.M, self.K), (self.K, self.N), (self.M, self.N)))
        launch = kernel.bind(a, b, c)
        expected = a.astype(cp.float32) @ b.astype(cp.float32)
        cp.cuda.Device().synchronize()
        for _ in range(4):
            for stream in (cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)):
                with stream:
                    for _ in range(3):
                        c.fill(cp.nan)
                        launch()
                        other = kernel(a, b)
                    stream.synchronize()
                    for found in (c, other):
                        assert float(cp.abs(found.astype(cp.float32) - expected).max()) < 0.1


@pytest.mark.parametrize("name", LIMBS)
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_errors_are_those_of_fp32_arithmetic_or_smaller(low, name, cp):
    """Of numbers with both signs, and of positive ones, where errors that all point one way would show."""
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


@pytest.mark.parametrize("name", LIMBS)
def test_infinities_and_nan_are_those_of_fp32_arithmetic(name, cp):
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


SGEMM_SHAPES = [(1, 1, 1, 1), (389, 277, 149, 2), (256, 128, 64, 1), (70, 516, 1036, 3)]
SPACES_OF = [(261, 132, 484), (261, 130, 482), (261, 131, 483)]  # rows of 4, 2 and 1 floats that lie side by side


@pytest.fixture(params=["sgemm", "sgemm_ws"])
def sgemm(request):
    if request.param == "sgemm_ws":
        request.getfixturevalue("hopper")
    return load_kernel(request.param)


def spread(kernel: Kernel, flags: dict[str, int]) -> list[Config]:
    """Configurations from all over the spaces of middling problems: all widths of loads, padded and swizzled tiles."""
    configs = []
    for place, (m, n, k) in enumerate(SPACES_OF):
        space = feasible_space(
            kernel.spec, kernel.spec.at({"M": m, "N": n, "K": k, "BATCH": 1, **flags}), live_device()
        )
        for swizzle in (0, 1):
            rows = np.flatnonzero(space.column("SWIZZLE") == swizzle)
            if rows.size:
                configs.append(space.config(int(rows[(len(rows) - 1) * (2 * place + swizzle) // 5])))
    return configs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nondeterministic", [0, 1])
def test_configurations_over_the_space_are_right(sgemm, on_device, layout, nondeterministic):
    template = on_device(sgemm.name)
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "NONDETERMINISTIC": nondeterministic}
    for config in spread(sgemm, flags)[nondeterministic :: 1 + nondeterministic]:
        function = template.compiled(config, "float32", flags)
        for m, n, k, batch in SGEMM_SHAPES:
            sizes = {"M": m, "N": n, "K": k, "BATCH": batch, **flags}
            for check in (False, True):
                template.expect_right(function, config, "float32", sizes, check=check)
