"""Importance of parameters: the share of the variance of the results that each explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Value
from autotile.search.embedding import Rows, positions
from autotile.search.gaussian_process import Floats, one_blas_thread
from autotile.space.search_space import SearchSpace

Codes = NDArray[np.integer]

_PAIR_WEIGHTS = (0.1, 0.5, 2.5)
"""Candidates for the variance of the effects of pairs, relative to that of single parameters."""
_NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates for the variance of the noise, relative to that of the effects of single parameters."""
_VARIANCE_ROWS = 500
"""Number of rows at which the variance of the prediction is computed."""


@dataclass(frozen=True, slots=True)
class RegressionWeights:
    """Variances of the effects of pairs and of the noise, with their leave-one-out error.

    Attributes
    ----------
    pairs, noise
        Relative to the variance of the effects of single parameters.
    error
        Mean squared leave-one-out error, relative to the variance of the targets.
    """

    pairs: float
    noise: float
    error: float


@dataclass(frozen=True, slots=True)
class Column:
    """One parameter.

    Attributes
    ----------
    kernel
        Covariance of the effects of two values, shape (values, values).
    trials, rows
        Code of the value in each trial and in each valid configuration, shapes (trials,) and (rows,).
    """

    kernel: Floats
    trials: Codes
    rows: Codes


def column_of(values: Sequence[Value], trials: Codes, rows: Codes) -> Column:
    """Return a column whose kernel has mean 0 over the rows (Durrande et al., 2013), so that effects are orthogonal.

    For numbers the kernel is exponential over their ascending order, with a length of half its range; other values are
    independent.
    """
    ordinals = positions(values)
    count = len(values)
    kernel = np.eye(count)
    if ordinals is not None:
        kernel = np.exp(-2 * np.abs(ordinals[:, None] - ordinals[None, :]) / max(1, count - 1))
    weights = np.bincount(rows, minlength=count) / len(rows)
    mean = kernel @ weights
    centered = kernel - np.outer(mean, mean) / (weights @ mean)
    return Column(centered / (weights @ np.diag(centered)), trials, rows)


def fit_weights(columns: Sequence[Column], targets: Floats) -> RegressionWeights:
    """Return the weights with the least leave-one-out error (closed form: Rasmussen and Williams, 2006, eq. 5.12)."""
    fitted = []
    for pairs in _PAIR_WEIGHTS:
        values, vectors = np.linalg.eigh(_covariance(columns, pairs, len(columns)))
        projected = vectors.T @ targets
        for noise in _NOISES:
            inverse = 1 / (np.maximum(values, 0) + noise)
            left_out = (vectors @ (projected * inverse)) / (np.square(vectors) @ inverse)
            fitted.append(RegressionWeights(pairs, noise, float(np.mean(np.square(left_out)) / targets.var())))
    return min(fitted, key=lambda weights: weights.error)


def shares(
    columns: Sequence[Column], targets: Floats, weights: RegressionWeights, parameters: int | None = None
) -> tuple[Floats, Floats]:
    """Return the share of each column in the variance of the predictions of the rows, alone and with half of each pair.

    A share is the covariance of a column's part with the whole (Li et al., Journal of Physical Chemistry A 114, 2010).
    The shares add up to 1 even if the valid configurations correlate parameters; half of each pair's share is its
    Shapley value (Owen, 2014).

    Parameters
    ----------
    columns
        The parameters.
    targets
        Targets of the trials, shape (trials,).
    weights
        Result of `fit_weights`.
    parameters
        Number of columns that the weights were fitted to; None for all.

    Returns
    -------
    alone, with_pairs : numpy.ndarray
        Shape (columns,).
    """
    counted = parameters or len(columns)
    covariance = _covariance(columns, weights.pairs, counted)
    covariance.flat[:: len(targets) + 1] += weights.noise
    solved = np.linalg.solve(covariance, targets)
    across = [column.kernel[:, column.trials] for column in columns]
    alone = np.array([(each @ solved / counted)[column.rows] for each, column in zip(across, columns, strict=True)])
    couples = list(combinations(range(len(columns)), 2))
    together = np.zeros((len(couples), alone.shape[1]))
    for index, (first, second) in enumerate(couples):
        table = _pair_scale(weights.pairs, counted) * (across[first] * solved) @ across[second].T
        together[index] = table[columns[first].rows, columns[second].rows]
    whole = alone.sum(axis=0) + together.sum(axis=0)
    centered = whole - whole.mean()
    scale = max(float(centered @ centered), np.finfo(np.float64).tiny)
    own, of_pairs = alone @ centered / scale, together @ centered / scale
    shared = own.copy()
    for share, couple in zip(of_pairs, couples, strict=True):
        shared[list(couple)] += share / 2
    return own, shared


