"""The likelihood against finite differences, and fits against SciPy's optimiser."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from autotile.search.gaussian_process import _LENGTH_BOUNDS, _NOISE_BOUNDS, density_of, fit


def test_the_gradient_is_that_of_the_likelihood() -> None:
    rng = np.random.default_rng(1)
    points, targets = rng.random((25, 4)), rng.normal(size=25)
    likelihood, center, _ = density_of(points, targets, np.array([0, 1, 1, 2]))
    at = center + 0.3 * rng.normal(size=4)
    gradient = likelihood(at)[1]
    for index in range(4):
        step = 1e-5 * np.eye(4)[index]
        difference = (likelihood(at + step)[0] - likelihood(at - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(difference, rel=1e-4, abs=1e-6)


def test_what_does_not_matter_gets_a_long_scale() -> None:
    rng = np.random.default_rng(2)
    points = rng.random((60, 2))
    targets = np.sin(6 * points[:, 0])
    found = fit(points, (targets - targets.mean()) / targets.std(), np.array([0, 1]))
    assert found.scale[0] > 4 * found.scale[1]
    assert found.noise < 0.01


def landscape(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, targets and groups of a function of three of six coordinates."""
    rng = np.random.default_rng(3)
    points = np.round(4 * rng.random((count, 6))) / 4
    targets = np.sin(5 * points[:, 0]) + points[:, 1] * points[:, 4] + 0.05 * rng.normal(size=count)
    return points, (targets - targets.mean()) / targets.std(), np.array([0, 1, 1, 2, 3, 4])


def logarithms(found) -> np.ndarray:
    return np.append(-np.log(found.scale[[0, 1, 3, 4, 5]]), np.log(found.noise))


@pytest.mark.parametrize("count", [6, 20, 80])
def test_a_fit_is_the_optimum_that_scipy_finds(count: int) -> None:
    points, targets, groups = landscape(count)
    likelihood, center, _ = density_of(points, targets, groups)
    bounds = [_LENGTH_BOUNDS] * 5 + [tuple(np.log(_NOISE_BOUNDS))]
    best = minimize(likelihood, center, jac=True, method="L-BFGS-B", bounds=bounds)
    found = fit(points, targets, groups)
    assert likelihood(logarithms(found))[0] == pytest.approx(best.fun, abs=5e-3)


def test_a_fit_that_begins_at_the_previous_one_takes_few_steps() -> None:
    points, targets, groups = landscape(80)
    first = fit(points[:70], targets[:70], groups)
    later = fit(points, targets, groups, start=first, max_steps=4)
    likelihood, *_ = density_of(points, targets, groups)
    assert likelihood(logarithms(later))[0] == pytest.approx(
        likelihood(logarithms(fit(points, targets, groups)))[0], abs=2e-2
    )


def test_a_fit_stays_within_its_bounds() -> None:
    points, _, groups = landscape(40)
    found = fit(points, np.tile([-1.0, 1.0], 20), groups)  # nothing but noise
    assert found.noise <= 1.001 * _NOISE_BOUNDS[1]
    assert (np.abs(-np.log(found.scale)) <= max(map(abs, _LENGTH_BOUNDS)) + 1e-9).all()
