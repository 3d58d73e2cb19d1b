"""Effects of the parameters on the time, as the trials show them: the variance that each explains, and thresholds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Effect, Trial, Value
from autotile.core.text import percent_text, plural
from autotile.search.gaussian_process import Floats, one_blas_thread, positions
from autotile.space.search_space import SearchSpace

Codes = NDArray[np.integer]

_PAIR_WEIGHTS = (0.1, 0.5, 2.5)
"""Candidates for the variance of the effects of pairs, relative to that of single parameters."""
_NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates for the variance of the noise, relative to that of the effects of single parameters."""
_VARIANCE_ROWS = 500
"""Number of rows at which the variance of the prediction is computed."""


Column = tuple[Floats, Codes, Codes]
"""One parameter: the covariance of the effects of two values, and its codes in trials and in valid configurations."""


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
    return centered / (weights @ np.diag(centered)), trials, rows


def _fit_weights(columns: Sequence[Column], targets: Floats) -> tuple[float, float, float]:
    """Return the variances of the effects of pairs and of the noise with the least leave-one-out error, and that error.

    The variances are relative to that of the effects of single parameters; the error is the mean squared one, relative
    to the variance of the targets (closed form: Rasmussen and Williams, 2006, eq. 5.12).
    """
    fitted = []
    for pairs in _PAIR_WEIGHTS:
        values, vectors = np.linalg.eigh(_covariance(columns, pairs, len(columns)))
        projected = vectors.T @ targets
        for noise in _NOISES:
            inverse = 1 / (np.maximum(values, 0) + noise)
            left_out = (vectors @ (projected * inverse)) / (np.square(vectors) @ inverse)
            fitted.append((pairs, noise, float(np.mean(np.square(left_out)) / targets.var())))
    return min(fitted, key=lambda weights: weights[2])


def _shares(
    columns: Sequence[Column], targets: Floats, pairs: float, noise: float, parameters: int | None = None
) -> tuple[Floats, Floats]:
    """Return the share of each column in the variance of the predictions of the rows, alone and with half of each pair.

    A share is the covariance of a column's part with the whole (Li et al., Journal of Physical Chemistry A 114, 2010).
    The shares add up to 1 even if the valid configurations correlate parameters; half of each pair's share is its
    Shapley value (Owen, 2014).

    Both have shape (columns,). ``parameters`` is the number of columns that ``pairs`` and ``noise`` were fitted to,
    None for all.
    """
    counted = parameters or len(columns)
    solved = np.linalg.solve(_covariance(columns, pairs, counted, noise), targets)
    across = [kernel[:, trials] for kernel, trials, _ in columns]
    placed = [rows for _, _, rows in columns]
    alone = np.array([(each @ solved / counted)[rows] for each, rows in zip(across, placed, strict=True)])
    couples = list(combinations(range(len(columns)), 2))
    together = np.zeros((len(couples), alone.shape[1]))
    for index, (first, second) in enumerate(couples):
        table = _pair_scale(pairs, counted) * (across[first] * solved) @ across[second].T
        together[index] = table[placed[first], placed[second]]
    whole = alone.sum(axis=0) + together.sum(axis=0)
    centered = whole - whole.mean()
    scale = max(float(centered @ centered), np.finfo(np.float64).tiny)
    own, of_pairs = alone @ centered / scale, together @ centered / scale
    shared = own.copy()
    for share, couple in zip(of_pairs, couples, strict=True):
        shared[list(couple)] += share / 2
    return own, shared


def _predicted_share(columns: Sequence[Column], targets: Floats, pairs: float, noise: float) -> float:
    """Return the share of the variance over the rows that the regression predicts, by its own estimate.

    The variance is that of the predictions plus their mean posterior variance, which is large in regions that a search
    hardly sampled (law of total variance; Rasmussen and Williams, 2006, eq. 2.26).
    """
    count = len(columns)
    covariance = _covariance(columns, pairs, count, noise)
    across = _combined([kernel[rows[:_VARIANCE_ROWS]][:, trials] for kernel, trials, rows in columns], pairs, count)
    prior = _combined([np.diag(kernel)[rows[:_VARIANCE_ROWS]] for kernel, _, rows in columns], pairs, count)
    solved = np.linalg.solve(covariance, np.column_stack([targets, across.T]))
    amplitude = float(targets @ solved[:, 0]) / len(targets)
    posterior = amplitude * (prior - np.einsum("ij,ji->i", across, solved[:, 1:]) + noise)
    predicted = float((across @ solved[:, 0]).var())
    return predicted / (predicted + float(posterior.mean()))


def _covariance(columns: Sequence[Column], pairs: float, parameters: int, noise: float = 0.0) -> Floats:
    covariance = _combined([kernel[trials][:, trials] for kernel, trials, _ in columns], pairs, parameters)
    covariance.flat[:: len(covariance) + 1] += noise
    return covariance


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


