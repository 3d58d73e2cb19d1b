"""Losses of the results of a study."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from autotile.search.gp_sampler import History, losses, result_of

DOWN, UP = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE
ONE = np.ones(1)


def test_slow_trials_are_crowded_and_fast_ones_spread() -> None:
    loss = losses(np.array([[1.0], [2.0], [10.0], [20.0]]), [DOWN], ONE)
    assert (np.diff(loss) > 0).all()
    assert loss[1] - loss[0] > 5 * (loss[3] - loss[2])


@pytest.mark.parametrize("values", [(1.0, 5.0, 3.0), (-1.0, 4.0, 0.0)])
def test_the_direction_turns_the_order(values: tuple[float, ...]) -> None:
    results = np.array(values)[:, None]
    assert np.argsort(losses(results, [DOWN], ONE)).tolist() == [0, 2, 1]
    assert np.argsort(losses(results, [UP], ONE)).tolist() == [1, 2, 0]


def test_a_failure_is_bad_and_counts_neither_for_mean_nor_spread() -> None:
    results = np.array([[1.0], [np.nan], [2.0], [4.0], [np.nan]])
    loss = losses(results, [DOWN], ONE)
    worked = loss[[0, 2, 3]]
    assert worked.mean() == pytest.approx(0, abs=1e-12)
    assert worked.std() == pytest.approx(1)
    assert loss[1] == loss[4]
    assert np.median(worked) < loss[1] < worked.max()


def test_equal_results_are_no_difficulty() -> None:
    assert losses(np.full((4, 1), 3.0), [DOWN], ONE).tolist() == [0.0] * 4
    assert losses(np.zeros((4, 1)), [DOWN], ONE).tolist() == [0.0] * 4


def test_weights_choose_between_objectives() -> None:
    results = np.array([(1.0, 9.0), (5.0, 5.0), (9.0, 1.0)])
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


def test_a_history_holds_trials_in_the_order_in_which_they_ended() -> None:
    history = History()
    indices = [history.begin(row) for row in range(100, 200)]
    assert indices == list(range(100))
    history.end(3, None)
    history.end(1, None)
    assert (history.begun, history.ended, history.first_success) == (100, 2, 2)
    history.end(70, (2.0, 5.0), 0.1)
    history.end(0, (1.0, 6.0))
    assert history.first_success == 2
    assert history.first_ended(3).tolist() == [3, 1, 70]
    assert history.rows(history.first_ended(10)).tolist() == [103, 101, 170, 100]
    assert np.array_equal(
        history.values(9), [[np.nan, np.nan], [np.nan, np.nan], [2.0, 5.0], [1.0, 6.0]], equal_nan=True
    )


def test_the_noise_of_a_loss_follows_from_the_error_of_its_time() -> None:
    history = History()
    for index, (time_us, error) in enumerate([(1.0, 0.0), (2.0, 0.1), (4.0, 0.1)]):
        history.end(history.begin(index), (time_us,), error)
    noise = history.noise(3, [DOWN])
    assert noise[0] == 0
    assert noise[1] == pytest.approx(4 * noise[2])
    deviation = np.std([1, 1 / 2, 1 / 4])
    assert noise[1] == pytest.approx((0.1 / 2 / deviation) ** 2)
