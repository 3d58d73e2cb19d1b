"""Hyperparameters that are fitted again as trials end."""

from __future__ import annotations

import numpy as np
from optuna.study import StudyDirection

from autotile.search.embedding import Rows
from autotile.search.gaussian_process import Floats
from autotile.search.history import History
from autotile.search.surrogate import STARTUP, Refits, Surrogate, due_fit

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


def refits_of(history: History) -> Refits:
    return Refits(points, GROUPS, history, directions=[StudyDirection.MINIMIZE])


def test_the_newest_fit_is_of_the_trials_that_were_due() -> None:
    for ended in (6, 7, 20, 37, 80):
        assert refits_of(history_of(ended)).newest().trials == due_fit(ended)


def test_a_fit_does_not_depend_on_the_calls() -> None:
    """A search that is rebuilt fits at once what the original fitted trial by trial."""
    late = refits_of(history_of(40)).newest()
    history = History()
    early = refits_of(history)
    whole = history_of(40)
    for index in range(40):
        history.end(history.begin(int(whole.rows(np.array([index]))[0])), tuple(whole.values(40)[index].tolist()))
        if history.ended >= STARTUP:
            used = early.newest()
    assert used.trials == late.trials
    assert np.array_equal(used.parameters.scale, late.parameters.scale)
    assert used.parameters.noise == late.parameters.noise


def test_the_coordinate_that_decides_has_the_shorter_length() -> None:
    scale = refits_of(history_of(60)).newest().parameters.scale
    assert scale[0] > 3 * scale[1]


def test_the_first_fit_has_a_success() -> None:
    assert refits_of(history_of(11, failures=10)).newest().trials == 11


def test_rows_that_are_not_evaluated_any_more_leave_neither_memory_nor_traces() -> None:
    history = history_of(30)
    fit = refits_of(history).newest()

    def surrogate() -> Surrogate:
        return Surrogate(fit, history, directions=[StudyDirection.MINIMIZE], max_first=30)

    used, weights = surrogate(), np.ones(1)
    for first, count in ((0, 30), (40, 30), (20, 10), (60, 20), (70, 30), (10, 30), (0, 20), (50, 50)):
        rows = np.arange(first, first + count)
        used.set_rows(rows)
        found = used.predict(history, weights)
        fresh = surrogate()
        fresh.set_rows(rows)
        expected = fresh.predict(history, weights)
        assert found.rows.tolist() == rows.tolist()
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.deviation, expected.deviation, rtol=1e-3, atol=1e-4)
    assert len(used._process._points) == 50
