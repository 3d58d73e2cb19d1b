"""The share of the variance of the results that each parameter explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Value
from autotile.search.gaussian_process import one_blas_thread
from autotile.search.row_sampler import positions
from autotile.space.search_space import SearchSpace

Floats = NDArray[np.float64]
Codes = NDArray[np.integer]

_PAIR_WEIGHTS = (0.1, 0.5, 2.5)
"""Variance of all that pairs do, over that of what parameters do alone, of which the likelier is taken."""
_NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Variance of the noise over that of what parameters do alone."""
_DOUBTED = 500
"""Rows of which it is asked how sure the prediction is."""


@dataclass(frozen=True, slots=True)
class Strength:
    """How strongly pairs and noise enter, and the mean squared error that trials are then predicted with.

    The error is of trials that the prediction does not know, over the variance of all.
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
        Covariance of what two of its values do, shape (values, values).
    trials, rows
        Code of its value in each trial and in each valid configuration, shapes (trials,) and (rows,).
    """

    kernel: Floats
    trials: Codes
    rows: Codes


def column_of(values: Sequence[Value], trials: Codes, rows: Codes) -> Column:
    """A column whose kernel has mean 0 over the rows (Durrande et al., 2013), so that effects do not overlap.

    Neighbouring numbers are alike, with an exponential kernel over their order that reaches half of it; other values
    are as different as any two.
    """
    places = positions(values)
    count = len(values)
    kernel = np.eye(count)
    if places is not None:
        kernel = np.exp(-2 * np.abs(places[:, None] - places[None, :]) / max(1, count - 1))
    weights = np.bincount(rows, minlength=count) / len(rows)
    mean = kernel @ weights
    centered = kernel - np.outer(mean, mean) / (weights @ mean)
    return Column(centered / (weights @ np.diag(centered)), trials, rows)


def likeliest_strength(columns: Sequence[Column], targets: Floats) -> Strength:
    """What predicts each trial best from the others, by their closed form (Rasmussen and Williams, 2006, eq. 5.12)."""
    found = []
    for pairs in _PAIR_WEIGHTS:
        values, vectors = np.linalg.eigh(_covariance(columns, pairs, len(columns)))
        projected = vectors.T @ targets
        for noise in _NOISES:
            inverse = 1 / (np.maximum(values, 0) + noise)
            left_out = (vectors @ (projected * inverse)) / (np.square(vectors) @ inverse)
            found.append(Strength(pairs, noise, float(np.mean(np.square(left_out)) / targets.var())))
    return min(found, key=lambda strength: strength.error)


def shares(
    columns: Sequence[Column], targets: Floats, strength: Strength, parameters: int | None = None
) -> tuple[Floats, Floats]:
    """Share of each column in the variance of what is predicted of the rows, alone and with its half of each pair.

    A share is the covariance of a column's part with the whole (Li et al., Journal of Physical Chemistry A 114, 2010),
    which adds up to 1 also where the valid configurations tie parameters to each other; halving what a pair does is
    what Shapley's value comes to (Owen, 2014).

    Parameters
    ----------
    parameters
        Columns that the strength was found for; None for all.

    Returns
    -------
    alone, with_pairs : numpy.ndarray
        Shape (columns,).
    """
    counted = parameters or len(columns)
    covariance = _covariance(columns, strength.pairs, counted)
    covariance.flat[:: len(targets) + 1] += strength.noise
    solved = np.linalg.solve(covariance, targets)
    across = [column.kernel[:, column.trials] for column in columns]
    alone = np.array([(each @ solved / counted)[column.rows] for each, column in zip(across, columns, strict=True)])
    couples = list(combinations(range(len(columns)), 2))
    together = np.zeros((len(couples), alone.shape[1]))
    for index, (first, second) in enumerate(couples):
        table = _pair_scale(strength.pairs, counted) * (across[first] * solved) @ across[second].T
        together[index] = table[columns[first].rows, columns[second].rows]
    whole = alone.sum(axis=0) + together.sum(axis=0)
    away = whole - whole.mean()
    scale = max(float(away @ away), np.finfo(np.float64).tiny)
    own, of_pairs = alone @ away / scale, together @ away / scale
    shared = own.copy()
    for share, couple in zip(of_pairs, couples, strict=True):
        shared[list(couple)] += share / 2
    return own, shared


