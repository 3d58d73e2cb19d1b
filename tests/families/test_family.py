"""Families of problems: parsing, members, points; features of a problem, and the tilings of grids."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from synthetic_gpu import DEVICE, SPEC

from autotile.errors import DataError, ProblemError
from autotile.families import features
from autotile.families.family import Extent, Family, family_of, parse_family, sample_members, select_points
from autotile.families.features import Column, Feature, Traits, list_features, tilings
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.search_space import enumerate_space

WIDE_FAMILY = ["M=1..8192", "N=128..8192", "K=4096,7168"]
ends = st.integers(1, 2**31 - 1)
extents = st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=4)


class TestParsing:
    def test_values_ranges_and_lists(self):
        family = parse_family(SPEC, ["M=1..8192", "N=4096", "K=7168,4096"])
        assert str(family) == "M=1..8192 N=4096 K=4096,7168"
        assert {"M": 1999, "N": 4096, "K": 7168} in family
        for outside in ({"M": 8193, "N": 4096, "K": 7168}, {"M": 1, "N": 4096, "K": 5000}, {"M": 1, "N": 4096}):
            assert outside not in family
        assert family.largest == {"M": 8192, "N": 4096, "K": 7168}
        overlapping = parse_family(SPEC, ["M=1..10,5..20,7", "N=3,3", "K=4,5"])
        assert str(overlapping) == "M=1..20 N=3 K=4,5"
        assert str(parse_family(SPEC, ["M=1..8", "N=1"])) == "M=1..8 N=1 K=4096"  # of the file

    @given(st.tuples(extents, extents, extents))
    def test_what_is_typed_is_what_is_read(self, parts):
        typed = [",".join(f"{a}..{b}" if a != b else str(a) for a, b in each) for each in parts]
        family = parse_family(SPEC, [f"{name}={text}" for name, text in zip("MNK", typed, strict=True)])
        assert parse_family(SPEC, str(family).split()) == family
        assert Family.from_json(family.to_json()) == family
        for name, each in zip("MNK", parts, strict=True):
            assert all(end in family.extents[name] for part in each for end in part)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "needs the size M, such as M=1..4096"),
            (["M=8..1", "N=1", "K=1"], r"range M=8..1 is empty; give its smaller end first: 1..8"),
            (["M=0..8", "N=1", "K=1"], "out of bounds, expected values from 1 to 2147483647"),
            (["M=1...8", "N=1", "K=1"], "cannot be read; expected a whole number, a range"),
            (["M=", "N=1", "K=1"], "cannot be read"),
            (["M=1", "M=2", "N=1", "K=1"], "M is given twice, as 1 and as 2; join values by commas"),
            (["Q=1", "N=1", "K=1"], "has no size 'Q'"),
            (["M=1..99999999999", "N=1", "K=1"], "out of bounds"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, words, said):
        with pytest.raises(ProblemError, match=said):
            parse_family(SPEC, words)

    def test_a_program_gives_numbers_lists_ranges_and_text(self):
        family = family_of(SPEC, {"M": range(1, 8193), "N": 4096, "K": [4096, 7168]})
        assert family == family_of(SPEC, {"M": "1..8192", "N": "4096", "K": (7168, 4096)})
        with pytest.raises(ProblemError, match="step 1"):
            family_of(SPEC, {"M": range(0, 10, 2), "N": 1, "K": 1})


def test_flags_and_sizes_of_one_may_be_left_out():
    spec = load_kernel("gemm_wgmma").spec
    family = parse_family(spec, ["M=64..128", "N=64", "K=64"])
    assert all(family.extents[name] == Extent(((spec.sizes[name],) * 2,)) for name in spec.flags)
    both = parse_family(spec, ["M=64..128", "N=64", "K=64", "TRANS_A=0,1"])
    assert both.extents["TRANS_A"].ends == (0, 1)
    with pytest.raises(ProblemError, match="expected values from 0 to 1"):
        parse_family(spec, ["M=64", "N=64", "K=64", "TRANS_A=2"])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[2, 1]], "M: expected parts in ascending order"),
        ([[1]], "expected array of length 2"),
        ([["1", "2"]], "expected int, got str"),
        ([[-1, 2]], "expected int >= 0"),
    ],
)
def test_a_damaged_family_is_refused(parts, said):
    with pytest.raises(DataError, match=said):
        Family.from_json({"M": parts})


class TestSelectPoints:
    def test_they_cover_ends_and_listed_values_and_the_logarithms_evenly_round_and_ragged(self):
        family = parse_family(SPEC, WIDE_FAMILY)
        points = select_points(family, 4)
        for name, extent in family.extents.items():
            assert set(extent.ends) <= {point[name] for point in points}
        points = select_points(parse_family(SPEC, ["M=1..8192", "N=4096", "K=4096"]), 14)
        places = np.sort([math.log2(point["M"]) for point in points])
        assert np.diff(places).max() <= 2.0  # 13 octaves, 14 points
        points = select_points(parse_family(SPEC, ["M=256..8192", "N=256..8192", "K=256..8192"]), 24)
        for name in "MNK":
            assert any(point[name] % 2 for point in points)
            assert any(point[name] % 64 == 0 for point in points)

    @settings(max_examples=8)
    @given(st.integers(1, 5000), st.integers(0, 5000), st.integers(2, 20))
    def test_they_are_members_each_once_and_the_same_every_time(self, low, more, count):
        family = parse_family(SPEC, [f"M={low}..{low + more}", "N=64,4096", "K=512"])
        points = select_points(family, count)
        assert all(point in family for point in points)
        assert len({tuple(point.values()) for point in points}) == len(points) <= count
        assert points == select_points(family, count)

    def test_a_small_family_is_taken_whole_and_too_few_points_are_refused(self):
        assert len(select_points(parse_family(SPEC, ["M=1,2,3", "N=4..6", "K=3"]), 24)) == 9
        with pytest.raises(ProblemError, match=r"3 points cannot cover K=1,2,3,4: expected at least 4"):
            select_points(parse_family(SPEC, ["M=1", "N=1", "K=1,2,3,4"]), 3)

    def test_impossible_problems_are_not_chosen_and_members_fill_the_family(self):
        family = parse_family(SPEC, WIDE_FAMILY)
        points = select_points(family, 10, lambda sizes: sizes["M"] % 8 == 0)
        assert len(points) == 10
        assert all(point["M"] % 8 == 0 for point in points)
        with pytest.raises(ProblemError, match="no valid configuration"):
            select_points(family, 10, lambda _: False)
        members = sample_members(family)
        assert len(members) > 1000
        assert all(member in family for member in members)
        assert {int(math.log2(member["M"])) for member in members} == set(range(14))


SIZES = [{"M": 4096, "N": 4096, "K": 1024}, {"M": 129, "N": 1999, "K": 7}]
PROBLEMS = [SPEC.at(sizes) for sizes in SIZES]
WIDE, NARROW = SPEC.default | {"BM": 256, "BN": 128}, SPEC.default | {"BM": 64, "BN": 64, "TM": 4, "TN": 4}
TRAITS = Traits.of(SPEC, DEVICE, [WIDE, NARROW], [1, 4], PROBLEMS)


def with_grid(grid: str) -> KernelSpec:
    return parse_spec(SPEC.text.replace('["ceil_div(M, BM)", "ceil_div(N, BN)"]', f'["{grid}"]'), "x.toml")


def value(feature: Feature) -> list[float]:
    return TRAITS.column(feature).tolist()


def test_sizes_and_work_and_blocks_that_agree_with_the_launch():
    assert value(Feature("size", "M")) == [4096, 129]
    assert value(Feature("alignment", "N")) == [256, 1]
    assert value(Feature("outputs")) == [4096 * 4096, 129 * 1999]
    flops, moved = 2 * 4096 * 4096 * 1024, 4 * (4096 * 1024 + 1024 * 4096 + 4096 * 4096)
    assert value(Feature("intensity"))[0] == pytest.approx(flops / moved)
    for number, config in enumerate((WIDE, NARROW)):
        blocks = [launch_geometry(SPEC, config, problem, DEVICE).blocks for problem in PROBLEMS]
        assert value(Feature("blocks", config=number)) == blocks
    assert value(Feature("waves", config=1)) == [64 * 64 / (4 * 132), 3 * 32 / (4 * 132)]
    wide, narrow = [np.ceil(16 * 32 / 132), np.ceil(1 * 16 / 132)], [np.ceil(64 * 64 / 132), np.ceil(3 * 32 / 132)]
    expected = [w * 256 * 128 / (n * 64 * 64) for w, n in zip(wide, narrow, strict=True)]
    assert value(Feature("work_ratio", config=0, over=1)) == pytest.approx(expected)  # whole rounds of whole tiles


def test_of_persistent_kernels_the_tiles_are_counted_and_not_the_blocks_that_take_them():
    spec = with_grid("min(device.sm_count, ceil_div(M, BM) * ceil_div(N, BN))")
    persistent = Traits.of(spec, DEVICE, [WIDE, NARROW], [1, 4], PROBLEMS)
    assert persistent.blocks.tolist() == TRAITS.blocks.tolist()
    assert persistent.tile.tolist() == TRAITS.tile.tolist() == [256 * 128, 64 * 64]


def test_rules_are_evaluated_for_many_problems_as_for_one():
    kept = enumerate_space(SPEC, PROBLEMS[0], DEVICE)
    broken = SPEC.default | {"BM": 256, "BN": 32}
    assert kept.row_of(broken) is None
    assert features.meet_rules(SPEC, DEVICE, [SPEC.default, broken], PROBLEMS).tolist() == [[True, False]] * 2


def test_features_read_back():
    names = tuple(SPEC.sizes)
    for feature in list_features(SPEC, 3):
        assert Feature.from_json(feature.to_json(), names, 3) == feature
        assert str(feature)
    other_size, other_config = {"feature": "size", "of": "Q"}, {"feature": "blocks", "config": 3}
    for damaged in (other_size, other_config, {"feature": "exec"}, {}, {"feature": []}, 7):
        with pytest.raises(ValueError, match=r"is not a feature|expected"):
            Feature.from_json(damaged, names, 3)


MANY_SMS = replace(DEVICE, sm_count=2**40)
KERNELS = ("gemm_wgmma", "gemm_wgmma_padded", "gemm_mma", "gemm_small")
KERNELS += ("sgemm", "sgemm_ws", "sgemm_bf16x6", "sgemm_bf16x6_ws", "sgemm_2d")
SIZE = st.integers(1, 20_000)


@lru_cache
def _tiling(name: str, transposed: int) -> tuple[KernelSpec, dict[str, int], tuple[Column, Column, list[int]]]:
    spec = load_kernel(name).spec
    flags = {flag: transposed if flag == "TRANS_B" else 0 for flag in spec.flags}
    return spec, flags, tilings(spec, DEVICE, [spec.default], [None], spec.at({**spec.sizes, **flags}))


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=30)
@given(m=SIZE, n=SIZE, k=SIZE, transposed=st.integers(0, 1))
def test_a_tiling_gives_the_blocks_of_the_grid(name, m, n, k, transposed):
    spec, flags, (tiles, columns, irregular) = _tiling(name, transposed)
    sizes = {**spec.sizes, **flags, "M": m, "N": n, "K": k}
    counts = [math.ceil(sizes[size] / tile) for size, tile in zip(spec.proper_sizes, tiles[0], strict=True)]
    geometry = launch_geometry(spec, spec.default, spec.at(sizes), MANY_SMS)
    assert not irregular
    assert math.prod(counts) * columns[0, 0] == geometry.blocks


def test_a_grid_of_another_form_is_evaluated_and_a_size_that_it_does_not_depend_on_has_no_tile():
    spec = with_grid("ceil_div(M, BM) + N")
    assert tilings(spec, DEVICE, [spec.default], [None], spec.at())[2] == [0]
    assert features.blocks_at(spec, DEVICE, WIDE, spec.at({"M": 1000, "N": 8, "K": 1})) == 4 + 8
    for spec, n_tile, units in ((SPEC, 128, 1.0), (with_grid("ceil_div(M, BM) * ceil_div(N, 4) * 3"), 4, 3.0)):
        tiles, columns, irregular = tilings(spec, DEVICE, [WIDE], [None], spec.at())
        assert dict(zip(spec.proper_sizes, tiles[0], strict=True)) == {"M": 256, "N": n_tile, "K": features.UNTILED}
        assert (columns[:, 0].tolist(), irregular) == ([units], [])


def test_array_extents_follow_the_flags():
    spec = load_kernel("sgemm").spec
    found = features.array_extents(spec, {"TRANS_A": 1, "TRANS_B": 0, "NONDETERMINISTIC": 0})
    assert found == {"A": (3, 2, 0), "B": (3, 2, 1), "C": (3, 0, 1)}
