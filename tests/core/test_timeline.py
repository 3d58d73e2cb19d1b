"""The timeline of a session."""

from __future__ import annotations

import json
import threading

import pytest

from autotile.core.timeline import Timeline


def test_a_span_has_its_track_start_duration_and_arguments() -> None:
    timeline = Timeline()
    timeline.add("compiler 1", "compile", 10.0, 10.25, options="-DBM=64")
    (name, order, span) = timeline.to_json()["traceEvents"]
    assert (name["ph"], name["name"], name["args"]) == ("M", "thread_name", {"name": "compiler 1"})
    assert (order["name"], order["args"]) == ("thread_sort_index", {"sort_index": 0})
    assert (span["ph"], span["name"], span["tid"], span["dur"]) == ("X", "compile", name["tid"], 250_000.0)
    assert span["args"] == {"options": "-DBM=64"}


def test_spans_of_a_with_statement_nest_and_are_recorded_where_the_body_fails() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("session", "search"), timeline.span("session", "propose"):
        raise KeyError
    inner, outer = (event for event in timeline.to_json()["traceEvents"] if event["ph"] == "X")
    assert (inner["name"], outer["name"]) == ("propose", "search")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.2


def test_tracks_of_threads_are_kept_apart() -> None:
    timeline = Timeline()
    threads = [
        threading.Thread(target=lambda n=number: timeline.add(f"compiler {n}", "compile", n, n + 1))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = [event for event in timeline.to_json()["traceEvents"] if event["ph"] == "X"]
    assert len({span["tid"] for span in spans}) == 4


def test_counters_are_recorded_and_the_document_is_json() -> None:
    timeline = Timeline()
    timeline.count("candidates", waiting=3, compiling=2)
    document = json.loads(json.dumps(timeline.to_json()))
    (event,) = document["traceEvents"]
    assert (event["ph"], event["name"], event["args"]) == ("C", "candidates", {"waiting": 3, "compiling": 2})
    assert document["displayTimeUnit"] == "ms"


def test_nothing_is_recorded_where_it_is_not_wanted() -> None:
    timeline = Timeline(is_recording=False)
    with timeline.span("session", "search"):
        timeline.add("compiler 1", "compile", 0.0, 1.0)
        timeline.count("candidates", waiting=1)
    assert timeline.to_json()["traceEvents"] == []