def predicted_share(columns: Sequence[Column], targets: Floats, weights: RegressionWeights) -> float:
    """Return the share of the variance over the rows that the regression predicts, by its own estimate.

    The variance is that of the predictions plus their mean posterior variance, which is large in regions that a search
    hardly sampled (law of total variance; Rasmussen and Williams, 2006, eq. 2.26).
    """
    count = len(columns)
    some = [Column(each.kernel, each.trials, each.rows[:_VARIANCE_ROWS]) for each in columns]
    covariance = _covariance(columns, weights.pairs, count)
    covariance.flat[:: len(targets) + 1] += weights.noise
    across = _combined([each.kernel[each.rows][:, each.trials] for each in some], weights.pairs, count)
    prior = _combined([np.diag(each.kernel)[each.rows] for each in some], weights.pairs, count)
    solved = np.linalg.solve(covariance, np.column_stack([targets, across.T]))
    amplitude = float(targets @ solved[:, 0]) / len(targets)
    posterior = amplitude * (prior - np.einsum("ij,ji->i", across, solved[:, 1:]) + weights.noise)
    predicted = float((across @ solved[:, 0]).var())
    return predicted / (predicted + float(posterior.mean()))


def _covariance(columns: Sequence[Column], pairs: float, parameters: int) -> Floats:
    """Return the covariance of the trials."""
    return _combined([each.kernel[each.trials][:, each.trials] for each in columns], pairs, parameters)


def _combined(kernels: Sequence[Floats], pairs: float, parameters: int) -> Floats:
    """Return the covariance of a constant, the effects of single parameters, and those of pairs.

    The sum of the products of all pairs follows from the sum and the sum of squares (Newton's identities).
    """
    total, squares = np.zeros(kernels[0].shape), np.zeros(kernels[0].shape)
    for each in kernels:
        total += each
        squares += each * each
    return 1 + total / parameters + _pair_scale(pairs, parameters) * (total * total - squares) / 2


def _pair_scale(pairs: float, parameters: int) -> float:
    return pairs / max(1, parameters * (parameters - 1) / 2)


_MIN_TRIALS = 30
_MIN_TRIALS_PER_PARAMETER = 6
"""With fewer trials, the result is meaningless: with about 50 trials of the default search from each recorded sgemm_2d
space, which has 11 parameters, half of the parameters that came first were not among the three that matter most."""
_MAX_TRIALS = 400
"""More trials, evenly spaced over the times, change no share of a recorded space by more than 0.03; the cost grows with
the cube of their number."""
_MAX_ROWS = 2000
"""Number of valid configurations, drawn at random, over which effects are averaged."""
_SHUFFLES = 3
_MIN_SPREAD = 0.02
"""Ratio of the slowest to the fastest time, minus one, below which times hardly differ."""
_MIN_EXPLAINED = 0.2
_MIN_PREDICTED = 0.5
"""Minimum share of the variance over the valid configurations that must be predicted."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one parameter.

    Attributes
    ----------
    share
        Share of the variance of the logarithm of the time over the valid configurations, 0 to 1: the share that it
        explains alone, plus half of the share of each pair with another parameter. All shares and the unexplained
        variance add up to 1.
    alone
        Share that it explains alone.
    matters
        Whether it explains more than chance would; if not, both shares are 0.
    """

    parameter: str
    share: float
    alone: float
    matters: bool


@dataclass(frozen=True, slots=True)
class Importance:
    """The parameters that were tried at several values, the most important first.

    Attributes
    ----------
    explained
        Explained share of the variance: of the trials, by leave-one-out predictions, or of the valid configurations,
        whichever is less.
    doubt
        Reason why there is no result; empty if there is one.
    """

    effects: tuple[Effect, ...] = ()
    explained: float = 0.0
    doubt: str = ""


