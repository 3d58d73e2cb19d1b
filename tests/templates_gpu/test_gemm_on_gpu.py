"""The templates of 16-bit types are right on a device: layouts, edges, batches, beta, splits, alignment."""

from __future__ import annotations

from itertools import product

import pytest

from autotile.core.model import Config
from autotile.cuda.driver import live_device
from autotile.kernel.library import load_kernel

pytestmark = pytest.mark.gpu(shared=True)
LAYOUTS = list(product((0, 1), repeat=2))
SPECS = {name: load_kernel(name).spec for name in ("gemm_mma", "gemm_small", "gemm_wgmma")}
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
CONFIGS = {"gemm_mma": MMA, "gemm_small": SMALL_SIDE, "gemm_wgmma": WGMMA}
SHAPES = {
    "gemm_mma": [(1, 1, 1, 1), (251, 241, 1019, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)],
    # Of the small side, the large side, K and the batch.
    "gemm_small": [(1, 1, 1, 1), (1, 4096, 1024, 1), (13, 277, 2501, 2), (16, 512, 8192, 1), (5, 1000, 149, 3)],
    "gemm_wgmma": [(8, 8, 8, 1), (200, 136, 264, 2), (1000, 520, 1032, 1), (2048, 1024, 512, 3)],
}
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
]


def chosen(kernel: str, name: str) -> Config:
    config = {**SPECS[kernel].default, **CONFIGS[kernel][name]}
    if (kernel == "gemm_wgmma" or config.get("CLUSTER_SPLIT")) and live_device().compute_capability != "9.0":
        pytest.skip("clusters and wgmma need compute capability 9.0")
    return config


def flags_of(kernel: str, layout: tuple[int, int], out_fp32: int = 0) -> dict[str, int]:
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": out_fp32}
    return flags if kernel == "gemm_small" else {**flags, "NONDETERMINISTIC": out_fp32}


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(case, on_device):
    kernel, name, dtype, layout, small_a = case
    config, shapes = chosen(kernel, name), SHAPES[kernel]
    if kernel == "gemm_small":
        config = {**config, "SMALL_A": small_a}
        shapes = shapes if small_a else [(large, small, k, batch) for small, large, k, batch in shapes]
    elif kernel == "gemm_wgmma":
        # The one rule here that keeps out what is wrong, and not only what is slow.
        shapes = [shape for shape in shapes if config["SPLIT_K"] <= -(-shape[2] // config["BK"])]
        assert len(shapes) >= 2
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
