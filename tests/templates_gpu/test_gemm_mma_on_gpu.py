"""The mma.sync template is right on a device: layouts, edges, batches, beta, splits, alignment."""

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
KERNEL = load_kernel(str(Path(__file__).parents[2] / "search_spaces" / "gemm_mma.toml"))
SPEC = KERNEL.spec
LAYOUTS = list(product((0, 1), repeat=2))
SHAPES = [(1, 1, 1, 1), (251, 241, 1019, 2), (33, 36, 4100, 1), (520, 264, 1032, 1), (64, 700, 512, 3)]
NARROW = {"BM": 64, "BN": 64, "WM": 32, "WN": 32, "STAGES": 4}
DEEP = {**NARROW, "BK": 128, "K_WARPS": 2, "STAGES": 3}
CONFIGS: dict[str, Config] = {
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


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> TemplateOnDevice:
    device = live_device()
    support = SupportKernels(CubinCache(tmp_path_factory.mktemp("support"), 2**28), device.architecture)
    return TemplateOnDevice(KERNEL, device, support, tmp_path_factory.mktemp("cubins"))


def chosen(name: str) -> Config:
    if CONFIGS[name].get("CLUSTER_SPLIT") and live_device().compute_capability != "9.0":
        pytest.skip("clusters need compute capability 9.0")
    return {**SPEC.default, **CONFIGS[name]}


# The default in all layouts, the others in one for each element type.
CASES = [
    (name, dtype, layout)
    for at, name in enumerate(CONFIGS)
    for second, dtype in enumerate(SPEC.dtypes)
    for layout in (LAYOUTS if name == "default" else [LAYOUTS[(at + 2 * second) % 4]])
]


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(case: tuple[str, str, tuple[int, int]], template: TemplateOnDevice) -> None:
    name, dtype, layout = case
    config = chosen(name)
    half = int(dtype == "float16")
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": half, "NONDETERMINISTIC": half}
    function = template.compiled(config, dtype, flags)
    for at, (m, n, k, batch) in enumerate(SHAPES):
        sizes = {"M": m, "N": n, "K": k, "BATCH": batch, **flags}
        template.expect_right(function, config, dtype, sizes, check=at % 2 == 1)


@pytest.mark.parametrize("name", ["default", "sliver", "deep_split_cluster"])
@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 2, 4), (100, 148, 132)), ((1, 3, 5), (96, 128, 200)), ((4, 8, 2), (61, 90, 77))]
)
def test_any_alignment(
    name: str, offsets: tuple[int, int, int], shape: tuple[int, int, int], template: TemplateOnDevice
) -> None:
    for layout in LAYOUTS[1:3]:
        flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": 0, "NONDETERMINISTIC": 0}
        sizes = {**dict(zip("MNK", shape, strict=True)), "BATCH": 1, **flags}
        template.expect_right_at_offsets(chosen(name), sizes, offsets)


def test_long_sums_keep_fp32_accuracy(template: TemplateOnDevice) -> None:
    flags = {"TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 1, "NONDETERMINISTIC": 0}
    function = template.compiled(dict(SPEC.default), "bfloat16", flags)
    sizes = {"M": 64, "N": 64, "K": 200_000, "BATCH": 1, **flags}
    template.expect_right(function, dict(SPEC.default), "bfloat16", sizes, check=False)