def importance_of(space: SearchSpace, rows: ArrayLike, times_us: ArrayLike) -> tuple[tuple[Effect, ...], str]:
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

    ``rows`` and ``times_us`` are those of the successful trials, shape (n,). The effects are of the parameters that
    were tried at several values, the most important first; none, and the reason, if the trials support no statement.
    """
    tried, times = np.asarray(rows, np.int64), np.asarray(times_us, np.float64)
    needed = max(_MIN_TRIALS, _MIN_TRIALS_PER_PARAMETER * sum(len(each.values) > 1 for each in space.parameters))
    if len(tried) < needed:
        return (), f"{plural(len(tried), 'time is', 'times are')} too few to tell what matters: {needed} are needed"
    if times.max() / times.min() - 1 < _MIN_SPREAD:
        return (), f"the times differ by less than {percent_text(_MIN_SPREAD, 0)}"
    rng = np.random.default_rng(0)
    # trials evenly spaced over the times, with targets of mean 0 and deviation 1
    order = np.argsort(np.log(times), kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(len(order), _MAX_TRIALS)).astype(np.int64)]
    kept = np.log(times)[chosen]
    targets = (kept - kept.mean()) / kept.std()
    with one_blas_thread():
        sample = rng.choice(len(space), min(len(space), _MAX_ROWS), replace=False)
        columns = {
            parameter.name: column_of(parameter.values, trials, valid)
            for parameter, trials, valid in zip(
                space.parameters, space.codes[tried[chosen]].T, space.codes[sample].T, strict=True
            )
            if len(np.unique(trials)) > 1 and len(np.unique(valid)) > 1
        }
        mattering: dict[str, Column] = {}
        if columns:
            real = list(columns.values())
            pairs, noise, _ = _fit_weights(real, targets)
            _, shared = _shares(real, targets, pairs, noise)
            chance = 0.0  # largest share of a shuffled column
            for _ in range(_SHUFFLES):
                shuffled = [(kernel, rng.permutation(ts), rng.permutation(rs)) for kernel, ts, rs in real]
                _, both = _shares([*real, *shuffled], targets, pairs, noise, len(real))
                chance = max(chance, float(both[len(real) :].max()))
            mattering = {
                name: column for (name, column), one in zip(columns.items(), shared, strict=True) if one > chance
            }
        used = list(mattering.values())
        pairs, noise, error = _fit_weights(used, targets) if used else (0.0, 0.0, 1.0)
        if 1 - error < _MIN_EXPLAINED:
            return (), "the parameters explain the differences no better than chance"
        explained = min(1 - error, _predicted_share(used, targets, pairs, noise))
        if explained < _MIN_PREDICTED:
            return (), "the trials predict too little of the rest of the space to tell what matters"
        alone, shared = (np.maximum(explained * each, 0) for each in _shares(used, targets, pairs, noise))
        effects = [Effect(name, float(shared[i]), float(alone[i]), True) for i, name in enumerate(mattering)]
        effects += [Effect(name, 0.0, 0.0, False) for name in columns if name not in mattering]
        return tuple(sorted(effects, key=lambda effect: -effect.share)), ""


_BEST_SHARE = 0.1
_MIN_BEST_TRIALS = 5
_MIN_OTHER_TRIALS = 20
"""Minimum number of trials beyond a threshold, or with other values than the best trials."""
_MIN_LOSS = 0.05
"""Minimum relative excess of the best time beyond a threshold over the best time of all."""
_MAX_CHANCE = 5e-4
"""Maximum probability that none of the best trials lies beyond a threshold by chance: 1 % over some twenty
thresholds."""
_NAMED_SHARE = 0.05
_MAX_NAMED = 3
_MAX_FAVOURED = 3

Side = Literal["above", "below"]
_SIDES: Mapping[Side, int] = {"above": 1, "below": -1}

_DERIVED: Mapping[str, tuple[Callable[[Trial], float | None], Callable[[float], str]]] = {
    "threads": (lambda t: t.geometry.threads if t.geometry is not None else None, "{:g} threads a block".format),
    "shared_bytes": (
        lambda t: (
            t.geometry.dynamic_smem_bytes + t.resources.static_smem_bytes
            if t.geometry is not None and t.resources is not None
            else None
        ),
        "{:,.0f} bytes of shared memory a block".format,
    ),
    "occupancy": (
        lambda t: t.occupancy.occupancy if t.occupancy is not None else None,
        lambda share: f"an occupancy of {percent_text(share, 0)}",
    ),
}
"""Quantities derived from a configuration: functions that read the value from a trial, and format it."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value beyond which no trial came close to the best."""

    quantity: str
    """Name of a parameter, or ``threads``, ``shared_bytes`` or ``occupancy``."""
    side: Side
    """Side of the value that the threshold excludes."""
    value: float
    """Extreme value among the best trials."""
    trials: int
    """Number of trials beyond it."""
    loss: float
    """Relative excess of the fastest of these over the best time of all, 0.12 for 12 %."""
    text: str
    """The value with its unit."""


