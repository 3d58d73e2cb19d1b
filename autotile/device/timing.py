"""Time launches with CUDA events: cold L2, warm clocks, as many repetitions as the noise asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotile.device.shots import BATCH_BELOW_US, BackToBack, BatchShot, Launch, Shot, SingleShot
from autotile.device.toolchain import load_cupy
from autotile.ground.model import L2Mode, Measurement
from autotile.ground.stats import median_interval

_PROBE_SAMPLES = 3
DISCARD_RATIO = 1.25
"""A probe slower than the best by this is dropped: a 3-run race with this cut loses no winner at 0.8 % noise."""
_TARGET_HALF_WIDTH = 0.005
_LEAST_SAMPLES = 9
"""Fewer than six samples have no distribution-free 95 % interval of the median; nine make it narrower."""
_MOST_SAMPLES = 200
_QUEUED_SAMPLES = 16
"""Samples queued before the host waits, so that the GPU never waits for the host."""
_WARM_UP_S = 0.3
_WARM_UP_LIMIT_S = 2.0
_SETTLED = 0.01


@dataclass(frozen=True, slots=True)
class Timing:
    """A measurement, and whether it was cut short because the candidate is clearly slower than the best."""

    measurement: Measurement
    discarded: bool


def discard_reason(best_us: float) -> str:
    """What is said of a candidate that was dropped."""
    return f"clearly slower than the best so far ({best_us:.4g} us)"


class Timer:
    """Times launches on a stream of its own.

    Parameters
    ----------
    l2_bytes
        Size of the device's L2 cache.
    l2
        ``cold`` writes a buffer of the L2's size before each launch, so that inputs come from memory; ``hot`` does not.
    limit_s
        Most GPU time that the samples of one measurement take, once there are nine.

    Attributes
    ----------
    l2
        As given.
    """

    def __init__(self, l2_bytes: int, l2: L2Mode, limit_s: float) -> None:
        cupy = load_cupy()
        self.l2 = l2
        self._limit_us = 1e6 * limit_s
        self._stream: Any = cupy.cuda.Stream()
        self._flush_bytes = max(l2_bytes, 1 << 20)
        self._flush_memory: Any = cupy.cuda.alloc(self._flush_bytes)

    def warm_up(self, launch: Launch) -> None:
        """Run until the clock has settled: at least 0.3 s, then until two medians in a row agree within 1 %."""
        start = time.perf_counter()
        last = float("inf")
        while True:
            median = float(np.median(self.samples(launch, 10)))
            elapsed = time.perf_counter() - start
            settled = abs(median - last) <= _SETTLED * median
            if (elapsed >= _WARM_UP_S and settled) or elapsed >= _WARM_UP_LIMIT_S:
                return
            last = median

    def event_floor_us(self) -> float:
        """What two events with nothing between them read, in microseconds: the least that can be seen."""
        return float(np.median(self.samples(lambda: None, 20)))

    def samples(self, launch: Launch, count: int) -> list[float]:
        """Times of ``count`` single launches, in microseconds."""
        with self._stream:
            return self._sample([SingleShot(launch, self.flush) for _ in range(min(count, _QUEUED_SAMPLES))], count)

    def measure(self, launch: Launch, best_us: float | None) -> Timing:
        """Median time with its interval, to half a percent or to the limits of time and samples.

        A kernel shorter than 50 us is timed in CUDA graphs of many launches.

        Parameters
        ----------
        launch
            Queues one launch.
        best_us
            Best time so far; a candidate clearly slower is dropped after three samples and its value kept.
        """
        times = self.samples(launch, _PROBE_SAMPLES)
        probe_us = float(np.median(times))
        with self._stream:
            shots = self._shots(launch, probe_us)
            if probe_us < BATCH_BELOW_US:
                times = self._sample(shots, _PROBE_SAMPLES)
            typical_us = float(np.median(times))
            resolution_us = shots[0].resolution_us
            if best_us is not None and typical_us > DISCARD_RATIO * best_us:
                return Timing(self._measurement(times, resolution_us), discarded=True)
            affordable = int(np.clip(self._limit_us / probe_us, _LEAST_SAMPLES, _MOST_SAMPLES))
            times += self._sample(shots, _LEAST_SAMPLES - len(times))
            while not _is_precise(times, resolution_us) and len(times) < affordable:
                times += self._sample(shots, min(len(times), affordable - len(times)))
        return Timing(self._measurement(times, resolution_us), discarded=False)

    def race(self, launches: Sequence[Launch], rounds: int, seed: int) -> list[list[float]]:
        """Time several candidates in turn, in a new order each round; one row of microseconds a candidate.

        Drift of clock and temperature then hits all alike, and times of one round can be compared in pairs.
        """
        generator = np.random.default_rng(seed)
        fastest_us = min(min(self.samples(launch, _PROBE_SAMPLES)) for launch in launches)
        times: list[list[float]] = [[] for _ in launches]
        with self._stream:
            shots = [self._shots(launch, fastest_us)[0] for launch in launches]
            for _ in range(rounds):
                order = generator.permutation(len(launches))
                for index in order:
                    shots[index].fire()
                for index in order:
                    times[index].append(shots[index].time_us())
        return times

    @contextmanager
    def back_to_back(self, step: Sequence[Launch], probe_us: float) -> Iterator[BackToBack]:
        """A step of about ``probe_us`` again and again; what is inside runs on the timer's stream."""
        with self._stream:
            yield BackToBack(step, probe_us)

    def _shots(self, launch: Launch, probe_us: float) -> Sequence[Shot]:
        """What to fire for a launch of about ``probe_us``, several of it so that samples can queue up."""
        if probe_us < BATCH_BELOW_US:
            return [BatchShot(launch, self.flush, probe_us)]
        return [SingleShot(launch, self.flush) for _ in range(_QUEUED_SAMPLES)]

    @staticmethod
    def _sample(shots: Sequence[Shot], count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            queued = shots[: count - len(times)]
            for shot in queued:
                shot.fire()
            times += [shot.time_us() for shot in queued]
        return times

    def flush(self) -> None:
        """Queue what empties the L2 cache; nothing where it is to stay hot."""
        if self.l2 == "cold":
            self._flush_memory.memset_async(0, self._flush_bytes)

    def _measurement(self, times: Sequence[float], resolution_us: float) -> Measurement:
        interval, slack_us = median_interval(times), resolution_us / 2
        low, high = min(interval.low, interval.value - slack_us), max(interval.high, interval.value + slack_us)
        return Measurement(interval.value, low, high, tuple(round(t, 3) for t in times), self.l2)


def _is_precise(times: Sequence[float], resolution_us: float) -> bool:
    interval = median_interval(times)
    return (interval.high - interval.low) / 2 <= max(_TARGET_HALF_WIDTH * interval.value, resolution_us / 2)
