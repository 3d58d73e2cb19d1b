from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autotile.core.documents import decode_json, encode_json
from autotile.errors import DataError
from autotile.families.network import Ensemble, Inputs

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
