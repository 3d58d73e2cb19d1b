"""Workspaces: shapes, device memory, and errors."""

from dataclasses import replace

import numpy as np
import pytest
from feature_kernels import CLUSTER_SPACE, SPLIT_SPACE

from autotile.core.device import device_profile
from autotile.errors import ConfigError, SpecError
from autotile.kernel.arguments import Workspace
from autotile.kernel.launch import LaunchData, known_names
from autotile.kernel.parser import parse_spec
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
SPEC = parse_spec(SPLIT_SPACE, "split.toml")
SIZES = {**SPEC.sizes, "M": 100, "N": 200, "K": 320, "BATCH": 2}


def data(split_k: int, tile: int = 16) -> LaunchData:
    config = {"TILE": tile, "SPLIT_K": split_k, "FAULT": 0}
    return LaunchData.of(SPEC, "float16", known_names(SPEC, config, SIZES, H200))


def test_shapes_follow_the_configuration() -> None:
    partials, counters = data(5).workspaces
    assert partials == Workspace("partials", "float32", (5, 2, 100, 200), zeroed=False)
    assert counters == Workspace("counters", "uint32", (2, 7, 13), zeroed=True)
    assert (partials.size_bytes, counters.size_bytes) == (4 * 5 * 2 * 100 * 200, 4 * 2 * 7 * 13)
    assert [workspace.size_bytes for workspace in data(1).workspaces] == [0, 0]
    assert data(5) != data(2)
    assert data(1, tile=16) != data(1, tile=32)  # extents differ, though all are empty


def test_a_negative_extent_is_refused_where_it_cannot_be_left_out() -> None:
    spec = parse_spec(SPLIT_SPACE.replace('"SPLIT_K if SPLIT_K > 1 else 0"', '"SPLIT_K - 2"'), "split.toml")
    config = {"TILE": 16, "SPLIT_K": 1, "FAULT": 0}
    said = r"memory: the workspace partials would have the shape -1 x 2 x 100 x 200"
    assert check_config(spec, config, SIZES, H200) == said
    found = feasible_space(spec, SIZES, H200)
    assert {found.config(row)["SPLIT_K"] for row in range(len(found))} == {2, 5}
    with pytest.raises(ConfigError, match="add a rule that excludes it"):
        LaunchData.of(spec, "float32", known_names(spec, config, SIZES, H200))


def test_buffers_and_workspaces_fit_in_the_devices_memory() -> None:
    elements = 2 * (100 * 320 + 320 * 200 + 100 * 200)
    for split_k, workspace_bytes in ((1, 0), (2, 4 * 2 * 2 * 20_000 + 4 * 2 * 7 * 13)):
        config = {"TILE": 16, "SPLIT_K": split_k, "FAULT": 0}
        needed = 2 * elements + workspace_bytes
        just_enough, too_small = (replace(H200, memory_bytes=needed - less) for less in (0, 1))
        assert check_config(SPEC, config, SIZES, just_enough, "float16") == ""
        assert "memory: its arrays and workspaces take 0.0 GiB" in check_config(
            SPEC, config, SIZES, too_small, "float16"
        )
    absurd = {**SIZES, **dict.fromkeys("MNK", 2**31 - 1)}
    with pytest.raises(
        SpecError, match=r"the limit memory of NVIDIA H200 leaves none of the 27 .* choose smaller sizes"
    ):
        feasible_space(SPEC, absurd, H200)


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ('init = "zeros"', 'init = "ones"', "arguments.counters.init", 'expected "zeros", or no init'),
        ('workspace = "float32"', 'workspace = "float"', "arguments.partials.workspace", "write 'float32'"),
        ('"SPLIT_K if', '"SPLITS if', "arguments.partials.shape", "did you mean 'SPLIT_K'"),
        ('{ workspace = "float32",', '{ workspace = "float32", access = "in",', "arguments.partials.access", "unknown"),
        ('{ workspace = "float32",', "{", "arguments.partials", "expected exactly one of the keys buffer"),
        ("beta * C", "beta * partials", "reference.outputs.C", "unknown name 'partials'"),
    ],
)  # fmt: skip
def test_refusals(old: str, new: str, key: str, said: str) -> None:
    assert old in SPLIT_SPACE
    with pytest.raises(SpecError) as caught:
        parse_spec(SPLIT_SPACE.replace(old, new), "split.toml")
    assert caught.value.key == key
    assert said in caught.value.problem


class TestClusters:
    SPEC = parse_spec(CLUSTER_SPACE, "swap.toml")

    @pytest.mark.parametrize("n", [1, 1000, 4096, 100_000])
    def test_a_cluster_divides_the_grid_and_has_at_most_eight_blocks(self, n: int) -> None:
        found = feasible_space(self.SPEC, {"n": n}, H200)
        configs = [found.config(row) for row in range(len(found))]
        expected = [
            {"THREADS": threads, "CLUSTER": cluster, "WHOLE": whole}
            for threads in (64, 256)
            for cluster in (1, 2, 3, 8)
            for whole in (False, True)
            if whole or int(np.ceil(n / threads)) % cluster == 0
        ]
        assert configs == expected

    def test_an_invalid_cluster_is_explained(self) -> None:
        config = {"THREADS": 64, "CLUSTER": 8, "WHOLE": False}
        reason = check_config(self.SPEC, config, {"n": 65}, H200)
        assert reason.startswith("cluster: clusters of 8 blocks in a grid of 2 blocks, expected 1 to 8 that divide")
