"""The finals: an interleaved race of the best candidates and the default, and checks of the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotile.core.model import Config, Measurement, Outcome, Trial, config_key
from autotile.core.statistics import Interval, median_interval, paired_ratio, ratio_of, widen_by_session_spread
from autotile.tuning.backend import Backend
from autotile.workers.protocol import Candidate
from autotile.workers.sanitizer import Finding, ToolResult

_RACE_S = 3.0
"""GPU time of the whole race, in seconds, which bounds the number of rounds."""
_MIN_ROUNDS = 9
_MAX_ROUNDS = 60
"""In simulation, 60 interleaved rounds of 12 finalists left a winner 0.01 % off, at 0.8 % noise with drift."""
_HURRIED_FINALISTS = 4
"""Maximum number of finalists besides the default and the incumbent after an interrupt."""


@dataclass(frozen=True, slots=True)
class Finals:
    """Comparison of the finalists.

    Attributes
    ----------
    ranked
        Finalists with their times from the race, winner first; empty where none passed the checks.
    default
        Trial of the default configuration, where it runs.
    speedup
        Time of the default over time of the winner; None where the default does not run.
    ties
        Configurations whose times cannot be distinguished from the winner's.
    refused
        Finalists that failed the checks, with the reason.
    notices
        Checks that could not be made, one line each.
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
    """Return the fastest trials, and the default and the incumbent if they have a time, in order of time.

    Parameters
    ----------
    trials
        All trials of the study.
    default, incumbent
        Configurations that take part regardless of their time; the incumbent is None where there is none.
    count
        Number of other finalists.
    hurried
        Whether the user has interrupted the session: four other finalists at most.
    """
    count = min(count, _HURRIED_FINALISTS) if hurried else count
    fastest = sorted((t for t in trials if t.outcome is Outcome.OK and t.time_us is not None), key=_time_us)
    seeded = {config_key(default)} | ({config_key(incumbent)} if incumbent is not None else set())
    others = [t for t in trials if t.outcome.has_time and config_key(t.config) in seeded]
    finalists = {config_key(t.config): t for t in [*fastest[: max(count, 1)], *others]}
    return sorted(finalists.values(), key=_time_us)


def run_finals(
    racing: Sequence[tuple[Trial, Candidate]],
    backend: Backend,
    *,
    default: Config,
    incumbent: Config | None,
    seed: int,
    hurried: bool = False,
) -> Finals:
    """Race the finalists and name the winner: the fastest that passes the checks, or the incumbent if they tie.

    In replay no race is possible, and the recorded medians and their intervals are compared instead.

    Parameters
    ----------
    racing
        Finalists, each with its compiled candidate.
    backend
        Device that they run on.
    default, incumbent
        As for `choose_finalists`.
    seed
        Seed of the order within the rounds.
    hurried
        Whether the user has interrupted the session: the minimum number of rounds that gives an interval.
    """
    finalists, candidates = [trial for trial, _ in racing], [candidate for _, candidate in racing]
    checks = FinalistChecks(backend, hurried=hurried)
    checks.sanitize(candidates)
    rounds = _MIN_ROUNDS if hurried else _rounds(finalists)
    times_us = backend.race(candidates, rounds, seed) if len(finalists) > 1 else None
    race = _Race(finalists, times_us)
    refused: list[Trial] = []
    left = list(range(len(finalists)))
    while left:
        finals = race.rank(left, default, incumbent)
        winner = next(i for i in left if _same(finalists[i].config, finals.ranked[0].config))
        outcome, reason, stage = checks.check(candidates[winner])
        if outcome is Outcome.OK:
            return replace(finals, refused=tuple(refused), notices=tuple(checks.notices))
        refused.append(replace(finalists[winner], outcome=outcome, reason=reason, stage=stage, measurement=None))
        left.remove(winner)
    return Finals((), None, None, (), tuple(refused), tuple(checks.notices))


_REPEATS = 75
"""Verification runs of a winner, two launches each: an error in one launch of fifty is then found with 95 %
probability, 1 - 0.98 ** 150."""
_HURRIED_REPEATS = 10


class FinalistChecks:
    """Repeated verification of finalists, and compute-sanitizer if it is enabled.

    Parameters
    ----------
    backend
        Device that they run on.
    hurried
        Whether the user has interrupted the session: fewer repeats, and no sanitizer.

    Attributes
    ----------
    notices
        Checks that could not be made, one line each.
    """

    def __init__(self, backend: Backend, *, hurried: bool) -> None:
        self._backend = backend
        self._hurried = hurried
        self._findings: dict[str, list[Finding]] = {}
        self.notices: list[str] = []

    def sanitize(self, candidates: Sequence[Candidate]) -> None:
        """Run all finalists under the sanitizer at once; `check` reports the findings."""
        if self._hurried:
            return
        found = self._backend.sanitize(candidates)
        self._findings = {c.cubin_path: findings for c, findings in zip(candidates, found, strict=True)}
        unchecked = [finding for findings in found for finding in findings if finding.result is ToolResult.UNCHECKED]
        if unchecked:
            self.notices.append(f"{len(unchecked)} of the sanitizer's checks were not made; {unchecked[0].reason}")

    def check(self, candidate: Candidate) -> tuple[Outcome, str, str]:
        """Return the outcome of the checks, its reason, and the stage that decided it."""
        faults = [f for f in self._findings.get(candidate.cubin_path, ()) if f.result is ToolResult.FAILED]
        if faults:
            outcome = Outcome.OUT_OF_BOUNDS if faults[0].tool == "memcheck" else Outcome.WRONG_RESULT
            return outcome, f"{faults[0].tool}: {faults[0].reason}", "sanitize"
        evaluation = self._backend.verify(candidate, _HURRIED_REPEATS if self._hurried else _REPEATS)
        return evaluation.outcome, evaluation.reason, evaluation.stage


class _Race:
    """Finalists with their interleaved times, or with the times of the search where no race was possible."""

    def __init__(self, finalists: Sequence[Trial], times_us: Sequence[Sequence[float]] | None) -> None:
        self._times_us = times_us
        self._trials = (
            list(finalists)
            if times_us is None
            else [_with_times(trial, row) for trial, row in zip(finalists, times_us, strict=True)]
        )

    def rank(self, participants: Sequence[int], default: Config, incumbent: Config | None) -> Finals:
        """Compare the finalists that still take part."""
        order = sorted(participants, key=lambda i: _time_us(self._trials[i]))
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
        if self._times_us is None:
            return ratio_of(_interval(self._trials[faster]), _interval(self._trials[slower]))
        if slower == faster:
            return Interval(1.0, 1.0, 1.0)
        return widen_by_session_spread(paired_ratio(self._times_us[faster], self._times_us[slower]))

    def _is(self, index: int, config: Config | None) -> bool:
        return config is not None and _same(self._trials[index].config, config)


def _rounds(finalists: Sequence[Trial]) -> int:
    round_us = sum(_time_us(trial) for trial in finalists)
    return int(np.clip(_RACE_S * 1e6 / round_us, _MIN_ROUNDS, _MAX_ROUNDS))


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
