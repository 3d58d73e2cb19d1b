"""Flags: problem parameters that are 0 or 1."""

from collections.abc import Mapping

import pytest
from feature_kernels import SPLIT_SPACE
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import device_profile
from autotile.errors import ProblemError, SpecError
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import resolve_problem, size_distance
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
SPEC = parse_spec(SPLIT_SPACE, "split.toml")
MNK = {"M": 33, "N": 17, "K": 70}


def edited(*changes: tuple[str, str]) -> KernelSpec:
    text = SPLIT_SPACE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_spec(text, "split.toml")


def test_flags_stand_behind_the_sizes() -> None:
    assert list(SPEC.sizes) == ["M", "N", "K", "BATCH", "TRANS_A", "TRANS_B", "OUT_FP32"]
    assert SPEC.flags == ("TRANS_A", "TRANS_B", "OUT_FP32")
    assert SPEC.ragged_sizes({**SPEC.sizes, "TRANS_A": 1}) == {
        "M": 45, "N": 37, "K": 67, "BATCH": 3, "TRANS_A": 1, "TRANS_B": 0, "OUT_FP32": 0
    }  # fmt: skip


def test_flags_and_sizes_of_one_may_be_left_out() -> None:
    problem = resolve_problem(SPEC, MNK)
    assert problem.sizes == {**MNK, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}
    assert resolve_problem(SPEC, {**MNK, "TRANS_B": True}).sizes["TRANS_B"] == 1
    assert type(resolve_problem(SPEC, {**MNK, "TRANS_B": True}).sizes["TRANS_B"]) is int
    with pytest.raises(ProblemError, match="needs the size K; give its sizes like M=256 N=192 K=320 BATCH=1 TRANS_A=0"):
        resolve_problem(SPEC, {"M": 33, "N": 17})


@pytest.mark.parametrize(
    ("given_value", "said"),
    [(2, "flag TRANS_A is 2, expected 0 or 1"), (-1, "is -1, expected 0 or 1"), ("1", "is '1', expected 0 or 1")],
)
def test_bad_flags(given_value: object, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        resolve_problem(SPEC, {**MNK, "TRANS_A": given_value})  # type: ignore[dict-item]


def test_shapes_and_types_follow_the_flags() -> None:
    a, _, c = SPEC.buffers
    sizes = resolve_problem(SPEC, {**MNK, "BATCH": 2}).sizes
    assert a.extents(sizes) == (2, 33, 70)
    assert a.extents({**sizes, "TRANS_A": 1}) == (2, 70, 33)
    assert [c.element_type("float16", {**sizes, "OUT_FP32": flag}) for flag in (0, 1)] == ["float16", "float32"]


@pytest.mark.parametrize(
    "text", ["TRANS_A", "not TRANS_B", "TRANS_A == 1", "TRANS_A + 1 > 1", "SPLIT_K > 1 and TRANS_A"]
)
@pytest.mark.parametrize("flags", [{"TRANS_A": a, "TRANS_B": b} for a in (0, 1) for b in (0, 1)])
def test_a_rule_over_flags_means_the_same_for_a_table_and_for_one_row(text: str, flags: Mapping[str, int]) -> None:
    rule = f'flagged = "TILE == 16 or ({text}) or not (TILE < 32 or TRANS_A and {text})"'
    spec = edited(("[launch]", f"{rule}\n[launch]"))
    sizes = {**spec.sizes, **flags}
    whole = feasible_space(SPEC, sizes, H200)
    expected = [
        config for config in map(whole.config, range(len(whole))) if not check_config(spec, config, sizes, H200)
    ]
    found = feasible_space(spec, sizes, H200)
    assert [found.config(row) for row in range(len(found))] == expected


def test_a_flag_may_be_passed_on_as_a_number() -> None:
    spec = edited(("M = { scalar", 'turned = { scalar = "int32", value = "TRANS_A" }\nM = { scalar'))
    (turned,) = (scalar for scalar in spec.scalars if scalar.name == "turned")
    assert [turned.value.evaluate({**spec.sizes, "TRANS_A": flag}) for flag in (0, 1)] == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ("TRANS_A = 0,", "TRANS_A = 2,", "problem.flags.TRANS_A", "whole number from 0 to 1"),
        ("TRANS_A = 0,", "TRANS_A = true,", "problem.flags.TRANS_A", "whole number"),
        ("TRANS_A = 0,", "M = 0,", "problem.flags.M", "already names a size"),
        ("TILE = [8,", "TRANS_A = [8,", "parameters.TRANS_A", "already names a flag"),
        (
            "M = { scalar",
            'TRANS_A = { scalar = "int32", value = "TRANS_A" }\nM = { scalar',
            "arguments.TRANS_A",
            "a flag",
        ),
        ("float32 if OUT_FP32", "floate32 if OUT_FP32", "arguments.C.buffer", "did you mean 'float32'"),
        ("float32 if OUT_FP32", "float32 if M > 1", "arguments.C.buffer", "unknown name 'M'"),
        ("float32 if OUT_FP32", "float32 if OUT_FP32 + 1", "arguments.C.buffer", "is a whole number"),
        ("float32 if OUT_FP32 else dtype", "float32 or dtype", "arguments.C.buffer", "expected a type, or two as in"),
        ("transpose(A) if TRANS_A", "transpose(A) if TURN_A", "reference.outputs.C", "unknown name 'TURN_A'"),
        ("transpose(A) if TRANS_A", "transpose(A) if A", "reference.outputs.C", "unknown name 'A'"),
    ],
)
def test_refusals(old: str, new: str, key: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        edited((old, new))
    assert caught.value.key == key
    assert said in caught.value.problem


class TestDistance:
    def test_flags_count_before_sizes(self) -> None:
        asked = {"M": 1024, "TRANS_A": 0, "TRANS_B": 1}
        assert size_distance(asked, asked) == (0, 0.0)
        assert size_distance({**asked, "M": 4096}, asked) == (0, 2.0)
        assert size_distance({"M": 512, "TRANS_A": 1, "TRANS_B": 0}, asked) == (2, 1.0)

    def test_names_of_one_side_are_passed_over(self) -> None:
        assert size_distance({"M": 8, "L": 1}, {"M": 8, "K": 4}) == (0, 0.0)

    @given(
        st.dictionaries(st.sampled_from("MNK"), st.integers(1, 2**31 - 1)),
        st.dictionaries(st.sampled_from("MNK"), st.integers(1, 2**31 - 1)),
    )
    def test_it_is_the_same_both_ways(self, a: dict[str, int], b: dict[str, int]) -> None:
        flags, doublings = size_distance(a, b)
        assert (flags, doublings) == (0, pytest.approx(size_distance(b, a)[1]))
        assert doublings >= 0