@dataclass(frozen=True, slots=True)
class ParameterEffects:
    """The parameters that matter, the values of the best trials, and the thresholds, most important first.

    ``effects`` are empty where the trials do not support a statement, for the reason ``doubt``. ``favoured`` are values
    of the best trials by parameter, where these are only some of the values tried.
    """

    effects: tuple[Effect, ...]
    favoured: Mapping[str, tuple[Value, ...]]
    thresholds: tuple[Threshold, ...]
    doubt: str = ""

    @property
    def sentence(self) -> str:
        """Summary in one sentence."""
        clauses = [] if self.effects else [self.doubt]
        if self.effects:
            first, *others = [effect for effect in self.effects if effect.matters]
            named = [effect for effect in others if effect.share >= _NAMED_SHARE][: _MAX_NAMED - 1]
            most = percent_text(first.share, 0)
            shares = [f"{first.parameter} explains {most} of the differences{self._values(first)}"]
            shares += [f"{effect.parameter} {percent_text(effect.share, 0)}{self._values(effect)}" for effect in named]
            idle = [effect.parameter for effect in self.effects if not effect.matters]
            clauses = [", ".join(shares), *([f"no effect is seen of {', '.join(idle)}"] if idle else [])]
        if self.thresholds:
            clearest = self.thresholds[0]
            where = f"{'beyond' if clearest.side == 'above' else 'under'} {clearest.text}"
            loss = int(100 * clearest.loss)
            clauses.append(f"none of {clearest.trials} trials {where} came within {loss} % of the best")
        return "; ".join(clauses)

    def to_json(self) -> dict[str, Any]:
        """Return ``importance``, ``thresholds`` and, as ``insight``, the sentence."""
        effects = [replace(one, share=round(one.share, 4), alone=round(one.alone, 4)) for one in self.effects]
        thresholds = [asdict(replace(one, loss=round(one.loss, 4))) for one in self.thresholds]
        return {
            "importance": [{**asdict(one), "favoured": [*self.favoured.get(one.parameter, ())]} for one in effects],
            "thresholds": [{name: one[name] for name in one if name != "text"} for one in thresholds],
            "insight": self.sentence,
        }

    def _values(self, effect: Effect) -> str:
        values = self.favoured.get(effect.parameter, ())
        return f" (best at {' or '.join(map(str, values))})" if values else ""


def find_parameter_effects(space: SearchSpace, trials: Sequence[Trial]) -> ParameterEffects:
    """Return the effects in the trials that have a time; failed trials are ignored."""
    costs = [(trial.cost, trial) for trial in trials if trial.outcome.has_time and trial.cost is not None]
    costs.sort(key=itemgetter(0))
    timed, times = [trial for _, trial in costs], np.array([cost for cost, _ in costs])
    placed = [(row, cost) for cost, trial in costs if (row := space.row_of(trial.config)) is not None]
    effects, doubt = importance_of(space, [row for row, _ in placed], [cost for _, cost in placed])
    mattering = [effect.parameter for effect in effects if effect.matters]
    count = math.ceil(_BEST_SHARE * len(timed))
    favoured: dict[str, tuple[Value, ...]] = {}
    for name in mattering:  # unless the values of the best trials are many, or others were hardly tried
        tried = [trial.config[name] for trial in timed]
        best = Counter(tried[:count])
        others = sum(value not in best for value in tried)
        if len(best) <= min(_MAX_FAVOURED, len(set(tried)) // 2) and others >= _MIN_OTHER_TRIALS:
            favoured[name] = tuple(value for value, _ in best.most_common())
    found: list[tuple[float, Threshold]] = []
    for name in [*_DERIVED, *(name for name in mattering if name not in favoured)]:
        read, text = _DERIVED.get(name, (None, f"{name}={{:g}}".format))
        readings = [trial.config[name] if read is None else read(trial) for trial in timed]
        if count < _MIN_BEST_TRIALS or any(reading is None or isinstance(reading, bool | str) for reading in readings):
            continue
        values = np.array(readings, np.float64)  # in the order of the times
        for side, sign in _SIDES.items():
            value = sign * (sign * values[:count]).max()
            beyond = times[sign * values > sign * value]
            loss = float(beyond.min() / times[0] - 1) if len(beyond) else 0.0
            chance = math.prod((len(times) - len(beyond) - place) / (len(times) - place) for place in range(count))
            if len(beyond) >= _MIN_OTHER_TRIALS and loss >= _MIN_LOSS and chance <= _MAX_CHANCE:
                threshold = Threshold(name, side, float(value), len(beyond), loss, text(value))
                found.append((chance, threshold))
    found.sort(key=lambda pair: (pair[0], -pair[1].loss))  # the most significant first
    return ParameterEffects(effects, favoured, tuple(threshold for _, threshold in found), doubt)
