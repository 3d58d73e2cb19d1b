"""What a study's trials say of the kernel, in a sentence: which parameters matter, and what did not help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from autotile.core.model import Trial, Value
from autotile.search.importance import Effect, importance_of
from autotile.space.search_space import SearchSpace

_BEST_SHARE = 0.1
_LEAST_BEST = 5
_LEAST_OTHERS = 20
"""Trials that must lie beyond a threshold, or have other values than the best ones, for that to be worth a word."""
_LEAST_LOSS = 0.05
"""By how much the best time beyond a threshold must be longer than the best of all."""
_MOST_CHANCE = 5e-4
"""Probability that none of the best trials lies beyond a threshold by accident: 1 % over some twenty thresholds."""
_NAMED_SHARE = 0.05
_MOST_NAMED = 3
_MOST_FAVOURED = 3

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
"""What follows from a configuration: how it is read off a trial, and how a value of it is told."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value beyond which nothing came near the best.

    Attributes
    ----------
    quantity
        A parameter, or ``threads``, ``shared_bytes`` or ``occupancy``.
    trials
        Trials that lie beyond it.
    loss
        By how much the fastest of them is slower than the best of all: 0.12 reads as 12 %.
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
        """Plain dictionary."""
        names = ("quantity", "side", "value", "trials", "loss")
        return {**{name: getattr(self, name) for name in names}, "loss": round(self.loss, 4)}


@dataclass(frozen=True, slots=True)
class Insight:
    """What matters.

    Attributes
    ----------
    effects
        The parameters, the most important first; empty where nothing can be told.
    favoured
        Values of a parameter that the best trials have, where they leave others out.
    thresholds
        The clearest first.
    doubt
        Why nothing is told of the parameters.
    """

    effects: tuple[Effect, ...]
    favoured: Mapping[str, tuple[Value, ...]]
    thresholds: tuple[Threshold, ...]
    doubt: str = ""

    @property
    def sentence(self) -> str:
        """All of it, as one reads it out."""
        return "; ".join([*self._parameters(), *self._beyond()])

    def to_json(self) -> dict[str, Any]:
        """``importance``, ``thresholds`` and the sentence."""
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

    def _parameters(self) -> list[str]:
        if not self.effects:
            return [self.doubt]
        first, *others = [effect for effect in self.effects if effect.matters]
        named = [effect for effect in others if effect.share >= _NAMED_SHARE][: _MOST_NAMED - 1]
        told = [f"{first.parameter} explains {100 * first.share:.0f} % of the differences{self._values(first)}"]
        told += [f"{effect.parameter} {100 * effect.share:.0f} %{self._values(effect)}" for effect in named]
        idle = [effect.parameter for effect in self.effects if not effect.matters]
        return [", ".join(told), *([f"no effect is seen of {', '.join(idle)}"] if idle else [])]

    def _values(self, effect: Effect) -> str:
        values = self.favoured.get(effect.parameter, ())
        return f" (best at {' or '.join(map(str, values))})" if values else ""

    def _beyond(self) -> list[str]:
        if not self.thresholds:
            return []
        clearest = self.thresholds[0]
        where = f"{'beyond' if clearest.side == 'above' else 'under'} {clearest.text}"
        return [f"none of {clearest.trials} trials {where} came within {int(100 * clearest.loss)} % of the best"]


def insight_of(space: SearchSpace, trials: Sequence[Trial]) -> Insight:
    """What the trials that have a time say, failures aside."""
    timed = sorted((t for t in trials if t.outcome.has_time and t.time_us is not None), key=_time_us)
    placed = [(row, _time_us(trial)) for trial in timed if (row := space.row_of(trial.config)) is not None]
    importance = importance_of(space, [row for row, _ in placed], [time_us for _, time_us in placed])
    mattering = [effect.parameter for effect in importance.effects if effect.matters]
    favoured = {name: values for name in mattering if (values := _favoured(name, timed))}
    others = [name for name in mattering if name not in favoured]
    return Insight(importance.effects, favoured, tuple(_thresholds(others, timed)), importance.doubt)


def _favoured(parameter: str, timed: Sequence[Trial]) -> tuple[Value, ...]:
    """Values that the best trials have, the most frequent first; none where they are many or others hardly tried."""
    values = [trial.config[parameter] for trial in timed]
    best = Counter(values[: _best_count(timed)])
    others = sum(value not in best for value in values)
    few = len(best) <= min(_MOST_FAVOURED, len(set(values)) // 2)
    return tuple(value for value, _ in best.most_common()) if few and others >= _LEAST_OTHERS else ()


def _thresholds(parameters: Sequence[str], timed: Sequence[Trial]) -> list[Threshold]:
    """What the trials support, from the least likely to be an accident on."""
    found: list[tuple[float, Threshold]] = []
    for name in [*_DERIVED, *parameters]:
        read, text = _DERIVED.get(name, (_reader(name), f"{name}={{:g}}"))
        readings = [(value, _time_us(trial)) for trial in timed if (value := read(trial)) is not None]
        if len(readings) == len(timed):
            found += _thresholds_of(name, text, np.array(readings, np.float64).reshape(-1, 2))
    return [threshold for _, threshold in sorted(found, key=lambda pair: (pair[0], -pair[1].loss))]


def _thresholds_of(name: str, text: str, readings: np.ndarray) -> list[tuple[float, Threshold]]:
    """The thresholds of one quantity, each with its chance to be an accident; readings are values and times."""
    values, times = readings.T
    count = _best_count(times)
    if count < _LEAST_BEST:
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
        if len(beyond) >= _LEAST_OTHERS and loss >= _LEAST_LOSS and chance <= _MOST_CHANCE:
            threshold = Threshold(name, side, float(value), len(beyond), loss, text.format(value))
            found.append((chance, threshold))
    return found


def _reader(parameter: str) -> Callable[[Trial], float | None]:
    """Reads a parameter off a trial where it is a number."""

    def read(trial: Trial) -> float | None:
        value = trial.config[parameter]
        return None if isinstance(value, bool | str) else float(value)

    return read


def _best_count(timed: Sequence[Any]) -> int:
    return int(np.ceil(_BEST_SHARE * len(timed)))


def _time_us(trial: Trial) -> float:
    assert trial.time_us is not None
    return trial.time_us
