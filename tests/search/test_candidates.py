from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import make_space, spaces

from autotile.search.gaussian_process import positions
from autotile.search.row_sampler import Candidates
from autotile.space.search_space import SearchSpace


@settings(deadline=None, max_examples=50)
@given(spaces(), st.randoms(use_true_random=False))
def test_codes_lead_to_their_row_exactly_when_it_is_free(space: SearchSpace, random) -> None:
    candidates = Candidates(space)
    for row in random.sample(range(len(space)), len(space) // 2):
        candidates.take(row)
    grid = np.array(list(product(*(range(len(each.values)) for each in space.parameters))))
    found = candidates.free_rows_of(grid)
    for codes, row in zip(grid, found, strict=True):
        config = {each.name: each.values[code] for each, code in zip(space.parameters, codes, strict=True)}
        expected = space.row_of(config)
        assert row == (-1 if expected is None or not candidates.free[expected] else expected)
    assert candidates.remaining == np.count_nonzero(candidates.free) == len(space) - len(space) // 2


def test_only_available_rows_count() -> None:
    space = make_space({"A": (1, 2, 3)})
    candidates = Candidates(space, [False, True, True])
    candidates.take(0)
    candidates.take(2)
    candidates.take(2)
    assert candidates.remaining == 1
    assert candidates.uniform(np.random.default_rng(0)) == 1


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        Candidates(make_space({"A": (1, 2, 3)}), [True, True])


def test_a_doubling_is_one_step_and_a_name_differs_or_not() -> None:
    space = make_space({"A": (8, 16, 32, 64, 128), "B": ("x", "y")})
    candidates = Candidates(space)
    rng = np.random.default_rng(0)
    wanted = {"A": 32, "B": "x"}
    order = []
    while candidates.remaining:
        row = candidates.nearest(space.codes[space.row_of(wanted)].astype(np.int64), rng)
        order.append(space.config(row))
        candidates.take(row)
    assert order[0] == wanted
    assert {config["A"] for config in order[1:3]} == {16, 64}
    assert {config["A"] for config in order[3:5]} == {8, 128}
    assert [config["B"] for config in order] == ["x"] * 5 + ["y"] * 5
    assert order[5] == {"A": 32, "B": "y"}


def test_ties_are_broken_by_the_generator_alone() -> None:
    space = make_space({"A": (1, 2, 4), "B": (1, 2, 4)}, lambda c: c != {"A": 2, "B": 2})
    centre = np.array([1, 1])

    def nearest(seed: int) -> int:
        return Candidates(space).nearest(centre, np.random.default_rng(seed))

    chosen = [nearest(seed) for seed in range(40)]
    assert chosen == [nearest(seed) for seed in range(40)]
    assert {tuple(space.config(row).values()) for row in chosen} == {(1, 2), (2, 1), (2, 4), (4, 2)}


def test_values_have_places_only_where_they_are_numbers() -> None:
    assert positions((64, 16, 32)).tolist() == [2, 0, 1]
    assert positions((False, True)) is None
    assert positions(("1", "2")) is None
