"""Corrections by the nearest measured problems."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.errors import DataError
from autotile.families.network import MAX_POINTS, Neighbours, _smallest


def measured(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, two sizes and a flag, and errors with a step at a size of 8 doublings for flag 1."""
    random = np.random.default_rng(seed)
    inputs = np.c_[random.uniform(0, 16, (count, 2)), random.integers(0, 2, count)].astype(np.float32)
    return inputs, np.where((inputs[:, 2] > 0.5) & (inputs[:, 0] > 8), 1.5, -0.25)


def test_a_step_that_the_prediction_missed_is_found() -> None:
    inputs, errors = measured()
    found = Neighbours.fit(inputs, errors, np.zeros(400, np.int64), 2)
    assert found.look_up(np.array([13, 5, 1], np.float32), 0)[0] == pytest.approx(1.5, abs=0.3)
    assert found.look_up(np.array([3, 5, 1], np.float32), 0)[0] == pytest.approx(-0.25, abs=0.3)


def test_the_deviation_is_large_where_the_nearest_errors_differ() -> None:
    inputs, errors = measured(4000)
    found = Neighbours.fit(inputs, errors, np.zeros(4000, np.int64), 2)
    at_the_step = found.look_up(np.array([8, 5, 1], np.float32), 0)[1]
    assert at_the_step > 0.4 > found.look_up(np.array([14, 5, 1], np.float32), 0)[1]


def test_each_item_has_errors_of_its_own() -> None:
    inputs, errors = measured()
    items = np.arange(400) % 2
    found = Neighbours.fit(inputs, np.where(items == 1, 3.0, errors), items, 2)
    assert found.look_up(np.array([3, 5, 0], np.float32), 1) == pytest.approx((3.0, 0.0))
    assert found.look_up(np.array([3, 5, 0], np.float32), 7) == (0.0, 1.0)


def test_a_long_list_is_thinned_out() -> None:
    inputs, errors = measured(MAX_POINTS + 5)
    assert len(Neighbours.fit(inputs, errors, np.zeros(len(errors), np.int64), 2).points) <= MAX_POINTS


@given(st.integers(300, 400), st.integers(0, 99), st.floats(2, 14), st.floats(2, 14))
def test_the_nearest_of_all_decide(count: int, seed: int, first: float, second: float) -> None:
    inputs, _ = measured(count, seed)
    errors = np.random.default_rng(seed).uniform(-1, 1, count)
    place = np.array([first, second, 1], np.float32)
    weights = np.array([1.0, 1.0, 0.7 if np.ptp(inputs[:, 2]) > 0 else 0.0])
    points = (inputs * weights).astype(np.float16).astype(float)
    distances = np.square(points - place * weights).sum(axis=1)
    nearest = distances.argsort()[:8]
    share = 1 / (distances[nearest] + 0.05)
    expected = (share * errors.astype(np.float16)[nearest]).sum() / share.sum()
    found = Neighbours.fit(inputs, errors, np.zeros(count, np.int64), 2)
    assert found.look_up(place, 0)[0] == pytest.approx(expected, abs=0.02)


@given(st.integers(1, 30), st.integers(0, 5))
def test_it_survives_its_file(count: int, seed: int) -> None:
    inputs, errors = measured(count, seed)
    one = Neighbours.fit(inputs, errors, np.zeros(count, np.int64), 2)
    other = Neighbours.from_json(json.loads(json.dumps(one.to_json())))
    place = np.array([4, 4, 0], np.float32)
    assert other.look_up(place, 0) == one.look_up(place, 0)


@pytest.mark.parametrize("change", [{"count": 3}, {"width": 0}, {"errors": "?"}, {"points": "AAAA"}, {"weights": None}])
def test_a_damaged_file_is_refused(change: dict[str, object]) -> None:
    inputs, errors = measured(20)
    document = Neighbours.fit(inputs, errors, np.zeros(20, np.int64), 2).to_json()
    with pytest.raises(DataError):
        Neighbours.from_json({**document, **change})


@given(st.integers(1, 600), st.integers(0, 99))
def test_the_nearest_are_found(count: int, seed: int) -> None:
    values = np.random.default_rng(seed).permutation(count).astype(np.float32)
    assert sorted(values[_smallest(values)]) == list(range(min(count, 8)))
