"""Medians with 95 % intervals that assume nothing about the distribution of times.

Times of a kernel are skewed, quantised by the timer and now and then far out, so means and normal intervals mislead.
The interval of a median runs between two order statistics chosen by the binomial distribution: H. A. David and
H. N. Nagaraja, Order Statistics, 3rd ed. (2003), section 7.1; recommended for benchmarks by T. Hoefler and R. Belli,
Scientific Benchmarking of Parallel Computing Systems, SC15 (2015), section 3.1.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the 95 % interval around it; ``low <= value <= high``."""

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the estimate: 0.005 reads as "known to 0.5 %"."""
        return (self.high - self.low) / (2.0 * self.value)

    def contains(self, value: float) -> bool:
        """Whether ``value`` is in the interval, ends included."""
        return self.low <= value <= self.high


def median_interval(samples: npt.ArrayLike) -> Interval:
    """Median of independent samples with its 95 % interval.

    Parameters
    ----------
    samples
        Shape ``(n,)``, positive times or ratios in any unit.

    Returns
    -------
    Interval
        In the samples' unit. It covers the true median with at least 95 % from 6 samples on. With fewer it runs
        from the least to the greatest, which covers it with ``1 - 2 ** (1 - n)``: 94 % of 5, 75 % of 3, never of 1.

    Raises
    ------
    ValueError
        No samples, more than one dimension, or a sample that is not positive and finite.
    """
    ordered = np.sort(_checked(samples))
    rank = _lower_rank(ordered.size)
    return Interval(float(np.median(ordered)), float(ordered[rank]), float(ordered[-1 - rank]))


def paired_ratio(a: npt.ArrayLike, b: npt.ArrayLike) -> Interval:
    """How many times longer ``b`` takes than ``a``, from rounds in which both were timed one after the other.

    Drift of clock and temperature is alike for both in a round and cancels in the round's ratio.

    Parameters
    ----------
    a, b
        Shape ``(rounds,)``: times of a round at the same index, in one unit.

    Returns
    -------
    Interval
        Median of ``b / a`` with its interval, as `median_interval` gives it; above 1 where ``b`` is slower.

    Raises
    ------
    ValueError
        Different lengths, or samples that `median_interval` refuses.
    """
    times_a, times_b = _checked(a), _checked(b)
    if times_a.size != times_b.size:
        raise ValueError(f"paired times need equal rounds: {times_a.size} of a, {times_b.size} of b")
    return median_interval(times_b / times_a)


def ratio_of(a: Interval, b: Interval) -> Interval:
    """How many times longer ``b`` takes than ``a`` where only their intervals are known, as in a recording.

    Conservative: the interval holds the true ratio whenever ``a`` and ``b`` hold their true values.

    Raises
    ------
    ValueError
        ``a`` reaches down to 0.
    """
    if a.low <= 0.0:
        raise ValueError(f"a ratio needs a positive divisor; its interval starts at {a.low}")
    return Interval(b.value / a.value, b.low / a.high, b.high / a.low)


SESSION_SPREAD = 2e-3
"""Relative spread of a ratio of times between sessions, beyond the interval that the rounds of one session give.

On an H200, ten sessions and one long race of 300 rounds gave the same two configurations ratios of 1.1486 to 1.1526,
each with an interval of 0.1 to 0.2 %. In races between the same set of configurations they agreed to 0.03 % beyond
their intervals.
"""


def widen_by_session_spread(ratio: Interval) -> Interval:
    """Return a ratio with its interval widened by `SESSION_SPREAD` at both ends."""
    return Interval(ratio.value, ratio.low * (1.0 - SESSION_SPREAD), ratio.high * (1.0 + SESSION_SPREAD))


def is_tie(ratio: Interval) -> bool:
    """Whether neither side of a ratio is shown to be faster: the interval holds 1."""
    return ratio.contains(1.0)


def _checked(samples: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"samples must be a column of at least one; the shape is {values.shape}")
    if not (np.isfinite(values) & (values > 0.0)).all():
        raise ValueError("samples must be positive and finite")
    return values


@cache
def _lower_rank(n: int) -> int:
    """Index of the interval's lower end in ``n`` sorted samples; the upper end is as far from the other side.

    The median lies below the sample of index r with the probability that at most r of n fair coins show heads. The
    largest r that keeps this within 2.5 % (a fortieth of 2 ** n outcomes) is taken, and 0 where none does.
    """
    rank, outcomes, at_most = -1, 1, 1
    while 40 * at_most <= 2**n:
        rank += 1
        outcomes = outcomes * (n - rank) // (rank + 1)
        at_most += outcomes
    return max(rank, 0)
