"""Timeline of a session, in the trace event format that Perfetto and Chrome's tracing page display."""

from __future__ import annotations

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
    """Records what each part of a session does, and when.

    Times are those of `time.perf_counter`, which all processes of a machine share. Recording is thread-safe.

    Parameters
    ----------
    is_recording
        Whether anything is recorded; if not, all methods return at once.

    References
    ----------
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """

    def __init__(self, *, is_recording: bool = True) -> None:
        self.is_recording = is_recording
        self._origin_s = time.perf_counter()
        self._events: list[_Event] = []

    @contextmanager
    def span(self, track: str, name: str, **arguments: Any) -> Iterator[None]:
        """Record the time that the body of a ``with`` statement takes.

        Parameters
        ----------
        track
            Row of the timeline, such as ``compiler 3``.
        name
            Name of the span.
        **arguments
            JSON values that a viewer shows with it.
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
            self._events.append(("C", "", name, now_s, now_s, dict(values)))

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as a document in the trace event format."""
        tracks = {track: number for number, track in enumerate(dict.fromkeys(event[1] for event in self._events))}
        names = [
            {"ph": "M", "name": kind, "pid": _PROCESS, "tid": number, "args": {key: value}}
            for track, number in tracks.items()
            if track
            for kind, key, value in (("thread_name", "name", track), ("thread_sort_index", "sort_index", number))
        ]
        spans = [self._event(event, tracks) for event in self._events]
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}

    def _event(self, event: _Event, tracks: dict[str, int]) -> dict[str, Any]:
        kind, track, name, start_s, end_s, arguments = event
        found = {"ph": kind, "name": name, "pid": _PROCESS, "ts": round(1e6 * (start_s - self._origin_s), 1)}
        if kind == "X":
            found |= {"tid": tracks[track], "dur": round(1e6 * (end_s - start_s), 1)}
        return {**found, "args": arguments}


NO_TIMELINE = Timeline(is_recording=False)
