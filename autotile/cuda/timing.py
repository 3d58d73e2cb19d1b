"""Time launches with CUDA events: timers, adaptive sampling, and a probe for drift."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autotile.core.model import L2Mode, Measurement
from autotile.core.statistics import median_interval
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import load_cupy

Launch = Callable[[], None]

BATCH_BELOW_US = 50.0
"""One event step is one percent of this; a shorter kernel is timed many at a time."""
_EVENT_STEP_US = 0.5
"""CUDA events tick in steps of about half a microsecond."""
_BATCH_US = 200.0
_MOST_IN_BATCH = 64
_STRETCH_US = 5000.0
"""Launches that are queued at once when they run back to back: more than the host needs to queue the next ones."""
_QUEUED_STRETCHES = 2


class Shot(Protocol):
    """One sample of a launch's time."""

    resolution_us: float
    """Smallest difference that a sample can show."""

    def fire(self) -> None:
        """Queue everything that one sample needs on the current stream."""

    def time_us(self) -> float:
        """Time of one launch in microseconds; waits for what was fired."""


class SingleShot:
    """One launch between two events, after what empties the L2 cache.

    Parameters
    ----------
    launch
        Queues the launch.
    flush
        Queues what empties the L2 cache; does nothing for a hot cache.
    """

    def __init__(self, launch: Launch, flush: Launch) -> None:
        self._launch = launch
        self._flush = flush
        self.resolution_us = _EVENT_STEP_US
        self._start, self._stop = _events(2)

    def fire(self) -> None:
        """Flush, then launch between two events."""
        self._flush()
        self._start.record()
        self._launch()
        self._stop.record()

    def time_us(self) -> float:
        """Time between the events."""
        self._stop.synchronize()
        return _elapsed_us(self._start, self._stop)


class BatchShot:
    """Many launches in one CUDA graph, each after a flush, less the time of a graph of the flushes alone.

    Both graphs run in every sample, one after the other, so that a drift of the memory clock hits both.

    Parameters
    ----------
    launch, flush
        As for `SingleShot`.
    probe_us
        About how long a launch takes; the batch lasts at least 200 us.
    """

    def __init__(self, launch: Launch, flush: Launch, probe_us: float) -> None:
        self._count = _batched(probe_us)
        self.resolution_us = _EVENT_STEP_US / self._count
        self._empty = _capture([flush], self._count)
        self._full = _capture([flush, launch], self._count)
        self._start, self._middle, self._stop = _events(3)
        for graph in (self._empty, self._full):
            graph()  # the first run of a graph carries it to the device

    def fire(self) -> None:
        """Run the two graphs between three events."""
        self._start.record()
        self._empty()
        self._middle.record()
        self._full()
        self._stop.record()

    def time_us(self) -> float:
        """Difference of the graphs' times, for one launch; no less than what events can show."""
        self._stop.synchronize()
        empty_us = _elapsed_us(self._start, self._middle)
        return max((_elapsed_us(self._middle, self._stop) - empty_us) / self._count, self.resolution_us)


class BackToBack:
    """A step again and again, so that the GPU never waits from the first to the last.

    Short ones come in CUDA graphs, as for `BatchShot`. All is used on one current stream, not the default one.

    Parameters
    ----------
    step
        What is repeated, in order: a flush and a launch.
    probe_us
        About how long they take together.
    """

    def __init__(self, step: Sequence[Launch], probe_us: float) -> None:
        self._count = _batched(probe_us) if probe_us < BATCH_BELOW_US else 1
        self._fire = _capture(step, self._count) if self._count > 1 else _in_turn(step)
        self._fires = max(1, round(_STRETCH_US / (self._count * probe_us)))
        self._runs = 0
        self._ends: deque[Any] = deque()
        self._fire()  # the first run of a graph carries it to the device
        (self._start,) = _events(1)
        self._start.record()
        self.keep_going()

    def keep_going(self) -> None:
        """Queue more where less than two stretches are; to be called every few milliseconds."""
        while self._ends and self._ends[0].done:
            self._ends.popleft()
        while len(self._ends) < _QUEUED_STRETCHES:
            for _ in range(self._fires):
                self._fire()
            self._runs += self._fires * self._count
            (end,) = _events(1)
            end.record()
            self._ends.append(end)

    def end(self) -> float:
        """Wait for what is queued; microseconds that a step took on the mean."""
        last = self._ends[-1]
        last.synchronize()
        return _elapsed_us(self._start, last) / self._runs


def _batched(probe_us: float) -> int:
    """Launches of a CUDA graph."""
    return max(1, min(_MOST_IN_BATCH, round(_BATCH_US / probe_us)))


def _in_turn(steps: Sequence[Launch]) -> Launch:
    def take() -> None:
        for step in steps:
            step()

    return take


def _capture(steps: Sequence[Launch], count: int) -> Launch:
    """A CUDA graph that takes the steps ``count`` times; the current stream must not be the default one."""
    stream = load_cupy().cuda.get_current_stream()
    stream.begin_capture()
    try:
        for _ in range(count):
            for step in steps:
                step()
    finally:
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


def _events(count: int) -> list[Any]:
    event = load_cupy().cuda.Event
    return [event() for _ in range(count)]


def _elapsed_us(start: Any, stop: Any) -> float:
    return 1e3 * float(load_cupy().cuda.get_elapsed_time(start, stop))


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


_TURNS = 12_000
"""About 60 us at 2 GHz: long enough for an event, short enough to go unnoticed beside a candidate's samples."""
_SAMPLES = 3


class DriftProbe:
    """Times a kernel of dependent multiply-adds, one block an SM: it takes a fixed number of the SMs' clock cycles.

    So its time moves with the clock, and with other load on the GPU, and with nothing that a candidate does.

    Parameters
    ----------
    support
        The worker's own kernels.
    timer
        What candidates are timed with.
    sm_count
        Of the device.
    """

    def __init__(self, support: SupportKernels, timer: Timer, sm_count: int) -> None:
        self._support = support
        self._timer = timer
        self._sm_count = sm_count

    def read_us(self) -> float:
        """Its time now, in microseconds."""
        samples = self._timer.samples(lambda: self._support.spin(self._sm_count, _TURNS), _SAMPLES)
        return round(float(np.median(samples)), 3)
