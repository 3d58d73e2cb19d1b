"""Time launches with CUDA events: cold L2, warm clocks, as many repetitions as the noise asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotile.device.toolchain import load_cupy
from autotile.ground.model import L2Mode, Measurement
from autotile.ground.stats import median_interval

Launch = Callable[[], None]

_PROBE_SAMPLES = 3
DISCARD_RATIO = 1.25
"""A probe slower than the best by this is dropped: a 3-run race with this cut loses no winner at 0.8 % noise."""
_TARGET_HALF_WIDTH = 0.005
_LEAST_SAMPLES = 9
"""Fewer than six samples have no distribution-free 95 % interval of the median; nine make it narrower."""
_MOST_SAMPLES = 200
_EVENT_RESOLUTION_US = 0.5
"""CUDA events tick in steps of about half a microsecond; no interval is narrower than half of that."""
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
    """Times launches on the current stream.

    Parameters
    ----------
    l2_bytes
        Size of the device's L2 cache.
    l2
        ``cold`` writes a buffer of the L2's size before each launch, so that inputs come from memory; ``hot`` does not.
    limit_s
        Most GPU time that the samples of one measurement take, once there are nine.
    """

    def __init__(self, l2_bytes: int, l2: L2Mode, limit_s: float) -> None:
        self._cupy = load_cupy()
        self._l2 = l2
        self._limit_us = 1e6 * limit_s
        self._flush_bytes = max(l2_bytes, 1 << 20)
        self._flush_memory: Any = self._cupy.cuda.alloc(self._flush_bytes)
        self._events = [(self._new_event(), self._new_event()) for _ in range(32)]

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
        """What two events with an empty memset between them read, in microseconds: the least that can be seen."""
        return float(np.median(self.samples(lambda: None, 20)))

    def samples(self, launch: Launch, count: int) -> list[float]:
        """Times of ``count`` launches, in microseconds."""
        times: list[float] = []
        while len(times) < count:
            batch = self._events[: count - len(times)]
            for start, stop in batch:
                self._sample(launch, start, stop)
            batch[-1][1].synchronize()
            times += [1e3 * self._cupy.cuda.get_elapsed_time(start, stop) for start, stop in batch]
        return times

    def measure(self, launch: Launch, best_us: float | None) -> Timing:
        """Median time with its interval, to half a percent or to the limits of time and samples.

        Parameters
        ----------
        launch
            Queues one launch.
        best_us
            Best time so far; a candidate clearly slower is dropped after three samples and its value kept.
        """
        times = self.samples(launch, _PROBE_SAMPLES)
        probe = float(np.median(times))
        if best_us is not None and probe > DISCARD_RATIO * best_us:
            return Timing(self._measurement(times), discarded=True)
        affordable = int(np.clip(self._limit_us / probe, _LEAST_SAMPLES, _MOST_SAMPLES))
        times += self.samples(launch, _LEAST_SAMPLES - len(times))
        while not self._is_precise(times) and len(times) < affordable:
            times += self.samples(launch, min(len(times), affordable - len(times)))
        return Timing(self._measurement(times), discarded=False)

    def race(self, launches: Sequence[Launch], rounds: int, seed: int) -> list[list[float]]:
        """Time several candidates in turn, in a new order each round; one row of microseconds a candidate.

        Drift of clock and temperature then hits all alike, and times of one round can be compared in pairs.
        """
        generator = np.random.default_rng(seed)
        times: list[list[float]] = [[] for _ in launches]
        for _ in range(rounds):
            for index in generator.permutation(len(launches)):
                times[index] += self.samples(launches[index], 1)
        return times

    def _is_precise(self, times: Sequence[float]) -> bool:
        interval = median_interval(times)
        half_width = (interval.high - interval.low) / 2
        return half_width <= max(_TARGET_HALF_WIDTH * interval.value, _EVENT_RESOLUTION_US / 2)

    def _measurement(self, times: Sequence[float]) -> Measurement:
        interval = median_interval(times)
        slack = _EVENT_RESOLUTION_US / 2
        low, high = min(interval.low, interval.value - slack), max(interval.high, interval.value + slack)
        return Measurement(interval.value, low, high, tuple(round(t, 3) for t in times), self._l2)

    def _sample(self, launch: Launch, start: Any, stop: Any) -> None:
        if self._l2 == "cold":
            self._flush_memory.memset_async(0, self._flush_bytes)
        start.record()
        launch()
        stop.record()

    def _new_event(self) -> Any:
        return self._cupy.cuda.Event()
