"""Losses of the results of a study."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from autotile.search.surrogate import losses, result_of

DOWN, UP = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE
ONE = np.ones(1)


def test_slow_trials_are_crowded_and_fast_ones_spread() -> None:
    loss = losses([(1.0,), (2.0,), (10.0,), (20.0,)], [DOWN], ONE)
    assert (np.diff(loss) > 0).all()
    assert loss[1] - loss[0] > 5 * (loss[3] - loss[2])


@pytest.mark.parametrize("values", [(1.0, 5.0, 3.0), (-1.0, 4.0, 0.0)])
def test_the_direction_turns_the_order(values: tuple[float, ...]) -> None:
    results = [(value,) for value in values]
    assert np.argsort(losses(results, [DOWN], ONE)).tolist() == [0, 2, 1]
    assert np.argsort(losses(results, [UP], ONE)).tolist() == [1, 2, 0]


def test_a_failure_is_bad_and_counts_neither_for_mean_nor_spread() -> None:
    results = [(1.0,), None, (2.0,), (4.0,), None]
    loss = losses(results, [DOWN], ONE)
    worked = loss[[0, 2, 3]]
    assert worked.mean() == pytest.approx(0, abs=1e-12)
    assert worked.std() == pytest.approx(1)
    assert loss[1] == loss[4]
    assert np.median(worked) < loss[1] < worked.max()


def test_equal_results_are_no_difficulty() -> None:
    assert losses([(3.0,)] * 4, [DOWN], ONE).tolist() == [0.0] * 4
    assert losses([(0.0,)] * 4, [DOWN], ONE).tolist() == [0.0] * 4


def test_weights_choose_between_objectives() -> None:
    results = [(1.0, 9.0), (5.0, 5.0), (9.0, 1.0)]
    assert losses(results, [DOWN, DOWN], np.array([0.99, 0.01])).argmin() == 0
    assert losses(results, [DOWN, DOWN], np.array([0.01, 0.99])).argmin() == 2
    assert losses(results, [UP, DOWN], np.array([0.5, 0.5])).argmin() == 2


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_that_violates_a_constraint_or_was_pruned_failed() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert result_of(create_trial(value=2.0)) == (2.0,)
    assert result_of(create_trial(value=2.0, constraints={"failed": 0.0})) == (2.0,)
    assert result_of(create_trial(value=2.0, constraints={"failed": 1.0})) is None
    assert result_of(create_trial(value=float("inf"))) is None
    assert result_of(create_trial(state=TrialState.PRUNED)) is None
