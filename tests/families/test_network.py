"""Networks of regression, and their corrections by the nearest measured problems."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotile.core.documents import decode_json, encode_json
from autotile.errors import DataError
from autotile.families.network import MAX_POINTS, Ensemble, Inputs, Neighbours, _smallest

ITEMS = 4
OFFSETS = np.array([0.0, 0.5, -0.5, 1.0])


def _rows(count: int, seed: int) -> tuple[Inputs, NDArray[np.float64]]:
    """Return rows of a function with a kink, in which each item has an offset that its inputs do not tell."""
    random = np.random.default_rng(seed)
    problem, pair = random.uniform(0, 10, (count, 2)), random.uniform(0, 5, (count, 1))
    number = random.integers(0, ITEMS, count)
    targets = np.maximum(problem[:, 0], problem[:, 1]) + 0.5 * pair[:, 0] + OFFSETS[number]
    item = np.zeros((count, 1), np.float32)
    return Inputs(problem.astype(np.float32), item, pair.astype(np.float32), number), targets


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    inputs, targets = _rows(2000, 0)
    return Ensemble.fit(inputs, targets, np.ones(2000), ITEMS, epochs=30, hidden=(16, 8))


def test_it_learns_a_function_with_a_kink_and_the_offsets_of_items(ensemble: Ensemble) -> None:
    inputs, targets = _rows(500, 1)
    mean, spread = ensemble.predict(inputs)
    assert np.sqrt(np.mean((mean - targets) ** 2)) < 0.3
    assert (spread >= 0).all()


def test_equal_rows_give_equal_networks() -> None:
    inputs, targets = _rows(200, 0)
    fits = [Ensemble.fit(inputs, targets, np.ones(200), ITEMS, epochs=2, hidden=(4, 4)) for _ in range(2)]
    assert all(np.array_equal(fits[0].arrays[name], fits[1].arrays[name]) for name in fits[0].arrays)


def test_preparing_the_items_of_one_problem_changes_nothing(ensemble: Ensemble) -> None:
    inputs, _ = _rows(ITEMS, 2)
    inputs = inputs._replace(problem=np.repeat(inputs.problem[:1], ITEMS, axis=0), number=np.arange(ITEMS))
    prepared = ensemble.prepare(inputs.number, inputs.item)
    np.testing.assert_allclose(
        prepared.predict(inputs.problem[0], inputs.pair.T)[0], ensemble.predict(inputs)[0], rtol=1e-5
    )


def test_many_items_are_predicted_as_few(ensemble: Ensemble) -> None:
    inputs, _ = _rows(700, 4)
    problem = inputs.problem[0]
    prepared = ensemble.prepare(inputs.number, inputs.item)
    for first in (0, 200, 690):
        part = slice(first, first + 10)
        few = ensemble.prepare(inputs.number[part], inputs.item[part])
        for rows, together in ((inputs.problem.T, inputs.problem[part].T), (problem, problem)):
            for all_values, values in zip(
                prepared.predict(rows, inputs.pair.T), few.predict(together, inputs.pair[part].T), strict=True
            ):
                np.testing.assert_allclose(all_values[part], values, rtol=1e-5, atol=1e-5)


def test_an_input_that_never_varied_is_ignored(ensemble: Ensemble) -> None:
    inputs, _ = _rows(50, 3)
    other = inputs._replace(item=inputs.item + 1000)
    assert np.array_equal(ensemble.predict(inputs)[0], ensemble.predict(other)[0])


def test_some_of_the_items_are_predicted_as_before(ensemble: Ensemble) -> None:
    inputs, _ = _rows(50, 3)
    chosen = inputs.rows(np.flatnonzero(inputs.number == 2))
    part = ensemble.only([3, 2]).predict(chosen._replace(number=np.ones(len(chosen.number), np.int64)))
    np.testing.assert_allclose(part[0], ensemble.predict(chosen)[0], rtol=1e-6)


def test_json_round_trip(ensemble: Ensemble) -> None:
    again = Ensemble.from_json(decode_json(encode_json(ensemble.to_json()), dict))
    assert all(np.array_equal(ensemble.arrays[name], again.arrays[name]) for name in ensemble.arrays)


@pytest.mark.parametrize(
    "change",
    [
        {"members": 3},
        {"items": 10**9},
        {"first": -1},
        {"arrays": {}},
        {"members": 16, "first": 1024, "second": 1024, "items": 1024},
    ],
)
def test_damaged_networks_are_refused(ensemble: Ensemble, change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        Ensemble.from_json({**ensemble.to_json(), **change})


@pytest.mark.parametrize("text", ["", "AAAA", "!", "AACAfw=="])
def test_damaged_weights_are_refused(ensemble: Ensemble, text: str) -> None:
    document = ensemble.to_json()
    with pytest.raises(DataError, match="out"):
        Ensemble.from_json({**document, "arrays": {**document["arrays"], "out": text}})


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
