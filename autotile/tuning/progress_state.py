"""The progress of tuning: the state of a session, its place in a schedule of sessions, and the time that is left."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Problem, Trial
from autotile.core.timeline import MIN_PACE_STEPS, STEADY_STEPS, Pace
from autotile.kernel.problem import Workrate
from autotile.tuning.finals import race_rounds
from autotile.tuning.options import TuneOptions


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a session among those of a schedule, such as round 2 of 3.

    Attributes
    ----------
    of
        Unit that is counted: ``round``, ``tuning point``, ``measuring point`` or ``problem``.
    number, count
        Number of this one, from 1, and number of them; a last race has a number above the count.
    ended
        Number of them that have ended.
    """

    of: str
    number: int
    count: int
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running session.

    Attributes
    ----------
    phase
        ``starting``, ``searching`` or ``finals`` of a session; ``measuring`` or ``learning`` of a family of an
        operation, whose trials are those of all its problems; ``ended`` of a problem of a plan.
    problem
        Problem that is tuned; None before the first one of a family of an operation.
    device
        Device that it is tuned for; None if it is not known yet.
    done
        Number of trials of this session; ``outcomes`` counts those of earlier sessions too. Of a family of an
        operation, number of problems.
    target
        Target number of trials of the study; None where there is none.
    elapsed_s, budget_s
        Wall time so far, and its limit; None without a limit.
    outcomes
        Number of trials by outcome.
    gates
        As in `TuneResult`; empty where no space is searched.
    best, last
        The best and the newest trial.
    rate
        Work of the problem, from which a time gives a rate.
    notices
        Remarks for the user, one line each.
    remaining_s
        Estimated time until the session ends, finals included, in seconds; None before there is a basis for it.
    may_end_earlier
        Whether ``remaining_s`` is a limit: ``until`` is expected to end the search, and it is not foreseen when.
    waiting
        What the session waits for beside results, such as a scheduler that is lost; empty for nothing.
    path
        Places of the session in the schedules that hold it, the outermost first; empty for a session alone.
    ending
        Of a problem of a plan that has ended, the time of its winner or why there is none; empty otherwise.
    """

    phase: str
    problem: Problem | None
    device: DeviceProperties | None
    done: int
    target: int | None
    elapsed_s: float
    budget_s: float | None
    outcomes: Mapping[Outcome, int]
    gates: Mapping[str, int]
    best: Trial | None
    rate: Workrate
    last: Trial | None = None
    notices: tuple[str, ...] = ()
    remaining_s: float | None = None
    may_end_earlier: bool = False
    waiting: str = ""
    path: tuple[Place, ...] = ()
    ending: str = ""

    def within(self, place: Place) -> Progress:
        """Return the state with its place in the schedule that holds the session."""
        return replace(self, path=(place, *self.path))


Observer = Callable[[Progress], None]
"""Callable that observes sessions."""

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
