"""The default sampler: losses, fits as trials end, results, robustness and repeatability."""

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial
from rows import advance, make_space, study_of, tile_space, tile_time_us, wide_ok, wide_space, wide_time_us

from autotile.core.model import Config
from autotile.search.gaussian_process import Floats, Rows
from autotile.search.gp_sampler import STARTUP, FeasibleGPSampler, History, Surrogate, due_fit, losses, result_of
from autotile.search.row_sampler import Candidates, rows_to_evaluate
from autotile.search.search import Search

ONE = np.ones(1)


def test_losses_keep_the_order_crowd_slow_trials_bear_equal_ones_and_weigh_objectives() -> None:
    loss = losses(np.array([[1.0], [2.0], [10.0], [20.0]]), ONE)
    assert (np.diff(loss) > 0).all()
    assert loss[1] - loss[0] > 5 * (loss[3] - loss[2])
    for values in ((1.0, 5.0, 3.0), (-1.0, 4.0, 0.0)):
        assert np.argsort(losses(np.array(values)[:, None], ONE)).tolist() == [0, 2, 1]
    for value in (3.0, 0.0):
        assert losses(np.full((4, 1), value), ONE).tolist() == [0.0] * 4
    results = np.array([(1.0, 9.0), (5.0, 5.0), (9.0, 1.0)])
    for weights, best in (((0.99, 0.01), 0), ((0.01, 0.99), 2)):
        assert losses(results, np.array(weights)).argmin() == best


def test_a_failure_is_bad_and_counts_neither_for_mean_nor_spread() -> None:
    loss = losses(np.array([[1.0], [np.nan], [2.0], [4.0], [np.nan]]), ONE)
    worked = loss[[0, 2, 3]]
    assert worked.mean() == pytest.approx(0, abs=1e-12)
    assert worked.std() == pytest.approx(1)
    assert loss[1] == loss[4]
    assert np.median(worked) < loss[1] < worked.max()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_that_violates_a_constraint_or_was_pruned_failed() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert result_of(create_trial(value=2.0)) == (2.0,)
    assert result_of(create_trial(value=2.0, constraints={"failed": 0.0})) == (2.0,)
    assert result_of(create_trial(value=2.0, constraints={"failed": 1.0})) is None
    assert result_of(create_trial(value=float("inf"))) is None
    assert result_of(create_trial(state=TrialState.PRUNED)) is None


def test_a_history_holds_trials_in_the_order_in_which_they_ended_with_their_noise() -> None:
    history = History()
    assert [history.begin(row) for row in range(100, 200)] == list(range(100))
    history.end(3, None)
    history.end(1, None)
    assert (history.begun, history.ended, history.first_success) == (100, 2, 2)
    history.end(70, (2.0, 5.0), 0.1)
    history.end(0, (1.0, 6.0))
    assert history.first_success == 2
    assert history.first_ended(3).tolist() == [3, 1, 70]
    assert history.rows[history.first_ended(10)].tolist() == [103, 101, 170, 100]
    expected = [[np.nan, np.nan], [np.nan, np.nan], [2.0, 5.0], [1.0, 6.0]]
    assert np.array_equal(history.values(9), expected, equal_nan=True)
    history = History()
    for index, (time_us, error) in enumerate([(1.0, 0.0), (2.0, 0.1), (4.0, 0.1)]):
        history.end(history.begin(index), (time_us,), error)
    noise = history.noise(3)
    assert noise[0] == 0
    assert noise[1] == pytest.approx(4 * noise[2])
    assert noise[1] == pytest.approx((0.1 / 2 / np.std([1, 1 / 2, 1 / 4])) ** 2)


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
    return Surrogate(points, np.array([0, 1]), history, max_first=30)


@pytest.mark.parametrize(
    ("ended", "failures", "fitted"), [(n, 0, due_fit(n)) for n in (6, 7, 20, 37, 80)] + [(11, 10, 11)]
)
def test_the_newest_fit_is_of_the_trials_that_were_due(ended: int, failures: int, fitted: int) -> None:
    """The first one has a success."""
    surrogate = surrogate_of(history_of(ended, failures=failures))
    assert surrogate.update()
    assert surrogate.fitted == fitted
    assert not surrogate.update()


