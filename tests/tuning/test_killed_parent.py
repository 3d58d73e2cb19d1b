"""Ctrl-C and kill at every stage, also at random moments: trials are kept, no child is left, and the same command
ends with the result of an undisturbed session. ``benchmarks/durability.py`` repeats the kills a hundred times."""

import os
import signal
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from endurance.crowd import run_crowd
from endurance.kills import Scenario, kill_and_resume
from interrupts import heeded_interrupts
from judges import BEST, ending_at
from processes import check_signal, count_configs, workers_with

from autotile.errors import InputError, WorkerError
from autotile.tuning.replay import ReplayBackend

TUNE = ("matmul_tiled", "M=2048", "N=2048", "K=2048", "--replay", "--workers", "2", "--sampler", "tpe")


def test_a_killed_session_ends_like_one_that_was_not(tmp_path):
    """It is killed in the search, while its compilers run."""
    scenario = Scenario("compiling", (*TUNE, "--trials", "5"), cold=True)
    done = list(kill_and_resume(tmp_path, [scenario], 1, seed=9))
    assert [series.faults for series in done] == [[]] * len(done)
    assert sum(len(series.kills) for series in done) == 1


def test_a_crowd_shares_one_database(tmp_path, cubin_cache_folder):
    crowd = run_crowd(tmp_path, 3, 0.3, cubin_cache_folder, large=False)
    assert crowd.faults == []
    assert crowd.acknowledged > 0
    assert {"import", "export"} & crowd.commands.keys()


class TestCtrlC:
    """`KeyboardInterrupt` in the tuning process, at every stage."""

    @pytest.fixture(autouse=True)
    def _no_child_is_left(self):
        yield
        assert workers_with(parent=os.getpid()) == []

    @pytest.mark.parametrize(
        ("phase", "done"), [("GPU worker", 0), ("starting", 0), ("searching", 1), ("searching", 7), ("finals", 12)]
    )
    def test_the_same_command_goes_on(self, bench, monkeypatch, database, phase, done):
        """Until then, the best trial of the search is served: an unfinished final crowns nobody."""
        recording = bench.record()
        with monkeypatch.context() as patch:
            if phase == "GPU worker":  # while it starts
                patch.setattr(ReplayBackend, "wait", Mock(side_effect=KeyboardInterrupt))
            result = bench.tune(recording, ending_at(done, phase))
        assert result.interrupted
        assert (result.stopped is None) is (done < 12)
        assert result.insight is None or done == 12
        assert (result.speedup, bench.stored("final")) == (None, [])
        assert sum(result.outcomes.values()) == len(bench.stored()) == done
        assert [(best.confirmed, best.trial) for best in database.best()] == [(False, result.winner)] * bool(done)
        again = bench.tune(recording)
        assert (again.interrupted, again.resumed, again.winner.config) == (False, done, BEST)
        assert set(count_configs(bench.stored()).values()) == {1}

    @pytest.mark.parametrize("error", [None, WorkerError, InputError])
    def test_a_run_ends_without_a_result_after_a_second_one_and_after_an_error(self, bench, database, error):
        def observe(progress):
            if progress.done == 3 or progress.phase == "finals":
                if error is not None:
                    raise error("ended by the test")
                signal.raise_signal(signal.SIGINT)

        with heeded_interrupts(), nullcontext() if error is None else pytest.raises(error):
            assert bench.tune(bench.record(), observe).interrupted
        (run,) = database.runs(1)
        assert (run.ended_at is None, run.summary, bench.stored("final")) == (False, {}, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_trial_that_ended_is_kept(tmp_path, number):
    """After a signal to `autotile tune` while its compilers run: a cold cache makes compiling take a while."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a shell runs the tests in the background
    try:
        check_signal((*TUNE, "--trials", "72"), tmp_path / "signals.db", number, AUTOTILE_CACHE=tmp_path / "cache")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
