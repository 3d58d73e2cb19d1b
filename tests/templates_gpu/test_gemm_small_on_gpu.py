"""Matrix-vector-like products are right on a device: sides, layouts, edges, batches, beta, splits, alignment."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from template_kit import TemplateOnDevice

from autotile.core.model import Config
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import live_device
from autotile.cuda.support import SupportKernels
from autotile.kernel.library import load_kernel

pytestmark = pytest.mark.gpu
KERNEL = load_kernel(str(Path(__file__).parents[2] / "search_spaces" / "gemm_small.toml"))
SPEC = KERNEL.spec
LAYOUTS = list(product((0, 1), repeat=2))
# Of the small side, the large side, K and the batch.
SHAPES = [(1, 1, 1, 1), (1, 4096, 1024, 1), (13, 277, 2501, 2), (16, 512, 8192, 1), (5, 1000, 149, 3)]
CONFIGS: dict[str, Config] = {
    "default": {},
    "rows_of_16": {"R": 16, "K_LANES": 8, "THREADS": 128, "LOADS": 2, "UNROLL": 1, "MIN_BLOCKS": 1},
    "wide_vectors": {"R": 4, "VEC": 8, "LOADS": 1},
    "single_elements": {"R": 2, "VEC": 1, "LOADS": 4, "K_LANES": 32, "THREADS": 256},
    "pairs_split": {"R": 8, "VEC": 2, "THREADS": 256, "SPLIT_K": 4, "MIN_BLOCKS": 1},
    "split": {"K_LANES": 16, "THREADS": 256, "SPLIT_K": 33, "UNROLL": 1},
    "rows_split": {"R": 16, "THREADS": 256, "K_LANES": 16, "LOADS": 1, "SPLIT_K": 8, "SMALL_KIB": 32, "MIN_BLOCKS": 1},
    "large_block": {"THREADS": 1024, "K_LANES": 128, "UNROLL": 1, "MIN_BLOCKS": 1},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> TemplateOnDevice:
    device = live_device()
    support = SupportKernels(CubinCache(tmp_path_factory.mktemp("support"), 2**28), device.architecture)
    return TemplateOnDevice(KERNEL, device, support, tmp_path_factory.mktemp("cubins"))


CASES = [
    (name, dtype, (at + 2 * second) % 2, LAYOUTS[(at // 2 + second) % 4])
    for at, name in enumerate([name for name in CONFIGS for _ in range(2)])
    for second, dtype in enumerate(SPEC.dtypes)
]


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(case: tuple[str, str, int, tuple[int, int]], template: TemplateOnDevice) -> None:
    name, dtype, small_a, layout = case
    config = {**SPEC.default, **CONFIGS[name], "SMALL_A": small_a}
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": int(dtype == "float16")}
    function = template.compiled(config, dtype, flags)
    for at, (small, large, k, batch) in enumerate(SHAPES):
        m, n = (small, large) if small_a else (large, small)
        sizes = {"M": m, "N": n, "K": k, "BATCH": batch, **flags}
        template.expect_right(function, config, dtype, sizes, check=at % 2 == 1)


@pytest.mark.parametrize("name", ["default", "wide_vectors", "rows_split"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_alignment(name: str, layout: tuple[int, int], template: TemplateOnDevice) -> None:
    config = {**SPEC.default, **CONFIGS[name]}
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": 0}
    template.expect_right_at_offsets(config, {"M": 3, "N": 333, "K": 517, "BATCH": 1, **flags}, (1, 3, 5))
    template.expect_right_at_offsets(config, {"M": 8, "N": 336, "K": 512, "BATCH": 1, **flags}, (4, 8, 2))
