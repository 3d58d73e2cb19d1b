"""Sessions that tune one problem at the same time: threads, processes that are killed, GPUs of different speed."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from judges import BEST, DEFAULT, by_threads, failing_if
from processes import count_configs, wait_until
from stored_runs import add_trial, start_run

from autotile.api.databases import db_merge as merge
from autotile.core.model import GPU_SCALE, Measurement, Outcome, Trial, config_key
from autotile.database import engine, runs
from autotile.errors import AutotileError
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.result import TuneResult

SESSION = """
import sys
from functools import partial
import autotile
from autotile.database import runs
from autotile.tuning import backend

backend.ReplayBackend = partial(backend.ReplayBackend, seconds=float(sys.argv[3]))
if sys.argv[4:]:
    runs.LEASE_S = float(sys.argv[4])
    runs.is_gone = lambda owner: False  # as for a process of another machine
result = autotile.tune(sys.argv[1], replay=sys.argv[2], workers=1, sampler="brute-force", progress=False)
print(result.winner.config, sum(result.outcomes.values()))
"""


def start(bench: Any, recording: Path, *seconds: float) -> subprocess.Popen[str]:
    """Start a session in which a candidate takes some seconds; a second number is that of its lease."""
    words = [sys.executable, "-c", SESSION, bench.kernel.spec.source, str(recording), *map(str, seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_end(bench: Any, session: subprocess.Popen[str]) -> None:
    """Assert that a session ends with the best of all configurations, each of which was tried once."""
    output, errors = session.communicate(timeout=60)
    assert output.split() == [*str(BEST).split(), "12"], errors
    assert_each_once(bench)


def assert_each_once(bench: Any) -> None:
    assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}


@pytest.fixture
def slow(monkeypatch):
    replay = partial(ReplayBackend, seconds=0.05)
    monkeypatch.setattr(import_module("autotile.tuning.backend"), "ReplayBackend", replay)


def both(run: Callable[[int], TuneResult]) -> list[TuneResult]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@pytest.mark.usefixtures("slow")
class TestTwoSessions:
    @pytest.mark.parametrize("sampler", ["brute-force", "feasible", "tpe", "random"])
    def test_they_try_each_configuration_once(self, bench, sampler):
        recording = bench.record()
        results = both(lambda number: bench.tune(recording, sampler=sampler, trials=12))
        assert_each_once(bench)
        assert [(result.winner.config, sum(result.outcomes.values())) for result in results] == [(BEST, 12)] * 2

    def test_what_the_other_measured_without_a_value_of_the_objective_is_tried_again(self, bench, database):
        told: list[int] = []

        def tell_of_another(_: object) -> None:
            if not told and (studies := database.studies()):
                told.append(studies[0].study_id)
                other = start_run(database, told[0], sampler="random")
                add_trial(database, told[0], other, Trial(BEST, Outcome.OK, measurement=Measurement(1.0, 0.9, 1.1)))

        options = {"sampler": "brute-force", "objective": "time_us * registers"}
        assert sum(bench.tune(bench.record(), tell_of_another, **options).outcomes.values()) == 12
        assert count_configs(bench.stored())[config_key(BEST)] == 2

    def test_they_reach_the_number_of_trials_together(self, bench):
        recording = bench.record()
        results = both(lambda number: bench.tune(recording, sampler="random", seed=number, trials=7))
        assert len(bench.stored()) == 7
        assert max(count_configs(bench.stored()).values()) == 1
        assert all(sum(result.outcomes.values()) == 7 for result in results)

    def test_what_a_user_names_is_tried_once_and_raced_by_both(self, bench):
        recording, named = bench.record(), {"THREADS": 64, "WORK": 2}
        results = both(lambda number: bench.tune(recording, trials=4, tries=(named,)))
        assert count_configs(bench.stored())[config_key(named)] == 1
        assert all([trial.config for trial in result.tried] == [named] for result in results)

    def test_fresh_sessions_share_nothing(self, bench):
        recording = bench.record()
        both(lambda number: bench.tune(recording, sampler="brute-force", fresh=True))
        assert set(count_configs(bench.stored()).values()) == {2}


@pytest.fixture
def location(postgresql, monkeypatch):
    url = postgresql.new_database()
    monkeypatch.setenv("AUTOTILE_DB", url)
    return url


def wait_for(bench: Any, count: int) -> None:
    wait_until(lambda: len(bench.stored()) >= count)


@pytest.mark.parametrize("lease_s", [(), (2.0,)], ids=["same machine", "other machine"])
def test_what_a_killed_process_was_trying_is_tried_by_the_other(bench, request, lease_s):
    """At once if that can be seen to be gone, or else when its lease has run out."""
    if lease_s:
        request.getfixturevalue("location")
    recording = bench.record()
    doomed = start(bench, recording, 0.4, *lease_s)
    wait_for(bench, 1)
    other = start(bench, recording, 0.1, *lease_s)
    wait_for(bench, 4)
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    check_end(bench, other)
    assert [trial.config for trial in bench.stored("final")[:1]] == [BEST]


@pytest.mark.usefixtures("location")
def test_sessions_go_on_after_restarts_and_crashes_of_the_server(bench, postgresql):
    recording = bench.record()
    sessions = [start(bench, recording, 0.3, 60.0) for _ in range(2)]
    for trials, how in ((2, signal.SIGINT), (6, signal.SIGQUIT)):
        wait_for(bench, trials)
        postgresql.stop(how)
        time.sleep(0.3)
        postgresql.start()
    for session in sessions:
        check_end(bench, session)


def test_a_server_that_stays_away_ends_the_session_which_resumes(bench, postgresql, monkeypatch, location, tmp_path):
    recording = bench.record()
    monkeypatch.setattr(engine, "RESTART_S", 0.2)
    monkeypatch.setattr(runs, "LEASE_S", 2.0)  # the same process holds it still, for the second session
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def stop_after_three(progress):
        if progress.done == 3:
            postgresql.stop()

    try:
        with pytest.raises(AutotileError, match=r"kept in .*rescued.*autotile db merge") as caught:
            bench.tune(recording, stop_after_three, sampler="brute-force")
    finally:
        postgresql.stop()
        postgresql.start()
    assert postgresql.password not in str(caught.value)
    assert len(bench.stored()) == 3
    (rescued,) = tmp_path.glob("tuning.rescued-*.db")
    merge([rescued], location)
    assert bench.tune(recording, sampler="brute-force").winner.config == BEST
    assert_each_once(bench)


SLOWNESS = {"GPU-fast": 1.0, "GPU-slow": 1.04}


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that selects the GPU of the calling thread's sessions, and with whom each has a candidate."""
    chosen = threading.local()

    class Chosen(ReplayBackend):
        def __init__(self, recording, options=None, *, uuid=""):
            super().__init__(recording, options, uuid=chosen.gpu, slowness=SLOWNESS[chosen.gpu])
            self._together = chosen.together

        def result(self):
            found = super().result()
            if self._together is not None and dict(found[0].config) != DEFAULT:
                self._together.wait(60)
                self._together = None
            return found

    monkeypatch.setattr(import_module("autotile.tuning.backend"), "ReplayBackend", Chosen)

    def choose(gpu, together=None):
        chosen.gpu = gpu
        chosen.together = together

    return choose


