"""Ctrl-C, once and twice."""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from interrupts import heeded_interrupts

from autotile.tuning.progress_state import Progress, StopRequest


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_only_asks_and_the_second_raises() -> None:
    with StopRequest() as stop:
        ctrl_c()
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_afterwards_ctrl_c_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_children_heed_it_though_the_tests_run_in_the_background() -> None:
    """A shell lets the commands that it starts in the background ignore Ctrl-C, and their children inherit that."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeded_interrupts():
            child = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.returncode == -signal.SIGINT


def test_another_thread_is_left_alone() -> None:
    entered: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            entered.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [False]


def test_once_ends_the_search_and_holds_the_finals(bench: Any) -> None:
    def interrupt(progress: Progress) -> None:
        if (progress.phase, progress.done) == ("searching", 6):
            ctrl_c()

    result = bench.tune(bench.record(), interrupt, discard=False)
    assert result.interrupted
    assert sum(result.outcomes.values()) == 7  # the one that ran is waited for
    assert result.speedup is not None
    assert 4 <= len(bench.stored("final")) <= 5  # four finalists, and the default if it is not among them
    assert bench.tune(bench.record()).resumed == 7


def test_twice_ends_at_once_and_what_ended_is_stored(bench: Any) -> None:
    def interrupt(progress: Progress) -> None:
        if (progress.phase, progress.done) == ("searching", 6):
            ctrl_c()
            ctrl_c()

    result = bench.tune(bench.record(), interrupt)
    assert result.interrupted
    assert result.speedup is None
    assert len(bench.stored()) == 6
    assert bench.stored("final") == []
