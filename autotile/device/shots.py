"""What is fired between two events: one launch, or for short kernels a CUDA graph of many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autotile.device.toolchain import load_cupy

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
