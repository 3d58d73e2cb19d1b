"""Hyperparameters that are fitted again as trials end."""

from __future__ import annotations

import numpy as np
import pytest
from optuna.study import StudyDirection

from autotile.search.gaussian_process import Floats, Rows
from autotile.search.gp_sampler import STARTUP, History, Surrogate, due_fit

GROUPS = np.array([0, 1])


def points(rows: Rows) -> Floats:
    return np.stack([rows % 10 / 10, rows // 10 / 10], axis=1)


def history_of(ended: int, *, failures: int = 0) -> History:
    rng = np.random.default_rng(1)
    history = History()
    for number, row in enumerate(rng.permutation(100)[:ended].tolist()):
        time_us = 1 + (row % 10 - 4) ** 2 + rng.uniform(0, 0.1)
        history.end(history.begin(row), None if number < failures else (time_us,))
    return history


def surrogate_of(history: History) -> Surrogate:
    found = Surrogate(points, GROUPS, history, directions=[StudyDirection.MINIMIZE], max_first=30)
    found.update()
    return found


@pytest.mark.parametrize("ended", [6, 7, 20, 37, 80])
def test_the_newest_fit_is_of_the_trials_that_were_due(ended: int) -> None:
    surrogate = surrogate_of(history_of(ended))
    assert surrogate.fitted == due_fit(ended)
    assert not surrogate.update()


def test_a_fit_does_not_depend_on_the_calls() -> None:
    """A search that is rebuilt fits at once what the original fitted trial by trial."""
    whole = history_of(40)
    late, history = surrogate_of(whole), History()
    early = Surrogate(points, GROUPS, history, directions=[StudyDirection.MINIMIZE], max_first=30)
    for index in range(40):
        history.end(history.begin(int(whole.rows(np.array([index]))[0])), tuple(whole.values(40)[index].tolist()))
        if history.ended >= STARTUP:
            early.update()
    assert early.fitted == late.fitted
    assert np.array_equal(early.parameters.scale, late.parameters.scale)
    assert early.parameters.noise == late.parameters.noise


def test_the_coordinate_that_decides_has_the_shorter_length() -> None:
    scale = surrogate_of(history_of(60)).parameters.scale
    assert scale[0] > 3 * scale[1]


def test_the_first_fit_has_a_success() -> None:
    assert surrogate_of(history_of(11, failures=10)).fitted == 11


def test_rows_that_are_not_evaluated_any_more_leave_neither_memory_nor_traces() -> None:
    history = history_of(30)
    used, weights = surrogate_of(history), np.ones(1)
    for first, count in ((0, 30), (40, 30), (20, 10), (60, 20), (70, 30), (10, 30), (0, 20), (50, 50)):
        rows = np.arange(first, first + count)
        used.set_rows(rows)
        found = used.predict(weights)
        fresh = surrogate_of(history)
        fresh.set_rows(rows)
        expected = fresh.predict(weights)
        assert found.rows.tolist() == rows.tolist()
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.deviation, expected.deviation, rtol=1e-3, atol=1e-4)
    assert len(used._process._points) == 50
