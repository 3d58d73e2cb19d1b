"""Hyperparameters that are fitted again as trials end."""

from __future__ import annotations

import numpy as np
from optuna.study import StudyDirection

from autotile.search.gaussian_process import Floats, Hyperparameters
from autotile.search.history import History
from autotile.search.refits import FIT_LAG, Refits, due_fit
from autotile.search.row_sampler import Rows

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


def test_the_medians_of_the_priors_are_used_before_the_first_fit() -> None:
    usual = Hyperparameters.usual(GROUPS)
    for ended in (6, 7):
        fit = refits_of(history_of(ended)).usable()
        assert fit.trials == 6
        assert np.array_equal(fit.parameters.scale, usual.scale)
    fitted = refits_of(history_of(8)).usable()
    assert fitted.trials == 6
    assert not np.array_equal(fitted.parameters.scale, usual.scale)


def test_a_fit_is_used_by_a_later_trial_than_the_one_that_made_it_due() -> None:
    for ended in (20, 37, 80):
        assert refits_of(history_of(ended)).usable().trials == due_fit(ended - FIT_LAG)


def test_a_fit_does_not_depend_on_the_calls() -> None:
    """A search that is rebuilt fits at once what the original fitted trial by trial, or ahead of time."""
    late = refits_of(history_of(40)).usable()
    history = History()
    early = refits_of(history)
    whole = history_of(40)
    for index in range(40):
        history.end(history.begin(int(whole.rows(np.array([index]))[0])), tuple(whole.values(40)[index].tolist()))
        early.prepare()
    used = early.usable()
    assert used.trials == late.trials
    assert np.array_equal(used.parameters.scale, late.parameters.scale)
    assert used.parameters.noise == late.parameters.noise


def test_the_coordinate_that_decides_has_the_shorter_length() -> None:
    scale = refits_of(history_of(60)).usable().parameters.scale
    assert scale[0] > 3 * scale[1]


def test_nothing_is_fitted_before_a_success() -> None:
    refits = refits_of(history_of(10, failures=10))
    refits.prepare()
    history = history_of(12, failures=10)
    assert refits_of(history).usable().trials == 11