def importance_of(space: SearchSpace, rows: ArrayLike, times_us: ArrayLike, seed: int = 0) -> Importance:
    """Attribute the differences between trials to the parameters.

    The logarithm of the time is regressed on the effects of single parameters and pairs (functional analysis of
    variance: Hooker, 2007; for tuning: Hutter, Hoos and Leyton-Brown, 2014). The effects are averaged over the valid
    configurations and not over the trials, which a search concentrates where times are short. A parameter matters if it
    explains more than any parameter whose values are shuffled among the trials (Boruta: Kursa and Rudnicki, 2010). The
    regression is then repeated with the parameters that matter.

    A search samples a small part of a space. Compared with the result of all 5,000 configurations of each recorded
    sgemm_2d space, 100 trials of the default search ranked one of the three parameters that matter most first in 85 %
    of the cases, with a mean error of its share of 0.11; 200 trials in 90 %, with 0.08; 200 random trials in all, with
    0.03. In a third of the cases, 100 trials of the search were found to be too few.

    Parameters
    ----------
    space
        The valid configurations.
    rows
        Row of each successful trial, shape (n,).
    times_us
        Times in microseconds, positive, shape (n,).
    seed
        Seed of the shuffles and of the configurations that are averaged over.
    """
    tried, times = np.asarray(rows, np.int64), np.asarray(times_us, np.float64)
    needed = max(_MIN_TRIALS, _MIN_TRIALS_PER_PARAMETER * sum(len(each.values) > 1 for each in space.parameters))
    if len(tried) < needed:
        return Importance(doubt=f"{len(tried)} times are too few to tell what matters: {needed} are needed")
    if times.max() / times.min() - 1 < _MIN_SPREAD:
        return Importance(doubt=f"the times differ by less than {100 * _MIN_SPREAD:.0f} %")
    rng = np.random.default_rng(seed)
    with one_blas_thread():
        return _attribute(space, *_sample(tried, np.log(times)), rng)


def _sample(rows: Rows, targets: Floats) -> tuple[Rows, Floats]:
    """Select trials evenly spaced over the targets, and standardize their targets to mean 0 and deviation 1."""
    order = np.argsort(targets, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(len(order), _MAX_TRIALS)).astype(np.int64)]
    kept = targets[chosen]
    return rows[chosen], (kept - kept.mean()) / kept.std()


def _attribute(space: SearchSpace, rows: Rows, targets: Floats, rng: np.random.Generator) -> Importance:
    sample = rng.choice(len(space), min(len(space), _MAX_ROWS), replace=False)
    columns = {
        parameter.name: column_of(parameter.values, trials, valid)
        for parameter, trials, valid in zip(space.parameters, space.codes[rows].T, space.codes[sample].T, strict=True)
        if len(np.unique(trials)) > 1 and len(np.unique(valid)) > 1
    }
    mattering = _mattering(columns, targets, rng)
    kept = list(mattering.values())
    weights = fit_weights(kept, targets) if kept else None
    if weights is None or 1 - weights.error < _MIN_EXPLAINED:
        return Importance(doubt="the parameters explain the differences no better than chance")
    explained = min(1 - weights.error, predicted_share(kept, targets, weights))
    if explained < _MIN_PREDICTED:
        return Importance(doubt="the trials predict too little of the rest of the space to tell what matters")
    alone, shared = (np.maximum(explained * each, 0) for each in shares(kept, targets, weights))
    effects = [Effect(name, float(shared[i]), float(alone[i]), True) for i, name in enumerate(mattering)]
    effects += [Effect(name, 0.0, 0.0, False) for name in columns if name not in mattering]
    return Importance(tuple(sorted(effects, key=lambda effect: -effect.share)), explained)


def _mattering(columns: dict[str, Column], targets: Floats, rng: np.random.Generator) -> dict[str, Column]:
    """Return the columns that explain more than any shuffled column."""
    if not columns:
        return {}
    real = list(columns.values())
    weights = fit_weights(real, targets)
    _, shared = shares(real, targets, weights)
    chance = 0.0
    for _ in range(_SHUFFLES):
        shuffled = [Column(each.kernel, rng.permutation(each.trials), rng.permutation(each.rows)) for each in real]
        _, both = shares([*real, *shuffled], targets, weights, len(real))
        chance = max(chance, float(both[len(real) :].max()))
    return {name: column for (name, column), share in zip(columns.items(), shared, strict=True) if share > chance}
