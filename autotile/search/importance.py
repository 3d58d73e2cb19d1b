"""How much of the differences between configurations each parameter explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.ground.space import SearchSpace
from autotile.search.anova import Column, column_of, known_share, likeliest_strength, shares
from autotile.search.blas import one_blas_thread

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
