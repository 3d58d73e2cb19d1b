"""The wgmma template over padded copies is right on a device of compute capability 9.0: layouts, edges, addresses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from autotile.core.model import Config
from autotile.kernel.library import load_kernel
from autotile.serving.dispatcher import forget_served, get_best_kernel

pytestmark = [pytest.mark.gpu(shared=True), pytest.mark.usefixtures("hopper")]
SPEC = load_kernel("gemm_wgmma_padded").spec
SHAPES = [(1, 1, 1, 1), (7, 9, 701, 1), (201, 137, 1003, 2), (1001, 515, 1035, 1)]
SPLIT_SHAPES = [(7, 9, 701, 1), (201, 137, 1003, 2), (333, 131, 2047, 1)]
SMALL = {"BM": 64, "BN": 64, "STAGES": 8, "CONSUMERS": 1}
CONFIGS: dict[str, Config] = {
    "default": {},
    "rows_of_8": {"ROW_UNIT": 8, "BN": 128},
    "ping_pong_pairs": {"BN": 128, "PINGPONG": 1, "STAGES": 6, "CLUSTER_M": 2},
    "pair_along_n": {"CLUSTER_N": 2, "ROW_UNIT": 8},
    "split": {"BN": 64, "STAGES": 8, "SPLIT_K": 3},
    "split_cluster": {**SMALL, "CLUSTER_SPLIT": 1, "SPLIT_K": 5},
}
CASES = [
    *(("default", layout, half) for layout in product((0, 1), repeat=2) for half in (0, 1)),
    *((name, (at // 2 % 2, at % 2), at % 2) for at, name in enumerate(CONFIGS) if name != "default"),
]


@pytest.mark.parametrize("case", CASES)
def test_right_at_every_shape(on_device, case):
    """Over workspaces of NaN: what the copy leaves out, or lies behind a row, makes the product NaN."""
    name, (trans_a, trans_b), half = case
    config = {**SPEC.default, **CONFIGS[name]}
    flags = {"TRANS_A": trans_a, "TRANS_B": trans_b, "OUT_FP32": half, "NONDETERMINISTIC": half}
    shapes = SHAPES if config["SPLIT_K"] == 1 else SPLIT_SHAPES
    on_device("gemm_wgmma_padded").expect_right_at_shapes(config, SPEC.dtypes[half], flags, shapes)


class TestServed:
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
