"""Sessions on GPUs of different speed that share a study: their times are on one scale."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from autotile.core.model import GPU_SCALE, Config, Measurement, Outcome, Trial
from autotile.exchange.recording import Recording
from autotile.tuning.replay import SimulatedGpu
from autotile.tuning.result import TuneResult
from autotile.workers.jobs import Candidate, Reading

DEFAULT = {"THREADS": 128, "WORK": 1}
SLOWNESS = {"GPU-fast": 1.0, "GPU-slow": 1.04}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that selects the GPU of the calling thread's sessions, and with whom each has a candidate."""
    chosen = threading.local()

    class Chosen(SimulatedGpu):
        def __init__(self, recording: Recording, notice: str = "", *, uuid: str = "") -> None:
            super().__init__(recording, notice, uuid=chosen.gpu, slowness=SLOWNESS[chosen.gpu])
            self._together = chosen.together

        def result(self) -> tuple[Candidate, Reading]:
            found = super().result()
            if self._together is not None and dict(found[0].config) != DEFAULT:
                self._together.wait(60)
                self._together = None
            return found

    monkeypatch.setattr("autotile.tuning.backend.ReplayBackend", Chosen)

    def choose(gpu: str, together: threading.Barrier | None = None) -> None:
        chosen.gpu = gpu
        chosen.together = together

    return choose


def by_threads(config: Config) -> Trial:
    time_us = 1000 / int(config["THREADS"]) + 2 / int(config["WORK"])
    return Trial(config, Outcome.OK, "", "measure", measurement=Measurement(time_us, time_us, time_us))


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


def test_sessions_that_run_at_the_same_time(bench: Any, on_gpu: Any) -> None:
    recording, results, together = bench.record(), dict[str, TuneResult](), threading.Barrier(2)

    def work(gpu: str) -> None:
        on_gpu(gpu, together)
        results[gpu] = bench.tune(recording, sampler="brute-force", discard=False)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in SLOWNESS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
def test_a_session_that_resumes_another_ones_study(bench: Any, on_gpu: Any, home: str) -> None:
    recording = bench.record()
    (other,) = SLOWNESS.keys() - {home}
    for gpu, trials in ((home, 6), (other, 12)):
        on_gpu(gpu)
        bench.tune(recording, sampler="brute-force", discard=False, trials=trials)
    assert_on_scale_of(home, bench.stored())
    assert {trial.gpu for trial in bench.stored("final")} == set(SLOWNESS)
    for trial in bench.stored("final"):  # finals are compared on one GPU
        assert trial.time_us == pytest.approx(SLOWNESS[trial.gpu] * recorded_us(trial), rel=1e-5)


def test_without_a_reference_times_stay_as_they_are(bench: Any, on_gpu: Any) -> None:
    def judge(config: Config) -> Trial:
        return Trial(config, Outcome.WRONG_RESULT, stage="verify") if dict(config) == DEFAULT else by_threads(config)

    on_gpu("GPU-fast")
    recording = bench.record(judge)
    bench.tune(recording, sampler="brute-force", discard=False, trials=6)
    on_gpu("GPU-slow")
    bench.tune(recording, sampler="brute-force", discard=False)
    measured = [trial for trial in bench.stored() if trial.outcome is Outcome.OK]
    assert {trial.gpu for trial in measured} == set(SLOWNESS)
    assert all(trial.time_us == pytest.approx(SLOWNESS[trial.gpu] * recorded_us(trial)) for trial in measured)
