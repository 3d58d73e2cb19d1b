"""The finals: the best candidates and the default, timed interleaved and compared in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotile.ground.model import Config, Measurement, Outcome, Trial, config_key
from autotile.ground.stats import Interval, median_interval, paired_ratio, ratio_of
from autotile.process.messages import Candidate
from autotile.tuning.evaluator import Evaluator

_RACE_S = 3.0
"""GPU time of the whole race; rounds are cut to fit it."""
_LEAST_ROUNDS = 9
_MOST_ROUNDS = 60
"""In simulation, 60 interleaved rounds of 12 finalists left a winner 0.01 % off, at 0.8 % noise with drift."""


@dataclass(frozen=True, slots=True)
class Finals:
    """How the finalists compare.

    Attributes
    ----------
    ranked
        Finalists with their times from the race, winner first.
    default
        The default configuration's trial, where it runs.
    speedup
        Time of the default over time of the winner; None where the default does not run.
    ties
        Configurations that cannot be told apart from the winner.
    """

    ranked: tuple[Trial, ...]
    default: Trial | None
    speedup: Interval | None
    ties: tuple[Config, ...]

    @property
    def winner(self) -> Trial:
        """The configuration to serve."""
        return self.ranked[0]


def choose_finalists(trials: Sequence[Trial], default: Config, incumbent: Config | None, count: int) -> list[Trial]:
    """The fastest ``count`` trials, and the default and the incumbent where they ran."""
    ran = sorted((t for t in trials if t.outcome is Outcome.OK and t.time_us is not None), key=_time_us)
    invited = {config_key(default)} | ({config_key(incumbent)} if incumbent is not None else set())
    slower = [t for t in trials if t.outcome.has_time and config_key(t.config) in invited]
    finalists = {config_key(t.config): t for t in [*ran[: max(count, 1)], *slower]}
    return sorted(finalists.values(), key=_time_us)


def run_finals(
    racing: Sequence[tuple[Trial, Candidate]],
    evaluator: Evaluator,
    *,
    default: Config,
    incumbent: Config | None,
    seed: int,
    hurried: bool = False,
) -> Finals:
    """Race the finalists and name the winner; among those that tie with the fastest, the incumbent wins.

    In replay nothing can be raced: the recorded medians and their intervals are compared instead. A hurried race has
    the fewest rounds that give an interval.
    """
    finalists, candidates = [trial for trial, _ in racing], [candidate for _, candidate in racing]
    rounds = _LEAST_ROUNDS if hurried else _rounds(finalists)
    times = evaluator.race(candidates, rounds, seed) if len(finalists) > 1 else None
    raced = list(finalists) if times is None else [_with_times(t, row) for t, row in zip(finalists, times, strict=True)]

    def ratio(slower: int, faster: int) -> Interval:
        if times is not None:
            return paired_ratio(times[faster], times[slower])
        return ratio_of(_interval(raced[faster]), _interval(raced[slower]))

    order = sorted(range(len(raced)), key=lambda i: _time_us(raced[i]))
    tied = [i for i in order if i == order[0] or ratio(i, order[0]).low <= 1.0]
    winner = next((i for i in tied if incumbent is not None and _same(raced[i].config, incumbent)), order[0])
    order = [winner, *(i for i in order if i != winner)]
    defaults = [i for i in order if _same(raced[i].config, default)]
    return Finals(
        ranked=tuple(raced[i] for i in order),
        default=raced[defaults[0]] if defaults else None,
        speedup=ratio(defaults[0], winner) if defaults else None,
        ties=tuple(raced[i].config for i in tied if i != winner),
    )


def _rounds(finalists: Sequence[Trial]) -> int:
    round_us = sum(_time_us(trial) for trial in finalists)
    return int(np.clip(_RACE_S * 1e6 / round_us, _LEAST_ROUNDS, _MOST_ROUNDS))


def _with_times(trial: Trial, times_us: Sequence[float]) -> Trial:
    interval = median_interval(times_us)
    l2 = trial.measurement.l2 if trial.measurement is not None else "cold"
    measurement = Measurement(interval.value, interval.low, interval.high, tuple(times_us), l2)
    return replace(trial, outcome=Outcome.OK, reason="", stage="finals", measurement=measurement)


def _interval(trial: Trial) -> Interval:
    if trial.measurement is None:
        raise ValueError(f"a finalist was never measured: {trial.config}")
    return Interval(trial.measurement.time_us, trial.measurement.low_us, trial.measurement.high_us)


def _time_us(trial: Trial) -> float:
    return _interval(trial).value


def _same(a: Config, b: Config) -> bool:
    return config_key(a) == config_key(b)
