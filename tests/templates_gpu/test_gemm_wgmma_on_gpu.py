"""The wgmma template is right on a device of compute capability 9.0: layouts, edges, batches, beta, alignment."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.device.arguments import pack_arguments
from autotile.device.compiler import compile_cubin, compile_job
from autotile.device.cubin_cache import CubinCache
from autotile.device.instance import ProblemInstance
from autotile.device.module import Function, Module
from autotile.device.properties import live_device
from autotile.device.support import SupportKernels
from autotile.device.toolchain import load_cupy
from autotile.files.library import load_kernel
from autotile.ground.geometry import known_names, launch_geometry
from autotile.ground.hardware import DeviceProperties
from autotile.ground.launch_data import LaunchData
from autotile.ground.model import Config, Outcome

pytestmark = pytest.mark.gpu
KERNEL = load_kernel(str(Path(__file__).parents[2] / "search_spaces" / "gemm_wgmma.toml"))
SPEC = KERNEL.spec

LAYOUTS = list(product((0, 1), repeat=2))
SHAPES = [(8, 8, 8, 1), (200, 136, 264, 2), (1000, 520, 1032, 1), (2048, 1024, 512, 3)]
SMALL = {"BM": 64, "BN": 64, "STAGES": 8, "CONSUMERS": 1, "STORE_STAGES": 1}
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
    "by_threads": {"BN": 128, "STAGES": 6, "STORE_STAGES": 1, "TMA_STORE": 0},
}


@pytest.fixture(scope="module")
def device() -> DeviceProperties:
    found = live_device()
    if found.compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    return found


@pytest.fixture(scope="module")
def support(device: DeviceProperties, tmp_path_factory: pytest.TempPathFactory) -> SupportKernels:
    return SupportKernels(CubinCache(tmp_path_factory.mktemp("cubins"), 2**28), device.architecture)


def loaded(config: Config, dtype: str, sizes: dict[str, int], folder: Path) -> Function:
    path = folder / f"{len(list(folder.iterdir()))}.cubin"
    path.write_bytes(compile_cubin(compile_job(KERNEL, config, dtype, "sm_90a", sizes)).cubin)
    return Module(path).function(SPEC.entry)


def launch(function: Function, config: Config, sizes: dict[str, int], device: DeviceProperties, arguments: Any) -> None:
    geometry = launch_geometry(SPEC, config, sizes, device)
    function.opt_in(geometry.dynamic_smem_bytes)
    function.launch(geometry.grid, geometry.block, arguments, geometry.dynamic_smem_bytes)


# The default in all layouts, the others in two of them, one for each element type.
CASES = [
    (name, dtype, layout)
    for at, name in enumerate(CONFIGS)
    for second, dtype in enumerate(SPEC.dtypes)
    for layout in (LAYOUTS if name == "default" else [LAYOUTS[(at + 2 * second) % 4]])
]


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(
    case: tuple[str, str, tuple[int, int]], device: DeviceProperties, support: SupportKernels, tmp_path: Path
) -> None:
    """Twice in a row each, so that what one launch leaves in the workspaces meets the next one."""
    name, dtype, layout = case
    config = {**SPEC.default, **CONFIGS[name]}
    half = int(dtype == "float16")
    flags = {"TRANS_A": layout[0], "TRANS_B": layout[1], "OUT_FP32": half, "NONDETERMINISTIC": half}
    function = loaded(config, dtype, flags, tmp_path)
    tried = 0
    for at, (m, n, k, batch) in enumerate(SHAPES):
        sizes = {"M": m, "N": n, "K": k, "BATCH": batch, **flags}
        if config["SPLIT_K"] > -(-k // config["BK"]):
            continue  # the one rule here that keeps out what is wrong and not only what is slow
        instance = ProblemInstance(SPEC, sizes, dtype, support, check=at % 2 == 1)
        bound = instance.bind(config, device)
        for _ in range(2):
            instance.prepare(bound)
            launch(function, config, sizes, device, bound.arguments)
            verdict = instance.verdict(bound)
            assert verdict.outcome is Outcome.OK, (sizes, verdict.reason)
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_of_c_of_any_length_and_address(offset: int, device: DeviceProperties, tmp_path: Path) -> None:
    cp = load_cupy()
    config = {**SPEC.default, **CONFIGS["by_threads"]}
    sizes = {**SPEC.sizes, "M": 333, "N": 277, "K": 200, "BATCH": 1, "TRANS_B": 1}
    a, b = (cp.random.standard_normal((rows, 200), dtype=cp.float32).astype(cp.float16) for rows in (333, 277))
    room = cp.full(333 * 277 + 2 * offset + 64, -7, cp.float16)
    c = room[offset : offset + 333 * 277]
    data = LaunchData.of(SPEC, "float16", known_names(SPEC, config, sizes, device))
    scalars = {"M": np.int32(333), "N": np.int32(277), "K": np.int32(200), "BATCH": np.int32(1)}
    arguments = pack_arguments(
        SPEC,
        data,
        pointers={"A": a.data.ptr, "B": b.data.ptr, "C": c.data.ptr},
        scalars={**scalars, "alpha": np.float32(1), "beta": np.float32(0)},
        workspaces={workspace.name: 0 for workspace in data.workspaces},
    )
    launch(loaded(config, "float16", sizes, tmp_path), config, sizes, device, arguments)
    right = a.astype(cp.float64) @ b.astype(cp.float64).T
    assert float(cp.abs(c.reshape(333, 277).astype(cp.float64) - right).max()) < 0.05
    assert float(cp.abs(room[:offset] + 7).sum() + cp.abs(room[offset + 333 * 277 :] + 7).sum()) == 0
