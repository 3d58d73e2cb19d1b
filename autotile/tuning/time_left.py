"""Estimate of the time that a session still takes: the pace of its trials, the rules that end it, and its finals."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from autotile.core.model import Outcome, Trial
from autotile.core.pace import MIN_PACE_STEPS, STEADY_STEPS, Pace
from autotile.tuning.finals import race_rounds
from autotile.tuning.options import TuneOptions

_FINALS_S = 0.3
"""Time of finals besides the race and the checks: recompiling, a second set of inputs. The finals of 120 sessions on an
H200 took 0.43 to 0.73 s where the race takes next to nothing (benchmarks/results/h200/unseen_*.json)."""
_RACE_SHARE = 0.6
"""Share of all rounds of a race that is run, as slower finalists leave early: 0.5 to 0.63 in these sessions."""


class TimeLeft:
    """Estimates how long a session still takes.

    Parameters
    ----------
    options
        Limits of the session.
    valid
        Number of valid configurations.
    """

    def __init__(self, options: TuneOptions, valid: int) -> None:
        self._options = options
        self._valid = valid
        self._pace = Pace()
        self._times_us: list[float] = []
        self._gpu_s: deque[float] = deque(maxlen=STEADY_STEPS)

    def add(self, elapsed_s: float, trial: Trial) -> None:
        """Register a trial that has just ended, ``elapsed_s`` seconds after the session began."""
        self._pace.add(elapsed_s)
        self.remember([trial])

    def remember(self, trials: Iterable[Trial]) -> None:
        """Register trials of earlier sessions, which may be in the finals."""
        for trial in trials:
            self._remember(trial)

    def _remember(self, trial: Trial) -> None:
        if trial.source == "replayed" or trial.outcome is not Outcome.OK or trial.time_us is None:
            return  # finals in replay compare stored times
        insort(self._times_us, trial.time_us)
        del self._times_us[self._options.finals :]
        self._gpu_s.append(trial.seconds.get("load", 0.0) + trial.seconds.get("verify", 0.0))

    def search_s(self, tried: int, elapsed_s: float, settles_after: float | None = None) -> float | None:
        """Return the estimated time until the search ends, in seconds; None before there is a basis for an estimate.

        Parameters
        ----------
        tried
            Number of trials of the study, those of earlier sessions included.
        elapsed_s
            Seconds since the session began.
        settles_after
            Number of trials after which a rule on the expected gain is expected to end the search; None if unknown.
        """
        budget_s = self._options.budget_s
        by_budget_s = max(0.0, budget_s - elapsed_s) if budget_s is not None else None
        left = self._trials_left(tried, settles_after)
        pace_s = self._pace.mean_s if len(self._pace) >= MIN_PACE_STEPS - 1 else None
        if left is None or pace_s is None:
            return by_budget_s
        return pace_s * left if by_budget_s is None else min(pace_s * left, by_budget_s)

    @property
    def finals_s(self) -> float:
        """Estimated time of the finals in seconds, without that of compute-sanitizer; 0 if there are none."""
        count = len(self._times_us)
        if not count or not self._options.finals:
            return 0.0
        round_us = sum(self._times_us)
        check_s = sum(self._gpu_s) / len(self._gpu_s)
        return _FINALS_S + 1e-6 * _RACE_SHARE * race_rounds(round_us) * round_us + count * check_s

    def _trials_left(self, tried: int, settles_after: float | None) -> float | None:
        """Return the number of trials until the first rule ends the search; None if that is not known.

        The space ends a search only where nothing else does: long before, a gain ends one that has no other limit.
        """
        target, until = self._options.trial_target, self._options.until
        limits = [] if target is None else [max(0.0, min(target, self._valid) - tried)]
        if target is None and until is None:
            limits.append(max(0.0, self._valid - tried))
        if settles_after is not None:
            limits.append(settles_after)
        return min(limits, default=None)
