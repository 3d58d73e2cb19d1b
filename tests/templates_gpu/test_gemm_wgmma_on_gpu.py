"""The wgmma template is right on a device of compute capability 9.0: layouts, edges, batches, beta, alignment."""

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
KERNEL = load_kernel(str(Path(__file__).parents[2] / "search_spaces" / "gemm_wgmma.toml"))
SPEC = KERNEL.spec

LAYOUTS = list(product((0, 1), repeat=2))
SHAPES = [(8, 8, 8, 1), (200, 136, 264, 2), (1000, 520, 1032, 1), (2048, 1024, 512, 3)]
SMALL = {"BM": 64, "BN": 64, "STAGES": 8, "CONSUMERS": 1, "STORE_STAGES": 1}
CLUSTER = {"CLUSTER_SPLIT": 1, "TMA_STORE": 0, "STORE_STAGES": 1}
CONFIGS: dict[str, Config] = {
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


@pytest.fixture
def template(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TemplateOnDevice:
    device = live_device()
    if device.compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    support = SupportKernels(CubinCache(tmp_path_factory.mktemp("cubins"), 2**28), device.architecture)
    return TemplateOnDevice(KERNEL, device, support, tmp_path)


# The default and one of the clusters along K in all layouts, the others in two, one for each element type.
CASES = [
    (name, dtype, layout)
    for at, name in enumerate(CONFIGS)
    for second, dtype in enumerate(SPEC.dtypes)
    for layout in (LAYOUTS if name in ("default", "split_cluster") else [LAYOUTS[(at + 2 * second) % 4]])
]


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(template: TemplateOnDevice, case: tuple[str, str, tuple[int, int]]) -> None:
    name, dtype, layout = case
    config = {**SPEC.default, **CONFIGS[name]}
    half = int(dtype == "float16")
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": half, "NONDETERMINISTIC": half}
    function = template.compiled(config, dtype, flags)
    # The one rule here that keeps out what is wrong, and not only what is slow.
    shapes = [shape for shape in SHAPES if config["SPLIT_K"] <= -(-shape[2] // config["BK"])]
    assert len(shapes) >= 2
    for at, shape in enumerate(shapes):
        sizes = {**dict(zip(("M", "N", "K", "BATCH"), shape, strict=True)), **flags}
        template.expect_right(function, config, dtype, sizes, check=at % 2 == 1)


@pytest.mark.parametrize("name", ["by_threads", "split_cluster"])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_rows_of_c_of_any_length_and_address(template: TemplateOnDevice, offset: int, name: str) -> None:
    config = {**SPEC.default, **CONFIGS[name]}
    template.expect_right_at_offsets(
        config, {**SPEC.sizes, "M": 333, "N": 277 + offset % 2, "K": 200, "BATCH": 1, "TRANS_B": 1}, (0, 0, offset)
    )
