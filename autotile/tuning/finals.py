"""The finals: interleaved races of the best candidates and the default, and checks of the finalists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotile.core.model import Config, Measurement, Outcome, Trial, config_key
from autotile.core.statistics import Interval, median_interval, paired_ratio, ratio_of, widen_by_session_spread
from autotile.tuning.backend import Evaluator
from autotile.workers.protocol import Candidate
from autotile.workers.sanitizer import Finding, Verdict

_REPEATS = 75
"""Of two runs each: a kernel that is wrong in one run of fifty is then found with 95 %: 1 - 0.98 ** 150."""
_HURRIED_REPEATS = 10


class Proof:
    """Proves finalists: verified again and again, and under compute-sanitizer where that was asked for.

    Parameters
    ----------
    evaluator
        Where they run.
    hurried
        Whether the user wants to leave: fewer repeats, and no sanitizer.

    Attributes
    ----------
    notices
        What could not be checked, a line each.
    """

    def __init__(self, evaluator: Evaluator, *, hurried: bool) -> None:
        self._evaluator = evaluator
        self._hurried = hurried
        self._findings: dict[str, list[Finding]] = {}
        self.notices: list[str] = []

    def sanitize(self, candidates: Sequence[Candidate]) -> None:
        """Run all finalists under the sanitizer at once; what it finds is told when they are proved."""
        if self._hurried:
            return
        found = self._evaluator.sanitize(candidates)
        self._findings = {c.cubin_path: findings for c, findings in zip(candidates, found, strict=True)}
        unchecked = [finding for findings in found for finding in findings if finding.verdict is Verdict.UNCHECKED]
        if unchecked:
            self.notices.append(f"{len(unchecked)} of the sanitizer's checks were not made; {unchecked[0].reason}")

    def __call__(self, candidate: Candidate) -> tuple[Outcome, str, str]:
        """How the candidate ends, the reason, and the stage that decided."""
        faults = [f for f in self._findings.get(candidate.cubin_path, ()) if f.verdict is Verdict.FAILED]
        if faults:
            outcome = Outcome.OUT_OF_BOUNDS if faults[0].tool == "memcheck" else Outcome.WRONG_RESULT
            return outcome, f"{faults[0].tool}: {faults[0].reason}", "sanitize"
        evaluation = self._evaluator.verify(candidate, _HURRIED_REPEATS if self._hurried else _REPEATS)
        return evaluation.outcome, evaluation.reason, evaluation.stage


_RACE_S = 3.0
"""GPU time of the whole race; rounds are cut to fit it."""
_LEAST_ROUNDS = 9
_MOST_ROUNDS = 60
"""In simulation, 60 interleaved rounds of 12 finalists left a winner 0.01 % off, at 0.8 % noise with drift."""
_HURRIED_FINALISTS = 4
"""Beside the default, when the user wants to leave."""


@dataclass(frozen=True, slots=True)
class Finals:
    """How the finalists compare.

    Attributes
    ----------
    ranked
        Finalists with their times from the race, winner first; empty where none could be proved.
    default
        The default configuration's trial, where it runs.
    speedup
        Time of the default over time of the winner; None where the default does not run.
    ties
        Configurations that cannot be told apart from the winner.
    refused
        Finalists in which a fault was found after all, with what it is.
    notices
        What could not be checked, a line each.
    """

    ranked: tuple[Trial, ...]
    default: Trial | None
    speedup: Interval | None
    ties: tuple[Config, ...]
    refused: tuple[Trial, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def winner(self) -> Trial | None:
        """The configuration to serve."""
        return self.ranked[0] if self.ranked else None


def choose_finalists(
    trials: Sequence[Trial], default: Config, incumbent: Config | None, count: int, *, hurried: bool = False
) -> list[Trial]:
    """The fastest ``count`` trials, four at most in a hurry, and the default and the incumbent where they ran."""
    count = min(count, _HURRIED_FINALISTS) if hurried else count
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
    """Race the finalists and name the winner: the fastest that is proved, or the incumbent where it ties with that.

    Proved is what passes `Proof`. In replay nothing can be raced: the recorded medians and their intervals are compared
    instead. A hurried race has the fewest rounds that give an interval.
    """
    finalists, candidates = [trial for trial, _ in racing], [candidate for _, candidate in racing]
    proof = Proof(evaluator, hurried=hurried)
    proof.sanitize(candidates)
    rounds = _LEAST_ROUNDS if hurried else _rounds(finalists)
    times = evaluator.race(candidates, rounds, seed) if len(finalists) > 1 else None
    race = _Race(finalists, times)
    refused: list[Trial] = []
    left = list(range(len(finalists)))
    while left:
        finals = race.rank(left, default, incumbent)
        winner = next(i for i in left if _same(finalists[i].config, finals.ranked[0].config))
        outcome, reason, stage = proof(candidates[winner])
        if outcome is Outcome.OK:
            return replace(finals, refused=tuple(refused), notices=tuple(proof.notices))
        refused.append(replace(finalists[winner], outcome=outcome, reason=reason, stage=stage, measurement=None))
        left.remove(winner)
    return Finals((), None, None, (), tuple(refused), tuple(proof.notices))


class _Race:
    """Finalists with their interleaved times, or with the search's own where they could not be raced."""

    def __init__(self, finalists: Sequence[Trial], times: Sequence[Sequence[float]] | None) -> None:
        self._times = times
        self._trials = (
            list(finalists)
            if times is None
            else [_with_times(trial, row) for trial, row in zip(finalists, times, strict=True)]
        )

    def rank(self, taking_part: Sequence[int], default: Config, incumbent: Config | None) -> Finals:
        """How those that still take part compare."""
        order = sorted(taking_part, key=lambda i: _time_us(self._trials[i]))
        tied = [i for i in order if i == order[0] or self._ratio(i, order[0]).low <= 1.0]
        winner = next((i for i in tied if self._is(i, incumbent)), order[0])
        order = [winner, *(i for i in order if i != winner)]
        baseline = next((i for i in order if self._is(i, default)), None)
        return Finals(
            ranked=tuple(self._trials[i] for i in order),
            default=self._trials[baseline] if baseline is not None else None,
            speedup=self._ratio(baseline, winner) if baseline is not None else None,
            ties=tuple(self._trials[i].config for i in tied if i != winner),
        )

    def _ratio(self, slower: int, faster: int) -> Interval:
        if self._times is None:
            return ratio_of(_interval(self._trials[faster]), _interval(self._trials[slower]))
        if slower == faster:
            return Interval(1.0, 1.0, 1.0)
        ratio = paired_ratio(self._times[faster], self._times[slower])
        return widen_by_session_spread(ratio)

    def _is(self, index: int, config: Config | None) -> bool:
        return config is not None and _same(self._trials[index].config, config)


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
