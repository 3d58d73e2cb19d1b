"""Pace of a process whose speed changes."""

from __future__ import annotations

import math

MIN_PACE_STEPS = 5
"""Number of steps before the first estimate: the first ones wait for the compilers."""
STEADY_STEPS = 20
"""Number of newest durations that are always used: fewer say little, as trials end in bursts."""
_KEPT = 4096
"""Number of newest durations from which the pace is computed, which bounds its cost."""
_GROWTH = 2.0
"""Factor by which the durations that are used grow while the older ones agree with the newer."""
_DISAGREEMENT = 1.0
"""Standard errors, beyond a tenth of the mean, that tell older durations from newer."""
_TOLERANCE = 0.1


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
        used = min(STEADY_STEPS, known)
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
