"""Estimate of the time that a session still takes: the pace of its trials, the rules that end it, and its finals."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable

from autotile.core.model import Outcome, Trial
from autotile.tuning.finals import race_rounds
from autotile.tuning.options import TuneOptions

_MIN_TRIALS = 5
"""Number of trials before the first estimate: the first ones wait for the compilers."""
_KEPT = 4096
"""Number of newest durations from which the pace is computed, which bounds its cost."""
_STEADY = 20
"""Number of newest durations that are always used: fewer say little, as trials end in bursts."""
_GROWTH = 2.0
"""Factor by which the durations that are used grow while the older ones agree with the newer."""
_DISAGREEMENT = 1.0
"""Standard errors, beyond a tenth of the mean, that tell older durations from newer."""
_TOLERANCE = 0.1

_FINALS_S = 0.3
"""Time of finals besides the race and the checks: recompiling, a second set of inputs. The finals of 120 sessions on an
H200 took 0.43 to 0.73 s where the race takes next to nothing (benchmarks/results/h200/unseen_*.json)."""
_RACE_SHARE = 0.6
"""Share of all rounds of a race that is run, as slower finalists leave early: 0.5 to 0.63 in these sessions."""


class Pace:
    """Duration of a step of a process whose speed changes: cores come and go, other programs start.

    The newest durations are averaged, as many as agree with each other: many while the speed is steady, few after it
    has changed. The time before the first step, such as that of starting workers, is left out.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._squares: list[float] = []
        """Sum of the squared durations up to each of these."""

    def __len__(self) -> int:
        return max(0, min(len(self._ends_s), _KEPT) - 1)

    def add(self, end_s: float, count: int = 1) -> None:
        """Add the end of ``count`` steps that share the time since the last one, in seconds since a common moment."""
        if not count:  # a report without a step
            return
        start_s, squares = (self._ends_s[-1], self._squares[-1]) if self._ends_s else (end_s, 0.0)
        step_s = (end_s - start_s) / count
        self._ends_s += [start_s + step_s * (number + 1) for number in range(count)]
        self._squares += [squares + step_s**2 * (number + 1) for number in range(count)]
        if len(self._ends_s) > 2 * _KEPT:
            del self._ends_s[:-_KEPT], self._squares[:-_KEPT]

    @property
    def mean_s(self) -> float | None:
        """Expected seconds of the next steps; None before two steps have ended."""
        known = len(self)
        if not known:
            return None
        used = min(_STEADY, known)
        newer_s, newer_variance = self._moments(0, used)
        while used < known:
            more = min(known, max(used + 4, int(used * _GROWTH)))
            older_s, older_variance = self._moments(used, more)
            error_s = math.sqrt(newer_variance / used + older_variance / (more - used))
            if abs(newer_s - older_s) > _DISAGREEMENT * error_s + _TOLERANCE * newer_s:
                break
            used = more
            newer_s, newer_variance = self._moments(0, used)
        return newer_s

    def _moments(self, newest: int, oldest: int) -> tuple[float, float]:
        """Return mean and variance of durations, given by their numbers counted back from the newest."""
        last, first, count = -1 - newest, -1 - oldest, oldest - newest
        mean_s = (self._ends_s[last] - self._ends_s[first]) / count
        return mean_s, max(0.0, (self._squares[last] - self._squares[first]) / count - mean_s**2)


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
        self._gpu_s: deque[float] = deque(maxlen=_STEADY)

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
        pace_s = self._pace.mean_s if len(self._pace) >= _MIN_TRIALS - 1 else None
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
