"""Ctrl-C and kill at every stage, also at random moments: trials are kept, no child is left, and the same command
ends with the result of an undisturbed session. ``benchmarks/durability.py`` repeats the kills a hundred times."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from endurance.crowd import run_crowd
from endurance.kills import Scenario, kill_and_resume
from faults.traces import descendants, settles
from interrupts import heeded_interrupts
from judges import BEST, ending_at
from processes import PATIENCE_S, count_configs, environment_of, wait_for_trials, wait_until, workers_with

from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.runs import RunRecord
from autotile.tuning.replay import ReplayBackend

TUNE = ("matmul_tiled", "M=2048", "N=2048", "K=2048", "--replay", "--workers", "2", "--sampler", "tpe")

DIES_AT_ONCE = """
import os, signal, threading, time
from autotile.workers.child import Child
child = Child("echo_worker")
threading.Thread(target=child.request, args=({"do": "hang"}, 60), daemon=True).start()
time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "scenario",
    [Scenario("searching", (*TUNE, "--trials", "10")), Scenario("compiling", (*TUNE, "--trials", "4"), cold=True)],
    ids=lambda scenario: scenario.name,
)
def test_a_killed_session_ends_like_one_that_was_not(
    tmp_path: Path, cubin_cache_folder: Path, scenario: Scenario
) -> None:
    done = list(kill_and_resume(tmp_path, [scenario], 1, seed=2, cache=cubin_cache_folder))
    assert [series.faults for series in done] == [[]] * len(done)
    assert sum(len(series.kills) for series in done) == 1


def test_a_worker_that_was_still_starting_leaves_too(tmp_path: Path) -> None:
    """A worker with a long request pending, which has never seen its parent alive."""
    mark = f"AUTOTILE_TEST_MARK={tmp_path}"
    workers = Path(__file__).parents[1] / "workers"
    paths = os.pathsep.join(map(str, [*filter(None, sys.path), workers]))
    environment = {**os.environ, "AUTOTILE_TEST_MARK": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", DIES_AT_ONCE], env=environment, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert settles(lambda: not descendants(mark))


def test_a_crowd_shares_one_database(tmp_path: Path, cubin_cache_folder: Path) -> None:
    crowd = run_crowd(tmp_path, 4, 0.3, cubin_cache_folder, large=False)
    assert crowd.faults == []
    assert crowd.acknowledged > 0
    assert {"import", "export"} & crowd.commands.keys()


SIZES = ("M=2048", "N=2048", "K=2048")
CONFIGURATIONS = 72
"""Number of valid configurations of matmul_tiled at these sizes, all of which are recorded."""
MORE_TRIALS = 2
"""Trials of a session that goes on."""


class TestCtrlC:
    """`KeyboardInterrupt` in the tuning process, at every stage."""

    @pytest.fixture(autouse=True)
    def _no_child_is_left(self) -> Iterator[None]:
        yield
        assert workers_with(f"PPid:\t{os.getpid()}\n") == []

    @pytest.mark.parametrize(("phase", "done"), [("starting", 0), ("searching", 1), ("searching", 7), ("finals", 12)])
    def test_the_same_command_goes_on(self, bench: Any, phase: str, done: int) -> None:
        recording = bench.record()
        result = bench.tune(recording, ending_at(done, phase))
        assert result.interrupted
        assert sum(result.outcomes.values()) == len(bench.stored()) == done
        again = bench.tune(recording)
        assert (again.interrupted, again.resumed, again.winner.config) == (False, done, BEST)
        assert set(count_configs(bench.stored()).values()) == {1}

    @pytest.mark.parametrize(("place", "done"), [((ReplayBackend, "wait"), 0), ((RunRecord, "add"), 3)])
    def test_while_the_gpu_worker_starts_or_a_trial_is_written(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], done: int
    ) -> None:
        call, calls = getattr(*place), itertools.count()

        def interrupted(*given: Any, **named: Any) -> Any:
            if next(calls) == done:
                raise KeyboardInterrupt
            return call(*given, **named)

        recording = bench.record()
        with monkeypatch.context() as patch:
            patch.setattr(*place, interrupted)
            assert bench.tune(recording).interrupted
        assert len(bench.stored()) == done
        assert bench.tune(recording).resumed == done

    def test_an_unfinished_final_crowns_nobody(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The best trial of the search is served until finals have ended."""
        interrupt = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr(import_module("autotile.tuning.finals"), "run_finals", interrupt)
        result = bench.tune(bench.record())
        assert (result.interrupted, result.winner.config) == (True, BEST)
        with Database.open(os.environ["AUTOTILE_DB"]) as database:
            (best,) = database.best("scale")
            assert not best.confirmed
            assert [run.ended_at for run in database.runs(best.study_id)] == [None]


class TestProcess:
    """A signal to `autotile tune` while its compilers run."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        """Start a tune with a cold cubin cache, so that compiling takes a while."""
        started: list[subprocess.Popen[str]] = []
        environment = environment_of(tmp_path / "signals.db", AUTOTILE_CACHE=tmp_path / "signals-cache")

        def command(*words: str) -> subprocess.Popen[str]:
            call = [sys.executable, "-m", "autotile", "tune", "matmul_tiled", *SIZES, "--replay", "--json", *words]
            pipe = subprocess.PIPE
            with heeded_interrupts():
                started.append(subprocess.Popen(call, env=environment, text=True, stdout=pipe, stderr=pipe))
            return started[-1]

        yield command
        for process in started:
            process.kill()
            process.communicate()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_every_trial_that_ended_is_kept(
        self, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
    ) -> None:
        location = tmp_path / "signals.db"
        first = start("--workers", "2", "--sampler", "tpe", "--trials", str(CONFIGURATIONS))
        seen = wait_for_trials(location, 5)
        first.send_signal(number)
        errors = first.communicate(timeout=PATIENCE_S)[1]
        assert first.returncode == (130 if number is signal.SIGINT else -number)
        assert "Traceback" not in errors
        wait_until(lambda: not workers_with(f"AUTOTILE_TEST_OF={location}"))

        with Database.open(location) as database:
            assert check_database(database).ok
            kept = database.trials(1, phase="search")
            # after Ctrl-C the best trials are still raced, after a killing signal they are not
            assert bool(database.trials(1, phase="final")) is (number is signal.SIGINT)
            assert len(kept) >= seen
            assert set(count_configs(kept).values()) == {1}
        total = min(len(kept) + MORE_TRIALS, CONFIGURATIONS)
        second = start("--workers", "1", "--sampler", "tpe", "--trials", str(total))
        assert f'"resumed": {len(kept)},' in second.communicate(timeout=PATIENCE_S)[0]
        assert second.returncode == 0
        with Database.open(location) as database:
            trials = database.trials(1, phase="search")
            assert len(trials) == total
            assert set(count_configs(trials).values()) == {1}
            (best,) = database.best("matmul_tiled")
            assert best.confirmed
