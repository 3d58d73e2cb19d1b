"""Families of problems: parsing, membership, serialization, and the selection of points."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_gpu import SPEC

from autotile.errors import ProblemError
from autotile.families.family import Extent, Family, family_of, parse_family, sample_members, select_points
from autotile.kernel.library import load_kernel

WIDE = ["M=1..8192", "N=128..8192", "K=4096,7168"]
ends = st.integers(1, 2**31 - 1)
extents = st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=4)


class TestParsing:
    def test_values_ranges_and_lists(self) -> None:
        family = parse_family(SPEC, ["M=1..8192", "N=4096", "K=7168,4096"])
        assert str(family) == "M=1..8192 N=4096 K=4096,7168"
        assert {"M": 1999, "N": 4096, "K": 7168} in family
        for outside in ({"M": 8193, "N": 4096, "K": 7168}, {"M": 1, "N": 4096, "K": 5000}, {"M": 1, "N": 4096}):
            assert outside not in family
        assert family.largest == {"M": 8192, "N": 4096, "K": 7168}

    @given(st.tuples(extents, extents, extents))
    def test_what_is_typed_is_what_is_read(self, parts: tuple[list[list[int]], ...]) -> None:
        typed = [",".join(f"{a}..{b}" if a != b else str(a) for a, b in each) for each in parts]
        family = parse_family(SPEC, [f"{name}={text}" for name, text in zip("MNK", typed, strict=True)])
        assert parse_family(SPEC, str(family).split()) == family
        assert Family.from_json(family.to_json()) == family
        for name, each in zip("MNK", parts, strict=True):
            assert all(end in family.extents[name] for part in each for end in part)

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["M=1..10,5..20,7", "N=3,3", "K=4,5"], "M=1..20 N=3 K=4,5"),  # overlapping parts are one
            (["M=1..8", "N=1"], "M=1..8 N=1 K=4096"),  # those that are left out are those of the file
        ],
    )
    def test_a_family_as_text(self, words: list[str], text: str) -> None:
        assert str(parse_family(SPEC, words)) == text

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
            (["M=1..9999999999", "N=1", "K=1"], "out of bounds"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, words: list[str], said: str) -> None:
        with pytest.raises(ProblemError, match=said):
            parse_family(SPEC, words)

    def test_a_program_gives_numbers_lists_ranges_and_text(self) -> None:
        family = family_of(SPEC, {"M": range(1, 8193), "N": 4096, "K": [4096, 7168]})
        assert family == family_of(SPEC, {"M": "1..8192", "N": "4096", "K": (7168, 4096)})
        with pytest.raises(ProblemError, match="step 1"):
            family_of(SPEC, {"M": range(0, 10, 2), "N": 1, "K": 1})


def test_flags_and_sizes_of_one_may_be_left_out() -> None:
    spec = load_kernel("gemm_wgmma").spec
    family = parse_family(spec, ["M=64..128", "N=64", "K=64"])
    assert all(family.extents[name] == Extent(((spec.sizes[name],) * 2,)) for name in spec.flags)
    both = parse_family(spec, ["M=64..128", "N=64", "K=64", "TRANS_A=0,1"])
    assert both.extents["TRANS_A"].ends == (0, 1)
    with pytest.raises(ProblemError, match="expected values from 0 to 1"):
        parse_family(spec, ["M=64", "N=64", "K=64", "TRANS_A=2"])


@pytest.mark.parametrize("data", [{"M": [[2, 1]]}, {"M": [[1]]}, {"M": [["1", "2"]]}, {"M": [[-1, 2]]}])
def test_a_damaged_family_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Family.from_json(data)


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