def test_fits_become_rarer_and_do_not_depend_on_the_calls() -> None:
    """A search that is rebuilt fits at once what the original fitted trial by trial."""
    assert [due_fit(count) for count in (6, 7, 20, 100, 109, 110)] == [6, 6, 20, 94, 103, 103]
    whole, history = history_of(40), History()
    late, early = surrogate_of(whole), surrogate_of(history)
    late.update()
    for index in range(40):
        history.end(history.begin(int(whole.rows[index])), tuple(whole.values(40)[index].tolist()))
        if history.ended >= STARTUP:
            early.update()
    assert early.fitted == late.fitted
    assert np.array_equal(early.parameters.scale, late.parameters.scale)
    assert early.parameters.noise == late.parameters.noise
    assert late.parameters.scale[0] > 3 * late.parameters.scale[1]  # the first coordinate decides


def test_rows_that_are_not_evaluated_any_more_leave_neither_memory_nor_traces() -> None:
    history = history_of(30)
    used = surrogate_of(history)
    used.update()
    for first, count in ((0, 30), (40, 30), (20, 10), (60, 20), (70, 30), (10, 30), (0, 20), (50, 50)):
        rows, fresh = np.arange(first, first + count), surrogate_of(history)
        fresh.update()
        for each in (used, fresh):
            each.set_rows(rows)
        found, expected = used.predict(ONE), fresh.predict(ONE)
        assert found.rows.tolist() == rows.tolist()
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.deviation, expected.deviation, rtol=1e-3, atol=1e-4)
    assert len(used._process._points) == 50


def large_space():
    """Build a space of 12,288 rows, of which a sample is evaluated."""
    return make_space(dict.fromkeys("ABCDEF", (1, 2, 4, 8)) | {"G": (1, 2, 3)})


def test_the_minimum_of_a_landscape_with_interactions_is_found_with_any_seed() -> None:
    """A random search finds it in 60 of 1,248 once in twenty."""
    space = wide_space()
    least = min(wide_time_us(space.config(row)) for row in range(len(space)))
    for seed in range(3):
        assert min(trial.time_us for trial in advance(Search(space, "feasible", seed), 70, wide_ok)) == least


def test_proposals_made_at_the_same_time_differ_and_are_spread() -> None:
    search = Search(wide_space(), "feasible", seed=0)
    advance(search, 20, wide_ok)
    batch = [search.propose() or pytest.fail("too few rows") for _ in range(16)]
    assert len({row for row, _ in batch}) == 16
    assert len({(config["BM"], config["BN"]) for _, config in batch}) >= 4


def test_many_compiled_rows_are_chosen_between_two_results() -> None:
    space = wide_space()
    search = Search(space, "feasible", seed=0)
    rows = [row for row, _ in (search.nominate() or pytest.fail("too few rows") for _ in range(200))]
    for row in rows[:12]:
        search.ranking.begin(row)
        search.tell(row, wide_ok(space.config(row)))
    waiting, chosen = rows[12:], []
    for _ in range(20):
        chosen.append(search.select(waiting))
        search.ranking.begin(chosen[-1])
        waiting.remove(chosen[-1])
    assert len(set(chosen)) == 20
    predicted, others = ([wide_time_us(space.config(row)) for row in part] for part in (chosen, waiting))
    assert np.median(predicted) < np.median(others)
    assert search.select(waiting[-3:]) in waiting[-3:]  # none of which need be ranked yet


def test_a_large_space_is_searched_near_the_best_and_everywhere() -> None:
    space = large_space()
    best = np.array([7000, 20])
    rows = rows_to_evaluate(Candidates(space), best, best, np.random.default_rng(0))
    assert len(np.unique(rows)) == len(rows) < len(space)
    assert rows.min() >= 0
    apart = (space.codes != space.codes[7000]).sum(axis=1)
    assert np.isin(np.flatnonzero(apart == 1), rows).all()
    assert np.bincount(rows // 1024, minlength=12).min() > 100


def test_the_best_of_a_large_space_is_found() -> None:
    places = {"A": 2, "B": 1, "C": 8, "D": 4, "E": 1, "F": 8}

    def value(config: Config) -> float:
        away = sum(abs(np.log2(config[name] / place)) for name, place in places.items())
        return float(np.exp(0.3 * away)) * config["G"]

    assert study_of(FeasibleGPSampler(large_space(), 0), 60, value).best_value < 1.4


def test_values_may_be_negative() -> None:
    study = study_of(FeasibleGPSampler(tile_space(), 0), 30, lambda config: tile_time_us(config) - 200)
    assert study.best_value == -100


def test_several_objectives_find_both_ends_of_the_front() -> None:
    space = tile_space()
    both = study_of(
        FeasibleGPSampler(space, 0), 50, lambda c: [tile_time_us(c), float(c["BM"] * c["BN"])], "minimize", "minimize"
    )
    values = np.array([trial.values for trial in both.best_trials])
    assert values[:, 0].min() == 100.0
    assert values[:, 1].min() == min(space.column("BM") * space.column("BN"))
