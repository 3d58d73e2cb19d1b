"""Sessions that tune the same problem at the same time: in threads, and in processes of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import count_configs, wait_for_trials

from autotile.core.model import Config, config_key
from autotile.exchange.recording import Recording
from autotile.tuning.replay import SimulatedGpu
from autotile.tuning.result import TuneResult

BEST = {"THREADS": 256, "WORK": 4}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each candidate take 50 ms."""

    class Slow(SimulatedGpu):
        def __init__(self, recording: Recording, notice: str = "", *, uuid: str = "") -> None:
            super().__init__(recording, notice, uuid=uuid, seconds=0.05)

    monkeypatch.setattr("autotile.tuning.backend.ReplayBackend", Slow)


def both(run: Callable[[int], TuneResult]) -> list[TuneResult]:
    results: dict[int, TuneResult] = {}

    def work(number: int) -> None:
        results[number] = run(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(2)]


@pytest.mark.usefixtures("slow")
class TestTwoSessions:
    @pytest.mark.parametrize("sampler", ["brute-force", "feasible", "tpe", "random"])
    def test_they_try_each_configuration_once(self, bench: Any, sampler: str) -> None:
        recording = bench.record()
        results = both(lambda number: bench.tune(recording, sampler=sampler, trials=12))
        assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}
        assert [result.winner.config for result in results] == [BEST, BEST]
        assert [sum(result.outcomes.values()) for result in results] == [12, 12]

    def test_they_reach_the_number_of_trials_together(self, bench: Any) -> None:
        recording = bench.record()
        results = both(lambda number: bench.tune(recording, sampler="random", seed=number, trials=7))
        assert len(bench.stored()) == 7
        assert max(count_configs(bench.stored()).values()) == 1
        assert all(sum(result.outcomes.values()) == 7 for result in results)

    def test_what_a_user_names_is_tried_once_and_raced_by_both(self, bench: Any) -> None:
        recording, named = bench.record(), {"THREADS": 64, "WORK": 2}
        results = both(lambda number: bench.tune(recording, trials=4, tries=(named,)))
        assert count_configs(bench.stored())[config_key(named)] == 1
        assert all([trial.config for trial in result.tried] == [named] for result in results)

    def test_fresh_sessions_share_nothing(self, bench: Any) -> None:
        recording = bench.record()
        both(lambda number: bench.tune(recording, sampler="brute-force", fresh=True))
        assert set(count_configs(bench.stored()).values()) == {2}


SESSION = """
import sys
from pathlib import Path
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings
from autotile.tuning import backend
from autotile.tuning.options import TuneOptions
from autotile.tuning.session import tune

class Slow(backend.SimulatedGpu):
    def __init__(self, recording, notice="", *, uuid=""):
        super().__init__(recording, notice, uuid=uuid, seconds=float(sys.argv[3]))

backend.ReplayBackend = Slow
kernel = load_kernel(sys.argv[1])
options = TuneOptions(replay=Path(sys.argv[2]), workers=1, sampler="brute-force")
result = tune(kernel, resolve_problem(kernel.spec, {"n": 4096}), read_settings(), options)
print(result.winner.config, sum(result.outcomes.values()))
"""


def test_what_a_killed_process_was_trying_is_tried_by_the_other(bench: Any, scale_toml: Path) -> None:
    recording = bench.record()

    def start(seconds: float) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", SESSION, str(scale_toml), str(recording), str(seconds)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    doomed = start(0.4)
    wait_for_trials(Path(os.environ["AUTOTILE_DB"]), 1)
    other = start(0.1)
    wait_for_trials(Path(os.environ["AUTOTILE_DB"]), 4)
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    output, _ = other.communicate(timeout=60)
    assert output.split() == [*str(BEST).split(), "12"]
    assert count_configs(bench.stored()) == {config_key(config): 1 for config in bench.configs()}
    winners: list[Config] = [trial.config for trial in bench.stored("final")[:1]]
    assert winners == [BEST]
