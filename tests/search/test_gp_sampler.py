"""The default sampler: losses, fits as trials end, results and repeatability; its process against textbook formulas."""

import numpy as np
import pytest
from child_python import python
from rows import advance, make_space, wide_ok, wide_space, wide_time_us
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

from autotile.kernel.spec import Parameter
from autotile.search import gaussian_process as gp
from autotile.search.gaussian_process import Embedding, Floats, GaussianProcess, Rows, density_of, fit, matern
from autotile.search.gp_sampler import STARTUP, History, Surrogate, due_fit, losses
from autotile.search.row_sampler import Candidates, rows_to_evaluate
from autotile.search.search import Search

ONE = np.ones(1)


def test_losses_keep_the_order_crowd_slow_trials_bear_equal_ones_and_weigh_objectives():
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


def test_a_failure_is_bad_and_counts_neither_for_mean_nor_spread():
    loss = losses(np.array([[1.0], [np.nan], [2.0], [4.0], [np.nan]]), ONE)
    worked = loss[[0, 2, 3]]
    assert worked.mean() == pytest.approx(0, abs=1e-12)
    assert worked.std() == pytest.approx(1)
    assert loss[1] == loss[4]
    assert np.median(worked) < loss[1] < worked.max()


def test_a_history_holds_trials_in_the_order_in_which_they_ended_with_their_noise():
    history = History()
    assert [history.begin(row) for row in range(100, 200)] == list(range(100))
    history.end(3, None)
    history.end(1, None)
    assert (history.begun, history.ended, history.first_success) == (100, 2, 2)
    history.end(70, (2.0, 5.0), 0.1)
    history.end(0, (1.0, 6.0))
    assert history.first_success == 2
    assert history.rows[history.order[: history.ended]].tolist() == [103, 101, 170, 100]
    expected = [[np.nan, np.nan], [np.nan, np.nan], [2.0, 5.0], [1.0, 6.0]]
    assert np.array_equal(history.values[: history.ended], expected, equal_nan=True)
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
def test_the_newest_fit_is_of_the_trials_that_were_due(ended, failures, fitted):
    """The first one has a success."""
    surrogate = surrogate_of(history_of(ended, failures=failures))
    assert surrogate.update()
    assert surrogate.fitted == fitted
    assert not surrogate.update()


def test_fits_become_rarer_and_do_not_depend_on_the_calls():
    """A search that is rebuilt fits at once what the original fitted trial by trial."""
    assert [due_fit(count) for count in (6, 7, 20, 100, 109, 110)] == [6, 6, 20, 94, 103, 103]
    whole, history = history_of(40), History()
    late, early = surrogate_of(whole), surrogate_of(history)
    late.update()
    for index in range(40):
        history.end(history.begin(int(whole.rows[index])), tuple(whole.values[index].tolist()))
        if history.ended >= STARTUP:
            early.update()
    assert early.fitted == late.fitted
    scale, noise, _ = early.parameters
    assert np.array_equal(scale, late.parameters[0])
    assert noise == late.parameters[1]
    assert scale[0] > 3 * scale[1]  # the first coordinate decides


def test_rows_that_are_not_evaluated_any_more_leave_neither_memory_nor_traces():
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


def test_the_minimum_of_a_landscape_with_interactions_is_found_with_any_seed():
    """A random search finds it in 60 of 1,248 once in twenty."""
    space = wide_space()
    least = min(wide_time_us(space.config(row)) for row in range(len(space)))
    for seed in range(3):
        assert min(trial.time_us for trial in advance(Search(space, "feasible", seed), 70, wide_ok)) == least


