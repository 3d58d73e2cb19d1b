"""Features of a problem."""

import numpy as np
import pytest
from synthetic_gpu import DEVICE, SPEC

from autotile.families.features import Feature, Traits, list_features, meet_rules
from autotile.kernel.launch import launch_geometry
from autotile.kernel.parser import parse_spec
from autotile.space.search_space import enumerate_space

SIZES = [{"M": 4096, "N": 4096, "K": 1024}, {"M": 129, "N": 1999, "K": 7}]
WIDE, NARROW = SPEC.default | {"BM": 256, "BN": 128}, SPEC.default | {"BM": 64, "BN": 64, "TM": 4, "TN": 4}
TRAITS = Traits.of(SPEC, DEVICE, [WIDE, NARROW], [1, 4], SIZES)


def value(feature: Feature) -> list[float]:
    return TRAITS.column(feature).tolist()


def test_sizes_and_work() -> None:
    assert value(Feature("size", "M")) == [4096, 129]
    assert value(Feature("alignment", "N")) == [256, 1]
    assert value(Feature("outputs")) == [4096 * 4096, 129 * 1999]
    flops, moved = 2 * 4096 * 4096 * 1024, 4 * (4096 * 1024 + 1024 * 4096 + 4096 * 4096)
    assert value(Feature("intensity"))[0] == pytest.approx(flops / moved)


def test_blocks_agree_with_the_launch() -> None:
    for number, config in enumerate((WIDE, NARROW)):
        blocks = [launch_geometry(SPEC, config, sizes, DEVICE).blocks for sizes in SIZES]
        assert value(Feature("blocks", config=number)) == blocks
    assert value(Feature("waves", config=1)) == [64 * 64 / (4 * 132), 3 * 32 / (4 * 132)]


def test_of_persistent_kernels_the_tiles_are_counted_and_not_the_blocks_that_take_them() -> None:
    text = SPEC.text.replace(
        'grid = ["ceil_div(M, BM)", "ceil_div(N, BN)"]',
        'grid = ["min(device.sm_count, ceil_div(M, BM) * ceil_div(N, BN))"]',
    )
    persistent = Traits.of(parse_spec(text, "persistent.toml"), DEVICE, [WIDE, NARROW], [1, 4], SIZES)
    assert persistent.blocks.tolist() == TRAITS.blocks.tolist()
    assert persistent.tile.tolist() == TRAITS.tile.tolist() == [256 * 128, 64 * 64]


def test_the_work_ratio_counts_whole_rounds_of_whole_tiles() -> None:
    wide = [np.ceil(16 * 32 / 132), np.ceil(1 * 16 / 132)]
    narrow = [np.ceil(64 * 64 / 132), np.ceil(3 * 32 / 132)]
    expected = [w * 256 * 128 / (n * 64 * 64) for w, n in zip(wide, narrow, strict=True)]
    assert value(Feature("work_ratio", config=0, over=1)) == pytest.approx(expected)


def test_rules_are_evaluated_for_many_problems_as_for_one() -> None:
    kept = enumerate_space(SPEC, SIZES[0], DEVICE)
    broken = SPEC.default | {"BM": 256, "BN": 32}
    assert kept.row_of(broken) is None
    assert meet_rules(SPEC, DEVICE, [SPEC.default, broken], SIZES).tolist() == [[True, False]] * 2


def test_features_read_back() -> None:
    names = tuple(SPEC.sizes)
    for feature in list_features(SPEC, 3):
        assert Feature.from_json(feature.to_json(), names, 3) == feature
        assert str(feature)
    for damaged in (
        {"feature": "size", "of": "Q"},
        {"feature": "blocks", "config": 3},
        {"feature": "exec"},
        {},
        {"feature": []},
        7,
    ):
        with pytest.raises(ValueError, match=r"is not a feature|expected"):
            Feature.from_json(damaged, names, 3)
