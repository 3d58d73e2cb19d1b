"""Selection of the points of a family."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_gpu import SPEC

from autotile.errors import ProblemError
from autotile.families.family import parse_family, sample_members, select_points

WIDE = ["M=1..8192", "N=128..8192", "K=4096,7168"]


class TestSelectPoints:
    def test_ends_and_listed_values_are_covered(self) -> None:
        family = parse_family(SPEC, WIDE)
        points = select_points(family, 4)
        for name, extent in family.extents.items():
            assert set(extent.ends) <= {point[name] for point in points}

    def test_they_are_spread_over_the_logarithms(self) -> None:
        points = select_points(parse_family(SPEC, ["M=1..8192", "N=4096", "K=4096"]), 14)
        places = np.sort([math.log2(point["M"]) for point in points])
        assert np.diff(places).max() <= 2.0  # 13 octaves, 14 points

    def test_round_and_ragged_sizes_are_among_them(self) -> None:
        points = select_points(parse_family(SPEC, ["M=256..8192", "N=256..8192", "K=256..8192"]), 24)
        for name in "MNK":
            assert any(point[name] % 2 for point in points)
            assert any(point[name] % 64 == 0 for point in points)

    @settings(max_examples=8, deadline=None)
    @given(st.integers(1, 5000), st.integers(0, 5000), st.integers(2, 20))
    def test_they_are_members_each_once_and_the_same_every_time(self, low: int, more: int, count: int) -> None:
        family = parse_family(SPEC, [f"M={low}..{low + more}", "N=64,4096", "K=512"])
        points = select_points(family, count)
        assert all(point in family for point in points)
        assert len({tuple(point.values()) for point in points}) == len(points) <= count
        assert points == select_points(family, count)

    def test_a_small_family_is_taken_whole(self) -> None:
        family = parse_family(SPEC, ["M=1,2,3", "N=4..6", "K=3"])
        assert len(select_points(family, 24)) == 9

    def test_impossible_problems_are_not_chosen(self) -> None:
        family = parse_family(SPEC, WIDE)
        points = select_points(family, 10, lambda sizes: sizes["M"] % 8 == 0)
        assert len(points) == 10
        assert all(point["M"] % 8 == 0 for point in points)
        with pytest.raises(ProblemError, match="no valid configuration"):
            select_points(family, 10, lambda _: False)

    def test_too_few_points_are_refused(self) -> None:
        with pytest.raises(ProblemError, match=r"3 points cannot cover K=1,2,3,4: expected at least 4"):
            select_points(parse_family(SPEC, ["M=1", "N=1", "K=1,2,3,4"]), 3)


def test_members_fill_the_family() -> None:
    family = parse_family(SPEC, WIDE)
    members = sample_members(family)
    assert len(members) > 1000
    assert all(member in family for member in members)
    octaves = {int(math.log2(member["M"])) for member in members}
    assert octaves == set(range(14))
