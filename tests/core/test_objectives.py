from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.model import (
    OBJECTIVES,
    Measurement,
    Outcome,
    Resources,
    Trial,
    non_dominated,
    normalize_objectives,
    objective_values,
)
from autotile.errors import InputError

TRIAL = Trial(
    {"BM": 64},
    Outcome.OK,
    resources=Resources(40, 0, 0, 0, 0),
    measurement=Measurement(10.0, 9.9, 10.1),
    telemetry={"energy_mj": 3.5, "max_error": 0, "power_w": 300},
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ("time",)),
        (["time"], ("time",)),
        (["registers"], ("time", "registers")),
        (["error", " energy", "time", "error"], ("time", "error", "energy")),
    ],
)
def test_time_is_always_the_first(given: list[str], meant: tuple[str, ...]) -> None:
    assert normalize_objectives(given) == meant


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"no objective 'register'.*registers.*known: time, registers, energy, error"):
        normalize_objectives(["time", "register"])


def test_values_come_in_the_order_asked_for() -> None:
    assert objective_values(TRIAL, list(OBJECTIVES)) == (10.0, 40, 3.5, 0.0)
    assert objective_values(TRIAL, ["error", "time"]) == (0.0, 10.0)


def test_what_lacks_one_has_none() -> None:
    assert objective_values(Trial({}, Outcome.OK, measurement=TRIAL.measurement), ["time", "energy"]) is None
    assert objective_values(Trial({}, Outcome.OK, measurement=TRIAL.measurement), ["time", "registers"]) is None
    assert objective_values(Trial({}, Outcome.CRASHED, resources=TRIAL.resources), ["registers"]) is None


POINTS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5), min_size=width, max_size=width), min_size=1, max_size=40)
)


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(POINTS)
@settings(deadline=None, max_examples=200)
def test_a_point_is_kept_where_no_other_dominates_it(points: list[list[int]]) -> None:
    values = np.array(points)
    expected = [not any(dominates(other, point) for other in values) for point in values]
    assert non_dominated(points).tolist() == expected


@given(POINTS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_the_points_is_of_no_effect(points: list[list[int]], random: object) -> None:
    order = list(range(len(points)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert non_dominated([points[i] for i in order]).tolist() == non_dominated(points)[order].tolist()


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([[1, 2], [1, 2], [2, 1], [2, 2]], [True, True, True, False]),  # equal points stay together
        ([[3.0], [1.0], [2.0], [1.0]], [False, True, False, True]),
        (np.zeros((0, 1)), []),
        (np.zeros((0, 3)), []),
    ],
)
def test_points_that_are_kept(points: Any, kept: list[bool]) -> None:
    assert non_dominated(points).tolist() == kept


def test_ten_thousand_points_on_the_front_are_quick() -> None:
    rising = np.arange(10_000.0)
    assert non_dominated(np.stack([rising, -rising], axis=1)).all()