def recorded_us(trial: Trial) -> float:
    return float(by_threads(trial.config).time_us or 0.0)


def assert_on_scale_of(home: str, trials: list[Trial]) -> None:
    """Check that all times are as one GPU takes them, and that those of the other state the factor."""
    (other,) = SLOWNESS.keys() - {home}
    assert {trial.gpu for trial in trials} == {home, other}
    for trial in trials:
        assert trial.time_us == pytest.approx(SLOWNESS[home] * recorded_us(trial), rel=1e-5)
        expected = None if trial.gpu == home else pytest.approx(SLOWNESS[home] / SLOWNESS[other], rel=1e-5)
        assert trial.telemetry.get(GPU_SCALE) == expected


def test_sessions_that_run_at_the_same_time(bench, on_gpu):
    recording, together = bench.record(), threading.Barrier(2)

    def run(number):
        on_gpu([*SLOWNESS][number], together)
        return bench.tune(recording, sampler="brute-force", discard=False)

    results = dict(zip(SLOWNESS, both(run), strict=True))
    trials = bench.stored()
    assert len(trials) == 12
    (home,) = {trial.gpu for trial in trials if trial.config == DEFAULT}
    assert_on_scale_of(home, trials)
    (other,) = results.keys() - {home}
    assert not any("times are multiplied" in notice for notice in results[home].notices)
    (notice,) = [notice for notice in results[other].notices if "times are multiplied" in notice]
    assert other in notice.split(" and ")[0]
    assert home in notice.split(" and ")[1]


@pytest.mark.parametrize("home", SLOWNESS)
def test_a_session_that_resumes_another_ones_study(bench, on_gpu, home):
    recording = bench.record()
    (other,) = SLOWNESS.keys() - {home}
    for gpu, trials in ((home, 6), (other, 12)):
        on_gpu(gpu)
        bench.tune(recording, sampler="brute-force", discard=False, trials=trials)
    assert_on_scale_of(home, bench.stored())
    assert {trial.gpu for trial in bench.stored("final")} == set(SLOWNESS)
    for trial in bench.stored("final"):  # finals are compared on one GPU
        assert trial.time_us == pytest.approx(SLOWNESS[trial.gpu] * recorded_us(trial), rel=1e-5)
        assert GPU_SCALE not in trial.telemetry


def test_without_a_reference_times_stay_as_they_are(bench, on_gpu):
    on_gpu("GPU-fast")
    recording = bench.record(failing_if(lambda config: dict(config) == DEFAULT, Outcome.WRONG_RESULT))
    bench.tune(recording, sampler="brute-force", discard=False, trials=6)
    on_gpu("GPU-slow")
    bench.tune(recording, sampler="brute-force", discard=False)
    measured = [trial for trial in bench.stored() if trial.outcome is Outcome.OK]
    assert {trial.gpu for trial in measured} == set(SLOWNESS)
    assert all(trial.time_us == pytest.approx(SLOWNESS[trial.gpu] * recorded_us(trial)) for trial in measured)