def known_share(columns: Sequence[Column], targets: Floats, strength: Strength) -> float:
    """Share of the variance over the rows that is told, by the regression's own account.

    The variance is that of what is predicted and the mean doubt about it, of which there is much where a search has
    hardly been (law of total variance; Rasmussen and Williams, 2006, eq. 2.26).
    """
    count = len(columns)
    some = [Column(each.kernel, each.trials, each.rows[:_DOUBTED]) for each in columns]
    covariance = _covariance(columns, strength.pairs, count)
    covariance.flat[:: len(targets) + 1] += strength.noise
    across = _combined([each.kernel[each.rows][:, each.trials] for each in some], strength.pairs, count)
    prior = _combined([np.diag(each.kernel)[each.rows] for each in some], strength.pairs, count)
    solved = np.linalg.solve(covariance, np.column_stack([targets, across.T]))
    amplitude = float(targets @ solved[:, 0]) / len(targets)
    doubt = amplitude * (prior - np.einsum("ij,ji->i", across, solved[:, 1:]) + strength.noise)
    told = float((across @ solved[:, 0]).var())
    return told / (told + float(doubt.mean()))


def _covariance(columns: Sequence[Column], pairs: float, parameters: int) -> Floats:
    """Covariance of the trials."""
    return _combined([each.kernel[each.trials][:, each.trials] for each in columns], pairs, parameters)


def _combined(kernels: Sequence[Floats], pairs: float, parameters: int) -> Floats:
    """Covariance of a constant, what each parameter does, and what each two do beyond that.

    The sum of the products of all pairs follows from the sum and the sum of squares (Newton's identities).
    """
    total, squares = np.zeros(kernels[0].shape), np.zeros(kernels[0].shape)
    for each in kernels:
        total += each
        squares += each * each
    return 1 + total / parameters + _pair_scale(pairs, parameters) * (total * total - squares) / 2


def _pair_scale(pairs: float, parameters: int) -> float:
    return pairs / max(1, parameters * (parameters - 1) / 2)


_LEAST_TRIALS = 30
_LEAST_A_PARAMETER = 6
"""Fewer say nothing: of some 50 times that the default search drew from each recorded sgemm_2d space, which has 11
parameters, half of the parameters that came first were not even among the three that matter most."""
_MOST_TRIALS = 400
"""More, evenly spread over the times, move no share of a recorded space by more than 0.03, at a cost of their cube."""
_MOST_ROWS = 2000
"""Valid configurations, drawn at random, over which effects are averaged."""
_SHUFFLES = 3
_LEAST_SPREAD = 0.02
"""Slowest over fastest, less one, below which times hardly differ."""
_LEAST_EXPLAINED = 0.2
_LEAST_KNOWN = 0.5
"""Share of the variance over the valid configurations that must be told."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one parameter does.

    Attributes
    ----------
    share
        Of the variance of the logarithm of the time over the valid configurations, 0 to 1: what it explains alone and
        half of what it explains together with each other one. All shares and what remains unexplained add up to 1.
    alone
        What it explains alone.
    matters
        Whether it explains more than chance would; if not, both are 0.
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
        Share of the variance that is explained: of the trials, judged by predicting each from the others, or of the
        valid configurations, where that is less.
    doubt
        Why nothing is said; then no effect is.
    """

    effects: tuple[Effect, ...] = ()
    explained: float = 0.0
    doubt: str = ""