def test_a_large_space_is_searched_near_the_best_and_everywhere():
    space = make_space(dict.fromkeys("ABCDEF", (1, 2, 4, 8)) | {"G": (1, 2, 3)})  # 12,288 rows
    best = np.array([7000, 20])
    rows = rows_to_evaluate(Candidates(space), best, best, np.random.default_rng(0))
    assert len(np.unique(rows)) == len(rows) < len(space)
    assert rows.min() >= 0
    apart = (space.codes != space.codes[7000]).sum(axis=1)
    assert np.isin(np.flatnonzero(apart == 1), rows).all()
    assert np.bincount(rows // 1024, minlength=12).min() > 100


SCALE, NOISE = np.array([1.0, 2.0, 0.5]), 1e-3
PARAMETERS = (SCALE, NOISE, None)


def covariance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return matern(np.square((left * SCALE)[:, None] - (right * SCALE)[None]).sum(axis=2))


def direct(points: np.ndarray, observed: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance by solving the whole system (Rasmussen and Williams, 2006, equations 2.25 and 2.26)."""
    inverse = np.linalg.inv(covariance(observed, observed) + NOISE * np.eye(len(observed)))
    across = covariance(points, observed)
    amplitude = (targets @ inverse @ targets + 2) / (len(targets) + 2)
    return across @ inverse @ targets, amplitude * (1 - np.einsum("ij,jk,ik->i", across, inverse, across))


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    return rng.random((50, 3)), rng.random((90, 3)), rng.normal(size=90)


@pytest.mark.parametrize("first", [1, 30, 90])
@pytest.mark.parametrize("together", [1, 7])
def test_observations_may_come_later(drawn, first, together):
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points, observed[:first])
    for start in range(first, 90, together):
        process.observe(observed[start : min(start + together, 90)])
    mean, deviation = process.predict(targets[None], np.ones(90, np.bool_))
    expected, variance = direct(points, observed, targets)
    assert mean[0] == pytest.approx(expected, abs=2e-2)
    assert np.square(deviation) == pytest.approx(variance, abs=2e-2)


def test_an_observation_lowers_the_doubt_as_a_chosen_point_explains_and_without_a_target_leaves_the_mean(drawn):
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points, observed[:20])
    known, some = np.arange(21) < 20, np.array([3, 7, 30, 41])
    before, doubt = process.predict(targets[None, :20], known[:20])
    explained = process.among(some)(1)
    process.observe(points[7:8])
    after, less = process.predict(np.append(targets[:20], 99.0)[None], known)
    assert after == pytest.approx(before, abs=1e-5)
    assert less[7] < 0.3 * doubt[7]
    assert (less <= doubt + 1e-4).all()
    assert np.square(less[some] / doubt[some]) == pytest.approx(1 - explained, abs=2e-3)


LOADS_SCIPY = """
import sys
from threadpoolctl import threadpool_info
from autotile.search.gaussian_process import load_scipy, one_blas_thread
threads = lambda: [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
assert "scipy" not in sys.modules
with one_blas_thread():
    load_scipy()
    with one_blas_thread():
        pass
    print(threads())
print(threads())
"""


def test_the_blas_of_scipy_has_one_thread_too_if_it_is_loaded_later():
    """Also once it was entered within itself, and as many as before afterwards."""
    done = python("-c", LOADS_SCIPY, env={"OPENBLAS_NUM_THREADS": "2"}, check=True)
    assert done.stdout.split("\n") == ["[1, 1]", "[2, 2]", ""]


@pytest.mark.parametrize("standard", [-100.0, -6.0, -4.9, 0.0, 2.0])
def test_expected_improvement_is_the_integral(standard):
    deviation = 0.5
    mean = -standard * deviation
    found = float(gp.log_expected_improvement(np.array([mean]), np.array([deviation]), 0.0)[0])
    if standard > -8:
        integral = quad(lambda value: -value * norm.pdf(value, mean, deviation), mean - 9, 0, epsabs=0, points=[0])[0]
        assert found == pytest.approx(np.log(integral), abs=1e-6)
    assert np.isfinite(found)


def test_expected_improvement_falls_into_its_tail_without_a_step():
    means = np.linspace(19.9, 20.1, 201)
    assert (np.diff(gp.log_expected_improvement(means, np.ones(201), 0.0)) < 0).all()


def test_the_gradient_is_that_of_the_likelihood():
    rng = np.random.default_rng(1)
    points, targets = rng.random((25, 4)), rng.normal(size=25)
    density, center, _ = density_of(points, targets, np.array([0, 1, 1, 2]))
    at = center + 0.3 * rng.normal(size=4)
    for index, slope in enumerate(density(at)[1]):
        step = 1e-5 * np.eye(4)[index]
        difference = (density(at + step)[0] - density(at - step)[0]) / 2e-5
        assert slope == pytest.approx(difference, rel=1e-4, abs=1e-6)


def landscape(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, targets and groups of a function of three of six coordinates."""
    rng = np.random.default_rng(3)
    points = np.round(4 * rng.random((count, 6))) / 4
    targets = np.sin(5 * points[:, 0]) + points[:, 1] * points[:, 4] + 0.05 * rng.normal(size=count)
    return points, (targets - targets.mean()) / targets.std(), np.array([0, 1, 1, 2, 3, 4])


def logarithms(found: gp.Hyperparameters) -> np.ndarray:
    scale, noise, _ = found
    return np.append(-np.log(scale[[0, 1, 3, 4, 5]]), np.log(noise))


@pytest.mark.parametrize("count", [6, 20, 80])
def test_a_fit_is_the_optimum_that_scipy_finds(count):
    points, targets, groups = landscape(count)
    density, center, _ = density_of(points, targets, groups)
    bounds = [gp._LENGTH_BOUNDS] * 5 + [tuple(np.log(gp._NOISE_BOUNDS))]
    best = minimize(density, center, jac=True, method="L-BFGS-B", bounds=bounds)
    assert density(logarithms(fit(points, targets, groups)))[0] == pytest.approx(best.fun, abs=5e-3)


@pytest.mark.parametrize(
    ("values", "column", "expected", "groups"),
    [
        ((8, 16, 32, 64), 0, [0, 1 / 3, 2 / 3, 1], [0]),  # a doubling is the same step anywhere
        ((64, 8, 32, 16), 0, [1, 0, 2 / 3, 1 / 3], [0]),
        ((16, 48, 64, 80, 96), 1, [0, 0, 1, 0, 0.5], [0, 1]),  # 16 divides all; 32 divides 96, 64 divides 64
        ((1, 3, 5), 0, [0, np.log2(3) / np.log2(5), 1], [0]),  # odd numbers alone have no alignment
        ((4, -1, 100, 0), 0, [2 / 3, 0, 1, 1 / 3], [0]),  # not all positive: by their order
        ((False, True), 0, [0, 1], [0]),
        (("a", "b"), 0, [0, 1], [0]),
        ((7, 300), 0, [0, 1], [0]),
    ],
)
def test_values_have_coordinates(values, column, expected, groups):
    embedding = Embedding([Parameter("A", values)])
    assert embedding.of(np.arange(len(values))[:, None])[:, column] == pytest.approx(expected)
    assert embedding.groups.tolist() == groups


@pytest.mark.parametrize("values", [("row", "column", "tiled"), (0, 1, 2), (2, 0, 1), (True, False, "auto")])
def test_choices_are_equally_far_apart(values):
    embedding = Embedding([Parameter("A", values)])
    points = embedding.of(np.arange(3)[:, None])
    assert np.square(points[:, None] - points[None]).sum(axis=2) == pytest.approx(1 - np.eye(3))
    assert embedding.groups.tolist() == [0, 0, 0]


def test_a_single_value_tells_nothing():
    embedding = Embedding([Parameter("A", (5,)), Parameter("B", (1, 2, 4))])
    assert embedding.of(np.array([[0, 2], [0, 0]])).tolist() == [[1.0], [0.0]]
    assert Embedding([Parameter("A", (5,))]).of(np.zeros((3, 1), np.int64)).shape == (3, 0)


def test_products_of_two_share_one_scale():
    """The last group's distance is that of the products of any two sizes, whatever their number."""
    sizes = [(1, 2, 4, 8), (16, 32, 64), (2, 4, 8, 16, 32)]
    embedding = Embedding([*(Parameter(f"P{i}", each) for i, each in enumerate(sizes)), Parameter("B", (False, True))])
    assert embedding.groups.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    codes = np.array([[0, 2, 4, 1], [3, 0, 1, 0]])
    away = np.diff(np.stack([np.log2(each)[codes[:, i]] for i, each in enumerate(sizes)], axis=1), axis=0)[0]
    products = sum((away[i] + away[k]) ** 2 for i in range(3) for k in range(i))
    found = np.diff(embedding.of(codes)[:, 4:], axis=0)[0]
    assert np.square(found).sum() == pytest.approx(products / 6**2)  # a sum of two spans 6 octaves on average
    assert embedding.of_each(codes).shape == (2, 4)


def test_what_does_not_differ_is_no_coordinate():
    features = {0: np.array([0.1, 0.5]), 1: np.array([0.3, 0.5]), 2: np.array([0.9, 0.6])}
    points, groups = gp.compiled_points(lambda rows: rows[:, None] * 1.0, np.array([0]), features, np.array([0, 1, 7]))
    assert groups.tolist() == [0, 1]
    assert points(np.array([2, 5])).tolist() == [[2.0, 0.9], [5.0, pytest.approx(0.2)]]
