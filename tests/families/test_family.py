"""Families of problems: parsing, membership, serialization."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_gpu import SPEC

from autotile.errors import ProblemError
from autotile.families.family import Extent, Family, family_of, parse_family
from autotile.kernel.library import load_kernel

ends = st.integers(1, 2**31 - 1)
extents = st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=4)


def typed(parts: list[list[int]]) -> str:
    return ",".join(f"{low}..{high}" if low != high else str(low) for low, high in parts)


class TestParsing:
    def test_values_ranges_and_lists(self) -> None:
        family = parse_family(SPEC, ["M=1..8192", "N=4096", "K=7168,4096"])
        assert str(family) == "M=1..8192 N=4096 K=4096,7168"
        assert {"M": 1999, "N": 4096, "K": 7168} in family
        assert {"M": 8193, "N": 4096, "K": 7168} not in family
        assert {"M": 1, "N": 4096, "K": 5000} not in family
        assert {"M": 1, "N": 4096} not in family
        assert family.largest == {"M": 8192, "N": 4096, "K": 7168}

    @given(st.tuples(extents, extents, extents))
    def test_what_is_typed_is_what_is_read(self, parts: tuple[list[list[int]], ...]) -> None:
        words = [f"{name}={typed(each)}" for name, each in zip("MNK", parts, strict=True)]
        family = parse_family(SPEC, words)
        assert parse_family(SPEC, str(family).split()) == family
        assert Family.from_json(family.to_json()) == family
        for name, each in zip("MNK", parts, strict=True):
            assert all(end in family.extents[name] for part in each for end in part)

    def test_overlapping_parts_are_one(self) -> None:
        assert str(parse_family(SPEC, ["M=1..10,5..20,7", "N=3,3", "K=4,5"])) == "M=1..20 N=3 K=4,5"

    def test_sizes_that_are_left_out_are_those_of_the_file(self) -> None:
        assert str(parse_family(SPEC, ["M=1..8", "N=1"])) == "M=1..8 N=1 K=4096"

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
