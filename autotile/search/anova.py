"""Regression on what parameters do alone and in pairs, split into how much of the differences each is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Value
from autotile.search.candidates import positions

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
