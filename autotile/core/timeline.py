"""Pace of a session, and its timeline in the trace event format of Perfetto and of Chrome's tracing page."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MAX_EVENTS = 2_000_000
"""About 300 MB of JSON; a trial takes some ten events."""
_Event = tuple[str, str, str, float, float, dict[str, Any]]
"""Kind, track, name, start and end in seconds, arguments."""
_PROCESS = 1
"""Process number of all events: tracks, not processes, are the rows of the timeline."""


class Timeline:
    """Records what each part of a session does, and when; nothing if ``is_recording`` is False.

    Times are those of `time.perf_counter`, which all processes of a machine share. Recording is thread-safe. The format
    is described at https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """

    def __init__(self, *, is_recording: bool = True) -> None:
        self.is_recording = is_recording
        self._origin_s = time.perf_counter()
        self._events: list[_Event] = []

    @contextmanager
    def span(self, track: str, name: str, **arguments: Any) -> Iterator[None]:
        """Record the time that the body of a ``with`` statement takes, in a row of the timeline such as ``compiler 3``.

        The further arguments are JSON values that a viewer shows with it.
        """
        if not self.is_recording:
            yield
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(track, name, start_s, time.perf_counter(), **arguments)

    def add(self, track: str, name: str, start_s: float, end_s: float, **arguments: Any) -> None:
        """Record a span whose start and end, by `time.perf_counter`, are known."""
        if self.is_recording and len(self._events) < _MAX_EVENTS:
            self._events.append(("X", track, name, start_s, end_s, arguments))

    def count(self, name: str, **values: float) -> None:
        """Record the values of a counter from now on."""
        if self.is_recording and len(self._events) < _MAX_EVENTS:
            now_s = time.perf_counter()
            self._events.append(("C", "", name, now_s, now_s, values))

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as a document in the trace event format."""
        tracks = {track: number for number, track in enumerate(dict.fromkeys(event[1] for event in self._events))}
        names = [
            {"ph": "M", "name": kind, "pid": _PROCESS, "tid": number, "args": {key: value}}
            for track, number in tracks.items()
            if track
            for kind, key, value in (("thread_name", "name", track), ("thread_sort_index", "sort_index", number))
        ]
        spans = []
        for kind, track, name, start_s, end_s, arguments in self._events:
            span = {"ph": kind, "name": name, "pid": _PROCESS, "ts": round(1e6 * (start_s - self._origin_s), 1)}
            if kind == "X":
                span |= {"tid": tracks[track], "dur": round(1e6 * (end_s - start_s), 1)}
            spans.append({**span, "args": arguments})
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}


NO_TIMELINE = Timeline(is_recording=False)

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
