"""Distances between configurations by their coordinates."""

from __future__ import annotations

import numpy as np
import pytest

from autotile.core.model import Value
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import Embedding


def coordinates(*values: Value) -> tuple[np.ndarray, np.ndarray]:
    embedding = Embedding([Parameter("A", values)])
    return embedding.of(np.arange(len(values))[:, None]), embedding.groups


def test_a_doubling_is_the_same_step_anywhere() -> None:
    points, groups = coordinates(8, 16, 32, 64)
    assert points[:, 0] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert groups.tolist() == [0]


def test_the_order_of_the_values_does_not_matter() -> None:
    points, _ = coordinates(64, 8, 32, 16)
    assert points[:, 0] == pytest.approx([1, 0, 2 / 3, 1 / 3])


def test_alignment_is_a_coordinate_of_its_own() -> None:
    points, groups = coordinates(16, 48, 64, 80, 96)
    assert points[:, 1] == pytest.approx([0, 0, 1, 0, 0.5])  # 16 divides all; 32 divides 96, 64 divides 64
    assert groups.tolist() == [0, 1]


def test_odd_numbers_alone_have_no_alignment() -> None:
    assert coordinates(1, 3, 5)[0].shape == (3, 1)


@pytest.mark.parametrize("values", [("row", "column", "tiled"), (0, 1, 2), (2, 0, 1), (True, False, "auto")])
def test_choices_are_equally_far_apart(values: tuple[Value, ...]) -> None:
    points, groups = coordinates(*values)
    distances = np.square(points[:, None] - points[None]).sum(axis=2)
    assert distances == pytest.approx(1 - np.eye(3))
    assert groups.tolist() == [0, 0, 0]


@pytest.mark.parametrize("values", [(False, True), ("a", "b"), (7, 300)])
def test_two_values_are_one_coordinate(values: tuple[Value, ...]) -> None:
    assert coordinates(*values)[0].tolist() == [[0.0], [1.0]]


def test_numbers_that_are_not_positive_go_by_their_order() -> None:
    assert coordinates(-1, 0, 4, 100)[0][:, 0] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_single_value_tells_nothing() -> None:
    embedding = Embedding([Parameter("A", (5,)), Parameter("B", (1, 2, 4))])
    assert embedding.of(np.array([[0, 2], [0, 0]])).tolist() == [[1.0], [0.0]]
    assert Embedding([Parameter("A", (5,))]).of(np.zeros((3, 1), np.int64)).shape == (3, 0)


def test_products_of_two_share_one_scale() -> None:
    """The last group's distance is that of the products of any two sizes, whatever their number."""
    sizes = [(1, 2, 4, 8), (16, 32, 64), (2, 4, 8, 16, 32)]
    embedding = Embedding([*(Parameter(f"P{i}", each) for i, each in enumerate(sizes)), Parameter("B", (False, True))])
    assert embedding.groups.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    codes = np.array([[0, 2, 4, 1], [3, 0, 1, 0]])
    logarithms = np.stack([np.log2(each)[codes[:, i]] for i, each in enumerate(sizes)], axis=1)
    away = np.diff(logarithms, axis=0)[0]
    products = sum((away[i] + away[k]) ** 2 for i in range(3) for k in range(i))
    found = np.diff(embedding.of(codes)[:, 4:], axis=0)[0]
    assert np.square(found).sum() == pytest.approx(products / 6**2)  # a sum of two spans 6 octaves on average
    assert embedding.of_each(codes).shape == (2, 4)
