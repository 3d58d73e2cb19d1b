import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.model import non_dominated

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


def test_equal_points_stay_together() -> None:
    assert non_dominated([[1, 2], [1, 2], [2, 1], [2, 2]]).tolist() == [True, True, True, False]


def test_one_objective_keeps_the_least() -> None:
    assert non_dominated([[3.0], [1.0], [2.0], [1.0]]).tolist() == [False, True, False, True]


@pytest.mark.parametrize("width", [1, 3])
def test_of_no_points_none_is_kept(width: int) -> None:
    assert non_dominated(np.zeros((0, width))).tolist() == []


def test_ten_thousand_points_on_the_front_are_quick() -> None:
    rising = np.arange(10_000.0)
    assert non_dominated(np.stack([rising, -rising], axis=1)).all()
