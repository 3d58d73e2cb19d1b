"""Medians with distribution-free 95 % confidence intervals.

Times of a kernel are skewed, quantised by the timer, and contain outliers, so means and normal intervals mislead. The
interval of a median lies between two order statistics given by the binomial distribution: H. A. David and H. N.
Nagaraja, Order Statistics, 3rd ed. (2003), section 7.1; recommended for benchmarks by T. Hoefler and R. Belli,
Scientific Benchmarking of Parallel Computing Systems, SC15 (2015), section 3.1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from autotile.core.model import Measurement


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval; ``low <= value <= high``."""

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the width of the interval divided by the estimate: 0.005 for an estimate known to 0.5 %."""
        return (self.high - self.low) / (2.0 * self.value)

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is in the closed interval."""
        return self.low <= value <= self.high

    def to_json(self, name: str = "ratio") -> dict[str, Any]:
        """Return the estimate under a name, and the interval."""
        return {name: self.value, "interval": [self.low, self.high]}


def median_interval(samples: npt.ArrayLike) -> Interval:
    """Return the median of independent times or ratios, shape ``(n,)``, with its 95 % confidence interval.

    From 6 samples on, it covers the true median with at least 95 % probability. With fewer, it extends from the minimum
    to the maximum, which covers it with probability ``1 - 2 ** (1 - n)``: 94 % for 5, 75 % for 3, 0 for 1. Raise
    `ValueError` if there are no samples, several dimensions, or samples that are not positive and finite.
    """
    ordered = np.sort(_checked(samples))
    rank = _lower_rank(ordered.size)
    return Interval(float(np.median(ordered)), float(ordered[rank]), float(ordered[-1 - rank]))


def paired_ratio(a: npt.ArrayLike, b: npt.ArrayLike) -> Interval:
    """Return the median of ``b / a``, from the times of rounds in which both were timed in succession.

    Drift of clock and temperature affects both times of a round alike and cancels in their ratio. Raise `ValueError` if
    the lengths differ, or the samples are invalid for `median_interval`.
    """
    times_a, times_b = _checked(a), _checked(b)
    if times_a.size != times_b.size:
        raise ValueError(f"paired times need equal numbers of rounds: {times_a.size} of a, {times_b.size} of b")
    return median_interval(times_b / times_a)


_CLEARLY_SLOWER = 1.02
"""Ratio of times beyond which a candidate leaves a race; that of two that tie differs from 1 by the session spread at
most, see `widen_by_session_spread`."""


def contenders(times: Sequence[Sequence[float]], racing: Sequence[int]) -> list[int]:
    """Return which candidates of a race may still win it or tie with the winner.

    ``times`` are those of each candidate by round; ``racing``, at least one, are the candidates that took part in all
    rounds. One that is certain to be more than 2 % slower than the fastest, by the interval of `paired_ratio`, is left
    out.
    """
    leader = min(racing, key=lambda i: float(np.median(times[i])))
    return [i for i in racing if i == leader or paired_ratio(times[leader], times[i]).low <= _CLEARLY_SLOWER]


def is_decided(times: Sequence[Sequence[float]], racing: Sequence[int], precision: float) -> bool:
    """Return True if a race, see `contenders`, has shown all that more rounds would.

    That is, the time of the fastest is known to the precision, and of each other one either the ratio of their times,
    or that it is slower by more than that. A precision is the half width of an interval relative to its value, such as
    0.005; 0 for never.
    """
    if not precision:
        return False
    leader = min(racing, key=lambda i: float(np.median(times[i])))
    ratios = [paired_ratio(times[leader], times[i]) for i in racing if i != leader]
    return median_interval(times[leader]).relative_half_width <= precision and all(
        ratio.low > 1.0 + precision or ratio.relative_half_width <= precision for ratio in ratios
    )


def ratio_of(a: Interval, b: Interval) -> Interval:
    """Return the ratio of ``b`` to ``a`` from their intervals alone, as for times of a recording.

    The interval is conservative: it contains the true ratio if ``a`` and ``b`` contain their true values. Raise
    `ValueError` if the interval of ``a`` is not positive.
    """
    if a.low <= 0.0:
        raise ValueError(f"a ratio needs a positive divisor; its interval starts at {a.low}")
    return Interval(b.value / a.value, b.low / a.high, b.high / a.low)


def ratio_of_times(a: Measurement, b: Measurement) -> Interval:
    """Return the ratio of time ``b`` to time ``a`` as `ratio_of` does; errors as there."""
    return ratio_of(*(Interval(one.time_us, one.low_us, one.high_us) for one in (a, b)))


SESSION_SPREAD = 2e-3
"""Relative spread of a ratio of times between sessions, beyond the interval that the rounds of one session give.

On an H200, ten sessions and one long race of 300 rounds gave the same two configurations ratios of 1.1486 to 1.1526,
each with an interval of 0.1 to 0.2 %. In races between the same set of configurations they agreed to 0.03 % beyond
their intervals.
"""


def widen_by_session_spread(ratio: Interval) -> Interval:
    """Return a ratio with its interval widened by `SESSION_SPREAD` at both ends."""
    return Interval(ratio.value, ratio.low * (1.0 - SESSION_SPREAD), ratio.high * (1.0 + SESSION_SPREAD))


def raced_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return `paired_ratio` of two contenders of a race, widened as by `widen_by_session_spread`.

    One of them may have left the race earlier: the rounds that both took part in count.
    """
    rounds = min(len(a), len(b))
    return widen_by_session_spread(paired_ratio(a[:rounds], b[:rounds]))


DISCARD_RATIO = 1.25
"""Ratio to the best time above which a probe is discarded. In simulation, 3 samples with this ratio lost no winner at
0.8 % noise."""


def discard_reason(best_us: float) -> str:
    """Return the reason that is recorded for a discarded candidate."""
    return f"clearly slower than the best so far ({best_us:.4g} us)"


def is_tie(ratio: Interval) -> bool:
    """Return True if a ratio shows neither side to be faster: its interval contains 1."""
    return ratio.contains(1.0)


def _checked(samples: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"samples must be a non-empty one-dimensional array; the shape is {values.shape}")
    if not (np.isfinite(values) & (values > 0.0)).all():
        raise ValueError("samples must be positive and finite")
    return values


@cache
def _lower_rank(n: int) -> int:
    """Return the index of the lower bound in ``n`` sorted samples; the upper bound is symmetric to it.

    The median is below the sample of index r with the probability that at most r of n fair coin tosses are heads. The
    result is the largest r for which this is within 2.5 % (a fortieth of 2 ** n outcomes), or 0 if there is none.
    """
    rank, outcomes, at_most = -1, 1, 1
    while 40 * at_most <= 2**n:
        rank += 1
        outcomes = outcomes * (n - rank) // (rank + 1)
        at_most += outcomes
    return max(rank, 0)
