"""The process against textbook formulas."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from threadpoolctl import threadpool_info

from autotile.search.gaussian_process import (
    GaussianProcess,
    Hyperparameters,
    log_expected_improvement,
    matern,
    one_blas_thread,
)

PARAMETERS = Hyperparameters(np.array([1.0, 2.0, 0.5]), 1e-3)


def covariance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    scale = PARAMETERS.scale
    return matern(np.square((left * scale)[:, None] - (right * scale)[None]).sum(axis=2))


def direct(points: np.ndarray, observed: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance by solving the whole system (Rasmussen and Williams, 2006, equations 2.25 and 2.26)."""
    inverse = np.linalg.inv(covariance(observed, observed) + PARAMETERS.noise * np.eye(len(observed)))
    across = covariance(points, observed)
    amplitude = (targets @ inverse @ targets + 2) / (len(targets) + 2)
    return across @ inverse @ targets, amplitude * (1 - np.einsum("ij,jk,ik->i", across, inverse, across))


@pytest.fixture
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((50, 3)), rng.random((90, 3)), rng.normal(size=90)


@pytest.mark.parametrize("first", [1, 30, 90])
@pytest.mark.parametrize("together", [1, 7])
def test_observations_may_come_later(drawn, first: int, together: int) -> None:
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points, observed[:first])
    for start in range(first, 90, together):
        process.observe(observed[start : min(start + together, 90)])
    mean, deviation = process.predict(targets[None], np.ones(90, np.bool_))
    expected, variance = direct(points, observed, targets)
    assert mean[0] == pytest.approx(expected, abs=2e-2)
    assert np.square(deviation) == pytest.approx(variance, abs=2e-2)


def test_an_observation_without_a_target_lowers_the_doubt_and_leaves_the_mean(drawn) -> None:
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points, observed[:20])
    before, doubt = process.predict(targets[None, :20], np.ones(20, np.bool_))
    process.observe(points[:1])
    after, less = process.predict(np.append(targets[:20], 99.0)[None], np.arange(21) < 20)
    assert after == pytest.approx(before, abs=1e-5)
    assert less[0] < 0.3 * doubt[0]
    assert (less <= doubt + 1e-4).all()


def test_a_chosen_point_explains_what_its_observation_would(drawn) -> None:
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points, observed[:20])
    known = np.ones(21, np.bool_)
    known[20] = False
    _, before = process.predict(targets[None, :20], known[:20])
    some = np.array([3, 7, 30, 41])
    explained = process.among(some)(1)
    process.observe(points[7:8])
    _, after = process.predict(targets[None, :21], known)
    assert np.square(after[some] / before[some]) == pytest.approx(1 - explained, abs=2e-3)


def test_points_may_be_replaced(drawn) -> None:
    points, observed, targets = drawn
    process = GaussianProcess(PARAMETERS, points[:30], observed[:20])
    process.observe(observed[20:25])
    process.replace_points(np.array([4, 9]), points[30:])
    process.observe(observed[25:90])
    mean, deviation = process.predict(targets[None], np.ones(90, np.bool_))
    order = [*range(4), 30, *range(5, 9), 31, *range(10, 30), *range(32, 50)]
    fresh = GaussianProcess(PARAMETERS, points[order], observed)
    expected, doubt = fresh.predict(targets[None], np.ones(90, np.bool_))
    assert mean == pytest.approx(expected, abs=2e-2)
    assert deviation == pytest.approx(doubt, abs=2e-2)


def test_one_blas_thread_may_be_entered_within_itself() -> None:
    before = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    with one_blas_thread():
        with one_blas_thread():
            pass
        assert {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"} == {1}
    assert [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"] == before


@pytest.mark.parametrize("standard", [-100.0, -6.0, -4.9, 0.0, 2.0])
def test_expected_improvement_is_the_integral(standard: float) -> None:
    deviation = 0.5
    mean = -standard * deviation
    found = float(log_expected_improvement(np.array([mean]), np.array([deviation]), 0.0)[0])
    if standard > -8:
        integral = quad(lambda value: -value * norm.pdf(value, mean, deviation), mean - 9, 0, epsabs=0, points=[0])[0]
        assert found == pytest.approx(np.log(integral), abs=1e-6)
    assert np.isfinite(found)


def test_expected_improvement_falls_into_its_tail_without_a_step() -> None:
    means = np.linspace(19.9, 20.1, 201)
    steps = np.diff(log_expected_improvement(means, np.ones(201), 0.0))
    assert (steps < 0).all()