def importance_of(space: SearchSpace, rows: ArrayLike, times_us: ArrayLike, seed: int = 0) -> Importance:
    """Split the differences between trials among the parameters.

    The logarithm of the time is regressed on what each parameter does alone and each two together (functional analysis
    of variance: Hooker, 2007; for tuning: Hutter, Hoos and Leyton-Brown, 2014). The effects are averaged over the valid
    configurations and not over the trials, which a search draws where it is fast. A parameter matters where it explains
    more than any parameter with its values shuffled among the trials does beside it (Boruta: Kursa and Rudnicki, 2010).
    The regression is then repeated with those that do.

    A search shows little of a space. Compared with what all 5,000 configurations of each recorded sgemm_2d space say,
    100 trials of the default search put first one of the three parameters that matter most in 85 % of the cases, with a
    share that was off by 0.11 on average; 200 trials in 90 %, by 0.08; 200 trials at random in all, by 0.03. In a third
    of the cases 100 trials of the search were found to tell too little.

    Parameters
    ----------
    space
        The valid configurations.
    rows
        Row of each trial that has a time, shape (n,).
    times_us
        Their times, shape (n,), positive, in microseconds.
    seed
        Of the shuffles and of the configurations that are averaged over.
    """
    tried, times = np.asarray(rows, np.int64), np.asarray(times_us, np.float64)
    least = max(_LEAST_TRIALS, _LEAST_A_PARAMETER * sum(len(each.values) > 1 for each in space.parameters))
    if len(tried) < least:
        return Importance(doubt=f"{len(tried)} times are too few to tell what matters: {least} are needed")
    if times.max() / times.min() - 1 < _LEAST_SPREAD:
        return Importance(doubt=f"the times differ by less than {100 * _LEAST_SPREAD:.0f} %")
    rng = np.random.default_rng(seed)
    with one_blas_thread():
        return _split(space, *_some(tried, np.log(times)), rng)


def _some(rows: NDArray[np.int64], targets: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As many trials as can be afforded, evenly over the times, and their targets with mean 0 and deviation 1."""
    order = np.argsort(targets, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(len(order), _MOST_TRIALS)).astype(np.int64)]
    kept = targets[chosen]
    return rows[chosen], (kept - kept.mean()) / kept.std()


def _split(
    space: SearchSpace, rows: NDArray[np.int64], targets: NDArray[np.float64], rng: np.random.Generator
) -> Importance:
    sample = rng.choice(len(space), min(len(space), _MOST_ROWS), replace=False)
    columns = {
        parameter.name: column_of(parameter.values, trials, valid)
        for parameter, trials, valid in zip(space.parameters, space.codes[rows].T, space.codes[sample].T, strict=True)
        if len(np.unique(trials)) > 1 and len(np.unique(valid)) > 1
    }
    mattering = _mattering(columns, targets, rng)
    kept = list(mattering.values())
    strength = likeliest_strength(kept, targets) if kept else None
    if strength is None or 1 - strength.error < _LEAST_EXPLAINED:
        return Importance(doubt="the parameters explain the differences no better than chance")
    explained = min(1 - strength.error, known_share(kept, targets, strength))
    if explained < _LEAST_KNOWN:
        return Importance(doubt="what was tried tells too little of the rest of the space to say what matters")
    alone, shared = (np.maximum(explained * each, 0) for each in shares(kept, targets, strength))
    effects = [Effect(name, float(shared[i]), float(alone[i]), True) for i, name in enumerate(mattering)]
    effects += [Effect(name, 0.0, 0.0, False) for name in columns if name not in mattering]
    return Importance(tuple(sorted(effects, key=lambda effect: -effect.share)), explained)


def _mattering(columns: dict[str, Column], targets: NDArray[np.float64], rng: np.random.Generator) -> dict[str, Column]:
    """The columns that explain more than any of all columns shuffled."""
    if not columns:
        return {}
    real = list(columns.values())
    strength = likeliest_strength(real, targets)
    _, shared = shares(real, targets, strength)
    chance = 0.0
    for _ in range(_SHUFFLES):
        shuffled = [Column(each.kernel, rng.permutation(each.trials), rng.permutation(each.rows)) for each in real]
        _, both = shares([*real, *shuffled], targets, strength, len(real))
        chance = max(chance, float(both[len(real) :].max()))
    return {name: column for (name, column), share in zip(columns.items(), shared, strict=True) if share > chance}
