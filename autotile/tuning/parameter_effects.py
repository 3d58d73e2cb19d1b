"""Effects of the parameters on the time, as the trials of a study show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotile.core.model import Trial, Value
from autotile.space.search_space import SearchSpace

if TYPE_CHECKING:
    from autotile.search.importance import Effect

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

_DERIVED: Mapping[str, tuple[Callable[[Trial], float | None], str]] = {
    "threads": (lambda t: t.geometry.threads if t.geometry is not None else None, "{:g} threads a block"),
    "shared_bytes": (
        lambda t: (
            t.geometry.dynamic_smem_bytes + t.resources.static_smem_bytes
            if t.geometry is not None and t.resources is not None
            else None
        ),
        "{:,.0f} bytes of shared memory a block",
    ),
    "occupancy": (lambda t: t.occupancy.occupancy if t.occupancy is not None else None, "an occupancy of {:.0%}"),
}
"""Quantities derived from a configuration: a function that reads the value from a trial, and a format for it."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value beyond which no trial came close to the best.

    Attributes
    ----------
    quantity
        Name of a parameter, or ``threads``, ``shared_bytes`` or ``occupancy``.
    side
        Side of the value that the threshold excludes.
    value
        Extreme value among the best trials.
    trials
        Number of trials beyond it.
    loss
        Relative excess of the fastest of these over the best time of all, 0.12 for 12 %.
    text
        The value with its unit.
    """

    quantity: str
    side: Literal["above", "below"]
    value: float
    trials: int
    loss: float
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        names = ("quantity", "side", "value", "trials", "loss")
        return {**{name: getattr(self, name) for name in names}, "loss": round(self.loss, 4)}


@dataclass(frozen=True, slots=True)
class ParameterEffects:
    """The parameters that matter, the values of the best trials, and the thresholds.

    Attributes
    ----------
    effects
        Effects of all parameters, most important first; empty where the trials do not support a statement.
    favoured
        Values of the best trials by parameter, where these are only some of the values tried.
    thresholds
        Thresholds, most significant first.
    doubt
        Reason for empty ``effects``.
    """

    effects: tuple[Effect, ...]
    favoured: Mapping[str, tuple[Value, ...]]
    thresholds: tuple[Threshold, ...]
    doubt: str = ""

    @property
    def sentence(self) -> str:
        """Summary in one sentence."""
        return "; ".join([*self._parameter_clauses(), *self._threshold_clauses()])

    def to_json(self) -> dict[str, Any]:
        """Return ``importance``, ``thresholds`` and, as ``insight``, the sentence."""
        return {
            "importance": [
                {
                    "parameter": effect.parameter,
                    "share": round(effect.share, 4),
                    "alone": round(effect.alone, 4),
                    "matters": effect.matters,
                    "favoured": list(self.favoured.get(effect.parameter, ())),
                }
                for effect in self.effects
            ],
            "thresholds": [threshold.to_json() for threshold in self.thresholds],
            "insight": self.sentence,
        }

    def _parameter_clauses(self) -> list[str]:
        if not self.effects:
            return [self.doubt]
        first, *others = [effect for effect in self.effects if effect.matters]
        named = [effect for effect in others if effect.share >= _NAMED_SHARE][: _MAX_NAMED - 1]
        clauses = [f"{first.parameter} explains {100 * first.share:.0f} % of the differences{self._values(first)}"]
        clauses += [f"{effect.parameter} {100 * effect.share:.0f} %{self._values(effect)}" for effect in named]
        idle = [effect.parameter for effect in self.effects if not effect.matters]
        return [", ".join(clauses), *([f"no effect is seen of {', '.join(idle)}"] if idle else [])]

    def _values(self, effect: Effect) -> str:
        values = self.favoured.get(effect.parameter, ())
        return f" (best at {' or '.join(map(str, values))})" if values else ""

    def _threshold_clauses(self) -> list[str]:
        if not self.thresholds:
            return []
        clearest = self.thresholds[0]
        where = f"{'beyond' if clearest.side == 'above' else 'under'} {clearest.text}"
        return [f"none of {clearest.trials} trials {where} came within {int(100 * clearest.loss)} % of the best"]


def find_parameter_effects(space: SearchSpace, trials: Sequence[Trial]) -> ParameterEffects:
    """Return what the trials that have a time show; failed trials are ignored."""
    timed = sorted((t for t in trials if t.outcome.has_time and t.time_us is not None), key=_cost)
    placed = [(row, _cost(trial)) for trial in timed if (row := space.row_of(trial.config)) is not None]
    from autotile.search.importance import importance_of  # imports SciPy; the search has begun by then

    importance = importance_of(space, [row for row, _ in placed], [time_us for _, time_us in placed])
    mattering = [effect.parameter for effect in importance.effects if effect.matters]
    favoured = {name: values for name in mattering if (values := _favoured(name, timed))}
    others = [name for name in mattering if name not in favoured]
    return ParameterEffects(importance.effects, favoured, tuple(_thresholds(others, timed)), importance.doubt)


def _favoured(parameter: str, timed: Sequence[Trial]) -> tuple[Value, ...]:
    """Return the values of the best trials, most frequent first; none where they are many, or others hardly tried."""
    values = [trial.config[parameter] for trial in timed]
    best = Counter(values[: _best_count(timed)])
    others = sum(value not in best for value in values)
    few = len(best) <= min(_MAX_FAVOURED, len(set(values)) // 2)
    return tuple(value for value, _ in best.most_common()) if few and others >= _MIN_OTHER_TRIALS else ()


def _thresholds(parameters: Sequence[str], timed: Sequence[Trial]) -> list[Threshold]:
    """Return the thresholds that the trials support, most significant first."""
    found: list[tuple[float, Threshold]] = []
    for name in [*_DERIVED, *parameters]:
        read, text = _DERIVED.get(name, (_reader(name), f"{name}={{:g}}"))
        readings = [(value, _cost(trial)) for trial in timed if (value := read(trial)) is not None]
        if len(readings) == len(timed):
            found += _thresholds_of(name, text, np.array(readings, np.float64).reshape(-1, 2))
    return [threshold for _, threshold in sorted(found, key=lambda pair: (pair[0], -pair[1].loss))]


def _thresholds_of(name: str, text: str, readings: np.ndarray) -> list[tuple[float, Threshold]]:
    """Return the thresholds of one quantity, each with its probability under chance.

    Parameters
    ----------
    name, text
        Quantity, and the format of its value.
    readings
        Value and time of each trial, in order of time, shape (trials, 2).
    """
    values, times = readings.T
    count = _best_count(times)
    if count < _MIN_BEST_TRIALS:
        return []
    found = []
    sides: tuple[tuple[Literal["above", "below"], float], ...] = (
        ("above", values[:count].max()),
        ("below", values[:count].min()),
    )
    for side, value in sides:
        beyond = times[values > value] if side == "above" else times[values < value]
        loss = float(beyond.min() / times[0] - 1) if len(beyond) else 0.0
        chance = prod((len(times) - len(beyond) - place) / (len(times) - place) for place in range(count))
        if len(beyond) >= _MIN_OTHER_TRIALS and loss >= _MIN_LOSS and chance <= _MAX_CHANCE:
            threshold = Threshold(name, side, float(value), len(beyond), loss, text.format(value))
            found.append((chance, threshold))
    return found


def _reader(parameter: str) -> Callable[[Trial], float | None]:
    """Return a function that reads a parameter from a trial, as a number or None."""

    def read(trial: Trial) -> float | None:
        value = trial.config[parameter]
        return None if isinstance(value, bool | str) else float(value)

    return read


def _best_count(timed: Sequence[Any]) -> int:
    return int(np.ceil(_BEST_SHARE * len(timed)))


def _cost(trial: Trial) -> float:
    assert trial.cost is not None
    return trial.cost
